"""HeteroFL: widths of layers, the small network that a narrow row is, means over those who have a parameter, bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from method_bench import ALL, LR, WORKS, by_hand, close, deep, gradient, linear, models, run, server, state
from torch import Tensor, nn

from kinfed.algorithms.common.masked_rows import MaskedUp, mean_where_held
from kinfed.algorithms.fedavg import FedAvg
from kinfed.algorithms.heterofl import HeteroFL, width_mask
from kinfed.core import rng
from kinfed.core.bitpack import packed, unpacked
from kinfed.data import Federation, Population
from kinfed.data.examples.batches import LocalTraining
from kinfed.data.examples.features import Features
from kinfed.data.examples.problem import Problem
from kinfed.data.examples.ragged import Ragged
from kinfed.engine.task_factory import make_task
from kinfed.errors import ConfigError
from kinfed.server.schedule import Schedule
from kinfed.testing import Bench
from kinfed.testing.workbench import SEED, normalized_model


def mask_of(model: Callable[[], nn.Module], rate: float) -> dict[str, Tensor]:
    """{parameter: bool of its shape}."""
    task = make_task(model)
    mask = width_mask(task.slots, rate)
    return {slot.name: mask[slot.start : slot.stop].reshape(slot.shape) for slot in task.slots}


def leading(*sizes: int, of: tuple[int, ...]) -> Tensor:
    mask = torch.zeros(of, dtype=torch.bool)
    mask[tuple(slice(size) for size in sizes)] = True
    return mask


def test_widths_of_dense_layers() -> None:
    """4 → 4 → 3 → 3 at one half: two and two hidden units; inputs and classes are complete."""
    found = mask_of(deep, 0.5)
    wanted = {
        "1.weight": leading(2, 4, of=(4, 4)), "1.bias": leading(2, of=(4,)),
        "3.weight": leading(2, 2, of=(3, 4)), "3.bias": leading(2, of=(3,)),
        "5.weight": leading(3, 2, of=(3, 3)), "5.bias": leading(3, of=(3,)),
    }  # fmt: skip
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert all(bool(part.all()) for part in mask_of(deep, 1.0).values())


def test_a_width_that_is_whole_is_not_rounded_up() -> None:
    """0.28 of 25 units are 7, though 0.28 * 25 is 7.000000000000001 in floating point."""
    assert 0.28 * 25 > 7
    found = mask_of(lambda: nn.Sequential(nn.Linear(1, 25), nn.Linear(25, 1)), 0.28)
    assert int(found["0.bias"].sum()) == 7


def test_widths_of_convolutions_and_what_follows_them() -> None:
    """Channels are flattened one after the other: of 4 channels with 36 pixels a quarter is the first 36 inputs."""

    def cnn() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1), nn.Flatten(), nn.Linear(144, 3)
        )

    found = mask_of(cnn, 0.25)
    assert torch.equal(found["0.weight"], leading(2, 1, 3, 3, of=(8, 1, 3, 3)))
    assert torch.equal(found["1.running_var"], leading(2, of=(8,)))
    assert torch.equal(found["1.weight"], leading(2, of=(8,)))
    assert torch.equal(found["3.weight"], leading(1, 2, 1, 1, of=(4, 8, 1, 1)))
    assert torch.equal(found["5.weight"], leading(3, 36, of=(3, 144)))


def test_models_whose_widths_are_unclear_are_refused_by_name() -> None:
    def grouped() -> nn.Module:
        return nn.Sequential(nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1, groups=2), nn.Flatten(), nn.Linear(16, 3))

    def normalized() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 3))

    for model, words in ((grouped, r"1\.weight"), (normalized, r"2\.weight .LayerNorm"), (linear, "has none")):
        with pytest.raises(ConfigError, match=words):
            HeteroFL().check(make_task(model), Population(3, 0))
    for rates in ("", "0,1", "2", "half"):
        with pytest.raises(ConfigError, match="shares of hidden units"):
            HeteroFL(rates=rates)


@pytest.mark.parametrize("name", ["steps", "epochs"])
def test_full_width_for_all_is_fedavg(name: str) -> None:
    ours, theirs = run(HeteroFL(WORKS[name], rates="1")), run(FedAvg(WORKS[name], weights="equal"))
    for field in ("server.w", "clients.rows.theta", "personal models"):
        assert torch.equal(ours[field], theirs[field]), field


@pytest.mark.parametrize("activation", [nn.Tanh, nn.Sigmoid])
def test_a_narrow_row_is_a_small_network(activation: type[nn.Module]) -> None:
    """At one half for all: the network 4 → 2 → 2 → 3 cut out of the common start, trained by plain torch; what lies
    outside of it never moves, also where units without weights are not silent."""

    def wide() -> nn.Module:
        return nn.Sequential(
            nn.Flatten(), nn.Linear(4, 4), activation(), nn.Linear(4, 3), activation(), nn.Linear(3, 3)
        )

    training = LocalTraining(lr=0.3, batch=100, steps=5)
    with by_hand(HeteroFL(training, rates="0.5"), sizes=(9,), model=wide) as loop:
        before = server(loop)
        parts = loop.task.unflatten(before)
        layers = (nn.Linear(4, 2), nn.Linear(2, 2), nn.Linear(2, 3))
        small = nn.Sequential(layers[0], activation(), layers[1], activation(), layers[2])
        with torch.no_grad():
            for layer, name in zip(layers, "135", strict=True):
                rows, columns = layer.weight.shape
                layer.weight.copy_(parts[f"{name}.weight"][:rows, :columns])
                layer.bias.copy_(parts[f"{name}.bias"][:rows])
        rows = loop.pool.federation.train[0]
        x, y = loop.pool.federation.features.gather(rows).flatten(1), loop.pool.federation.labels[rows]
        optimizer = torch.optim.SGD(small.parameters(), 0.3)
        for _ in range(5):
            optimizer.zero_grad()
            nn.functional.cross_entropy(small(x), y).backward()
            optimizer.step()
        loop.round()
        own = loop.task.unflatten(state(loop, 0, "theta"))
        for layer, name in zip(layers, "135", strict=True):
            rows, columns = layer.weight.shape
            close(own[f"{name}.weight"][:rows, :columns], layer.weight.detach(), 1e-5)
            close(own[f"{name}.bias"][:rows], layer.bias.detach(), 1e-5)
        outside = ~width_mask(loop.task.slots, 0.5)
        assert not bool(state(loop, 0, "theta")[outside].any())
        assert torch.equal(server(loop)[outside], before[outside])
        close(loop.task.logits(models(loop), x[None])[0], small(x).detach(), 1e-5)


def test_means_over_those_who_have_a_parameter() -> None:
    mask = torch.tensor([[True, True, False, False], [True, False, False, True], [True, True, False, False]])
    delta = torch.where(mask, torch.tensor([[1.0] * 4, [3.0] * 4, [8.0] * 4]), 0.0)
    assert mean_where_held(MaskedUp(delta, packed(mask), None)).tolist() == pytest.approx([4, 4.5, 0, 3])
    count = torch.tensor([1.0, 2.0, 1.0])
    assert mean_where_held(MaskedUp(delta, packed(mask), count)).tolist() == pytest.approx([15 / 4, 4.5, 0, 3])


def test_a_round_of_mixed_widths_by_hand_and_its_bytes() -> None:
    """Clients of all three rates, by plain autograd at masked rows."""
    with by_hand(HeteroFL(ALL, rates="1,0.5,0.25"), model=deep) as loop:
        w, levels = server(loop), server(loop, "level").tolist()
        assert sorted(levels) == [0, 1, 2]
        masks = [width_mask(loop.task.slots, (1, 0.5, 0.25)[level]) for level in levels]
        changes = [
            torch.where(mask, -LR * gradient(loop, m, torch.where(mask, w, 0.0)), 0.0) for m, mask in enumerate(masks)
        ]
        report = loop.round()
        holders = torch.stack(masks).sum(0)
        close(server(loop), w + torch.stack(changes).sum(0) / holders.clamp_min(1))
        numbers = int(holders.sum())
        assert [int(mask.sum()) for mask in (masks[levels.index(level)] for level in range(3))] == [47, 25, 13]
        assert (report.bytes_down, report.bytes_up) == ((4 * numbers + 3 * 6), (4 * numbers + 3 * 6))
        assert torch.equal(unpacked(server(loop, "bits")[1], 47), width_mask(loop.task.slots, 0.5))


def test_statistics_of_channels_that_a_client_lacks_stay_out_of_the_mean() -> None:
    training = LocalTraining(lr=0.1, batch=100, steps=3, weight_decay=0.1)
    with by_hand(HeteroFL(training, rates="0.5"), sizes=(6, 8), model=normalized_model) as loop:
        before = server(loop)
        for _ in range(3):
            loop.round()
        outside = ~width_mask(loop.task.slots, 0.5)
        behind = torch.arange(loop.task.num_params) >= loop.task.trainable.stop
        assert bool((outside & behind).any())
        assert torch.equal(server(loop)[outside], before[outside])
        assert not torch.equal(server(loop)[~outside & behind], before[~outside & behind])
        variance = next(slot for slot in loop.task.slots if slot.name.endswith("running_var"))
        assert bool((models(loop)[:, variance.start : variance.stop] > 0).all())


def test_rates_are_dealt_out_in_equal_parts_and_a_late_client_has_the_servers_model() -> None:
    levels = HeteroFL().init_server(make_task(deep), Population(9, 3)).level
    assert torch.bincount(levels).tolist() == [3, 3, 3]
    assert not torch.equal(levels, HeteroFL().init_server(make_task(deep), Population(9, 4)).level)
    with by_hand(HeteroFL(replace(ALL, lr=0.2)), model=deep, participation=0.67) as loop:
        loop.round()
        away = int((~loop.took_part).nonzero()[0])
        assert torch.equal(models(loop)[away], server(loop))


# Planted data.


def planted(x: Tensor, y: Tensor, train: int, clients: int) -> Federation:
    """Examples dealt out in turn, the first `train` of each client for training, the others for testing."""
    rows = torch.arange(len(y))
    owner, test = rows % clients, rows >= train * clients
    return Federation(
        Features(x), y, Problem.of_classes(int(y.max()) + 1),
        train=Ragged.grouped(rows[~test], owner[~test], clients), val=Ragged.empty(clients),
        test=Ragged.grouped(rows[test], owner[test], clients), names=[str(m) for m in range(clients)],
    )  # fmt: skip


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_wide_clients_learn_what_narrow_ones_have_no_units_for(seed: int) -> None:
    """Two classes in opposite quadrants of the plane, which two hidden units cannot tell apart. With clients of 16 and
    of 2 units the server's network can, though half of its clients are too narrow; with narrow clients alone the other
    units stay at their random start. Twelve examples are too few for a client of 16 units alone."""
    x = rng.normal(rng.root(seed, "planted"), 12 * 52 * 2).reshape(-1, 2).to(torch.float32)
    data = planted(x, ((x[:, 0] > 0) ^ (x[:, 1] > 0)).long(), 12, 12)
    work, right = LocalTraining(lr=0.5, batch=12, steps=10), {}
    for rates in ("1,0.125", "0.125"):
        bench = Bench(
            HeteroFL(work, rates=rates),
            federation=data,
            model=lambda: nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2)),
        )
        right[rates] = float(bench.run(Schedule(), rounds=30, chunk=None)["server correct"].sum() / (12 * 40))
    assert right["1,0.125"] > 0.82
    assert right["0.125"] < 0.62


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_narrow_and_wide_clients_learn_from_each_other(seed: int) -> None:
    """Four classes, of which clients of full width have two and those of half the width the other two. The units that
    both have are trained by all: each kind is sent a network that also knows the classes that it has never seen, of
    which a client alone, or an average over its own kind, gets none right."""

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))

    method, clients = HeteroFL(LocalTraining(lr=0.3, batch=100, steps=2), rates="1,0.5"), 8
    level = method.init_server(make_task(model), Population(clients, SEED)).level
    rows = torch.arange(clients * 41)
    y = torch.where(rows < clients * 16, 2 * level[rows % clients] + rows // clients % 2, rows % 4)
    noise = rng.normal(rng.root(seed, "planted"), len(y) * 6).reshape(-1, 6)
    data = planted((2.0 * torch.eye(4, 6)[y] + 0.5 * noise).to(torch.float32), y, 16, clients)
    with Bench(method, federation=data, model=model).loop(Schedule(), chunk=None) as loop:
        for _ in range(30):
            loop.round()
        tests = data.test.rows
        for kind in (0, 1):
            client = (level == kind).nonzero()[0]
            row = loop.algorithm.download(loop.server, client).w
            hits = loop.task.logits(row, data.features.raw[tests][None]).argmax(-1)[0] == y[tests]
            unseen = y[tests] // 2 != kind
            assert float(hits[~unseen].float().mean()) > 0.9
            assert float(hits[unseen].float().mean()) > 0.55
            outside = ~width_mask(loop.task.slots, (1.0, 0.5)[kind])
            assert not bool(state(loop, int(client), "theta")[outside].any())  # never trained, never held


def test_rates_go_by_group() -> None:
    method = HeteroFL(ALL, rates="1,0.5", by="group")
    groups = torch.tensor([0, 1, 1])
    with by_hand(method, model=deep) as loop:
        server = method.init_server(loop.task, replace(loop.population, groups=groups, num_groups=2))
        assert server.level.tolist() == [0, 1, 1]
        with pytest.raises(ConfigError, match="one for each"):
            method.check(loop.task, replace(loop.population, groups=groups, num_groups=3))
