"""Moments of local optimizers that clients keep: each loop its own, and the same wherever and however clients train."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kinfed.algorithms import ALGORITHMS, make_algorithm, tuning_space
from kinfed.algorithms.base import check_algorithm_settings
from kinfed.algorithms.common.averaging import ModelDown
from kinfed.config.config_reading import make_config
from kinfed.core.options import declared
from kinfed.data.examples.batches import LocalTraining
from kinfed.data.federations.federation import Federation
from kinfed.engine.task_factory import Task, make_task
from kinfed.engine.training.sgd import sgd
from kinfed.errors import CheckpointError, ConfigError
from kinfed.pools.local_pool import LocalPool
from kinfed.pools.worker import Worker, balance, compact, expected_work, make_shard
from kinfed.privacy.dpsgd import PrivateTask
from kinfed.privacy.noise import seeded_noise
from kinfed.testing import check_variant, tiny_federation, tiny_model
from kinfed.testing.workbench import Bench, expect_equal, outcome, state_of

SEED = 3
ADAMW = LocalTraining(lr=0.01, batch=5, steps=4, optimizer="adamw", weight_decay=0.01, optimizer_state="kept")
MOMENTUM = LocalTraining(batch=5, steps=None, epochs=1, momentum=0.9, nesterov=True, clip=1.0, optimizer_state="kept")
PRIVATE = LocalTraining(batch=5, steps=4, poisson=True)
WORKS = {"adamw": ADAMW, "momentum": MOMENTUM}
OWN_STEPS = [name for name in ALGORITHMS if "no momentum" in ALGORITHMS[name].target.traits]


def pool_of(method: Any, data: Federation | None = None, **options: Any) -> LocalPool:
    return LocalPool(method, make_task(tiny_model), data or tiny_federation(), SEED, **options)


def start_of(pool: LocalPool) -> Any:
    w = pool.task.init(SEED)
    return lambda ids: ModelDown(w.expand(len(ids), -1))


def trained(pool: LocalPool) -> dict[str, torch.Tensor]:
    """States by id after three rounds with different clients."""
    for round, ids in enumerate((torch.tensor([1, 4]), torch.arange(6), torch.tensor([0, 1, 5])), 1):
        pool.train(ids, start_of(pool), round)
    states = pool.states()
    order = torch.argsort(states["ids"])
    pool.close()
    return {name: tensor[order].clone() for name, tensor in states.items()}


# ---- each loop its own ----


@pytest.mark.parametrize("work", WORKS)
def test_both_loops_of_ditto_have_moments_of_their_own(work: str) -> None:
    """With λ = 0 Ditto's loops are those of two other methods: FedAvg's for the server's model, Local's for the own."""
    runs = {}
    for name, options in (("ditto", {"lam": 0.0}), ("fedavg", {}), ("local", {})):
        runs[name] = Bench(make_algorithm(name, WORKS[work], options)).run()
    assert torch.equal(runs["ditto"]["server.w"], runs["fedavg"]["server.w"])
    assert torch.equal(runs["ditto"]["clients.rows.v"], runs["local"]["clients.rows.theta"])
    for loop, name in enumerate(("fedavg", "local")):
        moments = {key: value for key, value in runs[name].items() if key.startswith("clients.moments.rows.0.")}
        assert len(moments) == (3 if work == "adamw" else 1)
        for key, value in moments.items():
            assert torch.equal(runs["ditto"][key.replace("rows.0.", f"rows.{loop}.")], value)


def test_kept_moments_change_training_and_nothing_that_is_sent() -> None:
    methods = [make_algorithm("fedavg", ADAMW, {"optimizer_state": state}) for state in ("reset", "kept")]
    results = []
    for method in methods:
        with Bench(method).loop() as loop:
            reports = [loop.round() for _ in range(3)]
            results.append(([(r.bytes_down, r.bytes_up) for r in reports], outcome(loop)))
    (bytes_before, reset), (bytes_after, kept) = results
    assert bytes_before == bytes_after
    assert not torch.equal(reset["server.w"], kept["server.w"])
    assert not any("moments" in name for name in reset)


def test_steps_of_a_client_count_over_its_rounds() -> None:
    states = trained(pool_of(make_algorithm("local", ADAMW)))
    assert states["moments.rows.0.steps"].tolist() == [8, 12, 4, 4, 8, 8]


# ---- wherever they train ----


@pytest.mark.parametrize("name", ["ditto", "fedem"])
def test_the_contract_of_methods_holds(name: str) -> None:
    """Resume, chunks, threads, failures, and evaluations that leave no trace: with two loops, and with wide rows."""
    check_variant(make_algorithm(name, ADAMW))


# FedNova must know how much a gradient counts in a round, and refuses Nesterov's form, clipping and kept moments.
# Methods by sums take no local steps, so that there is nothing to keep.
WITHOUT_MOMENTS = (*OWN_STEPS, "fednova", "lmm", "glmm", "cox")


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name not in WITHOUT_MOMENTS])
def test_every_method_goes_on_from_a_checkpoint_bit_for_bit(name: str) -> None:
    options = {"own": "1"} if name == "fedbn" else {}  # the usual model has no normalization layers
    bench = Bench(make_algorithm(name, MOMENTUM, options))
    with bench.loop() as through, bench.loop() as resumed:
        for loop in (through, through):
            loop.round()
        resumed.load(through.completed, state_of(through))
        for loop in (through, resumed):
            loop.round()
        assert any(name.startswith("clients.moments.") for name in through.state())
        expect_equal(outcome(resumed), outcome(through), "resumed")


@pytest.mark.parametrize("work", WORKS)
def test_threads_and_disk_give_the_same_bits(work: str, tmp_path: Path) -> None:
    method = make_algorithm("ditto", WORKS[work])
    usual = trained(pool_of(method, chunk=2, workers=1))
    expect_equal(trained(pool_of(method, chunk=2, workers=3)), usual, "three threads")
    expect_equal(trained(pool_of(method, chunk=2, workers=1, state_folder=tmp_path)), usual, "on disk")
    expect_equal(trained(pool_of(method, chunk=1)), usual, "other chunks", 1e-6)
    assert list(tmp_path.iterdir()) == []


def test_workers_hand_moments_on() -> None:
    """Two workers are one pool; states of a lost worker come back from its snapshots."""
    method, data = make_algorithm("ditto", ADAMW), tiny_federation()
    usual = trained(pool_of(method))
    task = make_task(tiny_model)
    down = ModelDown(task.init(SEED).expand(6, -1))
    for ids in balance(expected_work(method, data), 2):
        worker, snapshots = Worker(), []
        for round, called in enumerate((torch.tensor([1, 4]), torch.arange(6), torch.tensor([0, 1, 5])), 1):
            who = called[torch.isin(called, ids)]
            worker.load_shard(make_shard(data, ids))  # the process of the round before is gone
            worker.start_run("run", method, task, SEED)
            worker.restore([one.ids for one in snapshots], *snapshots)
            if len(who):
                snapshots.append(worker.train(who, compact(down), round, None)[1])
        states = worker.states()
        position = torch.searchsorted(usual["ids"], states["ids"])
        expect_equal(states, {name: tensor[position] for name, tensor in usual.items()}, "two workers", 1e-6)
        worker.close()


# ---- what leaves no trace ----


def test_fine_tuning_starts_anew_and_leaves_moments_alone() -> None:
    plain, tuned = (make_algorithm("local", ADAMW, {"finetune": steps}) for steps in (0, 3))
    with Bench(plain).loop() as without, Bench(tuned).loop() as with_steps:
        for loop in (without, with_steps):
            loop.round()
            loop.round()
        before = state_of(with_steps)
        one, other = with_steps.evaluate(keep_models=True).models, with_steps.evaluate(keep_models=True).models
        assert one is not None
        assert other is not None
        assert torch.equal(one, other)
        expect_equal(state_of(with_steps), before, "an evaluation")
        expect_equal(state_of(without), before, "fine-tuning")


class Overflowing(Task):
    """Gradients of client 2 are so large that their squares are not finite, though every step is."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.num_params, self.slots = inner, inner.num_params, inner.slots

    def init(self, seed: int, number: int = 0) -> torch.Tensor:
        return self.inner.init(seed, number)

    def logits(self, theta: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self.inner.logits(theta, x)

    def grad(self, theta: torch.Tensor, batch: Any) -> torch.Tensor:
        return torch.where((batch.ids == 2)[:, None], 1e30, self.inner.grad(theta, batch))


def test_moments_that_are_not_finite_are_not_stored() -> None:
    task = Overflowing(make_task(tiny_model))
    pool = LocalPool(make_algorithm("local", ADAMW), task, tiny_federation(), SEED)
    reply = pool.train(torch.arange(6), start_of(pool), 1)
    assert sorted(reply.refused) == [2]
    assert sorted(pool.states()["ids"].tolist()) == [0, 1, 3, 4, 5]
    assert all(bool(torch.isfinite(tensor).all()) for tensor in pool.states().values())
    pool.close()


def test_states_of_a_run_that_keeps_other_things_are_refused() -> None:
    kept = make_algorithm("local", ADAMW)
    with_moments = trained(pool_of(kept))
    without = {name: tensor for name, tensor in with_moments.items() if "moments" not in name}
    pool, other = pool_of(kept), pool_of(make_algorithm("local", ADAMW, {"optimizer_state": "reset"}))
    with pytest.raises(CheckpointError, match="without moments of local optimizers, which this run keeps"):
        pool.load(without)
    with pytest.raises(CheckpointError, match="with moments of local optimizers, which this run does not keep"):
        other.load(with_moments)
    damaged = with_moments | {"moments.rows.0.first": with_moments["moments.rows.0.first"][:2]}
    with pytest.raises(CheckpointError, match=r"0\.first"):
        pool.load(damaged)


# ---- privacy ----


def private_task() -> PrivateTask:
    return PrivateTask(make_task(tiny_model), 1.0, 1.0, seeded_noise(0))


def test_optimizers_ask_for_no_more_private_gradients_than_plain_sgd() -> None:
    asked = []
    for options in ({}, {"optimizer": "adamw", "lr": 0.01}, {"momentum": 0.9, "clip": 0.5, "optimizer_state": "kept"}):
        method, task = make_algorithm("ditto", PRIVATE, options), private_task()
        pool = LocalPool(method, task, tiny_federation(), SEED, workers=1)
        with task.recording() as record:
            pool.train(torch.arange(6), start_of(pool), 1)
            pool.train(torch.arange(6), start_of(pool), 2)
        asked.append(record.ledger().batches)
        pool.close()
    assert asked == [asked[0]] * 3


def test_an_optimizer_sees_private_gradients_only() -> None:
    """Its steps are those of torch's on the noised gradients, clipped once more."""
    training = replace(PRIVATE, optimizer="adamw", lr=0.01, clip=0.7)
    batches = tiny_federation().cohort(torch.tensor([2]), SEED, 1).train.batches(training)
    ours, again = private_task(), private_task()
    with ours.recording():
        trained_row = sgd(ours, ours.init(0)[None], batches)[0]
    parameter = torch.nn.Parameter(again.init(0))
    optimizer = torch.optim.AdamW([parameter], lr=0.01, weight_decay=0.0)
    with again.recording():
        for _, batch in batches:
            parameter.grad = again.grad(parameter.detach()[None], batch)[0]
            torch.nn.utils.clip_grad_norm_([parameter], 0.7)
            optimizer.step()
    torch.testing.assert_close(trained_row, parameter.detach(), rtol=0, atol=1e-6)


# ---- refusals and settings ----


@pytest.mark.parametrize("name", OWN_STEPS)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"optimizer": "adamw"},
            "its own, without optimizers but SGD; got adamw; set optimizer to sgd for this method",
        ),
        ({"momentum": 0.9, "nesterov": True}, r"without momentum; got 0\.9; set it to 0 for this method"),
        ({"clip": 1.0}, r"without clipping of gradients; got 1\.0; set clip to inf for this method"),
        ({"momentum": 0.9, "optimizer_state": "kept"}, "without momentum"),
    ],
)
def test_methods_with_steps_of_their_own_refuse_them(name: str, options: dict[str, Any], message: str) -> None:
    method = make_algorithm(name, LocalTraining(lr=0.01), options)
    clients = tiny_federation().population(SEED)
    with pytest.raises(ConfigError, match=message):
        check_algorithm_settings(method, make_task(tiny_model), clients)


def test_no_option_of_a_method_hides_a_setting_of_local_training() -> None:
    common = {field.name for field in fields(LocalTraining)}
    for name in ALGORITHMS:
        assert not common & declared(ALGORITHMS[name].target).keys(), name


def test_every_setting_of_local_training_is_one_of_runs() -> None:
    values: dict[str, Any] = {
        "lr": 0.01, "batch": 7, "epochs": 2, "optimizer": "adamw", "betas": "0.8,0.99", "eps": 1e-6,
        "weight_decay": 0.1, "clip": 2.0, "optimizer_state": "kept", "lr_decay": 0.9, "lr_floor": 0.001,
        "augment": "flip",
    }  # fmt: skip
    training = make_config(None, values).training
    expected = values | {"betas": (0.8, 0.99), "steps": None, "momentum": 0.0, "nesterov": False, "poisson": False}
    assert {field.name: getattr(training, field.name) for field in fields(LocalTraining)} == expected
    again = make_config(None, make_config(None, values | {"clip": "inf"}).dump())
    assert again.training.clip == float("inf")
    assert make_config(None, {"momentum": 0.9, "nesterov": True}).training.nesterov
    with pytest.raises(ConfigError, match=r"betas must be 2 numbers separated by commas; got '0\.9'"):
        make_config(None, {"betas": "0.9"})


def test_tuning_searches_smaller_rates_for_adam() -> None:
    assert tuning_space("fedavg", "adamw")["lr"].high < tuning_space("fedavg")["lr"].high
