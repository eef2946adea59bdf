"""Self-FL's study on synthetic data, hundreds of repeats at once.

    python -m kinfed.reproduce.studies.synthetic_study [--repeats 200] [--seed 0]

Chen et al., "Self-Aware Personalized Federated Learning", Appendix E.1: the two-level Gaussian task in two cases, at
participation rates from 0.1 to 1, against FedAvg, Ditto, pFedMe and Per-FedAvg. The loop of `server.loop` would need
two million rounds; `kinfed.reproduce.studies.synthetic` does all repeats of a setting at once.

Protocol, the same for all methods: θ^0 = 0, 20 rounds of FedAvg as a warm start, then 180 rounds; learning rate 1e-4,
50 local steps where the method does not choose them. (Starting at 1.6, as one may read the paper, starts at the
truth: a smoothing average then beats the best possible estimate.)

Errors are mean absolute ones after the last round, against two references each: the truth (θ_0; θ_m), which no method
can reach, and the best estimate from the same data (θ^G; the θ^FL of the paper), which a method could.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from kinfed.algorithms.selffl.uncertainty import Rules
from kinfed.errors import unknown_name
from kinfed.reproduce.studies.synthetic import Method, Protocol, State, Worlds, ditto, fedavg, perfedavg, pfedme, selffl
from kinfed.theory.gaussian import CASES, Case

RATES = (0.1, 0.2, 0.5, 0.8, 1.0)

ESTIMATED = Rules(contraction="gd", l_max=None)
# What is known of a client does not wait for it to be active.
KNOWN = replace(ESTIMATED, known_variances=True, domain="all")


def only(part: str) -> Rules:
    """One of the three parts of the method, and smoothing."""
    return replace(KNOWN, use_init=part == "init", use_steps=part == "steps", use_agg=part == "agg")


def methods(case: Case) -> dict[str, Method]:
    return {
        "FedAvg-w": fedavg,
        "FedAvg-e": partial(fedavg, equal=True),
        "control: FedAvg-w + smoothing": partial(fedavg, smooth=True),
        "Ditto, lambda 1": partial(ditto, lam=1.0),
        "Ditto, oracle lambda 1/s0": partial(ditto, lam=1 / case.s0),
        "pFedMe, lambda 15": pfedme,
        "pFedMe, lambda 15, weights by examples": partial(pfedme, equal=False),
        "Per-FedAvg, 1 step to adapt": perfedavg,
        "Per-FedAvg, 50 steps to adapt": partial(perfedavg, adapt_steps=50),
        "Self-FL, known variances": partial(selffl, rules=KNOWN),
        "Self-FL, estimated": partial(selffl, rules=ESTIMATED),
        "Self-FL, known, exact posterior": partial(selffl, rules=replace(KNOWN, posterior="exact")),
        "Self-FL, estimated, exact posterior": partial(selffl, rules=replace(ESTIMATED, posterior="exact")),
        "Self-FL, known, no smoothing": partial(selffl, rules=replace(KNOWN, smoothing=1.0)),
        "Self-FL Algorithm 2, known": partial(selffl, rules=KNOWN, augmented=True),
        "known, start (18) only": partial(selffl, rules=only("init")),
        "known, steps (19) only": partial(selffl, rules=only("steps")),
        "known, weights (20) only": partial(selffl, rules=only("agg")),
    }


class Errors(NamedTuple):
    """[R] each: |θ − θ_0|, |θ − θ^G|, and the means over clients of |θ_m^T − θ_m| and |θ_m^T − θ_m^FL|."""

    server: Tensor
    server_best: Tensor
    local: Tensor
    local_best: Tensor


KINDS: Mapping[str, str] = {
    "server": "global error, truth theta_0",
    "server_best": "global error, best estimate theta^G",
    "local": "local error, truth theta_m",
    "local_best": "local error, theta^FL of the paper",
}


def errors(worlds: Worlds, state: State) -> Errors:
    best = worlds.model
    return Errors(
        (state.server - worlds.case.theta0).abs(),
        (state.server - best.theta_G).abs(),
        (state.personal - worlds.theta).abs().mean(1),
        (state.personal - best.theta_FL).abs().mean(1),
    )


@dataclass(frozen=True)
class Cell:
    case: str
    method: str
    participation: float | None  # None for estimates that need no training
    kind: str
    mean: float
    error: float  # standard error over repeats


def run_study(
    repeats: int = 200,
    seed: int = 0,
    rates: Sequence[float] = RATES,
    protocol: Protocol | None = None,
    chosen: Collection[str] | None = None,
) -> list[Cell]:
    """Every method (or those of `methods` that are chosen) in every setting. Repeat r has the seed 1000·seed + r, so
    studies of up to 1000 repeats with different seeds share no draw."""
    protocol = protocol or Protocol()
    known = methods(next(iter(CASES.values())))
    for label in chosen or ():
        if label not in known:
            raise unknown_name("method of the study", label, known)
    cells: list[Cell] = []
    for name, case in CASES.items():
        worlds = Worlds.draw(case, [1000 * seed + r for r in range(repeats)])
        for label, state in _without_training(worlds):
            cells += _cells(name, label, None, errors(worlds, state))
        for rate in rates:
            last = protocol.warm + protocol.rounds
            warm = fedavg(
                worlds, worlds.active(rate, 1, protocol.warm), torch.full((repeats,), protocol.start).to(worlds.z),
                protocol, rate,
            )  # fmt: skip
            active = worlds.active(rate, protocol.warm + 1, last)
            for label, method in methods(case).items():
                if chosen is not None and label not in chosen:
                    continue
                cells += _cells(name, label, rate, errors(worlds, method(worlds, active, warm.server, protocol, rate)))
    return cells


def _without_training(worlds: Worlds) -> Iterator[tuple[str, State]]:
    best = worlds.model
    yield "theta^G and every client alone (z)", State(best.theta_G, worlds.z)
    yield "theta^G and theta^FL of the paper", State(best.theta_G, best.theta_FL)
    yield "theta^G and exact posterior mean", State(best.theta_G, best.exact.theta_FL)


def _cells(case: str, method: str, rate: float | None, found: Errors) -> list[Cell]:
    return [
        Cell(case, method, rate, kind, float(values.mean()), float(values.std() / len(values) ** 0.5))
        for kind, values in found._asdict().items()
    ]


# What an independent implementation of the same protocol found with other draws (200 repeats), C as in RATES.
INDEPENDENT: Mapping[tuple[str, str, str], tuple[float | None, ...]] = {
    ("homogeneous", "FedAvg-w", "server"): (0.0316, 0.0228, 0.0168, 0.0149, 0.0145),
    ("homogeneous", "FedAvg-w", "local"): (0.0410, None, None, None, 0.0384),
    ("heterogeneous", "FedAvg-w", "server"): (0.571, 0.426, 0.269, 0.214, 0.204),
    ("heterogeneous", "FedAvg-w", "local"): (0.077, None, None, None, 0.067),
    ("homogeneous", "pFedMe, lambda 15, weights by examples", "server"): (0.0170, 0.0153, 0.0148, 0.0147, 0.0148),
    ("homogeneous", "pFedMe, lambda 15, weights by examples", "local"): (0.0607,) * 5,
    ("heterogeneous", "pFedMe, lambda 15, weights by examples", "server"): (0.208, None, None, None, 0.202),
    ("heterogeneous", "pFedMe, lambda 15, weights by examples", "local"): (0.0341,) * 5,
    ("homogeneous", "control: FedAvg-w + smoothing", "server"): (0.0169, 0.0172, 0.0162, 0.0155, 0.0145),
    ("homogeneous", "control: FedAvg-w + smoothing", "local"): (0.0386,) * 5,
    ("heterogeneous", "control: FedAvg-w + smoothing", "server"): (0.212, 0.220, 0.227, 0.216, 0.204),
    ("heterogeneous", "control: FedAvg-w + smoothing", "local"): (0.0666,) * 5,
    ("homogeneous", "Self-FL, known variances", "server"): (0.0172, 0.0150, 0.0145, 0.0145, 0.0145),
    ("homogeneous", "Self-FL, known variances", "local"): (0.0290, None, None, None, 0.0275),
    ("heterogeneous", "Self-FL, known variances", "server"): (0.207, 0.211, 0.200, 0.191, 0.178),
    ("heterogeneous", "Self-FL, known variances", "local"): (0.0380,) * 5,
    ("homogeneous", "Self-FL, estimated", "server"): (0.0161, 0.0159, 0.0155, 0.0156, 0.0160),
    ("homogeneous", "Self-FL, estimated", "local"): (0.0283, None, None, None, 0.0287),
    ("heterogeneous", "Self-FL, estimated", "server"): (0.206, 0.211, 0.202, 0.192, 0.178),
    ("heterogeneous", "Self-FL, estimated", "local"): (0.0336, None, None, None, 0.0354),
}


def table(cells: Sequence[Cell], case: str, kind: str) -> str:
    """Markdown: one line per method, mean (and the largest standard error) for every rate; below it, where there is
    one, the independent implementation's."""
    here = [cell for cell in cells if cell.case == case and cell.kind == kind]
    rates = sorted({cell.participation for cell in here if cell.participation is not None})
    lines = [
        f"| {case}: {KINDS[kind]} | " + " | ".join(f"C={rate:g}" for rate in rates) + " | s.e. |",
        "|---" * (len(rates) + 2) + "|",
    ]
    for method in dict.fromkeys(cell.method for cell in here):
        row = {cell.participation: cell for cell in here if cell.method == method}
        shown = [_number(row[rate if rate in row else None].mean) for rate in rates]
        lines.append(f"| {method} | " + " | ".join(shown) + f" | {max(c.error for c in row.values()):.4f} |")
        other = INDEPENDENT.get((case, method, kind))
        if other is not None:
            values = dict(zip(RATES, other, strict=True))
            shown = ["" if values.get(rate) is None else _number(values[rate]) for rate in rates]
            lines.append("| *independent implementation* | " + " | ".join(shown) + " | |")
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}" if value < 1 else f"{value:.3g}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Self-FL's study on synthetic data")
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    began = time.perf_counter()
    cells = run_study(chosen.repeats, chosen.seed)
    for case in CASES:
        for kind in KINDS:
            print(table(cells, case, kind) + "\n")
    print(f"{chosen.repeats} repeats in {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
