"""Flower's programs: apps, processes, warm workers."""
