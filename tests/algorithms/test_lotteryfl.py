"""LotteryFL: what is pruned, rounds by hand, FedAvg without pruning, and fewer bytes with every pruning."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from method_bench import LR, WORKS, by_hand, close, deep, gradient, models, run, server, state

from kinfed.algorithms.fedavg import FedAvg
from kinfed.algorithms.lotteryfl import LotteryFL, pruned
from kinfed.core.bitpack import unpacked
from kinfed.data.examples.batches import LocalTraining
from kinfed.engine.task_factory import make_task
from kinfed.server.schedule import Schedule
from kinfed.testing import Bench, tiny_federation

ALL = LocalTraining(lr=LR, batch=100, steps=2)


@pytest.mark.parametrize("name", ["steps", "epochs"])
def test_without_pruning_it_is_fedavg(name: str) -> None:
    method = LotteryFL(WORKS[name], accuracy=1.0)
    data = tiny_federation().with_validation(0.25, 7)
    ends = []
    for algorithm in (method, FedAvg(WORKS[name], weights="equal")):
        with Bench(algorithm, federation=data).loop(Schedule(participation=0.67)) as loop:
            for _ in range(4):
                loop.round()
            ends.append((server(loop), models(loop)))
    assert torch.equal(ends[0][0], ends[1][0])
    assert torch.equal(ends[0][1], ends[1][1])


def test_the_smallest_weights_that_are_left_go() -> None:
    """Of every matrix, a share of what is left, rounded down; of equals the first; biases stay."""
    task = make_task(deep)
    x = torch.arange(47.0).expand(2, -1).clone()
    x[0, :16] = -x[0, :16]  # magnitudes count
    x[0, 35:44] = 1.0
    mask = torch.ones(2, 47, dtype=torch.bool)
    mask[1, :10] = False
    new = pruned(task.slots, x, mask, 0.25)
    assert (~new[0]).nonzero().squeeze(1).tolist() == [0, 1, 2, 3, 20, 21, 22, 35, 36]
    assert (~new[1]).nonzero().squeeze(1).tolist() == [*range(11), 20, 21, 22, 35, 36]  # a quarter of 6 is one
    assert bool((new <= mask).all())


def test_rounds_by_hand() -> None:
    """Everybody does well enough to prune, twice: back to the masked start, then two steps on what is left."""
    method = LotteryFL(ALL, accuracy=0.0, prune=0.3, least=0.6)
    data = tiny_federation((6, 9, 8)).with_validation(0.25, 7)
    with Bench(method, federation=data, model=deep).loop(Schedule()) as loop:
        start = server(loop)
        masks = [torch.ones(47, dtype=torch.bool) for _ in range(3)]
        left = [1.0] * 3
        for _ in range(4):
            w, thetas = server(loop), []
            cohort = loop.pool.federation.cohort(torch.arange(3), seed=7, round=1)
            received = torch.stack([torch.where(mask, w, 0.0) for mask in masks])
            well = loop.task.score(received, cohort.val).correct > 0
            for m in range(3):
                x = received[m]
                if bool(well[m]) and left[m] > 0.6:
                    masks[m] = pruned(loop.task.slots, x[None], masks[m][None], 0.3)[0]
                    left[m] *= 0.7
                    x = torch.where(masks[m], start, 0.0)
                for _ in range(2):
                    x = torch.where(masks[m], x - LR * gradient(loop, m, x), 0.0)
                thetas.append(x)
            report = loop.round()
            held = torch.stack(masks)
            mean = torch.stack(thetas).sum(0) / held.sum(0).clamp_min(1)
            close(server(loop), torch.where(held.any(0), mean, w), 1e-5)
            for m in range(3):
                close(state(loop, m, "theta"), thetas[m], 1e-5)
                assert torch.equal(unpacked(state(loop, m, "bits"), 47), masks[m])
                assert float(state(loop, m, "left")) == pytest.approx(left[m])
            assert report.bytes_up == 4 * int(held.sum()) + 3 * 6
        assert min(left) == pytest.approx(0.49)


def test_nobody_prunes_who_does_not_do_well_or_has_little_left() -> None:
    """A model of zeros says that everything is of the first class; who has no validation examples cannot tell."""
    assert bool((run(LotteryFL(ALL, accuracy=0.0, least=1.0), 2)["clients.rows.left"] == 1).all())
    task, plain = make_task(deep), tiny_federation((8, 12, 8, 12))
    for data in (plain.with_validation(0.5, 7), plain):
        cohort = data.cohort(torch.arange(4), seed=7, round=1)
        shares = [float((data.labels[data.val[m]] == 0).float().mean()) for m in range(4)]
        well = LotteryFL(ALL, accuracy=0.3)._does_well(task, torch.zeros(4, 47), cohort)
        assert well.tolist() == [share > 0.3 for share in shares]
    assert not bool(well.any())


def test_bytes_fall_with_what_is_left_and_accuracy_comes_back() -> None:
    method = LotteryFL(LocalTraining(lr=0.3, batch=10, steps=10), accuracy=0.6, prune=0.3, least=0.4)
    data = tiny_federation((20,) * 4).with_validation(0.25, 7)
    with Bench(method, federation=data).loop(Schedule()) as loop:
        reports = [loop.round() for _ in range(12)]
        assert reports[-1].bytes_down < 0.7 * reports[0].bytes_down
        score = loop.evaluate().personal
        assert score is not None
        assert float(score.correct.sum() / score.count.sum()) > 0.9


def test_a_mask_that_the_server_has_not_heard_of_counts() -> None:
    """After a lost reply the client's mask is smaller than the server's."""
    method = LotteryFL(ALL, accuracy=0.0, least=1.0)
    data = tiny_federation((6,)).with_validation(0.25, 7)
    with Bench(method, federation=data, model=deep).loop(Schedule()) as loop:
        loop.round()
        client = loop.pool.clients.take(torch.arange(1))
        bits = client.bits.clone()
        bits[0, 0] = 0  # the first eight weights
        loop.pool.clients.put(torch.arange(1), replace(client, bits=bits))
        loop.round()
        assert not bool(state(loop, 0, "theta")[:8].any())
        assert int(server(loop, "bits")[0, 0]) == 0


def test_personal_models_and_privacy() -> None:
    method = LotteryFL(ALL, accuracy=0.0, prune=0.3)
    with by_hand(method, sizes=(6, 9, 8), model=deep, participation=0.67) as loop:
        loop.round()
        away = int((~loop.took_part).nonzero()[0])
        assert torch.equal(models(loop)[away], server(loop))
        m = int(loop.took_part.nonzero()[0])
        data = loop.pool.federation.cohort(torch.tensor([m]), seed=7, round=2)
        client, down = loop.pool.clients.take(torch.tensor([m])), method.download(loop.server, torch.tensor([m]))
        by_name = method.personalize(loop.task, client, down, data)
        assert list(by_name) == ["personal", "masked"]
        assert torch.equal(by_name["masked"] != 0, unpacked(client.bits, 47) & (server(loop) != 0))
    assert any("validation" in text for text in LotteryFL(ALL).privacy(torch.tensor([4])).uncovered)
    assert not LotteryFL(ALL, accuracy=1.0).privacy(torch.tensor([4])).uncovered
