"""Kinds of requests to a node."""

from __future__ import annotations

HELLO, SUMS, TRAIN, EVALUATE = "hello", "sums", "train", "evaluate"
SECURE_KINDS = SHARE, MASK, CONFIRM, UNMASK = "share", "mask", "confirm", "unmask"  # of secure sums, after training
