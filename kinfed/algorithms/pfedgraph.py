"""pFedGraph: every client starts from its own mix of all models, by shares that weigh likeness against numbers of
examples.

Ye, Ni, Wu, Chen, Wang: Personalized Federated Learning with Inferred Collaboration Graphs, ICML 2023.

    server:    a_i = argmin over the simplex of  α ‖a − p‖² + Σ_j a_j d_ij,    d_ij = −cos(θ_i − w_0, θ_j − w_0)
               θ̄_i = Σ_j a_ij θ_j,        p_j ∝ N_j
    client i:  θ_i from θ̄_i by local training on  f_i(θ) − λ cos(θ, θ̄_i)

Nothing but θ̄_i goes down. α → ∞ is one mean for all: with λ = 0 and everybody called, FedAvg. α → 0 leaves the client
its own model and those that went in the same direction; so do cosines above `alike`, which count as 1.

Decisions. The quadratic program is solved exactly: a_i is the point of the simplex nearest to p − d_i/(2α). (Released
code calls a solver, and cuts cosines at 0.9, as here.) The second term of the client's loss draws θ towards the mix;
released code adds the cosine instead of subtracting it, so that its steps lead away from it. It is the code's variant
with the mix as it is, whose direction clients know: that of normalized models would travel beside it. Released code
mixes the clients of a round; here all last known models take part, and a client without one begins at the mean of these
by p, or at the common start before there are any.

Distances are of trainable columns. The server keeps N models, and `max_gb` refuses what would not fit. The personal
model is the client's own after its last training; there is no server model.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kinfed.algorithms.common.averaging import DeltaUp, ModelDown, Weights, check_memory
from kinfed.algorithms.common.one_model import Client, DeploysLastModel
from kinfed.algorithms.common.simplex import nearest_shares
from kinfed.algorithms.moon import cosine_and_slope
from kinfed.author import Cohort, Population, Range, RoundInfo, Task, Tree, cosines, each_step, example_counts, option
from kinfed.engine import sgd


@dataclass
class Server(Tree):
    w: Tensor  # [P] w_0
    theta: Tensor  # [N, P] last known models
    known: Tensor  # [N] bool: has sent one
    count: Tensor  # [N] examples, or ones with equal weights
    a: Tensor  # [N, N] float64 shares, rows sum to 1


@dataclass(frozen=True)
class PFedGraph(DeploysLastModel[Server, ModelDown, DeltaUp]):
    alpha: float = option(0.8, "α: how firmly shares are held at those of examples", gt=0, tune=Range(0.01, 10.0))
    lam: float = option(
        0.01, "λ: strength of the pull in the mix's direction; 0 leaves it out", ge=0, tune=Range(1e-3, 1.0)
    )
    alike: float = option(0.9, "cosines above count as 1", gt=0, le=1)
    weights: Weights = option("examples", "p: by N_m, or equal")
    max_gb: float = option(4.0, "refuse models that take more than this many gigabytes of the server's memory", gt=0)

    traits = frozenset({"no momentum"})
    single_updates = "keeps every single model"

    def check(self, task: Task, population: Population) -> None:
        n = population.num_clients
        what = f"pFedGraph's server keeps the models of all {n:,} clients, and a share for each pair of them"
        check_memory(what, 4 * n * (task.num_params + 2 * n), self.max_gb)

    def init_server(self, task: Task, population: Population) -> Server:
        n, w = population.num_clients, task.init(population.seed)
        no_client, shares = torch.zeros(n, dtype=torch.bool), torch.eye(n, dtype=torch.float64)
        return Server(w, w.repeat(n, 1), no_client, torch.zeros(n, dtype=torch.float64), shares)

    def download(self, server: Server, ids: Tensor) -> ModelDown:
        return ModelDown(self._mixes(server, ids))

    def _mixes(self, server: Server, ids: Tensor) -> Tensor:
        """[n, P] θ̄ of these clients."""
        # One row at a time, so that the mix does not depend on who is asked for with it.
        mixes = [server.a[i].to(server.theta) @ server.theta for i in ids.tolist()]
        return torch.stack(mixes) if mixes else server.theta[:0]

    def client_update(self, task: Task, client: Client, down: ModelDown, data: Cohort) -> tuple[Client, DeltaUp]:
        batches = data.train.batches(self.training)
        if not self.lam:
            theta = sgd(task, down.w, batches)
        else:
            theta, decay = down.w.clone(memory_format=torch.contiguous_format), self.training.weight_decay
            some = task.trainable
            for batch, (now, mix) in each_step(batches, theta, down.w):
                _, slope = cosine_and_slope(now[:, some], mix[:, some])  # ∂cos(θ, θ̄)/∂θ
                step = batches.lr * (self.lam * slope - decay * now[:, some])
                task.descend_(now, batch, batches.lr)
                now[:, some] += step
        up = DeltaUp(theta - down.w, example_counts(self.weights, data))
        return Client(theta, torch.ones_like(client.seen)), up

    def aggregate(self, server: Server, ids: Tensor, up: DeltaUp, round: RoundInfo) -> Server:
        theta, known, count = server.theta.clone(), server.known.clone(), server.count.clone()
        theta[ids] = self._mixes(server, ids) + up.delta
        known[ids], count[ids] = True, 1.0 if up.count is None else up.count.to(count)
        new = replace(server, theta=theta, known=known, count=count)
        return replace(new, a=self._shares(new, round.trainable))

    def _shares(self, server: Server, trainable: slice) -> Tensor:
        """a [N, N]; clients without a model get p, the shares of those that are known."""
        members = server.known.nonzero().squeeze(1)
        p = server.count / server.count.sum()
        change = (server.theta[members] - server.w)[:, trainable]
        likeness = torch.from_numpy(cosines(change))
        d = -torch.where(likeness > self.alike, 1.0, likeness).fill_diagonal_(1.0)
        a = p.repeat(len(p), 1)
        a[members] = 0.0
        a[members[:, None], members] = nearest_shares(p[members] - d / (2 * self.alpha))
        return a

    def place_newcomer(self, task: Task, server: Server, data: Cohort) -> Server:
        """Newcomers have no model yet and begin at the mean of all that are known."""
        return replace(server, a=self._shares(server, task.trainable)) if bool(server.known.any()) else server

    def server_models(self, server: Server) -> None:
        return None  # w_0 is only what changes are measured from

    def figures(self, server: Server) -> dict[str, Any]:
        return {"own_share": float(server.a.diagonal()[server.known].mean())} if bool(server.known.any()) else {}
