"""FedCAC: masks and overlaps by hand, FedAvg and local training as limits, who helps whom and for how long."""

from __future__ import annotations

import pytest
import torch
from method_bench import ALL, LR, WORKS, by_hand, close, deep, gradient, info, models, run, server, state, weighted
from torch import Tensor

from kinfed.algorithms.fedavg import FedAvg
from kinfed.algorithms.fedcac import FedCAC, Server, Up, overlaps
from kinfed.algorithms.local import Local
from kinfed.core.bitpack import packed, unpacked
from kinfed.data import Population
from kinfed.data.examples.batches import LocalTraining
from kinfed.engine.task_factory import make_task
from kinfed.errors import ConfigError
from kinfed.server.schedule import Schedule
from kinfed.testing import Bench, tiny_federation

SLOTS = (slice(0, 16), slice(16, 20), slice(20, 32), slice(32, 35), slice(35, 44), slice(44, 47))  # of `deep`


def mask(*rows: str) -> Tensor:
    return torch.tensor([[bit == "1" for bit in row] for row in rows])


def test_overlaps_by_hand() -> None:
    """1100 and 1010 have one of two in common: 1 − 2/4."""
    found = overlaps(packed(mask("1100", "1010", "0011", "1100")), 4)
    wanted = [[1, 0.5, 0, 1], [0.5, 1, 0.5, 0.5], [0, 0.5, 1, 0], [1, 0.5, 0, 1]]
    assert found.tolist() == wanted
    assert overlaps(packed(mask("0000", "0000")), 4).tolist() == [[1, 1], [1, 1]]


def test_who_helps_whom() -> None:
    """Overlaps of pairs are 1, ½, ½, ½, 0, 0: their mean is 5/12. At t = β only the largest suffices, later none."""
    method = FedCAC(beta=10.0)
    rows, bits = torch.arange(16.0).reshape(4, 4), packed(mask("1100", "1010", "0011", "1100"))
    nobody = torch.zeros(4, dtype=torch.bool)
    zero = torch.zeros((), dtype=torch.float64)
    start = Server(torch.zeros(4), torch.zeros(4, 4), torch.zeros_like(bits), nobody, torch.eye(4).bool(), zero)

    def helpers(number: int) -> list[list[int]]:
        new = method.aggregate(start, torch.arange(4), Up(rows, bits, None), info(number))
        assert float(new.overlap) == pytest.approx(5 / 12)
        return [new.helps[i].nonzero().squeeze(1).tolist() for i in range(4)]

    assert helpers(1) == [[0, 1, 3], [0, 1, 2, 3], [1, 2], [0, 1, 3]]  # 5/12 + 0.1 · 7/12 = 0.475
    assert helpers(2) == [[0, 3], [1], [2], [0, 3]]  # 0.533
    assert helpers(10) == [[0, 3], [1], [2], [0, 3]]
    assert helpers(11) == [[0], [1], [2], [3]]
    new = method.aggregate(start, torch.arange(4), Up(rows, bits, None), info(1))
    down = method.download(new, torch.arange(4)).w
    everyone = rows.mean(0)
    u = rows[[0, 1, 3]].mean(0)
    close(down[0], torch.cat([u[:2], everyone[2:]]))
    assert torch.equal(method.download(new, torch.tensor([2])).w[0], down[2])


@pytest.mark.parametrize("training", WORKS.values(), ids=WORKS.keys())
def test_nothing_critical_is_fedavg(training: LocalTraining) -> None:
    ours, theirs = run(FedCAC(training, tau=0.0)), run(FedAvg(training))
    for name in ("server.w", "clients.rows.theta", "personal models"):
        assert torch.equal(ours[name], theirs[name]), name


def test_everything_critical_and_no_helpers_is_local_training() -> None:
    training = WORKS["epochs"]
    with by_hand(FedCAC(training, tau=1.0, beta=0.5)) as ours, by_hand(Local(training)) as theirs:
        for _ in range(4):
            ours.round()
            theirs.round()
        assert torch.equal(models(ours), models(theirs))


def test_a_round_by_hand() -> None:
    """The largest |(θ − start) θ| of every tensor; all three help one another in the second round of a thousand."""
    with by_hand(FedCAC(ALL.with_steps(2), tau=0.4, beta=1e6), model=deep) as loop:
        w = server(loop)
        thetas, masks = [], []
        for m in range(3):
            theta = w
            for _ in range(2):
                theta = theta - LR * gradient(loop, m, theta)
            sensitivity = ((theta - w) * theta).abs()
            critical = torch.zeros(47, dtype=torch.bool)
            for slot in SLOTS:
                number = int(0.4 * (slot.stop - slot.start))
                critical[slot] = sensitivity[slot] >= sensitivity[slot].sort(descending=True).values[number - 1]
            thetas.append(theta)
            masks.append(critical)
        report = loop.round()
        new_w, starts = weighted(thetas), []
        assert [int(m.sum()) for m in masks] == [6 + 1 + 4 + 1 + 3 + 1] * 3
        close(server(loop), new_w, 1e-5)
        helps = server(loop, "helps")
        for i in range(3):
            assert torch.equal(unpacked(server(loop, "critical")[i], 47), masks[i])
            u = torch.stack([thetas[j] for j in range(3) if bool(helps[i, j])]).mean(0)
            starts.append(torch.where(masks[i], u, new_w))
        assert bool((helps.sum(1) > 1).any())
        close(loop.algorithm.download(loop.server, torch.arange(3)).w, torch.stack(starts), 1e-5)
        assert (report.bytes_down, report.bytes_up) == (3 * 47 * 4, 3 * (47 * 4 + 6 + 4))


def test_a_share_that_is_whole_is_not_rounded_down() -> None:
    """0.58 of 50 parameters are 29, though 0.58 * 50 is 28.999999999999996 in floating point."""
    assert 0.58 * 50 < 29
    task = make_task(lambda: torch.nn.Linear(50, 1, bias=False))
    critical = FedCAC(tau=0.58)._critical(task, torch.zeros(1, 50), torch.arange(50.0)[None])
    assert int(critical.sum()) == 29


def test_the_like_help_longest() -> None:
    """Clients k and k + 3 see mostly the same class. Halfway to β each is helped by its like, and by nobody else."""
    method = FedCAC(LocalTraining(lr=0.1, batch=20, steps=10), beta=20.0)
    with Bench(method, federation=tiny_federation((20,) * 6)).loop(Schedule()) as loop:
        for _ in range(10):
            loop.round()
        assert torch.equal(server(loop, "helps"), (torch.arange(6)[:, None] - torch.arange(6)) % 3 == 0)


def test_a_late_client_starts_from_the_average_and_those_away_are_remembered() -> None:
    with by_hand(FedCAC(ALL.with_steps(2)), participation=0.67) as loop:
        loop.round()
        away = int((~loop.took_part).nonzero()[0])
        assert torch.equal(models(loop)[away], server(loop))
        assert torch.equal(loop.algorithm.download(loop.server, torch.tensor([away])).w[0], server(loop))
        before = {m: state(loop, m, "theta") for m in range(3) if m != away}
        loop.round()
        for m, theta in before.items():
            took_part = m in loop.schedule.active(loop.pool.seed, 2, 3).tolist()
            assert torch.equal(server(loop, "theta")[m], theta) is not took_part


def test_too_many_models_are_refused() -> None:
    task = make_task(deep)
    FedCAC().check(task, Population(1000, 0))
    with pytest.raises(ConfigError, match=r"all 100,000 clients: 10.0 GB, more than max_gb=4"):
        FedCAC().check(task, Population(100_000, 0))
