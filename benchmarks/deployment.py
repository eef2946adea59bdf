"""Flower nodes beside the local pool: are the models the same, and what does a round cost?

    python benchmarks/deployment.py [--rounds 3] [--clients 12] [--methods fedavg,ditto] [--busy 2]

Starts a superlink and three nodes on this machine, with TLS, authentication and warm workers,
and runs methods on digits through them, with one client per node or several; then, with
one and all methods, FedAvg with 8,000 and with 3 million parameters. `--busy 2` keeps two cores busy with something
else all the while. Takes some minutes, nearly all of it waiting."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from flower_network import Network, network
from loopback import write_nodes

from kinfed.data.federations.federation import Federation
from kinfed.deploy.node.vault import Vault
from kinfed.deploy.operator.certs import make_certificates
from kinfed.deploy.settings import Deployment
from kinfed.engine.task_factory import ModuleTask
from kinfed.runs.loop_factory import simulate
from kinfed.serving.pipeline import ModelPipeline

NODES = ["x", "y", "z"]
METHODS = {"fedavg": "", "ditto": "", "selffl": "", "fedfomo": "models=2", "cgpfl": "contexts=2"}  # options
COMMON: dict[str, Any] = {
    "model": "mlp",
    "classes": "10",
    "scaling": "none",
    "steps": 5,
    "batch": 10,
    "eval-every": 0,
    "deadline": 120.0,
    "wait": 300.0,
}


def run(net: Network, folder: Path, name: str, settings: dict[str, Any]) -> list[float]:
    """Seconds of every round."""
    out = folder / name
    net.run(net.app(settings | {"out": str(out)}, name=f"app-{name}"))
    net.wait_done(out, 600)
    return [json.loads(line)["seconds"] for line in (out / "rounds.jsonl").read_text("utf-8").splitlines()]


@contextlib.contextmanager
def busy(cores: int) -> Iterator[None]:
    """That many processes that compute and do nothing else."""
    burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(cores)]
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clients", type=int, default=3, help="a multiple of the three supernodes")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--busy", type=int, default=0)
    arguments = parser.parse_args()
    print(f"load at the start: {os.getloadavg()[0]:.1f}", flush=True)
    rounds, names = arguments.rounds, [f"c{number:02}" for number in range(arguments.clients)]
    common = COMMON | {"clients": ",".join(names), "quorum": len(names), "rounds": rounds}
    x, y = load_digits(return_X_y=True)
    size = 100 * len(names)
    x, y, owner = (x[:size] / 16).astype(np.float32), y[:size], np.arange(size) % len(names)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_nodes(folder, x, y, owner, names)
        make_certificates(folder / "certs", ["127.0.0.1", "localhost"], NODES)
        with busy(arguments.busy), network(folder / "net", certs=folder / "certs") as net:
            net.start_server()
            net.register(*NODES)
            for number, node in enumerate(NODES):
                own = ",".join(names[number :: len(NODES)])
                places = {"data": str(folder / "{client}.npz"), "vault": str(folder / "vault-{client}")}
                net.start_node(node, {"client": own, **places})
            print("| method | personal accuracy, local | Flower | largest difference of a parameter | s/round |")
            print("|---|---|---|---|---|")
            for method in arguments.methods.split(","):
                settings = common | {"method": method, "options": METHODS[method]}
                seconds = run(net, folder, method, settings)
                report(method, folder, names, settings, (x, y, owner), seconds)
            print(f"load at the end: {os.getloadavg()[0]:.1f}", flush=True)
            if len(names) > len(NODES) or arguments.methods != ",".join(METHODS):
                return
            print("\n| parameters | s/round |\n|---|---|")
            for columns, model in ((784, "mlr"), (23_428, "mlp")):
                wide = np.random.default_rng(0).normal(size=(30, columns)).astype(np.float32)
                write_nodes(folder, wide, y[:30], owner[:30], names)
                settings = common | {"method": "fedavg", "model": model, "steps": 1}
                seconds = run(net, folder, f"wide-{model}", settings)
                size = columns * 10 + 10 if model == "mlr" else columns * 128 + 128 + 1290
                print(f"| {size:,} | {sorted(seconds)[len(seconds) // 2]:.1f} |", flush=True)


def report(
    method: str,
    folder: Path,
    names: list[str],
    settings: dict[str, Any],
    examples: tuple[np.ndarray, np.ndarray, np.ndarray],
    seconds: list[float],
) -> None:
    x, y, owner = examples
    deployment = Deployment.parse(settings | {"out": str(folder / method)})
    federation = Federation.from_arrays(x, y, np.array(names)[owner], num_classes=10)
    if deployment.validation_share:
        federation = federation.with_validation(deployment.validation_share, deployment.seed)
    loop = simulate(federation, deployment.run.model.name, deployment.algorithm)
    for _ in loop.rounds(deployment.run.rounds):
        pass
    evaluation = loop.evaluate(keep_models=True)
    assert evaluation.models is not None
    assert evaluation.personal is not None
    assert isinstance(loop.task, ModuleTask)
    here = [loop.task.module_of(row).state_dict() for row in evaluation.models]
    local = torch.stack([torch.cat([t.reshape(-1) for t in row.values()]) for row in here])
    modules = [ModelPipeline.read(Vault(folder / f"vault-{name}").model_path()).module for name in names]
    there = torch.stack([torch.cat([t.reshape(-1) for t in module.state_dict().values()]) for module in modules])
    accuracy = float(evaluation.personal.correct.sum() / evaluation.personal.count.sum())
    summary = json.loads((folder / method / "summary.json").read_text("utf-8"))["results"][0]
    middle = sorted(seconds)[len(seconds) // 2]
    print(
        f"| {method} | {accuracy:.2%} | {summary['personal']['accuracy']:.2%} "
        f"| {float((local - there).abs().max()):.1e} | {middle:.1f} ({min(seconds):.1f} to {max(seconds):.1f}) |",
        flush=True,
    )


if __name__ == "__main__":
    main()
