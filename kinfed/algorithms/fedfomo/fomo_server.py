"""The server of FedFomo and FedFomo-MA: it keeps every upload, remembers who helped whom, and chooses what to send.

What clients do with the models is the methods' own: fedfomo.py has the reference and all decisions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from kinfed.algorithms.base import Algorithm
from kinfed.algorithms.fedfomo import affinity
from kinfed.algorithms.fedfomo.weights import TINY, judges, mean_losses, shares
from kinfed.core import rng
from kinfed.core.tree import Tree
from kinfed.data.federation import Cohort, Population
from kinfed.engine.task import Task
from kinfed.errors import ConfigError

MAX_DRAWN = 200  # clients up to which the matrices of who helps whom are written to the journal


@dataclass
class Server(Tree):
    theta: Tensor  # [K, P] last upload of each client
    uploaded: Tensor  # [K] int64, the round of that upload; 0: never
    affinity: Tensor  # [K, K] float64  P
    plan: Tensor  # [K, m] int64, candidates of each active client in this round, m <= M; [K, 0] between rounds
    heard: Tensor  # [K, M] int64, candidates of each client's last update; -1: none
    mix: Tensor  # [K, M] float64  w* that it gave them
    averages: Tensor  # [g, P] with subglobal: averages of groups of clients, and the average of these
    count: Tensor  # [K] float64 training examples, with subglobal
    round: Tensor  # [] int64 completed rounds
    key: Tensor  # [] int64 for ties, exploration and clustering


@dataclass
class Up(Tree):
    theta: Tensor  # [n, P] the trained model
    w: Tensor  # [n, M] float32, signed weights of the candidates in the plan's order, then zeros
    count: Tensor | None  # [n] examples; only with subglobal


AnyClient = TypeVar("AnyClient", bound=Tree)
AnyDown = TypeVar("AnyDown", bound=Tree)


@dataclass(frozen=True)
class Fomo(Algorithm[Server, AnyClient, AnyDown, Up], Generic[AnyClient, AnyDown]):
    """The server's side: it keeps every upload, remembers who helped whom, and chooses what to send."""

    needs_validation: ClassVar[bool] = True
    symmetric: ClassVar[bool] = False
    # Of training examples only gradients leave a client, but its choice of models is made by validation examples.
    leaks: ClassVar[tuple[str, ...]] = (
        "weights of other clients' models, computed from losses on validation examples (on training examples where a "
        "client has no others)",
    )

    models: int = 5
    """M: candidates of a client per round, its own model included."""
    epsilon: float = 0.3
    """Chance that a place among the candidates goes to a random model instead of the next best."""
    epsilon_decay: float = 0.05
    """What ε loses per round."""
    decay: str = "subtract"
    """ε_t = max(ε − decay t, 0) ("subtract") or ε (1 − decay)^t ("multiply")."""
    available: str = "last_upload"
    """Models on offer: everyone's last upload, or only those of the "previous_round"."""
    newcomers: str = "train"
    """A client that never trained begins at the common start ("train") or at a combination of others ("combine").
    Either way it weighs what it is sent, the server learns from that, and it is evaluated with a combination."""
    norm: str = "l2"
    """The distance in Eq. (3): l2, l1, l2sq, or none."""
    affinity_update: str = "raw"
    """P grows by w ("raw") or by w / |Σ w| ("abs_sum", released code)."""
    evaluate: str = "post_federate"
    """The personal model: a fresh combination ("post_federate"), or the last trained one ("post_train")."""

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ConfigError(f"{name} is one of {', '.join(choices)}; got {getattr(self, name)!r}")
        if self.models < 1:
            raise ConfigError(f"models counts a client's own model too, so it is at least 1; got {self.models}")
        if not 0 <= self.epsilon <= 1 or not 0 <= self.epsilon_decay <= 1:
            raise ConfigError(f"epsilon and epsilon_decay lie in [0, 1]; got {self.epsilon} and {self.epsilon_decay}")

    def exploration(self, t: int) -> float:
        """ε after t completed rounds."""
        if self.decay == "subtract":
            return max(self.epsilon - self.epsilon_decay * t, 0.0)
        return self.epsilon * (1 - self.epsilon_decay) ** t

    def init_server(self, task: Task, clients: Population) -> Server:
        k = clients.num_clients
        return Server(
            theta=torch.zeros(k, task.num_params, device=task.device),
            uploaded=torch.zeros(k, dtype=torch.int64),
            affinity=torch.eye(k, dtype=torch.float64),
            plan=torch.zeros(k, 0, dtype=torch.int64),
            heard=torch.full((k, self.models), -1),
            mix=torch.zeros(k, self.models, dtype=torch.float64),
            averages=torch.zeros(0, task.num_params, device=task.device),
            count=torch.zeros(k, dtype=torch.float64),
            round=torch.tensor(0),
            key=clients.key("fomo"),
        )

    def on_offer(self, server: Server) -> Tensor:
        """bool [K]: whose models can be sent."""
        known = server.uploaded > 0
        return known if self.available == "last_upload" else known & (server.uploaded == server.round)

    def planned(self, server: Server, ids: Tensor, own: Tensor) -> Server:
        """The server with this round's candidates: the client itself where `own` [A], then others by affinity."""
        offered = self.on_offer(server)
        others = offered.sum() - offered[ids].to(torch.int64)
        width = min(self.models, int((others + own).min()))
        plan = torch.full((len(server.uploaded), width), -1)
        epsilon = self.exploration(int(server.round))
        key = rng.fold(server.key, server.round)
        if width:
            for who, mine in ((ids[own], 1), (ids[~own], 0)):
                chosen = affinity.choose(server.affinity, who, offered, width - mine, epsilon, key)
                plan[who] = torch.cat([who[:, None], chosen], 1) if mine else chosen
        return replace(server, plan=plan)

    def aggregate(self, server: Server, ids: Tensor, up: Up) -> Server:
        everyone = len(ids) == len(server.uploaded)
        uploaded, heard, mix = server.uploaded.clone(), server.heard.clone(), server.mix.clone()
        uploaded[ids] = server.round + 1
        candidates = server.plan[ids]
        width = candidates.shape[1]
        w = up.w[:, :width].to("cpu", torch.float64)
        heard[ids] = -1
        heard[ids, :width] = candidates
        mix[ids] = shares(up.w.to("cpu", torch.float64))
        growth = w / w.sum(1, keepdim=True).abs().clamp_min(TINY) if self.affinity_update == "abs_sum" else w
        return replace(
            server,
            theta=up.theta if everyone else server.theta.index_copy(0, ids.to(up.theta.device), up.theta),
            uploaded=uploaded,
            affinity=server.affinity.index_put((ids[:, None], candidates), growth, accumulate=True),  # p ← p + w
            plan=server.plan[:, :0],
            heard=heard,
            mix=mix,
            round=server.round + 1,
        )

    def adopt(self, task: Task, server: Server, data: Cohort) -> Server:
        """Newcomers try every model on offer once; how well each does on their own examples is their first affinity."""
        offered = self.on_offer(server).nonzero().squeeze(1)
        loss = mean_losses(task, [theta.expand(len(data), -1) for theta in server.theta[offered]], judges(data))
        finite = torch.isfinite(loss)
        worst = torch.where(finite, loss, -torch.inf).amax(1, keepdim=True)
        gain = torch.where(finite, worst - loss, 0.0)
        return replace(server, affinity=server.affinity.index_put((data.ids[:, None], offered), gain))

    def server_figures(self, server: Server) -> dict[str, Any]:
        k = len(server.uploaded)
        mixes = server.mix.sum(1) > 0
        own = (server.mix * (server.heard == torch.arange(k)[:, None])).sum(1)
        figures: dict[str, Any] = {
            "epsilon": self.exploration(max(int(server.round) - 1, 0)),
            "own_share": float(own[mixes].mean()) if bool(mixes.any()) else 0.0,
        }
        if k <= MAX_DRAWN:
            weights = torch.zeros(k, k + 1, dtype=torch.float64).scatter_add(1, server.heard % (k + 1), server.mix)
            figures |= {"affinity": server.affinity, "weights": weights[:, :k]}
        return figures


_CHOICES = {
    "decay": ("subtract", "multiply"),
    "available": ("last_upload", "previous_round"),
    "newcomers": ("train", "combine"),
    "norm": ("l2", "l1", "l2sq", "none"),
    "affinity_update": ("raw", "abs_sum"),
    "evaluate": ("post_federate", "post_train"),
}
