"""Freed memory stays with the process.

Every round makes and drops the same tensors of some megabytes. The C library of Linux gives each of them back to the
system and asks for it again, and every page asked for costs an interruption: a tenth of a round of FedAvg on a small
network, half of a server step of pFedHN. The price is this much memory per process, and with 10,000 clients (1.5 GB)
less than a tenth of theirs."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch  # the command line imports this file before it knows whether it needs torch

KEEP_BYTES = 64 << 20  # what may lie free at the end of the heap, and from where a tensor has pages of its own
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # names in malloc.h


def physical_memory() -> int | None:
    """Bytes of this machine; None if the system does not tell."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def device_memory(device: torch.device) -> int | None:
    """Bytes that an accelerator has free, for models and what training makes of them; None if it does not tell."""
    import torch

    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.current_allocated_memory()
    return None


@cache
def keep_freed_memory() -> bool:
    """Keep freed memory in the whole process, once. False where the C library knows no such setting (any but glibc)."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    return all(mallopt(name, KEEP_BYTES) == 1 for name in (_TRIM_THRESHOLD, _MMAP_THRESHOLD))
