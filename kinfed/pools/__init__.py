"""Pools: the processes in which clients have their data and states, and train."""
