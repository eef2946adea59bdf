"""Pools: where clients live, keep their state, and train."""
