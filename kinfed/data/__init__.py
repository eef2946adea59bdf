"""Data sets, and how they are shared out among clients."""
