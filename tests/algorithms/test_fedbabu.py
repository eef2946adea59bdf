"""FedBABU: the head stays to the bit, an empty one is FedAvg, and fine-tuning trains what it says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from method_bench import (
    ALL,
    LR,
    TWO_STEPS,
    WORKS,
    accuracy_on,
    by_hand,
    close,
    deep,
    gradient,
    models,
    one_body,
    run,
    weighted,
)

from kinfed.algorithms.fedavg import FedAvg
from kinfed.algorithms.fedbabu import FedBABU
from kinfed.algorithms.local import Local
from kinfed.data.examples.batches import LocalTraining
from kinfed.data.examples.ragged import Ragged
from kinfed.errors import ConfigError


def server(loop: Any) -> torch.Tensor:
    """[P] the server's model."""
    return loop.algorithm.server_models(loop.server).models[0]  # type: ignore[no-any-return]


HARD = WORKS["momentum and decay"]
HEAD = slice(35, 47)  # layer "5" of the deep model


@pytest.mark.parametrize("work", WORKS)
def test_an_empty_head_is_fedavg(work: str) -> None:
    ours, theirs = run(FedBABU(WORKS[work], head_layers=0, tune_steps=0)), run(FedAvg(WORKS[work]))
    assert torch.equal(ours["server.shared"], theirs["server.w"])


def test_the_head_stays_to_the_bit_under_momentum_and_weight_decay() -> None:
    with by_hand(FedBABU(HARD, tune_steps=0), model=deep) as loop:
        start = server(loop)
        for _ in range(3):
            loop.round()
        assert torch.equal(server(loop)[HEAD], start[HEAD])
        assert bool((server(loop)[:35] != start[:35]).all())
        for personal in models(loop):
            assert torch.equal(personal, server(loop))


def test_a_round_by_hand() -> None:
    """Two steps under a head that stays: in the second one a head that had moved would show."""
    with by_hand(FedBABU(TWO_STEPS), model=deep) as loop:
        w, ends = server(loop), []
        for m in range(3):
            theta = w.clone()
            for _ in range(2):
                theta[:35] -= LR * gradient(loop, m, theta)[:35]
            ends.append(theta)
        report = loop.round()
        close(server(loop), weighted(ends))
        assert (report.bytes_down, report.bytes_up) == (3 * 35 * 4, 3 * (35 + 1) * 4)


@pytest.mark.parametrize(("part", "moves"), [("full", (True, True)), ("head", (False, True)), ("body", (True, False))])
def test_fine_tuning_trains_its_part_of_everybodys_model(part: Any, moves: tuple[bool, bool]) -> None:
    """One step of all examples by hand, also of clients that never trained."""
    with by_hand(FedBABU(ALL, tune_part=part, tune_steps=1, tune_lr=0.2), model=deep, participation=0.34) as loop:
        loop.round()
        w = server(loop)
        for m, personal in enumerate(models(loop)):
            step = 0.2 * gradient(loop, m, w)
            if not moves[0]:
                step[:35] = 0
            if not moves[1]:
                step[HEAD] = 0
            close(personal, w - step)


def test_tuned_models_are_better_where_clients_differ() -> None:
    training = LocalTraining(batch=5, steps=5, lr=0.1)
    tuned, plain = (run(FedBABU(training, tune_steps=steps), 6) for steps in (20, 0))
    assert float(tuned["personal correct"].sum()) > float(plain["personal correct"].sum())
    assert torch.equal(tuned["server.shared"], plain["server.shared"])


@pytest.mark.parametrize("seed", [3, 4, 5])
def test_a_common_body_is_tuned_to_clients_of_few_classes(seed: int) -> None:
    """What it was invented for. Every client has two of four classes, six examples of them: too few to learn alone
    which inputs matter, which the body learns from all. Fine-tuning then makes use of what a client has."""
    data = one_body(seed=seed)

    def two_classes(part: Ragged) -> Ragged:
        y = data.labels[part.rows]
        return part.filter((y == part.owner % 4) | (y == (part.owner + 1) % 4))

    data = replace(data, train=two_classes(data.train), test=two_classes(data.test))
    work = LocalTraining(lr=0.5, batch=12, steps=5)
    tuned, _ = accuracy_on(data, FedBABU(work))
    assert tuned > accuracy_on(data, Local(work))[0] + 0.1
    assert tuned > accuracy_on(data, FedBABU(work, tune_steps=0))[0] + 0.04


def test_refusals() -> None:
    with pytest.raises(ConfigError, match="whole model"), by_hand(FedBABU(ALL, head_layers=3), model=deep):
        pass
    with (
        pytest.raises(ConfigError, match="there is no head"),
        by_hand(FedBABU(ALL, head_layers=0, tune_part="head"), model=deep),
    ):
        pass
    assert FedBABU(replace(ALL, steps=3), tune_steps=4).privacy(torch.tensor([5])).per_personalization == {
        1: torch.tensor([4])
    }
