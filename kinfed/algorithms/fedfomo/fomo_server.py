"""The server of FedFomo and FedFomo-MA: it keeps every upload, remembers who helped whom, and chooses what to send.

What clients do with the models is the methods' own: fedfomo.py has the reference and all decisions."""

from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import Tensor

from kinfed.algorithms.base import Algorithm, PrivacyProfile, RoundInfo, gradient_steps
from kinfed.algorithms.common.averaging import check_memory
from kinfed.algorithms.fedfomo.affinity import TINY, Affinity, Norm, choose_models, mixing_weights, validation_or_train
from kinfed.author import Cohort, Population, Range, Task, Tree, mean_losses, option

MOST_IN_JOURNAL = 200  # clients up to which the matrices of who helps whom are written to the journal


@dataclass
class Server(Tree):
    theta: Tensor  # [K, P] last upload of each client
    uploaded: Tensor  # [K] int64, the round of that upload; 0: never
    affinity: Affinity  # P
    plan: Tensor  # [K, m] int64, candidates of each active client in this round, m <= M; [K, 0] between rounds
    heard: Tensor  # [K, M] int64, candidates of each client's last update; -1: none
    mix: Tensor  # [K, M] float64  w* that it gave them
    averages: Tensor  # [g, P] with subglobal: averages of groups of clients, and the average of these
    count: Tensor  # [K] float64 training examples, with subglobal
    trained: Tensor  # [] int64 how many columns of a model are trainable; running statistics follow them


@dataclass
class Up(Tree):
    theta: Tensor  # [n, P] the trained model
    w: Tensor  # [n, M] float32, signed weights of the candidates in the plan's order, then zeros
    count: Tensor | None  # [n] examples; only with subglobal


AnyClient = TypeVar("AnyClient", bound=Tree)
AnyDown = TypeVar("AnyDown", bound=Tree)


@dataclass(frozen=True)
class FomoServer(Algorithm[Server, AnyClient, AnyDown, Up], Generic[AnyClient, AnyDown]):
    models: int = option(
        5, "M: candidates of a client per round, its own model included", ge=1, tune=Range(1, 5, log=False, whole=True)
    )
    epsilon: float = option(
        0.3, "ε: chance that a place among the candidates goes to a random model instead of the next best",
        ge=0, le=1, tune=Range(0.0, 1.0, log=False),
    )  # fmt: skip
    epsilon_decay: float = option(0.05, "what ε loses per round", ge=0, le=1)
    decay: Literal["subtract", "multiply"] = option("subtract", "ε_t = max(ε − decay t, 0), or ε (1 − decay)^t")
    available: Literal["last_upload", "previous_round"] = option(
        "last_upload", "models on offer: everyone's last upload, or only those of the previous round"
    )
    newcomers: Literal["train", "combine"] = option(
        "train",
        "a client that never trained begins at the common start, or at a combination of others; either way it weighs "
        "what it is sent, the server learns from that, and it is evaluated with a combination",
    )
    max_gb: float = option(16.0, "refuse models that take more than this many gigabytes of the server's memory", gt=0)
    norm: Norm = option("l2", "the distance in Eq. (3)")
    affinity_update: Literal["raw", "abs_sum"] = option("raw", "P grows by w, or by w / |Σ w| (released code)")
    evaluate: Literal["post_federate", "post_train"] = option(
        "post_federate", "the personal model: a fresh combination, or the last trained one"
    )

    traits = frozenset({"needs validation", "draws by client", "hands models on"})
    single_updates = "hands clients' models on to other clients instead of averaging them"

    def check(self, task: Task, population: Population) -> None:
        what = f"FedFomo's server keeps the model of every one of {population.num_clients:,} clients"
        check_memory(what, 4.0 * population.num_clients * task.num_params, self.max_gb)

    def exploration(self, t: int) -> float:
        """ε after t completed rounds."""
        if self.decay == "subtract":
            return max(self.epsilon - self.epsilon_decay * t, 0.0)
        return self.epsilon * (1 - self.epsilon_decay) ** t

    def init_server(self, task: Task, population: Population) -> Server:
        k = population.num_clients
        theta = torch.zeros(k, task.num_params, device=task.device)
        mix, count = torch.zeros(k, self.models, dtype=torch.float64), torch.zeros(k, dtype=torch.float64)
        return Server(
            theta, uploaded=torch.zeros(k, dtype=torch.int64), affinity=Affinity.identity(),
            plan=torch.zeros(k, 0, dtype=torch.int64), heard=torch.full((k, self.models), -1), mix=mix,
            averages=theta[:0].clone(), count=count, trained=torch.tensor(task.trainable.stop),
        )  # fmt: skip

    def on_offer(self, server: Server) -> Tensor:
        """bool [K]: whose models can be sent."""
        known = server.uploaded > 0
        return known if self.available == "last_upload" else known & (server.uploaded == server.uploaded.max())

    def choose_candidates(self, server: Server, ids: Tensor, own: Tensor, round: RoundInfo) -> Server:
        """The server with this round's candidates: the client itself where `own` [A], then others by affinity."""
        offered = self.on_offer(server)
        others = offered.sum() - offered[ids].to(torch.int64)
        width = min(self.models, int((others + own).min()))
        plan = torch.full((len(server.uploaded), width), -1)
        epsilon, key = self.exploration(round.number - 1), round.key("fomo")
        if width:
            for who, own_models in ((ids[own], 1), (ids[~own], 0)):
                chosen = choose_models(server.affinity, who, offered, width - own_models, epsilon, key)
                plan[who] = torch.cat([who[:, None], chosen], 1) if own_models else chosen
        return replace(server, plan=plan)

    def aggregate(self, server: Server, ids: Tensor, up: Up, round: RoundInfo) -> Server:
        uploaded, heard, mix = server.uploaded.clone(), server.heard.clone(), server.mix.clone()
        uploaded[ids] = round.number
        candidates = server.plan[ids]
        width = candidates.shape[1]
        w = up.w[:, :width].to("cpu", torch.float64)
        heard[ids] = -1
        heard[ids, :width] = candidates
        mix[ids] = mixing_weights(up.w.to("cpu", torch.float64))
        growth = w / w.sum(1, keepdim=True).abs().clamp_min(TINY) if self.affinity_update == "abs_sum" else w
        everyone = len(ids) == len(server.uploaded)
        theta = up.theta if everyone else server.theta.index_copy(0, ids.to(up.theta.device), up.theta)
        affinity, plan = server.affinity.added(ids, candidates, growth), server.plan[:, :0]  # p ← p + w
        return replace(server, theta=theta, uploaded=uploaded, affinity=affinity, plan=plan, heard=heard, mix=mix)

    def place_newcomer(self, task: Task, server: Server, data: Cohort) -> Server:
        """Newcomers try every model on offer once; how well each does on their own examples is their first affinity."""
        offered = self.on_offer(server).nonzero().squeeze(1)
        models = [theta.expand(len(data), -1) for theta in server.theta[offered]]
        loss = mean_losses(task, models, validation_or_train(data))
        finite = torch.isfinite(loss)
        worst = torch.where(finite, loss, -torch.inf).amax(1, keepdim=True)
        gain = torch.where(finite, worst - loss, 0.0)
        return replace(server, affinity=server.affinity.replaced(data.ids, offered, gain))

    def figures(self, server: Server) -> dict[str, Any]:
        k = len(server.uploaded)
        mixes = server.mix.sum(1) > 0
        own = (server.mix * (server.heard == torch.arange(k)[:, None])).sum(1)
        epsilon = self.exploration(max(int(server.uploaded.max()) - 1, 0))
        own_share = float(own[mixes].mean()) if bool(mixes.any()) else 0.0
        figures: dict[str, Any] = {"epsilon": epsilon, "own_share": own_share}
        if k <= MOST_IN_JOURNAL:
            weights = torch.zeros(k, k + 1, dtype=torch.float64).scatter_add(1, server.heard % (k + 1), server.mix)
            everyone = torch.arange(k)
            figures |= {"affinity": server.affinity.rows(everyone, everyone), "weights": weights[:, :k]}
        return figures

    def privacy(self, count: Tensor) -> PrivacyProfile:
        # Of training examples only gradients leave a client, but its choice of models is made by validation examples.
        choice = (
            "weights of other clients' models, computed from losses on validation examples (on training examples where "
            "a client has no others)"
        )
        return gradient_steps(self.training.num_steps(count), uncovered={choice: ""})
