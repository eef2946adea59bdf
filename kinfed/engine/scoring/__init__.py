"""Scores and metrics of predictions."""
