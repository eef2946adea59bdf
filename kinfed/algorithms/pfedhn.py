"""pFedHN: a hypernetwork at the server generates every client's model from what it has learned about the client.

Shamsian, Navon, Fetaya, Chechik: Personalized Federated Learning using Hypernetworks, ICML 2021, Algorithm 1.

    min_{φ, e}  Σ_i f_i(h(e_i; φ)),      θ_i = h(e_i; φ)

  client:  Δθ_i = θ̃_i − θ_i after local training from θ_i
  server:  φ ← φ − α Δφ,  Δφ = − J_φᵀ Δθ_i;      e_i ← e_i − α Δe_i,  Δe_i = − J_eᵀ Δθ_i         (their Eq. 3, 4)

h is a network of `hidden_layers` hidden layers of `hidden` units on an embedding e_i of 1 + N/4 numbers, and a linear
head to all T trainable parameters. φ and e never leave the server; the client keeps nothing. The personal model is
h(e_i; φ), fresh.

The paper calls one client per round, as does participation of 1/N here. With several clients φ moves once per round,
by the mean of their J_φᵀ Δθ_i, so that their order cannot matter; every called client's embedding moves by its own
J_eᵀ Δθ_i. Embeddings of others stay (in the released code their momentum and weight decay go on).

The server step is SGD with momentum and weight decay, norm of Δφ and of every Δe_i at most `server_clip`; values of the
released code. Local training is that of the run, as for all methods: the paper's is --set pfedhn.steps=50
--set pfedhn.lr=0.005 --set pfedhn.momentum=0.9 --set pfedhn.weight_decay=5e-5 --set pfedhn.batch=64, and 5000 rounds.

The server's rate is the paper's, for thousands of rounds: in runs of dozens raise server_lr to 0.05 or 0.1.

Differences: the head's bias starts at the common start of all methods (or a warm start), so that clients begin around
it; in the released code it is as random as the head's weights, which are so here too. Gradients of local steps are not
clipped. Running statistics (of BatchNorm, say) are not made by h: the server keeps the mean of those that clients send
back and hands it to all.

The head and its momentum hold 2 (hidden + 1) T numbers on the server, and as many again while a round moves them:
`max_gb` refuses what would not fit. Bytes per client and round: one model each way.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kinfed.algorithms.common.averaging import ChangeUp
from kinfed.algorithms.common.hypernetwork import Sizes, head_start, trunk_outputs, trunk_sizes, trunk_start
from kinfed.author import Algorithm, Cohort, ConfigError, Nothing, Population, RoundInfo, Task, mean_update, option, sgd
from kinfed.core import Range, Tree, kernels, rng


@dataclass
class Hypernetwork(Tree):
    """Parameters φ and e, or their momentum."""

    embedding: Tensor  # [N, E] e_i
    trunk: Tensor  # [W] weights and biases of the hidden layers, one after the other
    head: Tensor  # [T, H]
    bias: Tensor  # [T]


@dataclass
class Server(Tree):
    phi: Hypernetwork
    momentum: Hypernetwork
    statistics: Tensor  # [P − T] running statistics, the mean of clients'; often none


@dataclass
class Down(Tree):
    theta: Tensor  # [n, P] h(e_i; φ), and running statistics


Up = ChangeUp  # [n, P] Δθ_i


@dataclass
class Outer:
    """The matrix leftᵀ right [P, H], a sum of n outer products, which need not be multiplied out."""

    left: Tensor  # [n, P]
    right: Tensor  # [n, H]

    def norm(self) -> Tensor:
        """Frobenius, from the products of rows: ‖leftᵀ right‖² = Σ_ij (left leftᵀ)_ij (right rightᵀ)_ij"""
        of_left, of_right = (x @ x.T for x in (self.left, self.right))
        return (of_left * of_right).sum().clamp_min(0).sqrt()


@dataclass(frozen=True)
class PFedHN(Algorithm[Server, Nothing, Down, Up]):
    server_lr: float = option(1e-2, "α of the server's steps", gt=0, tune=Range(1e-3, 0.5))
    server_momentum: float = option(0.9, "momentum of the server's steps", ge=0, lt=1)
    server_weight_decay: float = option(1e-3, "weight decay of φ and of the embeddings of called clients", ge=0)
    server_clip: float = option(50.0, "greatest norm of a server gradient", gt=0)
    embedding: int | None = option(None, "numbers per client embedding; 1 + N/4 by default", ge=1)
    hidden: int = option(100, "units of a hidden layer", ge=1)
    hidden_layers: int = option(3, "hidden layers after the first", ge=0)
    max_gb: float = option(
        4.0, "refuse a hypernetwork that takes more than this many gigabytes of the server's memory", gt=0
    )

    traits = frozenset({"draws by client"})  # embeddings
    gradients = 1
    single_updates = "moves every client's embedding by that client's own update"

    def check(self, task: Task, population: Population) -> None:
        parameters = task.trainable.stop
        needed = 4 * 4 * (self.hidden + 1) * parameters / 1e9
        if needed > self.max_gb:
            raise ConfigError(
                f"pFedHN's head for a model of {parameters} parameters takes {needed:.1f} GB (weights and "
                f"momentum of {self.hidden} + 1 numbers per parameter, before and after a step), more than "
                f"max_gb={self.max_gb:g}; choose a smaller model, lower hidden, or raise max_gb"
            )

    def _sizes(self, embedding: int) -> Sizes:
        return trunk_sizes(embedding, self.hidden, self.hidden_layers)

    def init_server(self, task: Task, population: Population) -> Server:
        width = self.embedding or 1 + population.num_clients // 4
        key = population.key("pfedhn")
        embedding = rng.normal(rng.fold(key, 0, torch.arange(population.num_clients)), width)
        trunk = trunk_start(rng.fold(key, 1), self._sizes(width))
        model = task.init(population.seed)
        start, statistics = model[task.trainable].clone(), model[task.trainable.stop :].clone()
        head = head_start(rng.fold(key, 2), start, self.hidden)
        phi = Hypernetwork(embedding.to(start), trunk.to(start), head, start)
        return Server(phi, phi.map(torch.zeros_like), statistics)

    def features(self, embedding: Tensor, trunk: Tensor) -> Tensor:
        """[n, H]: the trunk's output for embeddings [n, E]."""
        return trunk_outputs(embedding, trunk, self._sizes(embedding.shape[1]))

    def download(self, server: Server, ids: Tensor) -> Down:
        phi = server.phi
        # One client at a time: a product of several rows rounds in another way than that of one. But some of the
        # head for all of them, while it is in the cache: it is a hundred times as large as a model.
        features = [self.features(phi.embedding[i : i + 1], phi.trunk)[0] for i in ids.tolist()]
        theta = phi.bias.expand(len(ids), -1).clone()
        count = self._rows_in_cache
        for some, head in zip(torch.split(theta, count, 1), torch.split(phi.head, count), strict=True):
            for row, f in zip(some.unbind(0), features, strict=True):
                row.addmv_(head, f)
        return Down(torch.cat([theta, server.statistics.expand(len(ids), -1)], 1) if len(server.statistics) else theta)

    def client_update(self, task: Task, client: Nothing, down: Down, data: Cohort) -> tuple[Nothing, Up]:
        return client, Up(sgd(task, down.theta, data.train.batches(self.training)) - down.theta)

    def aggregate(self, server: Server, ids: Tensor, up: Up, round: RoundInfo) -> Server:
        phi, old, n = server.phi, server.momentum, len(ids)
        moved, statistics = up.delta[:, : len(phi.bias)], server.statistics
        if len(statistics):
            statistics = statistics + mean_update(up.delta[:, len(phi.bias) :], None)
        e, trunk = phi.embedding[ids].requires_grad_(), phi.trunk.clone().requires_grad_()
        with torch.enable_grad():
            f = self.features(e, trunk)
        # θ = head f + bias, hence J_fᵀ Δθ = headᵀ Δθ: torch goes on from there through the trunk.
        d_e, d_trunk = torch.autograd.grad(f, (e, trunk), grad_outputs=-(moved @ phi.head))
        f = f.detach()
        d_head = Outer(moved, f / -n)  # Δφ is the mean over the clients
        d_bias, d_trunk = -moved.mean(0), d_trunk / n
        norm = torch.stack([d_head.norm(), d_trunk.norm(), d_bias.norm()]).norm()
        shrink = (self.server_clip / norm.clamp_min(self.server_clip)).item()
        trunk, v_trunk = self._step(phi.trunk, old.trunk, d_trunk * shrink)
        head, v_head = self._head_step(phi.head, old.head, d_head, shrink)
        bias, v_bias = self._step(phi.bias, old.bias, d_bias * shrink)
        e_norm = d_e.norm(dim=1, keepdim=True)
        embedding, velocity = phi.embedding.clone(), old.embedding.clone()
        d_e = d_e * (self.server_clip / e_norm.clamp_min(self.server_clip))
        embedding[ids], velocity[ids] = self._step(phi.embedding[ids], old.embedding[ids], d_e)
        momentum = Hypernetwork(velocity, v_trunk, v_head, v_bias)
        return Server(Hypernetwork(embedding, trunk, head, bias), momentum, statistics)

    def _step(self, parameter: Tensor, momentum: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """SGD: v ← μ v + wd p + g;  p ← p − α v."""
        v = (self.server_momentum * momentum).add_(parameter, alpha=self.server_weight_decay).add_(gradient)
        return parameter.add(v, alpha=-self.server_lr), v

    def _head_step(self, head: Tensor, momentum: Tensor, gradient: Outer, shrink: float) -> tuple[Tensor, Tensor]:
        """The same for the head, a hundred times as large as a model: some rows at a time, which stay in the cache,
        and the gradient of the others does not exist meanwhile."""
        moved, velocity = torch.empty_like(head), torch.empty_like(head)
        parts = (torch.split(x, self._rows_in_cache) for x in (head, momentum, gradient.left.T, moved, velocity))
        for p, old, left, to, v in zip(*parts, strict=True):
            torch.mul(old, self.server_momentum, out=v)
            v.add_(p, alpha=self.server_weight_decay).addmm_(left, gradient.right, alpha=shrink)
            torch.add(p, v, alpha=-self.server_lr, out=to)
        return moved, velocity

    @property
    def _rows_in_cache(self) -> int:
        return max(kernels.IN_CACHE // self.hidden, 1)

    def place_newcomer(self, task: Task, server: Server, data: Cohort) -> Server:
        raise ConfigError(
            "pFedHN makes a model from a client's embedding, which the server learns round by round, and a newcomer "
            "has none; run again with it, or adopt from another method"
        )

    def personalize(self, task: Task, client: Nothing, down: Down, data: Cohort) -> Tensor:
        return down.theta

    def figures(self, server: Server) -> dict[str, Any]:
        e = server.phi.embedding
        return {"embedding_spread": float((e - e.mean(0)).norm(dim=1).mean())}
