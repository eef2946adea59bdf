"""FedTGP: FedProto whose prototypes the server trains, so that those of different classes stay apart.

Zhang, Liu, Hua, Cao: FedTGP: Trainable Global Prototypes with Adaptive-Margin-Enhanced Contrastive Learning for Data
and Model Heterogeneity in Federated Learning, AAAI 2024.

    client m:  as in FedProto, with P̂_y in place of the mean prototype
    server:    P̂_c = F(P̌_c), a trained vector for each class through Linear, ReLU, Linear, all of d_f numbers wide;
               `server_steps` steps of SGD on the mean over all (m, c) that came of
               −log[ exp(−(|C_m,c − P̂_c| + δ)) / (exp(−(|C_m,c − P̂_c| + δ)) + Σ_{c'≠c} exp(−|C_m,c − P̂_c'|)) ]
               δ = min(max_c min_{c'≠c} |Q_c − Q_c'|, τ),   Q_c the mean of C_m,c over clients

`server_steps` 0 is FedProto, bit for bit: P̂ are then the means Q. λ = 0 is local training.

Decisions. A step of the server is on all pairs that came (released code: shuffled batches of ten), at a plain rate; P̌
begins normally distributed, the layers as torch draws them, from the seed. δ is the released code's: the largest of
the distances to the nearest other class, over the classes of the round. Where only one class came, δ is 0. Distances
have 10⁻¹² under the root, which has no slope at 0. A class that no client has sent yet has no prototype for clients.

Personal models, what travels and what leaves a client are FedProto's; the server sees every client's means.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear, one_hot, relu

from kinfed.algorithms.common.heads import linear_start, mean_prototypes
from kinfed.algorithms.fedproto import Down, FedProto, Up
from kinfed.algorithms.fedproto import Server as Prototypes
from kinfed.author import Population, Range, RoundInfo, Task, option, rng

LEAST = 1e-12  # under the root of a distance


@dataclass
class Server(Prototypes):
    vectors: Tensor  # [C, d_f] P̌
    layers: Tensor  # [2, d_f (d_f + 1)] of F, weights [in, out] before biases


@dataclass(frozen=True)
class FedTGP(FedProto):
    server_steps: int = option(100, "steps on the prototypes per round; 0 is FedProto", ge=0)
    server_lr: float = option(0.01, "their rate", gt=0, tune=Range(1e-3, 0.1))
    margin: float = option(100.0, "τ: largest margin between classes", ge=0)

    single_updates = "trains prototypes on those of every single client"

    def init_server(self, task: Task, population: Population) -> Server:
        plain, key = super().init_server(task, population), population.key("fedtgp")
        C, width = plain.prototypes.shape
        vectors = rng.normal(rng.fold(key, 0), C * width).view(C, width)
        layers = torch.stack([linear_start(rng.fold(key, k), width, width) for k in (1, 2)])
        return Server(plain.prototypes, plain.known, vectors.to(plain.prototypes), layers.to(plain.prototypes))

    def download(self, server: Prototypes, ids: Tensor) -> Down:
        return super().download(Prototypes(server.prototypes, server.known), ids)

    def aggregate(self, server: Prototypes, ids: Tensor, up: Up, round: RoundInfo) -> Server:
        assert isinstance(server, Server)
        plain = super().aggregate(Prototypes(server.prototypes, server.known), ids, up, round)
        if not self.server_steps:
            return Server(plain.prototypes, plain.known, server.vectors, server.layers)
        came = up.weight > 0
        C_m, c = up.prototypes[came], came.nonzero()[:, 1]
        delta = self._margin(up, came) * one_hot(c, came.shape[1]).to(C_m.dtype)
        parts = [server.vectors.clone(), server.layers.clone()]
        for _ in range(self.server_steps):
            with torch.enable_grad():
                leaves = [part.detach().requires_grad_() for part in parts]
                square = (C_m[:, None] - trained_prototypes(*leaves)).square().sum(-1)
                loss = cross_entropy(-((square + LEAST).sqrt() + delta), c)
                slopes = torch.autograd.grad(loss, leaves)
            parts = [part - self.server_lr * slope for part, slope in zip(parts, slopes, strict=True)]
        return Server(trained_prototypes(*parts), plain.known, *parts)

    def _margin(self, up: Up, came: Tensor) -> float:
        """δ of the class means that came."""
        Q, new = mean_prototypes(up.prototypes, came.to(up.prototypes.dtype), torch.zeros_like(up.prototypes[0]))
        if int(new.sum()) < 2:
            return 0.0
        apart = torch.cdist(Q[new].double(), Q[new].double(), compute_mode="donot_use_mm_for_euclid_dist")
        nearest = apart.fill_diagonal_(torch.inf).min(1).values
        return min(float(nearest.max()), self.margin)


def trained_prototypes(vectors: Tensor, layers: Tensor) -> Tensor:
    """P̂ [C, d_f] = F(P̌)."""
    width = vectors.shape[1]
    hidden, out = ((layer[: width * width].view(width, width).T, layer[width * width :]) for layer in layers.unbind(0))
    return linear(relu(linear(vectors, *hidden)), *out)
