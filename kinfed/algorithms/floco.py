"""Floco: M heads as the corners of a simplex under a common body; every client trains and uses a region of its own.

Grinwald, Wiesner, Nakajima: Federated Learning over Connected Modes, NeurIPS 2024.

    head of a point:   h(α) = Σ_i α_i h_i,    α on the simplex
    client m:          min  E f_m(body, h(α)),   α ~ R_m:  a new point at every step;  h_i moves by its share α_i
    server:            body and h_i by examples
    once, after τ:     c_m = the point of the simplex nearest to κ_m / z, by principal components κ_m of the changes of
                       clients' corners; z such that the energy Σ |c_m − c_j|⁻² is least
    regions:           R_m = all of the simplex up to round τ, then {α: |α − c_m|_1 ≤ ρ}

The personal model is (body, h(c_m)), that of the server (body, h(1/M)). M = 1 is FedAvg; with τ never reached all
clients use the same point.

Decisions. Not all of the paper's text could be checked: corners of the last layer only, M components, energy with its
least distance of 1e-4, and r of a region drawn uniformly follow the code released for Flower. That code draws points
that leave the simplex; here α lies on the way from c_m to a uniform point of the simplex, at a uniform part of what ρ
allows (ρ = 2 is the whole simplex, drawn uniformly). It asks all clients in round τ; here each counts with its
last change, and a client that has sent none by then keeps the whole simplex and its middle, as do newcomers. z runs
over 200 values from 1/100 to 10 times the largest |κ| instead of 1000 up to 1, so that the scale of changes does not
matter. Corners start at different draws, biases belong to them, and weight decay acts on the point of a step. Floco+,
which then trains a model by Ditto, is left out.

The server keeps the last change of the corners of every client, and `max_gb` refuses what would not fit.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kinfed.algorithms.base import Algorithm, RoundInfo, ServerModels
from kinfed.algorithms.common.averaging import Weights, check_memory, example_counts, mean_update
from kinfed.algorithms.common.partial import SharesPart
from kinfed.algorithms.common.simplex import nearest_shares
from kinfed.author import Cohort, Nothing, Population, Range, Task, Tree, each_step, option, rng, toward_zero

WHOLE = 2.0  # no two points of the simplex are farther apart in L1
LEAST = 1e-4  # distance that the energy counts
ROUNDING = 1e-6  # of the largest change: components below say nothing


@dataclass
class Server(Tree):
    shared: Tensor  # [G] the body
    corners: Tensor  # [M, H] h_i
    is_head: Tensor  # [P] bool
    change: Tensor  # [N, M H] last changes of the corners
    known: Tensor  # [N] bool: has sent one
    center: Tensor  # [N, M] c_m
    radius: Tensor  # [N] ρ, or that of the whole simplex
    placed: Tensor  # [] bool: regions have been given


@dataclass
class Down(Tree):
    shared: Tensor  # [n, G]
    corners: Tensor  # [n, M, H]
    center: Tensor  # [n, M]
    radius: Tensor  # [n]


@dataclass
class Up(Tree):
    delta: Tensor  # [n, G] change of the body
    corners: Tensor  # [n, M, H] change of the corners
    count: Tensor | None  # [n] examples; absent with equal weights


@dataclass(frozen=True)
class Floco(SharesPart[Server, Nothing, Down, Up], Algorithm[Server, Nothing, Down, Up]):
    corners: int = option(4, "M: heads whose mixes clients use; 1 is FedAvg", ge=1, tune=Range(2, 8, whole=True))
    tau: int = option(
        10, "τ: the round after which clients have regions of their own", ge=1, tune=Range(2, 20, whole=True)
    )
    rho: float = option(0.2, "ρ: L1 radius of a region; 0 is its centre alone", ge=0, le=2, tune=Range(0.02, 1.0))
    weights: Weights = option("examples", "weights of the average: by N_m, or equal")
    max_gb: float = option(4.0, "refuse changes that take more than this many gigabytes of the server's memory", gt=0)

    traits = frozenset({"no momentum", "draws by client"})
    acts_at = "head"
    gradients = 1
    single_updates = "keeps the last change of every single client's corners"

    def check(self, task: Task, population: Population) -> None:
        super().check(task, population)
        n, numbers = population.num_clients, self.corners * int(task.head.mask.sum())
        check_memory(f"Floco's server keeps changes of the corners of all {n:,} clients", 4 * n * numbers, self.max_gb)

    def init_server(self, task: Task, population: Population) -> Server:
        split, n, M = self.split(task), population.num_clients, self.corners
        starts = torch.stack([task.init(population.seed, number) for number in range(M)])
        corners = split.take_own(starts).clone()
        return Server(
            split.take_shared(starts[0]).clone(), corners, task.head.mask, corners.new_zeros(n, corners.numel()),
            torch.zeros(n, dtype=torch.bool), corners.new_full((n, M), 1 / M), corners.new_full((n,), WHOLE),
            torch.tensor(False),
        )  # fmt: skip

    def download(self, server: Server, ids: Tensor) -> Down:
        n = len(ids)
        shared, corners = server.shared.expand(n, -1), server.corners.expand(n, -1, -1)
        return Down(shared, corners, server.center[ids], server.radius[ids])

    def client_update(self, task: Task, client: Nothing, down: Down, data: Cohort) -> tuple[Nothing, Up]:
        split, batches = self.split(task), data.train.batches(self.training)
        parts = [getattr(down, name).clone(memory_format=torch.contiguous_format) for name in down.named()]
        for batch, (body, corners, center, radius) in each_step(batches, *parts):
            key = rng.fold(rng.root(batch.seed, "floco"), batch.round, batch.step, batch.ids)
            alpha = drawn(key, center, radius)
            head = mix(alpha, corners)
            row = split.join(head, body)
            task.descend_(row, batch, batches.lr, toward_zero(row, self.training.weight_decay))
            body.copy_(split.take_shared(row))
            corners += alpha[..., None] * (split.take_own(row) - head)[:, None]  # ∂h(α)/∂h_i = α_i
        return client, Up(parts[0] - down.shared, parts[1] - down.corners, example_counts(self.weights, data))

    def aggregate(self, server: Server, ids: Tensor, up: Up, round: RoundInfo) -> Server:
        change, known, flat = server.change.clone(), server.known.clone(), up.corners.flatten(1)
        change[ids], known[ids] = flat, True
        corners = server.corners + mean_update(flat, up.count).view_as(server.corners)
        shared = server.shared + mean_update(up.delta, up.count)
        new = replace(server, shared=shared, corners=corners, change=change, known=known)
        if round.number < self.tau or bool(server.placed):
            return new
        center, radius = server.center.clone(), server.radius.clone()
        center[known] = places(change[known], self.corners).to(center)
        radius[known] = self.rho
        return replace(new, center=center, radius=radius, placed=torch.tensor(True))

    def personalize(self, task: Task, client: Nothing, down: Down, data: Cohort) -> Tensor:
        return self.split(task).join(mix(down.center, down.corners), down.shared)

    def server_models(self, server: Server) -> ServerModels:
        w = server.shared.new_empty(len(server.is_head))
        w[server.is_head], w[~server.is_head] = server.corners.mean(0), server.shared
        return ServerModels(w[None])

    def figures(self, server: Server) -> dict[str, Any]:
        """How far the centres of regions are from the middle, in L1."""
        return {"off_middle": float((server.center - 1 / self.corners).abs().sum(1).mean())}


def mix(alpha: Tensor, corners: Tensor) -> Tensor:
    """h(α) [n, H] of points [n, M] and corners [n, M, H]."""
    return torch.bmm(alpha[:, None], corners).squeeze(1)


def drawn(key: Tensor, center: Tensor, radius: Tensor) -> Tensor:
    """[n, M] points of the regions around `center` [n, M]."""
    M = center.shape[1]
    u = rng.uniform(key, M + 1).to(center)
    waiting = -torch.log1p(-u[:, :M])  # exponential: their shares are uniform on the simplex
    way = waiting / waiting.sum(1, keepdim=True) - center
    part = u[:, M] * (radius / way.abs().sum(1).clamp_min(1e-12)).clamp_max(1)
    return center + torch.where(radius < WHOLE, part, 1.0)[:, None] * way


def places(change: Tensor, M: int) -> Tensor:
    """c [n, M] float64 of changes [n, M H]."""
    x = change.to("cpu", torch.float64)
    least = ROUNDING * x.norm(dim=1).max()
    x = x - x.mean(0)
    square, directions = torch.linalg.eigh(x @ x.T)
    kappa = (directions * square.clamp_min(0).sqrt()).flip(1)[:, :M]  # scores of the first M principal components
    kappa = kappa * torch.sign(kappa.gather(0, kappa.abs().argmax(0, keepdim=True)))  # whose signs nothing else says
    kappa = torch.nn.functional.pad(torch.where(kappa.abs() > least, kappa, 0.0), (0, M - kappa.shape[1]))
    largest = kappa.abs().max().clamp_min(1e-300)
    scales = torch.logspace(-2, 1, 200, dtype=torch.float64)
    choices = [nearest_shares(kappa / (largest * z)) for z in scales]
    return min(choices, key=energy)


def energy(points: Tensor) -> float:
    """Σ |c_m − c_j|⁻² over the pairs of points [n, M]: small where they spread over the simplex."""
    return float(torch.nn.functional.pdist(points).clamp_min(LEAST).pow(-2).sum())
