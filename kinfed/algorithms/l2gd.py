"""L2SGD: local models pulled towards their average, with communication only when it is needed.

Hanzely, Richtárik: Federated Learning of a Mixture of Global and Local Models, 2020, Algorithm 1 (L2GD) with
stochastic gradients.

    min_x  (1/n) Σ f_i(x_i) + (λ/2n) Σ ‖x_i − x̄‖²

A coin decides each iteration: with probability 1 − p every client steps, x_i ← x_i − η_l g_i(x_i); with probability
p all move to the average, x_i ← x_i − θ (x_i − x̄). Several equal results in a row need no communication in between,
so one round here is: receive x̄, all moves towards it, the local steps until the next communication, send.
In the paper's symbols η_l = α/(n (1 − p)) and θ = αλ/(np); their stability condition gives θ ≤ 1/2.

`geometric=False` (default) takes the steps of local training and one move per round, the expected lengths' shape, so
that methods are compared at equal local work; `geometric=True` draws both run lengths as the coin would, with
p = 1/(L + 1). θ = 0 is local training. Under full participation moving towards x̄ leaves Σ x_i unchanged; with partial
participation only active clients move, and x̄ stays the mean of the last known x_i (clients send differences).

Running statistics (of BatchNorm, say) move towards x̄'s like the rest. Sums of changes could leave the range of what is
averaged, which a variance must not, so clients send how far theirs are from x̄'s: x̄ has their mean where all take part,
and otherwise goes its share of the way to the mean of the active ones.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kinfed.algorithms.base import Algorithm, PrivacyProfile, RoundInfo, ServerModels, gradient_steps
from kinfed.algorithms.common.averaging import FOLLOWS_MEAN, ChangeUp
from kinfed.author import Cohort, ConfigError, Population, Range, Task, Tree, option, rng, sgd


@dataclass
class Server(Tree):
    mean: Tensor  # [P] x̄ over all clients' last known models
    moves: Tensor | None  # [] int64 moves towards x̄ in the planned round, with geometric lengths
    steps: Tensor | None  # [] int64 local steps in the planned round, with geometric lengths


@dataclass
class Client(Tree):
    x: Tensor  # [n, P]


Down = Server  # [n, P], [n] and [n]


Up = ChangeUp  # [n, P] change of x_i since it was last sent; of running statistics the distance from x̄


@dataclass(frozen=True)
class L2GD(Algorithm[Server, Client, Down, Up]):
    theta: float = option(
        0.25, "θ: share of the way to the average per move; above 1/2 L2GD is unstable",
        ge=0, le=0.5, tune=Range(0.0, 0.5, log=False),
    )  # fmt: skip
    geometric: bool = option(False, "draw the number of local steps and of moves as the paper's coin does")

    single_updates = FOLLOWS_MEAN

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.geometric and self.training.steps is None:
            raise ConfigError("geometric lengths replace a number of steps; give steps instead of epochs")

    def init_server(self, task: Task, population: Population) -> Server:
        start = task.init(population.seed)
        return Server(start, torch.tensor(1), torch.tensor(1)) if self.geometric else Server(start, None, None)

    def init_client(self, task: Task, data: Cohort) -> Client:
        return Client(task.init(data.seed).expand(len(data), -1))

    def plan(self, server: Server, active: Tensor, round: RoundInfo) -> tuple[Server, Tensor]:
        if not self.geometric:
            return server, active
        p = 1 / ((self.training.steps or 1) + 1)
        u = rng.uniform(round.key("l2gd"), 2)
        steps = 1 + math.floor(math.log1p(-float(u[0])) / math.log1p(-p))  # a run of heads: geometric, mean 1/p
        moves = 1 + math.floor(math.log1p(-float(u[1])) / math.log(p))  # a run of tails: mean 1/(1 − p)
        return Server(server.mean, torch.tensor(moves), torch.tensor(steps)), active

    def client_update(self, task: Task, client: Client, down: Down, data: Cohort) -> tuple[Client, Up]:
        moves = torch.ones(len(data)) if down.moves is None else down.moves.cpu()
        share = 1 - (1 - self.theta) ** moves.to(torch.float64)  # x ← x − θ (x − x̄), `moves` times
        x = torch.lerp(client.x, down.mean, share[:, None].to(down.mean))
        x = sgd(task, x, data.train.batches(self.training, steps=None if down.steps is None else down.steps.cpu()))
        delta, behind = x - client.x, slice(task.trainable.stop, None)
        delta[:, behind] = x[:, behind] - down.mean[:, behind]
        return Client(x), Up(delta)

    def heard(self, task: Task, before: Client, after: Client, down: Down, up: Up) -> Client:
        x = before.x + up.delta
        x[:, task.trainable.stop :] = down.mean[:, task.trainable.stop :] + up.delta[:, task.trainable.stop :]
        return Client(x)

    def invariant(self, task: Task, server: Server, clients: Client) -> tuple[Tensor, Tensor]:
        return server.mean[task.trainable], clients.x[:, task.trainable].mean(0)

    def aggregate(self, server: Server, ids: Tensor, up: Up, round: RoundInfo) -> Server:
        change = up.delta.to(torch.float64).sum(0) / round.population.num_clients  # x̄ ← x̄ + (1/n) Σ Δ_i
        mean = (server.mean.to(torch.float64) + change).to(server.mean.dtype)
        return replace(server, mean=mean)

    def personalize(self, task: Task, client: Client, down: Down, data: Cohort) -> Tensor:
        return client.x

    def server_models(self, server: Server) -> ServerModels:
        return ServerModels(server.mean[None])

    def privacy(self, count: Tensor) -> PrivacyProfile:
        return gradient_steps(None if self.geometric else self.training.num_steps(count))
