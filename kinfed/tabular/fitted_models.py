"""The models that a fit hands over: one of every site, the server's, and what a site takes that was not there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kinfed.core import storage
from kinfed.data import Federation
from kinfed.newcomers import RunInMemory, adopt, as_pipeline, learn_alone
from kinfed.serving import ModelPipeline
from kinfed.tabular.fit_result import server_path, site_path
from kinfed.tabular.portfolio import LOCAL, Contender


@dataclass(frozen=True)
class Newcomer:
    """What a site takes that was not there."""

    contender: Contender
    run: RunInMemory | None = None  # where it joins, in memory

    def model(self, name: str, rows: Federation, server: ModelPipeline | None) -> ModelPipeline:
        """Its model, from labelled rows of its own (kinfed.newcomers.adoption)."""
        label = self.contender.name
        if self.contender.model == "server" and server is not None:
            return ModelPipeline(server.module, server.inputs, {**server.about, "client": name})
        assert self.run is not None
        alone = self.contender.method == LOCAL
        theta = learn_alone(self.run, rows, label) if alone else adopt(self.run, rows, label).model
        return as_pipeline(self.run, theta, label, name)


@dataclass(frozen=True)
class FittedModels:
    """Models with all that belongs to them."""

    sites: dict[str, ModelPipeline]
    server: ModelPipeline | None  # the one model of all; None where there is one site
    chosen: dict[str, str]  # the contender of every site
    newcomer: Newcomer

    def save(self, folder: Path) -> None:
        for site, model in self.sites.items():
            storage.make_folder(site_path(folder, site).parent)
            model.save(site_path(folder, site))
        if self.server is not None:
            self.server.save(server_path(folder))
