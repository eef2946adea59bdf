"""Models with running statistics: every method averages them, and lets nothing else touch them."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from method_bench import by_hand, close, info, models, server, state
from torch import Tensor, nn

from kinfed.algorithms import make_algorithm
from kinfed.algorithms.base import RoundInfo
from kinfed.algorithms.common.averaging import DeltaUp
from kinfed.algorithms.fedfomo.affinity import weigh
from kinfed.algorithms.fedfomo.model_averages import FedFomoMA
from kinfed.algorithms.fedopt import FedOpt
from kinfed.algorithms.l2gd import L2GD, Client, Down
from kinfed.algorithms.pfedme import PFedMe
from kinfed.data.examples.batches import LocalTraining
from kinfed.engine.personal.personal_models import MixtureTask, mixture_rows
from kinfed.engine.task_factory import ModuleTask, make_task
from kinfed.engine.training.sgd import sgd
from kinfed.testing import CHECKS, Bench, tiny_federation
from kinfed.testing.workbench import SEED, normalized_model

ALONE = LocalTraining(lr=0.1, batch=100, steps=1)
HARSH = replace(ALONE, momentum=0.9, weight_decay=0.5)


@functools.cache
def task() -> ModuleTask:
    return make_task(normalized_model)


def behind() -> slice:
    return slice(task().trainable.stop, None)


# Options that extrapolate, move far, or pull hard: what would carry a variance below zero if it could.
AGGRESSIVE: list[tuple[str, dict[str, Any]]] = [
    ("fedavgm", {"server_lr": 2.0, "server_nesterov": True}),
    ("fedadam", {"server_lr": 1.0}),
    ("pfedme", {"beta": 3.0, "lr": 0.05, "lam": 20.0}),
    ("cgpfl", {"contexts": 2, "lr": 0.05, "lam": 20.0}),
    ("cgpfl", {"contexts": 2, "recluster": "all", "alpha": 0.5}),
    ("perfedavg_hf", {"beta": 1.0, "weight_decay": 0.5}),
    ("apfl", {"alpha_every_step": True, "weight_decay": 0.5}),
    ("l2sgd", {"theta": 0.5}),
    ("mocha_deep", {"learn_omega": True, "lam2": 0.9}),
    ("pfedhn", {"server_lr": 0.5}),
    ("selffl", {"r_max": float("inf")}),
    ("selffl_cluster", {"groups": "contexts", "clusters": 2, "recluster_every": 1}),
    ("fedfomo_ma", {"combine": "client", "newcomers": "combine"}),
    ("fedfomo", {"subglobal": 2}),
    ("ifca", {"init": "kmeans", "clusters": 2}),
    ("flhc", {"n1": 0}),
    ("cfl", {"t_min": 0, "eps1": 1e9, "eps2": 1e-9}),
    ("fedem", {"finetune": 2, "weight_decay": 0.5}),
    ("fedbn", {}),
]


@pytest.mark.parametrize(("name", "options"), AGGRESSIVE, ids=[name for name, _ in AGGRESSIVE])
def test_variances_survive_aggressive_options(name: str, options: dict[str, Any]) -> None:
    CHECKS["running_statistics_stay_sound"](Bench(name, options=options))


ONE_PASS: list[tuple[str, dict[str, Any]]] = [
    ("local", {}),
    ("fedavg", {}),
    ("fedprox", {"mu": 1.0}),
    ("ditto", {"lam": 1.0}),
    ("apfl", {"momentum": 0.0}),
    ("l2sgd", {}),
    ("mocha_deep", {}),
    ("lgfedavg", {}),
    ("fedper", {}),
    ("fedrep", {}),
    ("fedbn", {}),
    ("fedpac", {}),
    ("fedas", {}),
    ("pfedfda", {}),
    ("fedcp", {}),
    ("gpfl", {}),
    ("selffl", {}),
    ("pfedme", {"inner_steps": 1, "lr": 0.05, "momentum": 0.0}),
    ("cgpfl", {"inner_steps": 1, "lr": 0.05, "momentum": 0.0, "contexts": 1}),
]


@pytest.mark.parametrize(("name", "options"), ONE_PASS, ids=[name for name, _ in ONE_PASS])
def test_after_one_pass_statistics_are_those_of_plain_torch(name: str, options: dict[str, Any]) -> None:
    """Whatever a method pulls, decays or mixes: one client, one pass, 0.9 of the start and 0.1 of the batch."""
    method = make_algorithm(name, HARSH, options)
    with by_hand(method, sizes=(9,), model=normalized_model) as loop:
        module = task().module_of(task().init(SEED)).train()
        rows = loop.pool.federation.train[0]
        module(loop.pool.federation.features.gather(rows))
        loop.round()
        close(models(loop)[0, : task().num_params][behind()], task().flatten(module.state_dict())[behind()])


@pytest.mark.parametrize("optimizer", ["adam", "yogi", "adagrad", "momentum"])
def test_server_optimizers_leave_statistics_to_the_mean(optimizer: Any) -> None:
    method = FedOpt(server_optimizer=optimizer, server_lr=3.0)
    population = tiny_federation((2, 2)).population(SEED)
    now = method.init_server(task(), population)
    delta = torch.linspace(-1, 1, 2 * task().num_params).reshape(2, -1)
    count = torch.tensor([1.0, 3.0])
    new = method.aggregate(now, torch.arange(2), DeltaUp(delta, count), RoundInfo(1, population, task().trainable))
    close(new.w[behind()], (now.w + 0.25 * delta[0] + 0.75 * delta[1])[behind()])
    alone = replace(now, w=now.w[task().trainable])
    narrow = method.aggregate(alone, torch.arange(2), DeltaUp(delta[:, task().trainable], count), info())
    assert torch.equal(new.w[task().trainable], narrow.w)
    assert len(new.m) == task().trainable.stop


@pytest.mark.parametrize(("beta", "share"), [(3.0, 1.0), (1.0, 1.0), (0.5, 0.5)])
def test_pfedme_extrapolates_parameters_and_no_statistics(beta: float, share: float) -> None:
    method = PFedMe(ALONE, lam=1.0, beta=beta)
    population = tiny_federation((2,)).population(SEED)
    now = method.init_server(task(), population)
    delta = torch.linspace(-0.9, 1, task().num_params)[None]
    new = method.aggregate(now, torch.arange(1), DeltaUp(delta, None), RoundInfo(1, population, task().trainable))
    wanted = now.w + share * delta[0]
    wanted[task().trainable] = (now.w + beta * delta[0])[task().trainable]
    close(new.w, wanted)


def test_perfedavg_moves_statistics_by_both_passes() -> None:
    """b and b' hold all examples: two steps of 0.1 towards statistics at w and at w̃."""
    method = make_algorithm("perfedavg_hf", replace(ALONE, weight_decay=0.5), {})
    with by_hand(method, sizes=(9,), model=normalized_model) as loop:
        x, y = (
            t[loop.pool.federation.train[0]] for t in (loop.pool.federation.features.raw, loop.pool.federation.labels)
        )
        module = task().module_of(task().init(SEED)).train()
        nn.functional.cross_entropy(module(x), y).backward()
        with torch.no_grad():
            for p in module.parameters():
                p -= 0.1 * (p.grad + 0.5 * p)  # type: ignore[operator]
        module(x)
        loop.round()
        close(server(loop)[behind()], task().flatten(module.state_dict())[behind()])


def test_the_mean_of_l2gd_survives_a_lost_update() -> None:
    """A client's variance rose in a round whose update was lost; what it sends next must not take more from the mean
    than the mean has."""
    method = L2GD(replace(ALONE, steps=30), theta=0.0)
    data = tiny_federation((9, 9))
    start = task().init(SEED)
    risen = start.clone()
    risen[behind()] += 50.0
    _, up = method.client_update(
        task(), Client(risen[None]), Down(start[None], None, None), data.cohort(torch.tensor([0]), SEED, 2)
    )
    now = method.init_server(task(), data.population(SEED))
    new = method.aggregate(now, torch.tensor([0]), up, RoundInfo(2, data.population(SEED), task().trainable))
    variance = task().unflatten(new.mean)["2.running_var"]
    assert float(variance.min()) > 0


def test_fedfomo_measures_distances_of_parameters_only() -> None:
    base, other = torch.zeros(1, 4), torch.tensor([[3.0, 4.0, 100.0, 100.0]])
    for norm, distance in (("l2", 5.0), ("l1", 7.0), ("l2sq", 25.0)):
        w, _ = weigh(torch.tensor([[10.0]]), [other], base, norm, slice(0, 2))  # type: ignore[arg-type]
        assert float(w) == pytest.approx(10.0 / distance)


def test_averages_without_a_model_have_no_negative_variances() -> None:
    """Of variances 1, 1e-9 and 1e-9 the mean without the first is 1e-9; a difference of means rounds to below zero."""
    method = FedFomoMA(ALONE, models=3)
    population = tiny_federation((2, 2, 2)).population(SEED)
    now = method.init_server(task(), population)
    theta = torch.full((3, task().num_params), 1e-9)
    theta[0] = 1.0
    now = replace(now, theta=theta, uploaded=torch.ones(3, dtype=torch.int64), plan=torch.tensor([[0, 1, 2]] * 3))
    down = method.download(now, torch.arange(3))
    close(down.averages[0, 1, behind()] * 1e9, torch.ones(task().num_params)[behind()], 1e-5)
    assert torch.equal(method.download(now, torch.tensor([1])).averages[0], down.averages[1])


def test_an_apfl_client_that_never_trained_has_the_statistics_of_the_server() -> None:
    method = make_algorithm("apfl", ALONE, {"alpha": 0.0})
    with by_hand(method, sizes=(9, 9, 9), model=normalized_model, participation=0.34) as loop:
        loop.round()
        active = loop.pool.states()["ids"].tolist()
        never = next(k for k in range(3) if k not in active)
        assert torch.equal(models(loop)[never], server(loop))
        assert torch.equal(models(loop)[active[0], behind()], state(loop, active[0], "v")[behind()])


def moved_by_passes_only(theta: Tensor, **terms: Any) -> Tensor:
    training = terms.pop("training", HARSH)
    split = tiny_federation((9, 7)).cohort(torch.arange(2), SEED, 1).train
    return sgd(task(), theta, split.batches(training), **terms)


def test_no_term_of_local_training_touches_statistics() -> None:
    theta = task().init(SEED).repeat(2, 1)
    plain = moved_by_passes_only(theta, training=ALONE)[:, behind()]
    far = torch.full_like(theta, 7.0)
    for training in (HARSH, ALONE):
        assert torch.equal(moved_by_passes_only(theta, training=training, proximal=(0.5, far))[:, behind()], plain)
        assert torch.equal(moved_by_passes_only(theta, training=training, drift=far)[:, behind()], plain)


def test_statistics_outside_the_mask_stay() -> None:
    theta = task().init(SEED).repeat(2, 1)
    norm = task().layer_mask(("2",))
    moved = moved_by_passes_only(theta, mask=norm)
    assert not torch.equal(moved[:, behind()], theta[:, behind()])
    assert torch.equal(moved[:, ~norm], theta[:, ~norm])
    rest = moved_by_passes_only(theta, mask=~norm)
    assert torch.equal(rest[:, norm], theta[:, norm])
    assert not torch.equal(rest, theta)


def test_weight_decay_of_a_mixture_leaves_statistics_alone() -> None:
    mixture = MixtureTask(task(), 2)
    components = torch.stack([task().init(SEED, k) + 0.1 for k in range(2)])  # nothing is 0, which decay would not show
    rows = mixture_rows(components[None], torch.tensor([[0.5, 0.5]]))
    split = tiny_federation((9,)).cohort(torch.arange(1), SEED, 1).train
    decayed = sgd(mixture, rows, split.batches(HARSH), mask=mixture.mask(HARSH))
    plain = sgd(mixture, rows, split.batches(ALONE), mask=mixture.mask(ALONE))
    for slot in mixture.slots:
        same = torch.equal(decayed[:, slot.start : slot.stop], plain[:, slot.start : slot.stop])
        assert same is (not slot.trainable or slot.name == "pi"), slot.name
