"""Sums that a server has kept of every site (method lmm), after the run: sites leave it, and intervals by the profile.

    profiled("runs/exam", "lmm").profile.between["intercept"]
    forgotten = forget("runs/exam", ["school_01"], "lmm")
    forgotten.coefficients().rows, forgotten.models["school_02"], forgotten.server_model
    forgotten.save("runs/exam-without")

Forgetting takes the sums of sites out, and fits what remains anew. It is exact: a fit is a function of the sums it is
made of, so that no trace of a site is left in one that is made without its own. Other methods have mixed what sites
sent, and must run again without the site. The record says which sums the new fit is made of, each by its digest, so
that anyone who has the others' sums can compute it again, and the site can see that its own are not among them.

Two things are not undone: means and scales of columns are those that all sites gave before the run, and coefficients
are exact in spite of them, for they are in the units of the table; and the run's folder is as it was, until it is
deleted.

Profile intervals take some dozens of fits, and are made when they are asked for. Methods that work with totals have
Wald's alone: every point of a likelihood would be a round.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kinfed.core import storage
from kinfed.errors import ConfigError
from kinfed.newcomers.adoption import as_pipeline
from kinfed.newcomers.finished import EndedRun, opened
from kinfed.records import client_number
from kinfed.serving import ModelPipeline
from kinfed.serving import coefficients as fits


@dataclass(frozen=True)
class Forgotten:
    """A fit without some sites, with a model of every site that is left and the server's."""

    run: EndedRun
    algorithm: str
    names: tuple[str, ...]  # of the sites that are forgotten
    models: Mapping[str, ModelPipeline]  # of the others
    server_model: ModelPipeline  # for sites that were not there
    sums: Mapping[str, str]  # digests of the sums that the fit is made of, by site
    figures: Mapping[str, Any]

    def coefficients(self) -> fits.Coefficients:
        return fits.coefficient_rows(self.run.description, self.algorithm, self.run.seed, self.figures)

    @property
    def record(self) -> dict[str, Any]:
        """What was forgotten, and what the new fit is made of."""
        fit = self.coefficients()
        return {
            "algorithm": self.algorithm, "seed": self.run.seed, "forgotten": list(self.names), "sums": dict(self.sums),
            "rows": fit.count[0], "sites": fit.count[1], "criterion": self.figures["criterion"],
            "coefficients": {row.name: [row.estimate, None if row.is_left_out else row.se] for row in fit.rows},
        }  # fmt: skip

    def save(self, folder: Path | str) -> None:
        """Write server.safetensors, a file for every site that is left, and the record forgotten.json, last."""
        folder = Path(folder)
        if folder.exists():
            raise ConfigError(f"{folder} exists; the fit without these sites goes to a folder of its own")
        (folder / "models").mkdir(parents=True)
        self.server_model.save(folder / "server.safetensors")
        for name, model in self.models.items():
            model.save(folder / "models" / f"{storage.file_name(name, any_letters=True)}.safetensors")
        storage.write_json(folder / "forgotten.json", self.record)


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


def forget(
    ended: EndedRun | Path | str, clients: Sequence[str], algorithm: str | None = None, *, seed: int | None = None
) -> Forgotten:
    """The fit of a finished run, in a folder or in memory, as if these clients had never taken part."""
    run = opened(ended, seed)
    label = run.label(algorithm)
    method: Any = run.algorithm(label)
    names = run.description.names
    if not hasattr(method, "forget"):
        raise ConfigError(
            f"{label} has mixed what its clients sent, and cannot take one out again; run it anew without "
            f"{', '.join(clients)} (lmm keeps the sums of every site apart)"
        )
    task = run.task()
    server: Any = run.server(label, method, task)
    out = sorted({client_number(names, name) for name in clients})
    if not out:
        raise ConfigError("forget takes out clients; name one or more")
    heard = server.heard.clone()
    heard[out] = False
    if int(heard.sum()) < 2:
        raise ConfigError(f"without {', '.join(clients)} fewer than two sites are left, and {label} compares sites")
    server = method.forget(server, torch.tensor(out))
    ids = server.heard.nonzero().squeeze(1)
    rows, left = method.site_models(server, ids), [names[k] for k in ids.tolist()]
    shared = method.server_models(server)
    assert shared is not None  # of a method that forgets
    return Forgotten(
        run, label, tuple(names[k] for k in out),
        {name: as_pipeline(run, row, label, name) for name, row in zip(left, rows, strict=True)},
        as_pipeline(run, shared.models[0], label, "server"),
        {name: _digest(server.sums[k]) for name, k in zip(left, ids.tolist(), strict=True)}, method.figures(server),
    )  # fmt: skip


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.cpu().contiguous().numpy().tobytes()).hexdigest()
