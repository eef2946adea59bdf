"""The command `kinfed` as a user types it, for tests."""

from __future__ import annotations

import io
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest

from kinfed.cli.app import main


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


def kinfed(*arguments: str | Path, cwd: Path, **env: str) -> Done:
    """The command in this process, as the entry point runs it (importing torch anew for each would take minutes)."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.chdir(cwd)
        patch.setattr(sys, "argv", ["kinfed", *map(str, arguments)])
        for name, value in {"COLUMNS": "100", "NO_COLOR": "1", **env}.items():
            patch.setenv(name, value)
        try:
            main()
            code = 0
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
    return Done(code, out.getvalue(), err.getvalue())
