"""How many threads torch computes with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread of torch inside, as many as before afterwards; other threads of the process keep their number.

    A sum cut among threads adds up in another order, so its last bits depend on their number; what is decided by it
    (who joins which cluster, how many steps a client takes) may then be decided otherwise on another machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
