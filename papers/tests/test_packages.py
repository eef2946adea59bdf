"""benchmarks/packages.py: another package that computes the same is not apart, one that does not is."""

from __future__ import annotations

import sys
from copy import deepcopy
from types import ModuleType, SimpleNamespace

import packages
import pytest
import torch
from packages import KinfedRun, Models


def fedavg(ours: KinfedRun, lr: float) -> Models:
    """FedAvg as a plain loop over the batches that kinfed hands out."""
    server, rounds = ours.start(), packages.SETTINGS["rounds"]
    sizes = torch.tensor([len(ours.rows(client, "train")[1]) for client in ours.clients], dtype=torch.float32)
    for round in range(1, rounds + 1):
        clients = [deepcopy(server) for _ in ours.clients]
        for number, model in enumerate(clients):
            optimizer = torch.optim.SGD(model.parameters(), lr)
            for x, y in ours.batches(number, round):
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
        with torch.no_grad():
            for mean, *own in zip(server.parameters(), *(model.parameters() for model in clients), strict=True):
                mean.copy_(torch.einsum("k...,k->...", torch.stack(own), sizes / sizes.sum()))
    return Models(clients, server)


@pytest.mark.parametrize(("lr", "equal"), [(packages.LR, True), (packages.LR / 2, False)])
def test_a_plain_loop_beside_kinfed(lr: float, equal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("package_plain")
    vars(module).update(PAIRS={"fedavg": SimpleNamespace(ours={})}, run=lambda method, ours: fedavg(ours, lr))
    monkeypatch.setitem(sys.modules, "package_plain", module)
    monkeypatch.setitem(packages.PACKAGES, "plain", "plain")
    monkeypatch.setitem(packages.SETTINGS, "rounds", 2)
    figures = packages.compare("plain", "fedavg", 1)
    assert figures.apart is not None
    assert (figures.apart < 1e-6) is equal
    assert (figures.personal[0] == figures.personal[1]) is equal
    (table,) = packages.tables([figures])
    assert table.rows[0][0].text == "fedavg"
