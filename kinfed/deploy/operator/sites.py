"""Nodes that are connected to a superlink of this machine, to be asked from Python or the command line.

sites = Sites("127.0.0.1:8001", "certs", ["north", "south", "west"])
sites.describe(out="before")                                      what their tables are like
kinfed.fit(sites=sites, label_column="outcome", classes=["no", "yes"], out="search")
sites.evaluate(["north.safetensors", "server.safetensors"], label_column="outcome", out="matrix")
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kinfed.core import storage
from kinfed.data import Problem
from kinfed.deploy.operator.control import Control, Say, log_size
from kinfed.deploy.operator.forget_site import app_settings, without_site, write_record
from kinfed.deploy.programs.app_folder import make_app
from kinfed.deploy.server.question_server import read_models
from kinfed.deploy.server.status import FILE as STATUS
from kinfed.deploy.settings import COUNTS, DESCRIBE, EVALUATE, FIT, NUMBER, Deployment
from kinfed.errors import ConfigError
from kinfed.tabular import FitResult, FitSettings

LEARNT = {"regression": NUMBER, "counts": COUNTS}
# Fields of FitSettings as a deployment calls them.
OF_SEARCH = {
    "algorithms": "portfolio", "folds": "search_folds",
    **{name: name for name in ("models", "trials", "rounds", "steps", "test_fraction", "seed", "class_weights")},
}  # fmt: skip


@dataclass(frozen=True)
class Sites:
    """Running nodes, by the control port of their superlink (`kinfed deploy server`, on this machine).

    - `certs`: the folder of kinfed deploy certs, with the authority and the public keys of sites.
    - `names`: the sites that are asked, as they are enrolled.
    """

    address: str
    certs: Path | str
    names: Sequence[str]
    say: Say = print
    should_stop: Callable[[], bool] = lambda: False
    seconds: float = 86_400.0  # that all of it may take

    def fit(self, settings: FitSettings, out: Path | str, **more: Any) -> FitResult:
        """A search (`kinfed.fit(sites=...)`): every site takes what it is shown to gain by, and keeps its model and its
        page. `more`: label_column, and classes or target ("number", "counts"); other settings of a deployment. Safe
        mixtures need the rows of all sites in one place: what folds chose is handed over in their stead."""
        return FitResult.read(self.ask({"method": FIT, **search_settings(settings), **more}, out))

    def describe(self, out: Path | str, **more: Any) -> dict[str, Any]:
        """What the sites say of their tables; describe.html in `out` shows it."""
        return storage.read_json(self.ask({"method": DESCRIBE, **more}, out) / "describe.json")

    def evaluate(self, models: Sequence[Path | str], out: Path | str, **more: Any) -> dict[str, Any]:
        """Every model at every site; evaluate.html in `out` shows it. `more`: label_column, test_fraction, seed."""
        asked = evaluation_settings([str(one) for one in models]) | more
        return storage.read_json(self.ask({"method": EVALUATE, **asked}, out) / "evaluate.json")

    def forget(self, site: str, app: Path | str, out: Path | str = "") -> dict[str, Any]:
        """Let the others learn again without a site, by the settings of a deployment's app folder, and write down what
        the new run is made of (kinfed.deploy.operator.forget_site). `out`: its folder (default: beside the former)."""
        settings = app_settings(Path(app))
        before, asked = Deployment.parse(settings).folder, without_site(settings, site, str(out))
        self.ask(asked, asked["out"])
        return write_record(site, before, asked)

    def ask(self, settings: Mapping[str, Any], out: Path | str) -> Path:
        """Run a deployment at the sites; the folder of its results. The same again goes on where it was stopped."""
        folder, certs = Path(out).expanduser().resolve(), Path(self.certs).expanduser().resolve()
        listed = {name: ",".join(one) if isinstance(one, list | tuple) else one for name, one in settings.items()}
        whole = {"clients": ",".join(self.names), "keys": str(certs), **listed, "out": str(folder)}
        Deployment.parse(whole)  # what cannot run is refused before anything is started
        with tempfile.TemporaryDirectory(prefix="kinfed-") as home:
            control = Control(Path(home), self.address, certs / "ca.crt")
            control.connect()
            make_app(Path(home) / "app", whole)
            (folder / STATUS).unlink(missing_ok=True)
            position = log_size(folder)
            control.run(Path(home) / "app")
            control.follow(folder, self.say, self.should_stop, time.monotonic() + self.seconds, position)
        return folder


def search_settings(settings: FitSettings) -> dict[str, Any]:
    """Settings of a deployment that searches like this."""
    chosen = settings.dump()
    record = {name: chosen[field] for field, name in OF_SEARCH.items()} | {
        "deploy": "certified" if settings.deploy == "certified" else "chosen"
    }
    return record if settings.metric == "auto" else record | {"metric": settings.metric}


def problem_settings(problem: Problem) -> dict[str, Any]:
    """Settings that say what is predicted, of which nothing is to be learnt."""
    if problem.has_classes and problem.classifies:
        if any("," in label for label in problem.class_labels):
            raise ConfigError("names of classes are listed with commas between; one of them holds a comma")
        return {"classes": ",".join(problem.class_labels)}
    return {"target": json.dumps(problem.to_json())}


def evaluation_settings(models: Sequence[str]) -> dict[str, Any]:
    """Settings of an evaluation of these files, or of those in a folder."""
    paths = ",".join(str(Path(one).expanduser().resolve()) for one in models)
    first = next(iter(read_models(paths).values()))
    return {"judged": paths, **problem_settings(first.inputs.problem)}
