"""pFedFDA: the classifier, its statistics and a round by hand; both ends of the interpolation; the search for β."""

from __future__ import annotations

import math

import pytest
import torch
from method_bench import ALL, LR, SIZES, TWO_STEPS, by_hand, close, deep, features, gradient, models, server, weighted
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from torch import Tensor, nn

from kinfed.algorithms.common.feature_distribution import Distribution, Pencil, best_beta, local_distribution
from kinfed.algorithms.fedavg import FedAvg
from kinfed.algorithms.pfedfda import PFedFDA, folds, packed, unpacked
from kinfed.core import rng
from kinfed.data.examples.batches import LocalTraining
from kinfed.data.examples.features import Features
from kinfed.data.examples.problem import Problem
from kinfed.data.examples.ragged import Ragged
from kinfed.data.federations.federation import Federation
from kinfed.errors import ConfigError
from kinfed.server.schedule import Schedule
from kinfed.testing import Bench, tiny_federation
from kinfed.testing.workbench import SEED

DOUBLE = torch.float64
HEAD = slice(35, 47)  # of the deep model


def normals(seed: int, *shape: int) -> Tensor:
    return rng.normal(rng.root(seed, "test"), math.prod(shape)).reshape(*shape)


def test_a_classifier_by_hand() -> None:
    """M = (±1, 0), S = diag(2, 1), π = (0.75, 0.25); what ε adds is of its order."""
    one = Distribution(torch.tensor([[1.0, 0], [-1, 0]], dtype=DOUBLE), torch.tensor([[2.0, 0], [0, 1]], dtype=DOUBLE))
    weight, bias = one.classifier(torch.tensor([0.75, 0.25], dtype=DOUBLE))
    close(weight, torch.tensor([[0.5, 0], [-0.5, 0]]), 1e-4)
    close(bias, torch.tensor([-0.537682, -1.636294]), 1e-4)


def test_the_classifier_is_bayes_rule() -> None:
    """Differences of its logits are those of log π_c N(φ; M_c, S')."""
    means, root, phi = normals(1, 3, 4), normals(2, 4, 4), normals(3, 5, 4)
    S = root @ root.T + torch.eye(4, dtype=DOUBLE)
    prior = torch.tensor([0.2, 0.5, 0.3], dtype=DOUBLE)
    weight, bias = Distribution(means, S).classifier(prior)
    shrunk = (1 - 1e-4) * S + 1e-4 * S.trace() / 4 * torch.eye(4, dtype=DOUBLE)
    density = torch.distributions.MultivariateNormal(means, shrunk).log_prob(phi[:, None]) + prior.log()
    ours = phi @ weight.T + bias
    close(ours - ours[:, :1], density - density[:, :1], 1e-9)


def test_of_ones_own_data_it_is_scikit_learns_discriminant() -> None:
    """β = 1: the same means, shares and shrunk covariance, over N instead of N − 1, give the same head."""
    y = torch.tensor([0, 1, 2, 0, 1, 0, 2, 2, 0, 1, 1, 0])
    phi = normals(6, 12, 4) + 2 * torch.eye(3, 4, dtype=DOUBLE)[y]
    own = local_distribution(phi, y, torch.zeros(3, 4, dtype=DOUBLE), ridge=0.0)
    prior = torch.bincount(y).double() / 12
    weight, bias = Distribution(own.means, own.covariance * 11 / 12).classifier(prior)
    theirs = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=1e-4).fit(phi.numpy(), y.numpy())
    close(weight, torch.from_numpy(theirs.coef_), 1e-8)
    close(bias, torch.from_numpy(theirs.intercept_), 1e-8)


def test_local_statistics_by_hand() -> None:
    """Two of class 0, one of class 2; class 1 has the global mean, and no part in the scatter."""
    phi = torch.tensor([[1.0, 0], [3, 0], [0, 7]], dtype=DOUBLE)
    one = local_distribution(phi, torch.tensor([0, 0, 2]), torch.full((3, 2), 9.0, dtype=DOUBLE), ridge=0.5)
    assert one.means.tolist() == [[2, 0], [9, 9], [0, 7]]
    assert one.covariance.tolist() == [[1.5, 0], [0, 0.5]]  # (1 + 1)/(3 − 1) + 0.5


def test_triangles_hold_symmetric_matrices() -> None:
    root = normals(4, 5, 5)
    assert torch.equal(unpacked(packed(root + root.T), 5), root + root.T)


def test_folds_are_halves_of_every_class() -> None:
    y = torch.tensor([0] * 7 + [1] * 4 + [2])
    fold = folds(y, rng.root(0, "test"))
    assert fold[y == 2].tolist() == [-1]
    assert [int((fold[y == 0] == k).sum()) for k in (0, 1)] == [4, 3]
    assert [int((fold[y == 1] == k).sum()) for k in (0, 1)] == [2, 2]
    assert not torch.equal(fold, folds(y, rng.root(1, "test")))


def trials(shift: float, size: int, seed: int = 5) -> tuple[Distribution, list[tuple[Distribution, Tensor, Tensor]]]:
    """A client with two classes at ±1 in 4 dimensions, and a global distribution that is off by `shift`."""
    common = Distribution(
        torch.tensor([[1.0 + shift] * 4, [-1.0 + shift] * 4], dtype=DOUBLE), torch.eye(4, dtype=DOUBLE)
    )
    y = torch.arange(2 * size) % 2
    phi = torch.where(y[:, None] == 0, 1.0, -1.0) + normals(seed, 2 * size, 4)
    halves = [(phi[:size], y[:size]), (phi[size:], y[size:])]
    return common, [(local_distribution(*halves[k], common.means, 1e-4), *halves[1 - k]) for k in (0, 1)]


def test_much_data_far_from_the_others_is_its_own_and_little_is_not() -> None:
    """What the interpolation is for."""
    prior = torch.tensor([0.5, 0.5], dtype=DOUBLE)
    common, several = trials(shift=2.0, size=200)
    assert float(best_beta(several, common, prior, single=False)[0]) > 0.9
    common, few = trials(shift=0.0, size=5)
    assert float(best_beta(few, common, prior, single=True).max()) < 0.2


def test_losses_of_the_search_are_those_of_the_classifier() -> None:
    """In the basis where both covariances are diagonal, and their derivatives, against plain formulas and autograd."""
    common, several = trials(shift=0.5, size=12)
    prior, beta = torch.tensor([0.3, 0.7], dtype=DOUBLE), torch.tensor([0.3, 0.8], dtype=DOUBLE, requires_grad=True)
    for local, phi, y in several:
        weight, bias = common.toward(local, beta).classifier(prior)
        wanted = nn.functional.cross_entropy(phi @ weight.T + bias, y)
        (slope,) = torch.autograd.grad(wanted, beta)
        value, slopes = Pencil.of(common, local, phi, y).loss(0.3, 0.8, prior.log().numpy())
        assert value == pytest.approx(float(wanted.detach()), rel=1e-9)
        assert slopes.tolist() == pytest.approx(slope.tolist(), rel=1e-8)


@pytest.mark.parametrize("single", [True, False])
def test_the_search_finds_the_least_loss(single: bool) -> None:
    common, several = trials(shift=0.5, size=12)
    prior = torch.tensor([0.5, 0.5], dtype=DOUBLE)

    def loss(beta: Tensor) -> float:
        heads = [common.toward(local, beta).classifier(prior) for local, _, _ in several]
        each = [
            nn.functional.cross_entropy(phi @ weight.T + bias, y)
            for (weight, bias), (_, phi, y) in zip(heads, several, strict=True)
        ]
        return float(sum(each))

    steps = torch.linspace(0, 1, 21, dtype=DOUBLE).tolist()
    grid = [(a, b) for a in steps for b in ([a] if single else steps)]
    least = min(loss(torch.tensor(pair, dtype=DOUBLE)) for pair in grid)
    beta = best_beta(several, common, prior, single=single)
    assert 0 <= float(beta.min()) <= float(beta.max()) <= 1
    assert loss(beta) <= least + 1e-4


@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_rounds_by_hand(beta: float) -> None:
    """Plain autograd and loops over examples; two of three clients in each round."""
    with by_hand(PFedFDA(TWO_STEPS, beta=beta, ridge=0.1), model=deep, participation=0.67) as loop:
        data, start = loop.pool.federation, loop.task.init(SEED)
        body, M, S = start[:35], server(loop, "means").double(), torch.eye(3, dtype=DOUBLE)
        for number in range(1, 4):
            active = loop.schedule.active(SEED, number, 3).tolist()
            bodies, means, covariances = [], [], []
            for m in active:
                theta = torch.cat([body, head(M, S, shares(data.labels[data.train[m]]))])
                for _ in range(2):
                    theta[:35] -= LR * gradient(loop, m, theta)[:35]
                local = by_loops(loop, m, theta, M)
                bodies.append(theta[:35])
                means.append(beta * local[0] + (1 - beta) * M)
                covariances.append(beta * local[1] + (1 - beta) * S)
            size = tuple(SIZES[m] for m in active)
            body, M, S = weighted(bodies, size), weighted(means, size), weighted(covariances, size)
            report = loop.round()
            assert report.bytes_down == len(active) * 4 * (35 + 9 + 6)
            assert report.bytes_up == len(active) * 4 * (35 + 9 + 6 + 1)
            close(server(loop, "shared"), body, 1e-5)
            close(server(loop, "means"), M, 1e-5)
            close(unpacked(server(loop, "covariance"), 3), S, 1e-5)
        theta = torch.cat([body, head(M, S, torch.full((3,), 1 / 3, dtype=DOUBLE))])
        close(loop.algorithm.server_models(loop.server).models[0], theta, 1e-4)
        for m in range(3):
            local = by_loops(loop, m, torch.cat([body, start[HEAD]]), M)
            own = head(
                beta * local[0] + (1 - beta) * M,
                beta * local[1] + (1 - beta) * S,
                shares(data.labels[data.train[m]]),
            )
            close(models(loop)[m], torch.cat([body, own]), 1e-4)


def shares(y: Tensor) -> Tensor:
    share = torch.bincount(y, minlength=3).double() / len(y) + 1e-4
    return share / share.sum()


def head(M: Tensor, S: Tensor, prior: Tensor) -> Tensor:
    """W and b as they lie in a row, by an inverse."""
    inverse = torch.linalg.inv((1 - 1e-4) * S + 1e-4 * S.trace() / 3 * torch.eye(3, dtype=DOUBLE))
    weight = M @ inverse
    return torch.cat([weight.reshape(-1), prior.log() - 0.5 * (M @ inverse @ M.T).diagonal()]).float()


def by_loops(loop, m: int, theta: Tensor, M: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[no-untyped-def]
    data = loop.pool.federation
    phi, y = features(loop, theta, data.features.gather(data.train[m])).double(), data.labels[data.train[m]]
    means = torch.stack([phi[y == c].mean(0) if bool((y == c).any()) else M[c] for c in range(3)])
    scatter = sum(torch.outer(p - means[c], p - means[c]) for p, c in zip(phi, y.tolist(), strict=True))
    return means, scatter / (len(y) - 1) + 0.1 * torch.eye(3, dtype=DOUBLE)  # type: ignore[operator]


def test_means_and_covariance_have_a_beta_each() -> None:
    ours = Distribution(torch.zeros(1, 1, dtype=DOUBLE), torch.zeros(1, 1, dtype=DOUBLE))
    theirs = Distribution(torch.ones(1, 1, dtype=DOUBLE), torch.ones(1, 1, dtype=DOUBLE))
    mixed = ours.toward(theirs, torch.tensor([0.25, 0.75], dtype=DOUBLE))
    assert (float(mixed.means), float(mixed.covariance)) == (0.25, 0.75)


def test_beta_is_judged_by_examples_that_it_was_not_fitted_to() -> None:
    """Labels without meaning: fitted to the examples it is judged by, a local distribution would look best."""
    phi, y = normals(8, 24, 8), torch.arange(24) % 2
    common = Distribution(torch.zeros(2, 8, dtype=DOUBLE), torch.eye(8, dtype=DOUBLE))
    prior = torch.tensor([0.5, 0.5], dtype=DOUBLE)
    split = tiny_federation().cohort(torch.tensor([0]), seed=0, round=1).train
    assert float(PFedFDA(ALL)._beta(phi, y, common, prior, split)[0]) < 0.3
    fitted = local_distribution(phi, y, common.means, 1e-4)
    assert float(best_beta([(fitted, phi, y)], common, prior, single=False)[0]) > 0.7


def test_at_beta_zero_heads_differ_by_class_shares_only() -> None:
    with by_hand(PFedFDA(ALL, beta=0.0), model=deep) as loop:
        loop.round()
        rows = models(loop)
    assert torch.equal(rows[0, :44], rows[1, :44])
    assert not torch.equal(rows[0, 44:], rows[1, 44:])


def test_a_last_layer_without_a_bias_is_refused() -> None:
    with (
        pytest.raises(ConfigError, match="'2' has none; build it with bias=True"),
        by_hand(PFedFDA(ALL), model=lambda: nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3, bias=False))),
    ):
        pass


def test_feature_statistics_are_not_private() -> None:
    assert "covariance" in PFedFDA(ALL).privacy(torch.tensor([4])).impossible


@pytest.mark.parametrize("seed", [0, 1])
def test_classifiers_follow_clients_whose_inputs_are_shifted(seed: int) -> None:
    """What it was invented for: three classes, seen by every client through a shift of its own. Twelve examples show
    the shift; the classifier that all have in common does not know it, and neither does FedAvg's model."""
    clients, count = 8, 8 * 32
    key, rows = rng.root(seed, "planted"), torch.arange(count)
    owner, test, y = rows % clients, rows >= 12 * clients, rows // clients % 3
    noise = rng.normal(rng.fold(key, 1), count * 6).reshape(-1, 6)
    shift = 2 * rng.normal(rng.fold(key, 2), clients * 6).reshape(-1, 6)
    data = Federation(
        Features((2.0 * torch.eye(3, 6)[y] + 0.7 * noise + shift[owner]).to(torch.float32)), y, Problem.of_classes(3),
        train=Ragged.grouped(rows[~test], owner[~test], clients), val=Ragged.empty(clients),
        test=Ragged.grouped(rows[test], owner[test], clients), names=[str(m) for m in range(clients)],
    )  # fmt: skip
    work, right = LocalTraining(lr=0.05, batch=12, steps=5), {}
    methods = {"own": PFedFDA(work), "common": PFedFDA(work, beta=0.0), "fedavg": FedAvg(work)}
    for name, method in methods.items():
        bench = Bench(method, federation=data, model=lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)))
        found = bench.run(Schedule(), rounds=6, chunk=None)
        right[name] = float(found["server correct" if name == "fedavg" else "personal correct"].sum() / test.sum())
    assert right["own"] > right["common"] + 0.1
    assert right["own"] > right["fedavg"] + 0.1
