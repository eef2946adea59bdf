"""FedFomo: every client mixes its own choice of other clients' models, judged on its own validation examples.

Zhang, Sapra, Fidler, Yeung, Alvarez: Personalized Federated Learning with First Order Model Optimization, ICLR 2021.

    min Σ_i L_i(θ_i),      L_i the mean loss of client i's validation examples, which may come from any distribution
    w_n = (L_i(θ_i^old) − L_i(θ_n)) / ‖θ_n − θ_i^old‖                                                      Eq. (3)
    θ_i ← θ_i^old + Σ_n w*_n (θ_n − θ_i^old),      w*_n = max(w_n, 0) / Σ_k max(w_k, 0)                     Eq. (13)

The candidates n are the client's own trained model, which costs no download, and M − 1 uploads of others, chosen by
the server: those of the highest affinity P[i, n], the sum of all w_n so far, now and then (ε) a random one.
M = 1 is local training that forgets a round in which the validation loss rose.

Decisions where paper, released code and other implementations differ:
  * θ_i^old is the model at the *start* of the last local training (the released code's too). Were it the trained
    one, the own candidate would weigh 0/0 and the early stopping that the paper speaks of could not happen.
  * Without a positive weight the client keeps θ_i^old: its last training is discarded.
  * ‖·‖ is Euclidean (`norm`; the released default is l1, its "l2" the squared distance). A model at distance 0
    weighs nothing. P is updated by signed weights as they are (`affinity_update`).
  * P starts as the identity; ties are broken at random, without which "equal chance" is not true.
  * ε falls by subtraction, 0.3, 0.25, ..., 0 (`decay`). Client sampling and exploration draw anew in every round;
    the released code re-seeds and repeats both.
  * Evaluated is a fresh combination without further training (`evaluate`), as in the released code; the model after
    the last training is scored beside it. Out of distribution the two differ by much.
  * Losses are means over all validation examples, without augmentation. A candidate whose loss is not finite weighs
    nothing and is counted. A client without validation examples is judged by its training examples.
  * The published commands also offer averages of groups of clients that the server finds in P (`subglobal`); it is
    off by default, because the paper's text does not know them.

All clients of a round are sent the same number of models, so that messages have equal rows and bytes are those of
models really sent. While fewer than M models exist, it is the number that every active client can get.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from kinfed import affinity, rng
from kinfed.algorithm import EXAMPLE_COUNT, Algorithm, mean_of
from kinfed.data.batches import Part
from kinfed.data.federation import Cohort, Population
from kinfed.errors import ConfigError
from kinfed.local import sgd
from kinfed.norms import squared_norm
from kinfed.task import Task
from kinfed.tree import Tree

TINY = 1e-9  # distances and sums below this count as zero
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
class Client(Tree):
    old: Tensor  # [n, P]  θ_i^old, where the last local training began
    theta: Tensor  # [n, P]  where it ended
    seen: Tensor  # [n] bool
    kept: Tensor  # [n] bool, the last combination found nothing better than θ_i^old
    unusable: Tensor  # [n] int64 candidates so far whose loss was not finite


@dataclass
class Down(Tree):
    models: Tensor  # [n, m − 1, P] of other clients
    averages: Tensor  # [n, g, P]


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


@dataclass(frozen=True)
class FedFomo(Fomo[Client, Down]):
    subglobal: int = 0
    """Groups of clients, found in P, whose averages (and the average of these) everyone is sent as well."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.subglobal < 0:
            raise ConfigError(f"subglobal is a number of groups, 0 for none; got {self.subglobal}")

    def leaked(self) -> dict[str, str]:
        return super().leaked() | ({EXAMPLE_COUNT: "subglobal = 0"} if self.subglobal else {})

    def init_client(self, task: Task, data: Cohort) -> Client:
        start = task.init(data.seed).expand(len(data), -1)
        never = torch.zeros(len(data), dtype=torch.bool)
        return Client(start, start, never, never, torch.zeros(len(data), dtype=torch.int64))

    def prepare(self, server: Server, ids: Tensor) -> Server:
        return self.planned(server, ids, torch.ones(len(ids), dtype=torch.bool))

    def download(self, server: Server, ids: Tensor) -> Down:
        plan = server.plan[ids, 1:].to(server.theta.device)
        models = server.theta.index_select(0, plan.flatten())  # whole rows at once, which theta[plan] does not copy
        models = models.view(*plan.shape, server.theta.shape[1])
        return Down(models, server.averages.expand(len(ids), -1, -1))

    def client_update(self, task: Task, client: Client, down: Down, data: Cohort) -> tuple[Client, Up]:
        mixed, w, unusable = self._combine(task, client, down, data)
        if self.newcomers == "train":
            mixed = torch.where(client.seen[:, None].to(mixed.device), mixed, client.old)
        kept = client.seen & ~(w > 0).any(1)
        theta = sgd(task, mixed, data.train.batches(self.work))
        sent = down.models.shape[1] + 1
        reported = torch.zeros(len(data), self.models)
        reported[:, :sent] = w[:, :sent].to(torch.float32)
        count = data.train.count.to(torch.float32) if self.subglobal else None
        seen = torch.ones_like(client.seen)
        return Client(mixed, theta, seen, kept, client.unusable + unusable), Up(theta, reported, count)

    @torch.no_grad()
    def _combine(self, task: Task, client: Client, down: Down, data: Cohort) -> tuple[Tensor, Tensor, Tensor]:
        """The mixed models [n, P], the signed weights of all candidates, and how many of them were unusable [n]."""
        candidates = [client.theta, *down.models.unbind(1), *down.averages.unbind(1)]
        loss = mean_losses(task, [client.old, *candidates], judges(data))
        w, unusable = weights(loss[:, :1] - loss[:, 1:], candidates, client.old, self.norm)  # Eq. (3)
        share = shares(w)
        keeps = (share.sum(1) == 0)[:, None].to(client.old.device)
        return torch.where(keeps, client.old, convex(candidates, share)), w, unusable

    def aggregate(self, server: Server, ids: Tensor, up: Up) -> Server:
        new = super().aggregate(server, ids, up)
        if up.count is None:
            return new
        count = server.count.clone()
        count[ids] = up.count.to("cpu", torch.float64)
        members = self.on_offer(new).nonzero().squeeze(1)
        seed = rng.numpy_seed(rng.fold(new.key, new.round))
        label = affinity.groups(new.affinity[members][:, members], self.subglobal, seed)
        groups = [members[label == g] for g in range(int(label.max()) + 1)]
        means = torch.stack([mean_of(new.theta[group], count[group]) for group in groups])
        return replace(new, count=count, averages=torch.cat([means, means.mean(0, keepdim=True)]))

    def personalize(self, task: Task, client: Client, down: Down, data: Cohort) -> Tensor:
        return self._combine(task, client, down, data)[0] if self.evaluate == "post_federate" else client.theta

    def alternatives(self, task: Task, client: Client, down: Down, data: Cohort) -> dict[str, Tensor]:
        if self.evaluate == "post_federate":
            return {"post_train": client.theta}
        return {"post_federate": self._combine(task, client, down, data)[0]}

    def client_figures(self, client: Client) -> dict[str, Tensor]:
        return {"kept_baseline": client.kept.to(torch.float32), "unusable_models": client.unusable.to(torch.float32)}


def judges(data: Cohort) -> Part:
    """Every client's validation examples; the training examples of those who have none."""
    val, train = data.val, data.train
    lacks = val.count == 0
    if not bool(lacks.any()):
        return val
    return replace(
        val,
        rows=torch.cat([val.rows, train.rows]),
        start=torch.where(lacks, len(val.rows) + train.start, val.start),
        count=torch.where(lacks, train.count, val.count),
    )


def mean_losses(task: Task, models: list[Tensor], part: Part) -> Tensor:
    """[n, len(models)] float64: mean loss of each model [n, P] on each client's examples, which are fetched once."""
    total = torch.zeros(len(part.count), len(models), dtype=torch.float64)
    for rows, batch in part.everything():
        real = batch.weight > 0
        for number, theta in enumerate(models):
            losses = torch.where(real, task.losses(theta[rows], batch), 0.0)
            total[rows, number] += losses.sum(1).to("cpu", torch.float64)
    return total / part.count[:, None]


def weights(gain: Tensor, candidates: list[Tensor], base: Tensor, norm: str) -> tuple[Tensor, Tensor]:
    """gain [n, m] per distance of the candidates from the base, float64; and how many gains were not finite [n]."""
    finite = torch.isfinite(gain)
    distance = torch.stack([_distance(theta - base, norm) for theta in candidates], 1).cpu()
    usable = finite & (distance >= TINY)
    return torch.where(usable, gain / distance.clamp_min(TINY), 0.0), (~finite).sum(1)


def _distance(difference: Tensor, norm: str) -> Tensor:
    if norm == "none":
        return torch.ones(len(difference), dtype=torch.float64)
    if norm == "l1":
        size: Tensor = torch.linalg.vector_norm(difference, 1, dim=1, dtype=torch.float64)
        return size
    square = squared_norm(difference)
    return square if norm == "l2sq" else square.sqrt()


def shares(w: Tensor) -> Tensor:
    """w* of Eq. (13): positive weights scaled to sum to one; all zero where there is none."""
    positive = w.clamp_min(0)
    total = positive.sum(1, keepdim=True)
    return torch.where(total > 0, positive / total, 0.0)


def convex(models: list[Tensor], share: Tensor) -> Tensor:
    """[n, P]: Σ_j share[:, j] models[j]."""
    out = torch.zeros_like(models[0], memory_format=torch.contiguous_format)
    for theta, part in zip(models, share.to(out.device, out.dtype).unbind(1), strict=True):
        out.addcmul_(theta, part[:, None])
    return out
