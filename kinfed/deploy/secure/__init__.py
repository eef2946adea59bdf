"""Secure sums, at client and server."""
