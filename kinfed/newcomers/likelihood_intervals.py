"""Profile intervals of a finished run by lmm, from the sums that its server has kept.

    profiled("runs/exam", "lmm").profile.between["intercept"]

They take some dozens of fits, and are made when they are asked for. Methods that work with totals have Wald's alone:
every point of a likelihood would be a round.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kinfed.errors import ConfigError
from kinfed.newcomers.finished import EndedRun, opened
from kinfed.serving import coefficients as fits


def profiled(
    ended: EndedRun | Path | str, algorithm: str | None = None, *, seed: int | None = None
) -> fits.Coefficients:
    """Coefficients of a finished run, in a folder or in memory, with intervals by the profile likelihood."""
    run = opened(ended, seed)
    label = run.label(algorithm)
    method: Any = run.algorithm(label)
    if not hasattr(method, "profile"):
        raise ConfigError(f"{label} keeps no sums of sites, and has no profile intervals; lmm has")
    server: Any = run.server(label, method, run.task())
    profile, basis = method.profile(server)
    fit = fits.coefficient_rows(run.description, label, run.seed, method.figures(server))
    return fits.with_profile(fit, run.description, profile, basis)
