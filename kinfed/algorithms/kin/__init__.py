"""Kin: how much a client learns alone, from everyone, or from clients like it, found out by itself."""
