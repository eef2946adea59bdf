"""FedPer: shared base layers, a head of one's own.

Arivazhagan, Aggarwal, Singh, Choudhary: Federated Learning with Personalization Layers, 2019.

    θ_m = (base, head_m);   clients train both, the server averages the base by examples, heads never leave

An empty head (`head_layers = 0`) is FedAvg. The personal model joins the current base and the client's own head, as
it was left by its last training; a client that has not trained yet uses the common initial head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kinfed.algorithms.base import Algorithm, mean_of
from kinfed.core.tree import Tree, runs
from kinfed.data.federation import Cohort, Population
from kinfed.engine.sgd import sgd
from kinfed.engine.task import Task
from kinfed.errors import ConfigError


@dataclass
class Server(Tree):
    shared: Tensor  # [G] the shared parameters


@dataclass
class Client(Tree):
    own: Tensor  # [n, P − G] parameters that never leave the client


@dataclass
class Down(Tree):
    shared: Tensor  # [n, G]


@dataclass
class Up(Tree):
    delta: Tensor  # [n, G]
    count: Tensor | None  # [n] examples; absent with equal weights


@dataclass(frozen=True)
class FedPer(Algorithm[Server, Client, Down, Up]):
    head_layers: int = 1
    """How many of the last layers form the head (K_P in the paper)."""
    head: str = ""
    """Layers of the head by name, separated by commas, instead of `head_layers`."""
    weights: str = "examples"
    """Weights of the average: "examples" or "equal"."""

    def __post_init__(self) -> None:
        if self.weights not in ("examples", "equal"):
            raise ConfigError(f"weights is examples or equal; got {self.weights!r}")
        if self.head_layers < 0:
            raise ConfigError(f"head_layers must not be negative; got {self.head_layers}")

    @property
    def named_head(self) -> tuple[str, ...]:
        return tuple(name.strip() for name in self.head.split(",") if name.strip())

    def own_mask(self, task: Task) -> Tensor:
        """bool [P]: parameters that stay with the client."""
        names = task.layer_names()
        last = min(self.head_layers, len(names))
        return task.layer_mask(self.named_head or names[len(names) - last :]).to(task.device)

    def check(self, task: Task, clients: Population) -> None:
        super().check(task, clients)
        if bool(self.own_mask(task).all()):
            layers = ", ".join(task.layer_names())
            raise ConfigError(
                f"{type(self).__name__} must leave some layers to share, but all of {layers} stay with the clients; "
                "choose a deeper model or fewer own layers"
            )

    def _join(self, own: Tensor, shared: Tensor, mask: Tensor) -> Tensor:
        theta = shared.new_empty(len(shared), len(mask))
        for part, chosen in ((own, mask), (shared, ~mask)):
            places = runs(chosen)
            sizes = [place.stop - place.start for place in places]
            for place, columns in zip(places, torch.split(part, sizes, 1), strict=True):
                theta[:, place] = columns
        return theta

    def init_server(self, task: Task, clients: Population) -> Server:
        return Server(task.init(clients.seed)[~self.own_mask(task)])

    def init_client(self, task: Task, data: Cohort) -> Client:
        return Client(task.init(data.seed)[self.own_mask(task)].expand(len(data), -1))

    def download(self, server: Server, ids: Tensor) -> Down:
        return Down(server.shared.expand(len(ids), -1))

    def client_update(self, task: Task, client: Client, down: Down, data: Cohort) -> tuple[Client, Up]:
        mask = self.own_mask(task)
        theta = self.train(task, self._join(client.own, down.shared, mask), mask, data)
        count = data.train.count.to(torch.float32) if self.weights == "examples" else None
        return Client(_columns(theta, mask)), Up(_columns(theta, ~mask) - down.shared, count)

    def train(self, task: Task, theta: Tensor, own: Tensor, data: Cohort) -> Tensor:
        """Local training of the joined model; what related methods change."""
        return sgd(task, theta, data.train.batches(self.training))

    def aggregate(self, server: Server, ids: Tensor, up: Up) -> Server:
        return Server(server.shared + mean_of(up.delta, torch.ones(len(ids)) if up.count is None else up.count))

    def averaged(self) -> str:
        return "delta"

    def personalize(self, task: Task, client: Client, down: Down, data: Cohort) -> Tensor:
        return self._join(client.own, down.shared, self.own_mask(task))


def _columns(theta: Tensor, chosen: Tensor) -> Tensor:
    """theta[:, chosen], whole layers at a time instead of number by number; a view where they follow one another."""
    parts = [theta[:, place] for place in runs(chosen)]
    return parts[0] if len(parts) == 1 else torch.cat([theta[:, :0], *parts], 1)
