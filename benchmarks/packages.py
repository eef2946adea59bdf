"""The same methods in kinfed and other packages: same clients, rows, start, batches and budget, figures side by side.

    python -m venv beside && beside/bin/pip install -c constraints.txt . fluke-fl fedlab pfl
    beside/bin/python benchmarks/packages.py                                  all pairs, seeds 0, 1 and 2
    beside/bin/python benchmarks/packages.py --package fedlab --methods scaffold,fednova --seeds 0
    beside/bin/python benchmarks/packages.py --json packages.json             also the figures of every seed
    beside/bin/python benchmarks/packages.py --read packages.json             the tables again

A package is asked through its public classes (benchmarks/package_*.py) and gets what
kinfed has drawn: rows of clients, the starting model, and the batches of every round in their order, so that a
difference is one of the methods and not of chance. Everybody takes part in every round. Personal accuracy is that of
clients' own models on their own test rows after the last round, one vote per client; the server's model is scored on
the same rows. `apart` is the largest difference of any parameter of any of these models: where it is below 1e-4, the
two packages computed the same thing, with sums in another order.
"""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

import kinfed
from kinfed.data.examples.batches import LocalTraining
from kinfed.errors import ConfigError, unknown_name
from kinfed.report.tables import TableColumn, TextTable

PACKAGES = {"fluke": "fluke-fl", "fedlab": "fedlab", "pfl": "pfl"}
CLIENTS, ROUNDS, LR, BATCH = 10, 20, 0.1, 20
SETTINGS: dict[str, Any] = {
    "dataset": "digits", "partition": {"name": "dirichlet", "alpha": 0.3}, "clients": CLIENTS, "participation": 1.0,
    "model": "mlp", "rounds": ROUNDS, "epochs": 1, "batch": BATCH, "lr": LR, "eval_every": 0,
}  # fmt: skip
TRAINING = LocalTraining(lr=LR, batch=BATCH, steps=None, epochs=1)

Batches = Iterator[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class KinfedRun:
    """A run of one method in kinfed, and everything of it that another package needs to repeat it."""

    result: kinfed.RunResult
    seed: int

    @classmethod
    def of(cls, method: str, options: Mapping[str, Any], seed: int) -> KinfedRun:
        return cls(kinfed.run(algorithms={method: options}, seeds=[seed], progress=False, **SETTINGS), seed)

    @cached_property
    def federation(self) -> Any:
        return self.result.federations[self.seed]

    @property
    def clients(self) -> range:
        return range(len(self.federation.names))

    @property
    def classes(self) -> int:
        return int(self.federation.num_classes)

    def rows(self, client: int, split: str) -> tuple[Tensor, Tensor]:
        """Examples, flat, and classes."""
        rows = self.federation.split(split)[client]
        return self.federation.features.gather(rows).flatten(1), self.federation.labels[rows]

    def batches(self, client: int, round: int, stream: str = "batches") -> Batches:
        """What the client trains on in a round, in this order."""
        cohort = self.federation.cohort(torch.tensor([client]), self.seed, round)
        for _, batch in cohort.train.batches(TRAINING, stream=stream):
            example = batch.weight[0] > 0  # the last batch of a pass is padded
            yield batch.x[0, example].flatten(1), batch.y[0, example]

    def module(self, row: Tensor) -> nn.Sequential:
        """The network with these parameters, for flat examples."""
        flatten, *layers = self.result.task.module_of(row)
        assert isinstance(flatten, nn.Flatten)
        return nn.Sequential(*layers)

    def start(self) -> nn.Sequential:
        return self.module(self.result.task.init(self.seed))

    def personal(self) -> list[nn.Module]:
        models = self.result.result().evaluation.models
        assert models is not None
        return [self.module(row) for row in models]

    def server(self) -> nn.Module | None:
        row = self.result.result().server_model
        return None if row is None else self.module(row)


@dataclass(frozen=True)
class Models:
    """What a package has after the last round."""

    personal: Sequence[nn.Module] = ()  # by client, what the package scores as the client's; none: it keeps none
    server: nn.Module | None = None
    rows_differ: bool = False  # personal models hold other parameters than kinfed's, such as a second head


@dataclass
class Figures:
    package: str
    method: str
    seed: int
    personal: tuple[float | None, float | None]  # mean accuracy over clients: kinfed, the package
    server: tuple[float | None, float | None]
    apart: float | None


def compare(package: str, method: str, seed: int) -> Figures:
    """Run the method in both."""
    partner = importlib.import_module(f"package_{package}")
    ours = KinfedRun.of(method, partner.PAIRS[method].ours, seed)
    theirs: Models = partner.run(method, ours)
    tests = [ours.rows(client, "test") for client in ours.clients]
    personal, server = ours.personal(), ours.server()
    pairs = [] if theirs.rows_differ else list(zip(personal, theirs.personal, strict=bool(theirs.personal)))
    if server is not None and theirs.server is not None:
        pairs.append((server, theirs.server))
    return Figures(
        package,
        method,
        seed,
        (_accuracy(personal, tests), _accuracy(theirs.personal, tests)),
        (_accuracy([server] * len(tests), tests), _accuracy([theirs.server] * len(tests), tests)),
        max((_distance(*pair) for pair in pairs), default=None),
    )


@torch.no_grad()
def _accuracy(models: Sequence[nn.Module | None], tests: Sequence[tuple[Tensor, Tensor]]) -> float | None:
    if not models or models[0] is None:
        return None
    return fmean(
        float((model.eval()(x).argmax(1) == y).float().mean())
        for model, (x, y) in zip(models, tests, strict=True)
        if model is not None
    )


@torch.no_grad()
def _distance(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)


def tables(figures: Sequence[Figures]) -> Iterator[TextTable]:
    """One per package: means over seeds, and the largest difference of a parameter over all of them."""
    for package, name in PACKAGES.items():
        by_method: dict[str, list[Figures]] = {}
        for one in figures:
            if one.package == package:
                by_method.setdefault(one.method, []).append(one)
        columns = [
            TableColumn("method", "name"),
            *(TableColumn(who, group=f"{kind} %") for kind in ("personal", "server") for who in ("kinfed", name)),
            "apart",
        ]
        rows = [
            [
                method,
                *(_percent([one.personal[place] for one in seeds]) for place in (0, 1)),
                *(_percent([one.server[place] for one in seeds]) for place in (0, 1)),
                max((f"{one.apart:.0e}" for one in seeds if one.apart is not None), key=float, default="–"),
            ]
            for method, seeds in by_method.items()
        ]
        if rows:
            yield TextTable.of(f"{name}: means over {len(next(iter(by_method.values())))} seeds", columns, rows)


def _percent(accuracies: Sequence[float | None]) -> str:
    known = [accuracy for accuracy in accuracies if accuracy is not None]
    return f"{100 * fmean(known):.1f}" if known else "–"


def main() -> None:
    parser = argparse.ArgumentParser("packages.py")
    parser.add_argument("--package", default=",".join(PACKAGES), help=f"of {', '.join(PACKAGES)}")
    parser.add_argument("--methods", default="", help="names separated by commas; all where none is named")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--json", type=Path, help="file for the figures of every seed")
    parser.add_argument("--read", type=Path, help="file of figures to show again")
    arguments = parser.parse_args()
    if arguments.read is not None:
        show([Figures(**one) for one in json.loads(arguments.read.read_text("utf-8"))])
        return
    torch.set_num_threads(1)
    figures: list[Figures] = []
    for package in arguments.package.split(","):
        if package not in PACKAGES:
            raise unknown_name("package", package, PACKAGES)
        pairs = importlib.import_module(f"package_{package}").PAIRS
        for method in arguments.methods.split(",") if arguments.methods else pairs:
            if method not in pairs:
                raise ConfigError(f"{package} is asked for {', '.join(pairs)}; got {method}")
            for seed in map(int, arguments.seeds.split(",")):
                figures.append(compare(package, method, seed))
                print(json.dumps(asdict(figures[-1])), flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(one) for one in figures], indent=1) + "\n", "utf-8")
    for package in dict.fromkeys(one.package for one in figures):
        print(
            f"{PACKAGES[package]} {version(PACKAGES[package])}, kinfed {kinfed.__version__}, torch {torch.__version__}"
        )
    show(figures)


def show(figures: Sequence[Figures]) -> None:
    for table in tables(figures):
        Console().print(table)


if __name__ == "__main__":
    main()
