"""What one worker of pytest-xdist takes at a time.

A unit is a file, whose fixtures are then set up once; one method's part of the contract suite, whose checks share
runs; or all files that compile the engine's loops, which takes longer than to test them. `--dist loadgroup` would not
do: xdist 3.8 hands groups on in the ids of tests, and pytest 9.2 ignores that.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

COMPILED = ("papers/tests/test_bench.py", "tests/engine/test_fused", "tests/engine/test_objective.py")


class WorkUnits(LoadScopeScheduling):
    def __init__(self, config: pytest.Config, log: Any = None) -> None:
        config.option.loadscopereorder = False  # the order of collection, in which tests that wait come first
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        """The unit to which a test belongs."""
        file, _, test = nodeid.partition("::")
        method = re.match(r"test_contract\[(\w+)-", test)
        if file.startswith(COMPILED):
            return "compiled loops"
        return file if method is None else f"{file}::{method[1]}"
