"""What a round of each method costs beside FedAvg's, Self-FL's at equal local steps, and CGPFL's beside pFedMe's.

    python benchmarks/costs.py                                 all methods on mlr and mlp, and Self-FL
    python benchmarks/costs.py --cgpfl                         CGPFL / pFedMe, and the share of clustering
    python benchmarks/costs.py --models mlp --methods ditto,apfl --repeats 15
    python benchmarks/costs.py --methods fedfomo,pfedhn --steps 50 --batch 64
    python benchmarks/costs.py --selffl --repeats 25           Self-FL / FedAvg only

Methods take turns with FedAvg in one process on one core (kinfed.bench.costs). An overhead above 1.3 is marked: the
method then takes longer than its gradients explain.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console
from torch import Tensor

from kinfed.algorithms.base import RoundInfo
from kinfed.algorithms.cgpfl.cgpfl import CGPFL, Server
from kinfed.algorithms.clustering import Clusters
from kinfed.algorithms.pfedme import PFedMe
from kinfed.algorithms.selffl.selffl import SelfFL
from kinfed.bench.costs import SETTINGS, Cost, compare, measure_costs, print_costs
from kinfed.bench.machine import describe_machine
from kinfed.bench.workload import WORKLOADS, synthetic

SELFFL = [
    WORKLOADS["mlr"],
    WORKLOADS["mlp"],
    replace(WORKLOADS["mlp"], name="mlp-10", batch=10),
    WORKLOADS["cnn"],
]


def clustering(model: str, repeats: int, console: Console) -> None:
    """CGPFL does what pFedMe does, and clusters the uploads: here of 40 clients, all active."""
    workload = replace(SETTINGS[model], participation=1.0)
    federation = synthetic(workload)
    training = replace(workload.training, lr=0.005)
    for contexts in (1, 20):
        watched = Watched(training=training, contexts=contexts)
        cost = compare(watched, workload, federation, repeats, 4, against=PFedMe(training=training))
        share = statistics.median(watched.assigned) / cost.seconds
        console.print(
            f"CGPFL (K = {contexts}) / pFedMe, {workload.title}: {cost.time_ratio:.3f} ({cost.best_ratio:.3f} of the "
            f"best); clustering takes {share:.1%} of a round, {max(watched.assigned) / cost.seconds:.0%} in the first",
            soft_wrap=True,
        )


@dataclass(frozen=True)
class Watched(CGPFL):
    """CGPFL that remembers how long it took to find contexts, in processor seconds per round."""

    assigned: list[float] = field(default_factory=list)

    def assign(self, server: Server, members: Tensor, uploads: Tensor, round: RoundInfo) -> Clusters:
        began = time.process_time()
        found = super().assign(server, members, uploads, round)
        self.assigned.append(time.process_time() - began)
        return found


def main() -> None:
    parser = argparse.ArgumentParser("costs.py")
    parser.add_argument("--models", default=",".join(SETTINGS))
    parser.add_argument("--methods", default="", help="names separated by commas; all where none is named")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--steps", type=int, help="local steps of the table's methods instead of the setting's")
    parser.add_argument("--batch", type=int, help="examples of a step, likewise")
    parser.add_argument("--selffl", action="store_true", help="only Self-FL against FedAvg at equal local steps")
    parser.add_argument("--json", type=Path, help="also write all figures to this file")
    parser.add_argument("--cgpfl", action="store_true", help="only CGPFL against pFedMe, for K = 1 and 20")
    given = parser.parse_args()
    console = Console()
    if given.cgpfl:
        for model in given.models.split(","):
            clustering(model, given.repeats, console)
        return
    found: dict[str, list[Cost]] = {}
    if not given.selffl:
        for model in given.models.split(","):
            with console.status("") as status:
                names = [name for name in given.methods.split(",") if name]
                found[model] = measure_costs(
                    model, names, given.repeats, steps=given.steps, batch=given.batch, progress=status.update
                )
            print_costs(found[model], SETTINGS[model].with_work(given.steps, given.batch).title, console)
    if given.selffl or not given.methods:
        for workload in SELFFL:
            warm_up = 60 if workload.participation < 1 else 4  # until all clients have a state
            method = SelfFL(training=workload.training, use_steps=False)
            repeats = given.repeats if workload.model != "cnn" else -(-given.repeats // 5)  # its rounds take seconds
            cost = compare(method, workload, synthetic(workload), repeats, warm_up)
            found[f"selffl {workload.name}"] = [cost]
            console.print(
                f"Self-FL / FedAvg, {workload.title}: {cost.time_ratio:.3f} ({cost.best_ratio:.3f} of the best)"
            )
    machine = describe_machine()
    console.print(f"{datetime.date.today()}, {machine['processor']}, {machine['cores']} core(s), {machine['torch']}")
    if given.json is not None:
        figures = {setting: [cost.figures() for cost in costs] for setting, costs in found.items()}
        given.json.write_text(json.dumps({"machine": machine, "costs": figures}, indent=2) + "\n")


if __name__ == "__main__":
    main()
