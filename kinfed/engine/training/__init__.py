"""Local training on top of any backend: SGD, optimizers, programs of several models."""
