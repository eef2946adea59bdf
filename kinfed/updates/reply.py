"""Updates of a cohort, on their way from the pool to the server."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from kinfed.privacy import Record


@dataclass
class Reply:
    """What came back from a cohort: rows of `up` belong to `ids`, in ascending order."""

    ids: Tensor
    up: Any  # None where nobody replied
    nbytes: int  # of all updates sent, the rejected ones too
    rejected: list[int] = field(default_factory=list)  # clients whose update or new state could not be used
    reasons: dict[int, str] = field(default_factory=dict)  # of rejections, where there is more to say than "not finite"
    record: Record | None = None  # of private tasks in other processes; None where the loop's own task recorded it
    nbytes_down: int = 0  # of messages to the clients beside what `download` made
