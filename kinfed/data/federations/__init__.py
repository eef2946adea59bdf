"""Federations: who has which examples, and changes to it."""
