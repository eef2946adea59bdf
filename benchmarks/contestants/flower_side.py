"""Rounds of Flower's simulation runtime: its FedAvg strategy, clients that train with PyTorch in Ray's workers."""

from __future__ import annotations

import logging
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch_training import batches, network
from turnstile import Turnstile
from work import Images, Side, Work, versions_of

MANY = 1_000_000  # rounds: as many as are asked for


class FlowerSide(Side):
    has_processes = True

    def __init__(self, work: Work, images: Images, method: str, cores: int) -> None:
        logging.getLogger("flwr").setLevel(logging.ERROR)
        torch.set_num_threads(1)
        self._test = torch.from_numpy(images.standardized()[1])
        self._test_y = torch.from_numpy(images.test_y)
        self._net = network(work)
        self._turnstile = Turnstile()
        path = images_path()
        server = ServerApp()

        @server.main()
        def main(grid: Grid, context: Context) -> None:
            strategy = FedAvg(
                fraction_train=work.active / work.clients, fraction_evaluate=0.0, min_train_nodes=work.active,
                min_available_nodes=work.clients,
            )  # fmt: skip
            strategy.start(grid, ArrayRecord(self._net.state_dict()), num_rounds=MANY, evaluate_fn=self._after_round)

        client = ClientApp()

        @client.train()
        def train(message: Message, context: Context) -> Message:
            return _train(work, path, message, int(context.node_config["partition-id"]))

        # A cluster of its own: Ray would join any other that happens to run here.
        ray = {"address": "local", "num_cpus": cores, "include_dashboard": False}
        resources = {"client_resources": {"num_cpus": 1}, "init_args": ray}
        self._turnstile.start(
            lambda: run_simulation(server, client, num_supernodes=work.clients, backend_config=resources)
        )

    def _after_round(self, number: int, arrays: ArrayRecord) -> MetricRecord:
        self._net.load_state_dict(arrays.to_torch_state_dict())
        if not self._turnstile.wait_for_turn():
            raise SystemExit
        return MetricRecord()

    def rounds(self, count: int) -> None:
        self._turnstile.let_pass(count)

    def accuracy(self) -> float:
        with torch.no_grad():
            return float((self._net(self._test).argmax(1) == self._test_y).float().mean())

    def versions(self) -> dict[str, Any]:
        return versions_of("flwr", "ray", "torch")

    def close(self) -> None:
        import ray

        ray.shutdown()  # the process is left without waiting for its threads, and workers would stay


_loaded: dict[str, tuple[torch.Tensor, torch.Tensor, Any]] = {}  # of a worker process: read once


def images_path() -> str:
    import os

    return os.environ["KINFED_RIVALS_IMAGES"]


def _train(work: Work, path: str, message: Message, client: int) -> Message:
    from pathlib import Path

    if path not in _loaded:
        torch.set_num_threads(1)
        images = Images.load(Path(path))
        _loaded[path] = torch.from_numpy(images.standardized()[0]), torch.from_numpy(images.y), images.offsets
    x, y, offsets = _loaded[path]
    begin, end = int(offsets[client]), int(offsets[client + 1])
    net = network(work)
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer, criterion = torch.optim.SGD(net.parameters(), lr=work.lr), torch.nn.CrossEntropyLoss()
    for index in batches(end - begin, work):
        optimizer.zero_grad()
        criterion(net(x[begin:end][index]), y[begin:end][index]).backward()
        optimizer.step()
    content = {
        "arrays": ArrayRecord(net.state_dict()), "metrics": MetricRecord({"num-examples": end - begin}),
    }  # fmt: skip
    return Message(RecordDict(content), reply_to=message)
