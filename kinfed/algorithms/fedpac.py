"""FedPAC: a shared body with aligned features, and heads that each client mixes from those of clients like it.

Xu, Tong, Huang: Personalized Federated Learning with Feature Alignment and Classifier Collaboration, ICLR 2023,
Algorithm 1.

    client i:  0. on the received body: h_i[c] = r_c μ_c  with r_c = N_ic / N_i, μ_c its mean φ of class c, and
                  V_i = (Σ_c r_c E_c|φ|² − |h_i|²) / N_i
               1. the head alone, `head_epochs` passes at `head_lr`, the body fixed
               2. the body alone, the usual steps on CE + λ mean |φ − C̄_y|²/d_f, the head fixed
               3. its mean φ of every class under the new body
    server:    bodies by examples; prototypes C̄_c by examples of the class
               W_i ← Σ_j α_ij W_j over the clients of the round,  α_i = argmin over the simplex of α' (diag V + Q_i) α,
               Q_i[j, k] = ⟨h_i − h_j, h_i − h_k⟩       (a bound on the error of the mixed head: variance + distance)

λ = 0 with `mix` off and equal weights is FedRep whose heads take `head_epochs` passes, bit for bit. Where all h agree,
α_ij ∝ 1/V_j.

Decisions. The quadratic program is solved exactly: with M = L L' positive definite, b = argmin ½ b'Mb − 1'b over b ≥ 0
is a least-squares problem with nonnegative unknowns (scipy.optimize.nnls on L' and L⁻¹1), and α = b/Σb. Q is a Gram
matrix, so that the repair of eigenvalues in the released code has nothing to repair; a millionth of a millionth of M's
mean diagonal keeps M definite where several V are 0. A client of one example has V = 0 and keeps its own head. Weights
below 0.001 are dropped and the others scaled up to sum to 1 (released code). A program that the solver gives up on
leaves the own head and is counted in the figure `unsolved`. A mixed head is delivered with the client's next message,
not by a second one in the same round; the server keeps it, so clients keep nothing. A client not heard yet gets
the mean of all heads that the server keeps, or the common start before there are any. Prototypes are means over a
clean pass. A class without C̄ is drawn to the client's own mean of step 0, once any prototypes exist (released code);
a class that no client sent keeps its C̄.

The personal model is the current body under the client's mixed head; there is no server model. Not private: class
means and counts leave a client.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from scipy.linalg import solve_triangular
from scipy.optimize import nnls
from torch import Tensor

from kinfed.algorithms.common.averaging import Weights, mean_update
from kinfed.algorithms.common.heads import class_means, mean_prototypes
from kinfed.algorithms.common.partial import SharesPart
from kinfed.algorithms.fedproto import PrototypePull
from kinfed.author import ClassSums, Nothing, Range, RoundInfo, Task, Tree, counts_examples, option, sgd
from kinfed.data import Cohort, LocalTraining, Population

NEGLIGIBLE = 1e-3  # weights of heads below this are dropped
RIDGE = 1e-12  # of the mean diagonal, added to the diagonal


@dataclass
class Server(Tree):
    shared: Tensor  # [G] the body
    prototypes: Tensor  # [C, d_f] C̄; zeros where unknown
    known: Tensor  # [C] bool
    heads: Tensor  # [N, P − G] W_i as last mixed
    heard: Tensor  # [N] bool: has sent a head
    own_share: Tensor  # [] float64 mean α_ii of the last round
    unsolved: Tensor  # [] int64 programs without a solution so far


@dataclass
class Down(Tree):
    shared: Tensor  # [n, G]
    head: Tensor  # [n, P − G] W_i
    prototypes: Tensor  # [n, C, d_f]
    known: Tensor  # [n, C] bool


@dataclass
class Up(Tree):
    delta: Tensor  # [n, G]
    head: Tensor  # [n, P − G]
    prototypes: Tensor  # [n, C, d_f] means under the new body; zeros for classes that the client lacks
    count: Tensor = field(metadata=counts_examples())  # [n, C] examples of each class; their sum is N_i
    h: Tensor  # [n, C, d_f] shares times means under the received body
    variance: Tensor  # [n] V


@dataclass(frozen=True)
class FedPAC(SharesPart[Server, Nothing, Down, Up]):
    lam: float = option(1.0, "λ: strength of the pull to prototypes; 0 leaves it out", ge=0, tune=Range(0.1, 10.0))
    mix: bool = option(True, "mix heads of clients; off: everyone keeps its own")
    head_lr: float | None = option(
        0.1, "rate of the head's steps (released code); none: the common one", gt=0, tune=Range(0.01, 1.0)
    )
    head_epochs: int = option(1, "passes over a client's examples that train its head, per round", ge=1)
    weights: Weights = option("examples", "weights of bodies in the average: by N_i, or equal")

    traits = frozenset({"needs classes"})
    acts_at = "body"
    leaks = "the mean features and the numbers of its examples of every class"
    single_updates = "also sends heads, class means and variances, from which the server solves for mixtures"

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self._head_training  # or a rate below lr_floor would be refused in the first round only

    @property
    def _head_training(self) -> LocalTraining:
        rate = self.training.lr if self.head_lr is None else self.head_lr
        return replace(self.training, lr=rate, steps=None, epochs=self.head_epochs, poisson=False)

    def init_server(self, task: Task, population: Population) -> Server:
        head, start, n = task.head, task.init(population.seed), population.num_clients
        split = self.split(task)
        body, heads = split.take_shared(start).clone(), split.take_own(start).repeat(n, 1)
        prototypes = torch.zeros(head.outputs, head.inputs, device=task.device)
        unknown = torch.zeros(head.outputs, dtype=torch.bool, device=task.device)
        return Server(body, prototypes, unknown, heads, torch.zeros(n).bool(), torch.ones(()).double(), torch.tensor(0))

    def download(self, server: Server, ids: Tensor) -> Down:
        n, heads = len(ids), server.heads[ids]
        if self.mix and bool(server.heard.any()):
            mean = server.heads[server.heard].mean(0)
            heads = torch.where(server.heard[ids, None].to(heads.device), heads, mean)
        return Down(server.shared.expand(n, -1), heads, server.prototypes.expand(n, -1, -1), server.known.expand(n, -1))

    def client_update(self, task: Task, client: Nothing, down: Down, data: Cohort) -> tuple[Nothing, Up]:
        split, head = self.split(task), task.head.mask.to(down.shared.device)
        theta = split.join(down.head, down.shared)
        sums = task.class_sums(theta, data.train)  # 0.
        h, variance = error_terms(sums)
        theta = sgd(task, theta, data.train.batches(self._head_training, stream="head"), mask=head)  # 1.
        feature_loss = None
        if self.lam and bool(down.known.any()):
            own = class_means(sums).to(down.prototypes)
            target = torch.where(down.known[..., None], down.prototypes, own)
            feature_loss = PrototypePull(target, torch.ones_like(down.known), self.lam, 1 / task.head.inputs)
        theta = sgd(task, theta, data.train.batches(self.training, loop=1), mask=~head, feature_loss=feature_loss)  # 2.
        means = class_means(task.class_sums(theta, data.train))  # 3.
        kind = theta.dtype
        delta = split.take_shared(theta) - down.shared
        up = Up(delta, split.take_own(theta), means.to(kind), sums.count.to(kind), h.to(kind), variance.to(kind))
        return client, up

    def aggregate(self, server: Server, ids: Tensor, up: Up, round: RoundInfo) -> Server:
        heads, heard, own_share, unsolved = server.heads.clone(), server.heard.clone(), server.own_share, 0
        heads[ids], heard[ids] = up.head, True
        if self.mix:
            alpha, unsolved = mixing_weights(up.h.flatten(1), up.variance)
            mixed = alpha @ up.head.to("cpu", torch.float64)  # W_i ← Σ_j α_ij W_j
            heads[ids] = mixed.to(heads)
            own_share = alpha.diagonal().mean()
        prototypes, new = mean_prototypes(up.prototypes, up.count, server.prototypes)
        count = up.count.sum(1) if self.weights == "examples" else None
        shared, known = server.shared + mean_update(up.delta, count), server.known | new
        return Server(shared, prototypes, known, heads, heard, own_share, server.unsolved + unsolved)

    def personalize(self, task: Task, client: Nothing, down: Down, data: Cohort) -> Tensor:
        return self.split(task).join(down.head, down.shared)

    def figures(self, server: Server) -> dict[str, Any]:
        return {"own_share": float(server.own_share), "unsolved": float(server.unsolved)}


def error_terms(sums: ClassSums) -> tuple[Tensor, Tensor]:
    """h [n, C, d_f] and V [n] in float64: the two parts of the error that one client's head makes at another."""
    N = sums.count.sum(1).clamp_min(1)
    h = sums.total / N[:, None, None]  # r_c μ_c
    # Of one example the difference is 0, of equal ones it may round to below.
    variance = (sums.square.sum(1) / N - h.square().sum((1, 2))).clamp_min(0.0) / N
    return h, variance


def mixing_weights(h: Tensor, variance: Tensor) -> tuple[Tensor, int]:
    """(α [n, n] float64, rows sum to 1; how many of them have no solution) of h [n, C d_f] and V [n]."""
    h64, v = h.to("cpu", torch.float64).numpy(), variance.to("cpu", torch.float64).clamp_min(0.0).numpy()
    alpha, unsolved = np.eye(len(v)), 0
    for i in range(len(v)):
        if v[i] == 0:  # then the own head has no error at all
            continue
        away = h64[i] - h64
        try:
            a = least_on_simplex(np.diag(v) + away @ away.T)  # diag V + Q_i
        except RuntimeError:  # of nnls: too many iterations
            unsolved += 1
            continue
        a[a < NEGLIGIBLE] = 0.0
        alpha[i] = a / a.sum()
    return torch.from_numpy(alpha), unsolved


def least_on_simplex(M: np.ndarray) -> np.ndarray:
    """argmin a'Ma over a ≥ 0 with Σa = 1, of a symmetric positive semidefinite M [n, n] that is not 0."""
    n = len(M)
    M = M / (np.trace(M) / n) + RIDGE * np.eye(n)
    lower = np.linalg.cholesky(M)
    # ½ b'Mb − 1'b = ½ |L'b − L⁻¹1|² − const, and by its homogeneity the minimum on the simplex is b/Σb.
    b, _ = nnls(lower.T, solve_triangular(lower, np.ones(n), lower=True), maxiter=100 * n)
    result: np.ndarray = b / b.sum()
    return result
