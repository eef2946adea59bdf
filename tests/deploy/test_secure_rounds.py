"""Secure aggregation with nodes in this process: what the server gets, who may go away when, and what nodes refuse."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loopback import Loopback, write_nodes
from torch import Tensor

from kinfed.data.federation import Federation
from kinfed.deploy.exchange import Sent
from kinfed.deploy.node import Node
from kinfed.deploy.questions import CONFIRM, MASK, SECURE_KINDS, SHARE, TRAIN, UNMASK
from kinfed.deploy.rules import Refused
from kinfed.deploy.server import TooFewClients, serve
from kinfed.deploy.settings import Deployment
from kinfed.deploy.vault import Vault
from kinfed.deploy.wire import MessageError, Packet
from kinfed.errors import ConfigError
from kinfed.pools.base import Reply
from kinfed.privacy.secure_sum import ProtocolSize
from kinfed.runs.predict import read_model
from kinfed.runs.simulation import simulate

pytest.importorskip("cryptography", reason="the extra flower is not installed")

from kinfed.deploy.certs import make_certificates
from kinfed.deploy.masks import agreed_key, join_secret, mask, new_secret, public_key, seal, split_secret, unseal
from kinfed.deploy.secure_messages import threshold_of

NAMES = ["a", "b", "c", "d", "e"]
WIDTH = 18  # numbers in an update: logistic regression of 5 features and 3 classes
SETTINGS: dict[str, Any] = {
    "method": "fedavg", "model": "mlr", "rounds": 2, "clients": 5, "classes": "3", "scaling": "none", "steps": 3,
    "batch": 5, "eval-every": 0, "deadline": 60.0, "wait": 60.0, "secure-sum": True, "quorum": 3,
}  # fmt: skip


def examples() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    numbers = np.random.default_rng(3)
    owner = np.repeat(np.arange(5), (30, 17, 24, 12, 21))
    y = numbers.integers(0, 3, len(owner))
    return (numbers.normal(size=(len(owner), 5)) + 2 * np.eye(3, 5)[y]).astype(np.float32), y, owner


class Net(Loopback):
    """Clients that go away before the questions named in `away` (kind by client) in some rounds."""

    away: Mapping[str, tuple[int, str]] = {}

    def send(self, messages: Any) -> list[str]:
        kept = []
        for one in messages:
            name, round = one.packet.header.get("name"), one.packet.header.get("round")
            if name in self.away and self.away[name] == (round, one.kind):
                self.offline.add(one.node)
                kept.append("")
            else:
                (number,) = super().send([one])
                kept.append(number)
        return kept

    def nodes(self) -> Collection[int]:
        return super().nodes()


def make(folder: Path, **settings: Any) -> Net:
    run_config = SETTINGS | {"out": str(folder / "run")} | {k.replace("_", "-"): v for k, v in settings.items()}
    return Net(run_config, write_nodes(folder, *examples(), NAMES))


def run(net: Loopback) -> Path:
    return serve(Deployment.parse(net.run_config), net, net.log.append, **net.time)


def simulated(net: Loopback, present: Callable[[int], list[int]] = lambda round: [0, 1, 2, 3, 4]) -> Tensor:
    """[K, P] personal models of plain averaging in one process, over the clients that were `present` in a round."""
    x, y, owner = examples()
    deployment = Deployment.parse(net.run_config)
    federation = Federation.from_arrays(x, y, np.array(NAMES)[owner], num_classes=3)
    loop = simulate(federation, "mlr", deployment.algorithm)
    train = loop.pool.train

    def some(ids: Tensor, download: Any, round: int, effort: Any = None) -> Reply:
        return train(torch.tensor(present(round)), download, round, effort)

    loop.pool.train = some  # type: ignore[method-assign]
    for _ in loop.rounds(deployment.run.rounds):
        pass
    models = loop.evaluate(keep_models=True).models
    assert models is not None
    rows = [loop.task.module_of(row).state_dict() for row in models]  # type: ignore[attr-defined]
    return torch.stack([torch.cat([t.reshape(-1) for t in row.values()]) for row in rows])


def models(net: Loopback, names: Collection[str] = NAMES) -> Tensor:
    rows = []
    for config in net.nodes_.values():
        if config["client"] in names:
            module = read_model(Vault(config["vault"]).model_path()).module
            rows.append(torch.cat([t.detach().reshape(-1) for t in module.state_dict().values()]))
    return torch.stack(rows)


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]


# ---- the sum ----


@pytest.mark.parametrize(("method", "options"), [("fedavg", ""), ("ditto", "weights=equal"), ("fedper", "")])
def test_results_are_those_of_plain_averaging(tmp_path: Path, method: str, options: str) -> None:
    net = make(tmp_path, method=method, options=options)
    run(net)
    torch.testing.assert_close(models(net), simulated(net), rtol=0, atol=1e-6)
