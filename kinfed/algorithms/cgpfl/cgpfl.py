"""CGPFL: K context models instead of one global model, found by clustering what the clients send.

Tang, Guo, Guo: Personalized Federated Learning with Contextualized Generalization, IJCAI 2022, Algorithm 1.

    min_Θ  (1/N) Σ_i [ f_i(θ_i) + (λ/2) ‖θ_i − ω_k(i)‖² ]
    s.t.   (Ω, k) minimizes (1/N) Σ_i ‖θ_i − ω_k(i)‖²            the k-means cost

A client receives its context model ω, takes S proximal steps of θ per batch, then one step of its copy of ω, for R
local rounds (the steps of local training), and sends the copy back; the server clusters the copies (k-means++).
K = 1 with `restart` is pFedMe with equal weights and β = α. K = N leaves every client alone with its own ω.

Decisions where the paper is silent or its letter does not work (docs/cgpfl.md has the measurements):
  * `pull`. The printed step is ω − β (2/N) (ω − θ) with a β that is never given; with β = lr, 60% of the *initial*
    model remains after all rounds. The step is parametrized as ω − pull (ω − θ); the default pull = lr λ is pFedMe's
    step, which the K = 1 equivalence claimed by the paper requires. β = pull N / 2 is among the figures.
  * θ_i carries over from round to round (Θ_I^0 is an input of Algorithm 1); `restart` begins at the received ω.
  * Contexts keep their identity: once they differ, k-means starts from the current Ω, so α < 1 averages like with
    like. A context that has lost all its clients is moved to the reply that fits its own context worst.
  * The paper calls all clients in every round. Here a context whose clients are not called stays as it is, whatever
    the others send; clients that are not called keep their context (`recluster="active"`) or take part with their last
    upload ("all"). A client that has never replied belongs to no context yet (−1) and is sent the mean of the
    contexts: sent one of them, it would hardly get away from it. With "all", as long as clients reply for the first
    time, their contexts are found afresh and matched with the old ones: the first few say little about those to come.
  * Weight decay is part of f_i; momentum, which proximal steps do not have, is refused.
  * Distances and clusters are those of trainable parameters. Running statistics (of BatchNorm, say) move with the
    passes at θ; the client's copy of ω takes them over, and the server averages them with the rest of a context.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from kinfed.algorithms.base import Algorithm, PrivacyProfile, RoundInfo, ServerModels, gradient_steps
from kinfed.algorithms.common import one_model
from kinfed.algorithms.common.averaging import ModelDown, own_or_server
from kinfed.algorithms.common.clustering import Clusters, k_means, lloyd, match_labels
from kinfed.author import Cohort, ConfigError, GradientStep, Mix, Population, Task, best_fit, run_program, weighted_mean
from kinfed.core import Range, Tree, kernels, option, rng

NONE = -1  # the context of a client that has not replied yet


@dataclass
class Choice(Tree):
    """Choice of the number of contexts by CGPFL-Heur (`kinfed.algorithms.cgpfl.heuristic`); in CGPFL all is empty."""

    count: Tensor  # [N] float64 examples of each client, once known
    complexity: Tensor  # [K_max] float64 first term of e(K), empty until K is chosen
    cost: Tensor  # [K_max] float64 cost(K), empty until K is chosen
    mu: Tensor  # [] float64 μ used


@dataclass
class Server(Tree):
    omega: Tensor  # [K, P] context models
    context: Tensor  # [N] int64, context of each client; −1 before its first reply
    start: Tensor  # [P] for clients without context: mean of the contexts, each counted by its clients
    last: Tensor  # [N, P] last upload of each client with recluster="all", else [0, P]
    moved: Tensor  # [] int64 clients that changed their context in the last round
    spread: Tensor  # [] float64 mean ‖ω̃_i − mean of its context‖² over the clustered uploads
    step: Tensor  # [] float64 mean over the contexts of ‖ω_k − its model a round ago‖²
    distances: Tensor  # [K, K] float64 of the contexts
    choice: Choice


@dataclass
class Client(one_model.Client):
    apart: Tensor  # [n] float64 ‖θ_i − ω‖² after the last round, ω as received; for the report


@dataclass
class Up(Tree):
    omega: Tensor  # [n, P] the client's copy ω̃_i after R local rounds
    count: Tensor | None = None  # [n] examples; sent in CGPFL-Heur only


@dataclass(frozen=True)
class CGPFL(Algorithm[Server, Client, ModelDown, Up]):
    contexts: int = option(4, "K, the number of context models", ge=1, tune=Range(2, 6, log=False, whole=True))
    lam: float = option(
        12.0, "λ: how firmly personal models are held near the context model", gt=0, tune=Range(1.0, 20.0)
    )
    inner_steps: int = option(5, "S: proximal steps per batch", ge=1)
    alpha: float = option(1.0, "α of ω ← (1 − α) ω + α mean of the context's members", gt=0, le=1)
    pull: float | None = option(None, "step of the local ω towards θ; lr · λ by default", gt=0, le=1)
    personal_lr: float | None = option(None, "η of the proximal steps; the common lr by default", gt=0)
    restart: bool = option(
        False, "begin each round's θ at the received context model (as pFedMe) instead of the client's last θ"
    )
    recluster: Literal["active", "all"] = option(
        "active", "cluster the replies of the round (active) or everyone's last upload (all)"
    )

    traits = frozenset({"no momentum"})
    single_updates = "groups clients by their updates"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self._pull(self.training.lr) <= 1:
            raise ConfigError(f"pull (by default lr * lam) must lie in (0, 1]; got {self._pull(self.training.lr):g}")
        if not self._inner_lr(self.training.lr) * self.lam < 2:
            raise ConfigError(f"the proximal steps are unstable for personal_lr * lam >= 2; got lam = {self.lam}")

    def _pull(self, lr: float) -> float:
        """Pull of a round, decaying in step with the common rate."""
        return lr * self.lam if self.pull is None else self.pull

    def _inner_lr(self, lr: float) -> float:
        return lr if self.personal_lr is None else self.personal_lr * lr / self.training.lr

    def check(self, task: Task, population: Population) -> None:
        if self.contexts > population.num_clients:
            raise ConfigError(f"{self.contexts} contexts need as many clients; got {population.num_clients}")

    def init_server(self, task: Task, population: Population) -> Server:
        n, w = population.num_clients, task.init(population.seed)
        zero, empty = torch.tensor(0.0, dtype=torch.float64), torch.zeros(0, dtype=torch.float64)
        last = w.new_zeros(n if self.recluster == "all" else 0, len(w))
        distances = torch.zeros(self.contexts, self.contexts, dtype=torch.float64)
        return Server(
            w.repeat(self.contexts, 1), torch.full((n,), NONE), start=w.clone(), last=last, moved=torch.tensor(0),
            spread=zero, step=zero, distances=distances, choice=Choice(empty, empty, empty, mu=zero),
        )  # fmt: skip

    def init_client(self, task: Task, data: Cohort) -> Client:
        return Client.start(task, data, torch.zeros(len(data), dtype=torch.float64, device=task.device))

    def download(self, server: Server, ids: Tensor) -> ModelDown:
        return ModelDown(self.server_models(server).rows(ids))

    def client_update(self, task: Task, client: Client, down: ModelDown, data: Cohort) -> tuple[Client, Up]:
        batches = data.train.batches(self.training)
        eta, pull = self._inner_lr(batches.lr), self._pull(batches.lr)
        omega, trainable, decay = down.w.clone(), task.trainable, self.training.weight_decay
        theta = down.w.clone() if self.restart else own_or_server(client.seen, client.theta, down.w)
        program = (
            # θ ← θ − η (∇f(θ) + λ (θ − ω))
            GradientStep("theta", eta, decay=decay, proximal=(self.lam, "omega"), times=self.inner_steps),
            Mix("omega", "omega", "theta", pull),  # ω ← ω − β (2/N) (ω − θ)
        )
        run_program(task, [batches], program, {"omega": omega, "theta": theta})
        apart = (theta - down.w)[:, trainable].square().sum(1, dtype=torch.float64)
        return Client(theta, torch.ones_like(client.seen), apart), Up(omega)

    def aggregate(self, server: Server, ids: Tensor, up: Up, round: RoundInfo) -> Server:
        server, members, uploads = self.gather(server, ids, up)
        server = self.choose_contexts(server, members, uploads, round)
        clusters = self.assign(server, members, uploads, round)
        omega, context = server.omega.clone(), server.context.clone()
        context[members] = clusters.label.to(context)
        for k in torch.unique(clusters.label).tolist():
            changes = uploads[clusters.label == k]
            omega[k].lerp_(weighted_mean(changes, torch.ones(len(changes))), self.alpha)  # Ω ← (1 − α) Ω + α Ω_I P
        start = weighted_mean(omega, torch.bincount(context[context >= 0], minlength=len(omega)))
        moved = ((context != server.context) & (server.context >= 0)).sum()
        spread = torch.tensor(clusters.cost, dtype=torch.float64)
        step = (omega - server.omega)[:, round.trainable].square().sum(1, dtype=torch.float64).mean().cpu()
        distances = torch.from_numpy(kernels.pairwise_distances(omega[:, round.trainable]))
        return Server(omega, context, start, server.last, moved, spread, step, distances, server.choice)

    def gather(self, server: Server, ids: Tensor, up: Up) -> tuple[Server, Tensor, Tensor]:
        """The server with what it keeps of the replies, and who is to be clustered by which upload [n, P]."""
        if up.count is not None:
            count = server.choice.count
            count = count.index_copy(0, ids.to(count.device), up.count.to(count))
            server = replace(server, choice=replace(server.choice, count=count))
        if self.recluster == "active":
            return server, ids, up.omega
        replied = server.context >= 0
        replied[ids] = True
        last = server.last.index_copy(0, ids.to(server.last.device), up.omega)
        members = replied.nonzero().squeeze(1)
        return replace(server, last=last), members, last[members]

    def choose_contexts(self, server: Server, members: Tensor, uploads: Tensor, round: RoundInfo) -> Server:
        """The server with as many contexts as there are to be from now on; here they are given."""
        return server

    def assign(self, server: Server, members: Tensor, uploads: Tensor, round: RoundInfo) -> Clusters:
        """The context of each upload [n, P]: by k-means from the current contexts, or afresh."""

        uploads = uploads[:, round.trainable]

        def find_afresh() -> Clusters:
            return k_means(kernels.coordinates(uploads), len(server.omega), rng.numpy_seed(round.key("contexts")))

        if bool((server.omega == server.omega[:1]).all()):
            return find_afresh()
        x = kernels.coordinates(uploads, server.omega[:, round.trainable])
        points, centres = x[: len(uploads)], x[len(uploads) :]
        if self.recluster == "all" and bool((server.context[members] < 0).any()):
            clusters = find_afresh()
            return Clusters(match_labels(clusters.label, points, centres), clusters.cost)
        absent = server.context >= 0
        absent[members] = False
        held = torch.bincount(server.context[absent], minlength=len(centres)) > 0
        return lloyd(points, centres, held=held.cpu().numpy())

    def personalize(self, task: Task, client: Client, down: ModelDown, data: Cohort) -> Tensor:
        return own_or_server(client.seen, client.theta, down.w)

    def server_models(self, server: Server) -> ServerModels:
        """The contexts and, after them as long as a client belongs to none, the model that such clients are sent."""
        outside = server.context < 0
        if not bool(outside.any()):
            return ServerModels(server.omega, server.context)
        models = torch.cat([server.omega, server.start[None]])
        return ServerModels(models, server.context.masked_fill(outside, len(server.omega)))

    def place_newcomer(self, task: Task, server: Server, data: Cohort) -> Server:
        """Newcomers join the context, of those that have clients, whose model fits their training examples best."""
        used = torch.unique(server.context[server.context >= 0])
        candidates = [w.expand(len(data), -1) for w in server.omega[used]]
        context = server.context.clone()
        context[data.ids] = used[best_fit(task, candidates, data.train)]
        return replace(server, context=context)

    def figures(self, server: Server) -> dict[str, Any]:
        used, beta = torch.unique(server.context[server.context >= 0]), self._pull(self.training.lr) / 2
        return {
            "contexts": len(server.omega), "contexts_in_use": len(used), "moved": int(server.moved),
            "spread": float(server.spread), "squared_step": float(server.step), "beta": beta * len(server.context),
            "distances": server.distances, "assignment": server.context,
        }  # fmt: skip

    def client_figures(self, client: Client) -> dict[str, Tensor]:
        return {"squared_distance_to_context": client.apart}

    def privacy(self, count: Tensor) -> PrivacyProfile:
        return gradient_steps({self.inner_steps: self.training.num_steps(count)})
