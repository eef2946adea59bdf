"""Who gains from federating, judged from a finished Self-FL run.

The run's own estimates stand for the two-level model's quantities: a client's last model for z_m, its uncertainty
σ_m² (movement of its models over the rounds) for s_m, σ_0² for s0. They measure the trajectory of training as much
as the sampling of data (docs/selffl.md), so the result says what Self-FL believed, not what is true.
"""

from __future__ import annotations

from pathlib import Path

import torch

from kinfed.errors import ConfigError
from kinfed.runs.folder import RunFolder
from kinfed.runs.gain import GainReport, gain_from_arrays


def gain_from_run(
    folder: Path,
    algorithm: str | None = None,
    seed: int | None = None,
    *,
    s0: float | None = None,
    margin: float = 0.05,
) -> GainReport:
    """Theoretical limits per client of a run that holds a Self-FL method; s0 is its last σ_0² unless given."""
    run = RunFolder(folder)
    records = [
        record
        for record in run.records()
        if (algorithm is None or record["algorithm"] == algorithm)
        and (seed is None or record["seed"] == seed)
        and "sigma_m_sq" in (record["method"].get("clients") or {})
        and (s0 is not None or "sigma0_sq" in record["method"])  # Self-FL's control estimates none
    ]
    if not records:
        wanted = algorithm or "a Self-FL method"
        raise ConfigError(f"{folder} holds no evaluated round of {wanted} with client variances; run selffl first")
    chosen = records[0]["algorithm"], records[0]["seed"]
    last = [record for record in records if (record["algorithm"], record["seed"]) == chosen][-1]
    variance = torch.tensor(
        [value if value is not None else -1.0 for value in last["method"]["clients"]["sigma_m_sq"]], dtype=torch.float64
    )
    known = (variance > 0).nonzero().squeeze(1)
    if len(known) < 2:
        raise ConfigError(
            f"only {len(known)} client(s) of {chosen[0]} trained often enough to have a variance, and two are needed; "
            "run more rounds"
        )
    federation = run.read_federation(chosen[1])
    count = torch.tensor([sum(row) for row in federation["train"]], dtype=torch.float64)
    models = run.read_models(*chosen).personal
    return gain_from_arrays(
        models[known],
        (variance * count)[known],
        count[known],
        clients=[federation["names"][int(k)] for k in known],
        s0=float(last["method"]["sigma0_sq"]) if s0 is None else s0,
        margin=margin,
    )
