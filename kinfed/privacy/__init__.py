"""Differential privacy for every method that learns by gradients; docs/privacy.md says what it promises and to whom."""
