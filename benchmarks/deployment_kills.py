"""kill -9 in a deployment: superlink, the server's part of the run, supernodes and processes that answer messages.

A superlink with TLS and three nodes (`kinfed deploy server`, `kinfed deploy node`) run on this machine. Whenever a run
has got on by a round, one of its processes is killed; what a run needs to go on is what an operator would do: nothing
after a supernode or an answer, `flwr run` again after the server's part or the superlink. At the end of each run the
personal models in the vaults are compared, bit for bit, with those of a simulation in one process. It is called by
benchmarks/kills.py."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor

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

NAMES = ["a", "b", "c"]
ROUNDS = 5
SETTINGS: dict[str, Any] = {
    "method": "ditto", "model": "mlr", "classes": "10", "scaling": "none", "steps": 3, "batch": 10, "eval-every": 0,
    "rounds": ROUNDS, "clients": ",".join(NAMES), "quorum": 3, "deadline": 900.0, "wait": 900.0,
}  # fmt: skip
VICTIMS = ("server's part", "supernode", "answer", "superlink")
SECONDS = 900.0  # for a run to get on


def examples() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    x, y = load_digits(return_X_y=True)
    return (x[:300] / 16).astype(np.float32), y[:300], np.arange(300) % 3


def simulated(settings: dict[str, Any]) -> Tensor:
    x, y, owner = examples()
    federation = Federation.from_arrays(x, y, np.array(NAMES)[owner], num_classes=10)
    loop = simulate(federation, "mlr", Deployment.parse(settings).algorithm)
    for _ in loop.rounds(ROUNDS):
        pass
    models = loop.evaluate(keep_models=True).models
    assert models is not None
    assert isinstance(loop.task, ModuleTask)
    return _rows([loop.task.module_of(row) for row in models])


def _rows(modules: list[torch.nn.Module]) -> Tensor:
    return torch.stack([torch.cat([t.reshape(-1) for t in module.state_dict().values()]) for module in modules])


class Machine:
    """Processes of this deployment, by what they do."""

    def __init__(self, net: Network) -> None:
        self.net = net

    def processes(self) -> dict[int, tuple[int, str]]:
        """Number: parent and command line, of all that belong to the deployment's folder."""
        table = {}
        for path in Path("/proc").glob("[0-9]*"):
            try:
                command = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                stat = (path / "stat").read_text().rpartition(")")[2].split()
                inside = str(self.net.folder).encode() in (path / "environ").read_bytes()
            except OSError:
                continue  # it has ended
            if inside and stat[0] != "Z" and int(path.name) != os.getpid():
                table[int(path.name)] = (int(stat[1]), command)
        return table

    def find(self, victim: str) -> list[int]:
        table = self.processes()
        if victim in ("superlink", "supernode"):
            return [pid for pid, (_, command) in table.items() if f"bin/flower-{victim}" in command]
        word = " deploy server " if victim == "server's part" else " deploy node "
        workers = {pid for pid, (parent, command) in table.items() if word in command and parent == os.getpid()}
        return [pid for pid, (parent, command) in table.items() if word in command and parent in workers]  # forks

    def kill(self, victim: str) -> int:
        """Somebody of that kind, as soon as there is one; its number, 0 where nobody came."""
        end = time.monotonic() + 60
        while time.monotonic() < end:
            if candidates := self.find(victim):
                pid = random.choice(candidates)
                os.kill(pid, signal.SIGKILL)
                return pid
            time.sleep(0.02)
        return 0


def rounds_done(out: Path) -> int:
    path = out / "rounds.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def is_done(out: Path) -> bool:
    log = out / "log.txt"
    return log.exists() and " done; " in log.read_text()


def wait_for_round(out: Path, number: int) -> None:
    end = time.monotonic() + SECONDS
    while rounds_done(out) < number and not is_done(out):
        if time.monotonic() > end:
            raise SystemExit(
                f"no round {number} within {SECONDS:g} s; the log says:\n{(out / 'log.txt').read_text()[-3000:]}"
            )
        time.sleep(0.2)


def one_run(net: Network, app: Path, out: Path, victims: list[str]) -> list[str]:
    """Run to the end, with a kill after every round while there are victims left; who was killed."""
    machine, killed = Machine(net), []
    net.run(app, out=str(out))
    while victims and rounds_done(out) < ROUNDS - 1:
        wait_for_round(out, rounds_done(out) + 1)
        time.sleep(random.uniform(0.0, 4.0))
        if is_done(out):
            break
        victim = victims.pop(0)
        if not (pid := machine.kill(victim)):
            continue
        killed.append(victim)
        print(f"deployment: killed {victim} {pid} after round {rounds_done(out)}", flush=True)
        if victim == "superlink":
            net.wait_for(lambda: machine.find("superlink") and net._listening(), 400, "the superlink to be back")
        if victim in ("superlink", "server's part"):
            time.sleep(5)
            net.run(app, out=str(out))
    wait_for_round(out, ROUNDS)
    net.wait_for(lambda: is_done(out), SECONDS, "the run to end")
    return killed


def kills(count: int, folder: Path, seed: int) -> bool:
    random.seed(seed)
    folder.mkdir()
    nodes = write_nodes(folder, *examples(), NAMES)
    make_certificates(folder / "certs", ["127.0.0.1", "localhost"], NAMES)
    done, equal, runs = list[str](), 0, 0
    with network(folder / "net", certs=folder / "certs") as net:
        machine = Machine(net)
        net.start_server()
        net.register(*NAMES)
        for config in nodes.values():
            net.start_node(config["client"], config)
        app = net.app(SETTINGS)
        wanted = [VICTIMS[(seed + number) % len(VICTIMS)] for number in range(count)]
        while len(done) < count or not runs:
            out = folder / f"run-{runs}"
            done += one_run(net, app, out, wanted[len(done) :])
            runs += 1
            models = _rows(
                [ModelPipeline.read(Vault(config["vault"]).model_path()).module for config in nodes.values()]
            )
            apart = (models - simulated(SETTINGS | {"out": str(out)})).abs().amax(1)
            equal += not bool(apart.any())
            print(f"deployment: run {runs} after {len(done)} kills; largest differences {apart.tolist()}", flush=True)
            if bool(apart.any()):
                print((out / "log.txt").read_text(), flush=True)
        family = machine.processes()
    time.sleep(2)
    left = family.keys() & machine.processes().keys()
    print(
        f"deployment: {len(done)} kills, {equal} of {runs} runs equal bit for bit, {len(left)} processes left",
        flush=True,
    )
    return equal == runs and not left
