"""FedLC: margins by class counts, absent classes, FedAvg as its limit."""

from __future__ import annotations

from math import inf, log

import pytest
import torch
from method_bench import ALL, LR, WORKS, by_hand, close, cut_gradient, deep, linear, run, server, weighted
from torch import Tensor, nn

from kinfed.algorithms.common.heads import class_counts
from kinfed.algorithms.fedavg import FedAvg
from kinfed.algorithms.fedlc import FedLC, ShiftedLogits
from kinfed.data.examples.batches import Batch, LocalTraining
from kinfed.data.examples.features import Features
from kinfed.data.examples.problem import Problem
from kinfed.data.examples.ragged import Ragged
from kinfed.data.federations.federation import Federation
from kinfed.testing import Bench


def one_example(z: list[float], y: int) -> tuple[Tensor, Batch]:
    logits = torch.tensor([[z]])
    return logits, Batch(logits, torch.tensor([[y]]), torch.ones(1, 1), torch.tensor([0]))


@pytest.mark.parametrize("training", WORKS.values(), ids=WORKS.keys())
def test_without_margins_it_is_fedavg(training: LocalTraining) -> None:
    ours, theirs = run(FedLC(training, tau=0.0)), run(FedAvg(training))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_one_example_by_hand() -> None:
    """z = (1, 0), counts (81, 16), τ = 1, y = 0: s = (2/3, −1/2), the cross-entropy 0.271098; dz sums to 0."""
    z, batch = one_example([1.0, 0.0], 0)
    dz, dphi = ShiftedLogits(-torch.tensor([[81.0, 16.0]]).pow(-0.25))(z, z, batch, torch.tensor([0]))
    assert dz is not None
    assert dphi is None
    true = 1 + float(dz[0, 0, 0])  # softmax(s)_y
    assert -log(true) == pytest.approx(0.271098, abs=1e-6)
    assert float(dz.sum()) == pytest.approx(0.0, abs=1e-6)


def test_equal_counts_change_nothing_and_absent_classes_drop_out() -> None:
    z, batch = one_example([1.0, 0.0, 3.0], 0)
    same, _ = ShiftedLogits(torch.full((1, 3), -0.5))(z, z, batch, torch.tensor([0]))
    plain, _ = ShiftedLogits(torch.zeros(1, 3))(z, z, batch, torch.tensor([0]))
    assert same is not None
    assert plain is not None
    close(same, plain)
    without, _ = ShiftedLogits(torch.tensor([[0.0, 0.0, -inf]]))(z, z, batch, torch.tensor([0]))
    assert without is not None
    close(without[0, 0], torch.tensor([torch.softmax(torch.tensor([1.0, 0.0]), 0)[0] - 1, 0.268941, 0.0]))


@pytest.mark.parametrize("floor", [0.0, 0.5])
def test_rounds_by_hand(floor: float) -> None:
    """Plain autograd of CE(z − τ N^(−1/4)) at every client; bytes are FedAvg's."""
    with by_hand(FedLC(ALL, tau=0.7, floor=floor), model=deep) as loop:
        counts = class_counts(loop.pool.federation.cohort(torch.arange(3), seed=0, round=1).train, 3).float()
        assert bool((counts == 0).any())
        shift = 0.7 * counts.clamp_min(floor) ** -0.25
        for _ in range(2):
            w = server(loop)
            models = []
            for m in range(3):
                g = cut_gradient(
                    loop,
                    m,
                    w,
                    lambda x, phi, z, y, m=m: nn.functional.cross_entropy(z - shift[m], y),  # type: ignore[misc]
                )
                models.append(w - LR * g)
            report = loop.round()
            close(server(loop), weighted(models))
            assert (report.bytes_down, report.bytes_up) == (3 * 4 * 47, 3 * 4 * 48)


def test_weights_of_an_absent_class_stay() -> None:
    with by_hand(FedLC(ALL), sizes=(2,), model=linear) as loop:
        counts = class_counts(loop.pool.federation.cohort(torch.arange(1), seed=0, round=1).train, 3)[0]
        before = server(loop).split([12, 3])
        loop.round()
        after = server(loop).split([12, 3])
        for c in range(3):
            moved = not torch.equal(before[0].view(3, 4)[c], after[0].view(3, 4)[c])
            assert moved is bool(counts[c] > 0 and (counts > 0).sum() > 1)


def rare_class(common: int, rare: int) -> Federation:
    """One client with two classes that overlap, and a balanced test."""
    g = torch.Generator().manual_seed(3)
    labels = torch.tensor([0] * common + [1] * rare + [0] * 200 + [1] * 200)
    raw = torch.randn(len(labels), 4, generator=g) + 1.5 * labels[:, None]
    train = torch.arange(len(labels)) < common + rare
    rows = torch.arange(len(labels))
    return Federation(
        Features(raw), labels, Problem.of_classes(2),
        train=Ragged.grouped(rows[train], torch.zeros(common + rare, dtype=torch.int64), 1),
        val=Ragged.empty(1),
        test=Ragged.grouped(rows[~train], torch.zeros(400, dtype=torch.int64), 1),
        names=["one"],
    )  # fmt: skip


def test_a_rare_class_keeps_its_margin() -> None:
    """95 examples of one class and 5 of the other: on a balanced test the calibrated model is right more often."""
    correct = {}
    training = LocalTraining(lr=0.5, batch=100, steps=50)
    for name, method in {"fedavg": FedAvg(training), "fedlc": FedLC(training, tau=2.0)}.items():
        bench = Bench(method, federation=rare_class(95, 5), model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(4, 2)))
        correct[name] = int(bench.run(rounds=2)["server correct"].sum())
    assert correct["fedlc"] > correct["fedavg"] + 20


def test_counts_in_the_loss_are_not_private() -> None:
    profile = FedLC(ALL).privacy(torch.tensor([4]))
    assert "numbers of examples by class" in profile.impossible
    assert not FedLC(ALL, tau=0.0).privacy(torch.tensor([4])).impossible
