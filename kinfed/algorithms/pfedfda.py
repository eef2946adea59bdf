"""pFedFDA: a shared body trained under a Gaussian classifier; every client interpolates between the global feature
distribution and its own.

Mclaughlin, Su: Personalized Federated Learning via Feature Distribution Adaptation, NeurIPS 2024, Algorithm 1.

    LDA(M, S, π):  W = M S'⁻¹,  b_c = −⟨M_c, W_c⟩/2 + log π_c,  S' = (1 − ε) S + ε tr(S)/d_f I      (a linear head)
    client m:  head ← LDA(M, S, π_m), which stays;  K steps on the body
               M_loc, S_loc = its class means and covariance within classes under the new body
               (β_M, β_S) = argmin over [0, 1]² of the cross-entropy of LDA(M_β, S_β, π_m) in 2-fold cross-validation
               M_m = β_M M_loc + (1 − β_M) M,  S_m = β_S S_loc + (1 − β_S) S
    server:    body, M, S ← means of body_m, M_m, S_m by examples

π_m are the client's own class shares plus ε, scaled to sum to 1. β = 0 gives all clients the same classifier but for
log π; β = 1 is a classifier of the client's own data.

Decisions. Statistics are of a clean pass of the trained body (the released code collects features while weights move).
S_loc is the scatter within classes over N − 1 plus `ridge` times the identity; the released code adds 1e-4 to every
entry and a whole identity, which `ridge = 1` comes close to. The paper's 1e-4 leaves the covariance of few examples
nearly singular, with losses of a hundred and more; the default is in between. Classes that a client lacks have the
global mean. Folds are stratified, from the keys of the seed; classes of a single example are left out of them, and a
client without a class of two has β = 0. β is found by L-BFGS-B from 0.5 in at most 10 iterations, with exact
derivatives in float64 (the released code clips an unbounded search). M starts at uniform draws, S at the identity
(released code).

Everyone's personal model is made when it is asked for, from the current body, M and S and the client's training
examples; clients keep nothing. The server's model has LDA(M, S, uniform π). The last layer needs a bias. Not private:
class means and a covariance leave a client.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kinfed.algorithms.base import RoundInfo, ServerModels
from kinfed.algorithms.common.averaging import mean_of
from kinfed.algorithms.common.feature_distribution import EPS, Distribution, best_beta, local_distribution
from kinfed.algorithms.common.heads import class_counts, features_by_client, required_body
from kinfed.algorithms.common.partial import SharesPart
from kinfed.author import Cohort, ColumnSplit, ConfigError, Nothing, Population, Range, Split, Tree, exact, option, rng
from kinfed.engine import Dense, Head, Task, sgd


@dataclass
class Server(Tree):
    shared: Tensor  # [G] the body
    means: Tensor  # [C, d_f] M
    covariance: Tensor  # [d_f (d_f + 1)/2] the lower triangle of S
    head_at: Tensor  # [2] int64: where W and b begin in a row


@dataclass
class Down(Tree):
    shared: Tensor  # [n, G]
    means: Tensor  # [n, C, d_f]
    covariance: Tensor  # [n, d_f (d_f + 1)/2]


@dataclass
class Up(Tree):
    delta: Tensor  # [n, G]
    means: Tensor  # [n, C, d_f] M_m
    covariance: Tensor = field(metadata=exact())  # [n, d_f (d_f + 1)/2] S_m: a rounded one may not be positive
    count: Tensor  # [n] examples


@dataclass(frozen=True)
class PFedFDA(SharesPart[Server, Nothing, Down, Up]):
    beta: float | None = option(None, "β fixed for means and covariance, instead of cross-validation", ge=0, le=1)
    single_beta: bool = option(False, "one β for both")
    ridge: float = option(0.1, "added to the diagonal of a client's covariance", gt=0, tune=Range(1e-4, 1.0))

    traits = frozenset({"needs classes"})
    leaks = "the class means and the covariance of its features"
    single_updates = "sends covariances, which another rule than the mean would not leave positive definite"

    def check(self, task: Task, population: Population) -> None:
        head = required_body("pFedFDA", task)
        if head.dense.bias is None:
            raise ConfigError(
                f"pFedFDA's classifier has a bias, and the last layer {head.name!r} has none; build it with bias=True"
            )

    def init_server(self, task: Task, population: Population) -> Server:
        head, split = task.head, self.split(task)
        C, width = head.outputs, head.inputs
        means = rng.uniform(population.key("feature-means"), C * width).reshape(C, width)
        body, covariance = split.take_shared(task.init(population.seed)).clone(), packed(torch.eye(width))
        at = torch.tensor([head.dense.weight, head.dense.bias])
        return Server(body, means.to(task.device, torch.float32), covariance.to(task.device), at)

    def download(self, server: Server, ids: Tensor) -> Down:
        n = len(ids)
        return Down(server.shared.expand(n, -1), server.means.expand(n, -1, -1), server.covariance.expand(n, -1))

    def client_update(self, task: Task, client: Nothing, down: Down, data: Cohort) -> tuple[Nothing, Up]:
        split, head = self.split(task), task.head.mask.to(down.shared.device)
        common = distributions(down)
        prior = class_shares(task, data.train)
        theta = with_classifiers(task.head, self.at_start(task, down.shared, data.seed), common, prior)
        theta = sgd(task, theta, data.train.batches(self.training), mask=~head)
        mixed = self._interpolated(task, theta, common, prior, data.train)
        means = torch.stack([one.means for one in mixed]).to(down.means)
        covariance = torch.stack([packed(one.covariance) for one in mixed]).to(down.covariance)
        delta, count = split.take_shared(theta) - down.shared, data.train.count.to(torch.float32)
        return client, Up(delta, means, covariance, count)

    def _interpolated(
        self, task: Task, theta: Tensor, common: list[Distribution], prior: Tensor, split: Split
    ) -> list[Distribution]:
        """(M_m, S_m) of every client under its body in theta [n, P]."""
        mixed = []
        for i, (features, y) in enumerate(features_by_client(task, theta, split)):
            phi = features.to(torch.float64)
            beta = self._beta(phi, y, common[i], prior[i], split)
            mixed.append(common[i].toward(local_distribution(phi, y, common[i].means, self.ridge), beta))
        return mixed

    def _beta(self, phi: Tensor, y: Tensor, common: Distribution, prior: Tensor, split: Split) -> Tensor:
        """[2] β_M and β_S of one client."""
        if self.beta is not None:
            return torch.full((2,), self.beta, dtype=torch.float64)
        fold = folds(y, rng.fold(rng.root(split.seed, "folds"), split.round))
        halves = [(phi[fold == k], y[fold == k]) for k in (0, 1)]
        finite = all(bool(torch.isfinite(part).all()) for part in (phi, common.means, common.covariance))
        if not all(len(labels) for _, labels in halves) or not finite:
            return torch.zeros(2, dtype=torch.float64)
        trials = [(local_distribution(*halves[k], common.means, self.ridge), *halves[1 - k]) for k in (0, 1)]
        return best_beta(trials, common, prior, single=self.single_beta)

    def aggregate(self, server: Server, ids: Tensor, up: Up, round: RoundInfo) -> Server:
        mean = mean_of(up, ("delta", "means", "covariance"), up.count)
        return Server(server.shared + mean.delta, mean.means, mean.covariance, server.head_at)

    def personalize(self, task: Task, client: Nothing, down: Down, data: Cohort) -> Tensor:
        theta, prior = self.at_start(task, down.shared, data.seed), class_shares(task, data.train)
        mixed = self._interpolated(task, theta, distributions(down), prior, data.train)
        return with_classifiers(task.head, theta, mixed, prior)

    def server_models(self, server: Server) -> ServerModels:
        (C, width), (weight, bias) = server.means.shape, server.head_at.tolist()
        head = Head("", Dense(width, C, weight, bias), len(server.shared) + C * (width + 1))
        split = ColumnSplit.from_mask(head.mask)
        theta = split.join(server.shared.new_zeros(1, C * (width + 1)), server.shared[None])
        uniform = torch.full((1, C), 1 / C, dtype=torch.float64)
        common = distributions(self.download(server, torch.zeros(1, dtype=torch.int64)))
        return ServerModels(with_classifiers(head, theta, common, uniform))


def packed(matrix: Tensor) -> Tensor:
    """[d (d + 1)/2] the lower triangle of a symmetric matrix [d, d], row by row."""
    rows, columns = torch.tril_indices(*matrix.shape, device=matrix.device)
    return matrix[rows, columns]


def unpacked(triangle: Tensor, width: int) -> Tensor:
    """[d, d] from what `packed` gives."""
    matrix = triangle.new_zeros(width, width)
    rows, columns = torch.tril_indices(width, width, device=triangle.device)
    matrix[rows, columns] = triangle
    matrix[columns, rows] = triangle
    return matrix


def distributions(down: Down) -> list[Distribution]:
    """Distributions as every client received them, on the processor and in float64."""
    means, covariance = down.means.to("cpu", torch.float64), down.covariance.to("cpu", torch.float64)
    return [Distribution(m, unpacked(s, m.shape[1])) for m, s in zip(means, covariance, strict=True)]


def class_shares(task: Task, split: Split) -> Tensor:
    """[n, C] float64 π: shares of classes among a client's examples, none of them 0."""
    counts = class_counts(split, task.head.outputs).to("cpu", torch.float64)
    share = counts / counts.sum(1, keepdim=True) + EPS
    return share / share.sum(1, keepdim=True)


def with_classifiers(head: Head, theta: Tensor, by_client: list[Distribution], prior: Tensor) -> Tensor:
    """[n, P]: theta with the head LDA(M, S, π) of every client."""
    parts = [one.classifier(p) for one, p in zip(by_client, prior, strict=True)]
    weight, bias = (torch.stack(column).to(theta) for column in zip(*parts, strict=True))
    return head.join(theta, weight, bias)


def folds(y: Tensor, key: Tensor) -> Tensor:
    """[N] 0 or 1: examples of every class in two halves at random; −1 where a class has one example only."""
    order = rng.permutation(key, len(y))
    fold = torch.full_like(y, -1)
    for c in set(y.tolist()):
        members = order[y[order] == c]
        if len(members) > 1:
            fold[members] = torch.arange(len(members)) % 2
    return fold
