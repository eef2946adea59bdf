"""Fine-tuning: an option of every method that changes what is deployed and nothing else."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from method_bench import close, linear, run
from torch import Tensor

import kinfed
from kinfed.algorithms import ALGORITHMS, make_algorithm
from kinfed.algorithms.base import option_values, privacy_profile
from kinfed.data.examples.batches import LocalTraining
from kinfed.engine.training.sgd import sgd
from kinfed.errors import ConfigError
from kinfed.testing import CHECKS, VARIANT_CHECKS, Bench
from kinfed.testing.workbench import SEED

WORK = LocalTraining(batch=5, steps=4, lr_decay=0.9)
# One of each kind: a state at the client, a model computed afresh, validation data, a mixture, other models to report.
KINDS = ("local", "ditto", "perfedavg", "ifca", "fedfomo", "fedem")


def made(name: str, **options: Any) -> Any:
    return make_algorithm(name, WORK, options)


@pytest.mark.parametrize("name", KINDS)
def test_zero_steps_are_the_method(name: str) -> None:
    plain, tuned = run(made(name)), run(made(name, finetune=0))
    assert plain.keys() == tuned.keys()
    assert all(torch.equal(plain[key], tuned[key]) for key in plain)


@pytest.mark.parametrize("name", KINDS)
def test_training_is_untouched_and_the_plain_model_is_reported_beside(name: str) -> None:
    plain, tuned = run(made(name)), run(made(name, finetune=3))
    for key, value in plain.items():
        if not key.startswith("personal"):
            assert torch.equal(tuned[key], value), key
    assert not torch.allclose(tuned["personal models"], plain["personal models"])
    assert torch.equal(tuned["without_finetuning loss"], plain["personal loss"])
    assert torch.equal(tuned["without_finetuning correct"], plain["personal correct"])


def personal(algorithm: Any, rounds: int = 3) -> tuple[Tensor, Any]:
    with Bench(algorithm).loop(chunk=None) as loop:
        for _ in range(rounds):
            loop.round()
        found = loop.evaluate(keep_models=True).models
        assert found is not None
        return found, loop


@pytest.mark.parametrize("rate", [None, 0.2])
def test_the_steps_are_sgd_on_the_clients_own_stream(rate: float | None) -> None:
    plain, loop = personal(made("ditto"))
    tuned, _ = personal(made("ditto", finetune=3, finetune_lr=rate))
    data = loop.pool.federation.cohort(torch.arange(6), SEED, 3)
    batches = data.train.batches(WORK.with_steps(3), stream="finetune")
    assert batches.lr == pytest.approx(0.05 * 0.81)  # of the round just completed
    close(tuned, sgd(loop.task, plain, batches, lr=rate))


def test_a_mixture_is_tuned_as_a_whole_and_keeps_its_proportions() -> None:
    """Its loss on training examples falls; weight decay would shrink the proportions if it touched them."""
    for decay in (0.0, 0.1):
        options = {"weight_decay": decay, "components": 2}
        plain, _ = personal(made("fedem", **options))
        tuned, loop = personal(made("fedem", **options, finetune=20))
        assert torch.equal(tuned[:, -2:], plain[:, -2:])
        before, after = loop.evaluate("train").alternatives["without_finetuning"], loop.evaluate("train").personal
        assert float(after.loss.sum()) < float(before.loss.sum())


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench(make_algorithm("ditto", LocalTraining(batch=5, steps=5), {"finetune": 2, "finetune_lr": 0.03}))


@pytest.mark.parametrize("check", VARIANT_CHECKS)
def test_a_tuned_method_keeps_the_contract(bench: Bench, check: str) -> None:
    CHECKS[check](bench)


def test_every_method_takes_the_option() -> None:
    for name, entry in ALGORITHMS.items():
        algorithm = make_algorithm(name, LocalTraining(), {"finetune": 2})
        assert type(algorithm) is entry.target, name
        assert option_values(algorithm)["finetune"] == 2
        assert {"finetune", "finetune_lr"} <= {option.name for option in entry.describe_options()}
    options = {option.name: option for option in ALGORITHMS["ditto"].describe_options()}
    assert options["finetune"].default == 0
    assert "local steps" in options["finetune"].text


def test_tuned_methods_are_values_like_others() -> None:
    a, b = made("ditto", finetune=2), made("ditto", finetune=2)
    assert a == b != made("ditto", finetune=3)
    assert pickle.loads(pickle.dumps(a)) == a
    assert copy.deepcopy(a) == a
    assert replace(a, lam=0.5).finetune == 2


def test_private_training_counts_the_steps() -> None:
    count = torch.tensor([3, 50])

    def steps(algorithm: Any) -> list[int]:
        profile = privacy_profile(algorithm, count)
        assert profile is not None
        return profile.per_personalization[1].tolist()

    assert steps(made("ditto", finetune=4)) == [4, 4]
    assert steps(made("perfedavg", finetune=4, adapt_steps=2)) == [6, 6]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"finetune": -1}, "finetune must be at least 0"),
        ({"finetune": 2.5}, "finetune must be int"),
        ({"finetune": 2, "finetune_lr": 0}, "finetune_lr must be positive"),
        ({"finetune_lr": 0.1}, "set finetune too"),
        ({"finetune": 2, "lam": -1}, "lam must be at least 0"),
        ({"finetun": 2}, "did you mean finetune"),
    ],
)
def test_bad_options(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        made("ditto", **options)


def test_summary_and_journal_show_both(tmp_path: Path) -> None:
    result = kinfed.run(
        algorithms={"fedavg": {"finetune": 5}}, clients=4, rounds=2, seeds=[0], model="mlr", eval_every=1, workers=1,
        out=tmp_path / "run",
    )  # fmt: skip
    summary = result.result().to_json()
    assert summary["personal"]["accuracy"] > 0
    assert summary["alternatives"]["without_finetuning"]["accuracy"] > 0
    assert summary["alternatives"]["without_finetuning"]["loss"] != summary["personal"]["loss"]
    line = (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()[-1]
    assert '"without_finetuning_accuracy"' in line


def test_one_linear_model_by_hand() -> None:
    """One full-batch step from the method's model is θ − η ∇f(θ)."""
    training = LocalTraining(lr=0.1, batch=100, steps=1)
    with Bench(make_algorithm("local", training, {"finetune": 1}), model=linear).loop() as loop:
        theta = loop.task.init(SEED).expand(6, -1)  # nobody has trained yet
        data = loop.pool.federation.cohort(torch.arange(6), SEED, 0)
        for _, batch in data.train.in_order():
            share = batch.weight / batch.weight.sum(1, keepdim=True)
            wanted = theta - 0.1 * loop.task.grad(theta, replace(batch, weight=share))
        found = loop.evaluate(keep_models=True).models
        assert found is not None
        close(found, wanted)
