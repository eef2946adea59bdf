"""Batches are a pure function of (seed, round, client), and every example gets its share."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import chain
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from conftest import MakeSplit
from kinfed.core import rng
from kinfed.data.examples import batches as module
from kinfed.data.examples.batches import Batch, Batches, LocalTraining, Split
from kinfed.data.examples.features import Features
from kinfed.errors import ConfigError

sizes_of_clients = st.lists(st.integers(1, 40), min_size=1, max_size=6)
Steps = dict[int, list[tuple[list[int], list[float]]]]


def owned(split: Split, client: int) -> list[int]:
    begin = int(split.start[client])
    return split.rows[begin : begin + int(split.count[client])].tolist()


def collect(batches: Batches) -> Steps:
    """{client id: [(examples, their weights) of every step]}, padding left out; checks what holds for any batch."""
    split = batches.split
    found: Steps = {int(i): [] for i in split.ids}
    lists = {int(client): set(owned(split, k)) for k, client in enumerate(split.ids)}
    for expected_step, (rows, batch) in enumerate(batches):
        assert torch.equal(split.ids[rows], batch.ids)
        assert batch.step == expected_step
        assert batch.round == split.round
        assert batch.x.shape[:2] == batch.y.shape == batch.weight.shape
        assert batch.x.dtype == batch.weight.dtype == torch.float32
        assert len(batch) == len(batch.ids)
        example = batch.x.reshape(*batch.y.shape, -1)[..., 0].to(torch.int64)
        assert torch.equal(split.labels[example], batch.y)
        for r, client in enumerate(batch.ids.tolist()):
            assert set(example[r].tolist()) <= lists[client]  # padding too is the client's own
            real = batch.weight[r] > 0
            found[client].append((example[r][real].tolist(), batch.weight[r][real].tolist()))
    return found


def examples(steps: Steps) -> dict[int, list[list[int]]]:
    return {client: [rows for rows, _ in found] for client, found in steps.items()}


def stream_of(split: Split, client: int, epochs: int, stream: str = "batches") -> list[list[int]]:
    """The textbook: every epoch sorts the client's examples by draws of its own key."""
    own = owned(split, client)
    root = rng.root(split.seed, stream)
    orders = []
    for epoch in range(epochs):
        draws = rng.bits(rng.fold(root, split.round, int(split.ids[client]), epoch), len(own)).tolist()
        orders.append([own[i] for i in sorted(range(len(own)), key=lambda i: draws[i] % 2**64)])
    return orders


# --- steps


@given(sizes_of_clients, st.integers(1, 50), st.integers(1, 12), st.integers(0, 3))
def test_steps_cut_the_stream_into_windows(
    make_split: MakeSplit, sizes: list[int], batch: int, steps: int, seed: int
) -> None:
    split = make_split(sizes, seed=seed, round=seed + 1)
    found = collect(split.batches(LocalTraining(batch=batch, steps=steps)))
    for k, n in enumerate(sizes):
        size = min(batch, n)
        stream = list(chain.from_iterable(stream_of(split, k, -(-steps * size // n))))
        assert [rows for rows, _ in found[k]] == [stream[s * size : (s + 1) * size] for s in range(steps)]
        assert all(weights == pytest.approx([1 / size] * size) for _, weights in found[k])
        # All examples are used equally often, up to one.
        used = Counter(chain.from_iterable(rows for rows, _ in found[k]))
        counts = [used[row] for row in owned(split, k)]
        assert max(counts) - min(counts) <= 1
        assert sum(counts) == steps * size


def test_a_batch_may_hold_an_example_twice_only_across_epochs(make_split: MakeSplit) -> None:
    split = make_split([7])
    rows = list(chain.from_iterable(examples(collect(split.batches(LocalTraining(batch=5, steps=7))))[0]))
    for epoch in range(5):
        assert sorted(rows[7 * epoch : 7 * epoch + 7]) == sorted(owned(split, 0))
    assert len({tuple(rows[7 * e : 7 * e + 7]) for e in range(5)}) == 5  # a fresh order every epoch


# --- epochs


@given(sizes_of_clients, st.integers(1, 50), st.integers(1, 4))
def test_epochs_use_every_example_once_each(make_split: MakeSplit, sizes: list[int], batch: int, epochs: int) -> None:
    split = make_split(sizes)
    found = collect(split.batches(LocalTraining(batch=batch, steps=None, epochs=epochs)))
    for k, n in enumerate(sizes):
        expected = []
        for order in stream_of(split, k, epochs):
            expected += [order[i : i + batch] for i in range(0, n, batch)]
        assert [rows for rows, _ in found[k]] == expected
        for rows, weights in found[k]:
            assert sum(weights) == pytest.approx(1)
            assert weights == pytest.approx([1 / len(rows)] * len(rows))


def test_the_last_batch_of_an_epoch_is_smaller(make_split: MakeSplit) -> None:
    steps = collect(make_split([5]).batches(LocalTraining(batch=2, steps=None, epochs=2)))[0]
    assert [len(rows) for rows, _ in steps] == [2, 2, 1, 2, 2, 1]
    assert steps[2][1] == [1.0]


def test_number_of_steps() -> None:
    count = torch.tensor([1, 10, 11, 0])
    assert LocalTraining(batch=10, steps=None, epochs=3).num_steps(count).tolist() == [3, 3, 6, 0]
    assert LocalTraining(batch=10, steps=7).num_steps(count).tolist() == [7] * 4
    assert LocalTraining(epochs=3, steps=None).with_steps(5) == LocalTraining(steps=5)


# --- purity


WORKS = [
    LocalTraining(batch=4, steps=6),
    LocalTraining(batch=4, steps=None, epochs=2),
    LocalTraining(batch=4, steps=5, poisson=True),
]
modes = pytest.mark.parametrize("training", WORKS, ids=["steps", "epochs", "poisson"])


@modes
@given(sizes=sizes_of_clients, order=st.randoms(use_true_random=False))
@settings(max_examples=40)
def test_chunks_and_order_of_the_cohort_change_nothing(
    make_split: MakeSplit, training: LocalTraining, sizes: list[int], order: Random
) -> None:
    split = make_split(sizes, ids=[3 * k + 5 for k in range(len(sizes))])
    whole = collect(split.batches(training))
    for k in range(len(sizes)):
        client = int(split.ids[k])
        assert collect(split.take(slice(k, k + 1)).batches(training)) == {client: whole[client]}
    mixed = list(range(len(sizes)))
    order.shuffle(mixed)
    assert collect(split.take(torch.tensor(mixed)).batches(training)) == whole
    assert collect(split.batches(training).take(torch.tensor(mixed))) == whole


@modes
def test_equal_draws_do_not_tie_an_order_to_the_cohort(
    make_split: MakeSplit, training: LocalTraining, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Draws are cut to their first two and last six bits, so that most are equal or nearly so; orders must still
    not depend on who else is sorted."""
    draw = rng.at
    monkeypatch.setattr(module.rng, "at", lambda key, position: draw(key, position) & ((-1 << 62) | 0b111111))
    split = make_split([40, 33, 37, 5] * 20)
    whole = collect(split.batches(training))
    for k in (0, 13, 79):
        assert collect(split.take(slice(k, k + 1)).batches(training))[k] == whole[k]


@modes
@pytest.mark.parametrize("limit", ["GATHER_BYTES", "PLAN_EXAMPLES"])
@pytest.mark.parametrize("room", [1, 40, 200, 1 << 12])
def test_how_much_is_fetched_at_once_changes_nothing(
    make_split: MakeSplit, training: LocalTraining, limit: str, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    split = make_split([9, 1, 30, 4], shape=(2, 3))

    def in_order() -> list[tuple[Tensor | slice, Batch]]:
        return list(split.batches(training))

    usual = in_order()
    monkeypatch.setattr(module, limit, room)
    for (rows, a), (again, b) in zip(usual, in_order(), strict=True):
        assert torch.equal(split.ids[rows], split.ids[again])
        assert torch.equal(a.x, b.x)
        assert torch.equal(a.y, b.y)
        assert torch.equal(a.weight, b.weight)
        assert (a.round, a.step) == (b.round, b.step)
    assert collect(split.batches(training)) == collect(replace(split).batches(training))


@modes
def test_seed_round_client_and_stream_give_other_batches(make_split: MakeSplit, training: LocalTraining) -> None:
    def first(split: Split, stream: str = "batches") -> list[list[int]]:
        return examples(collect(split.batches(training, stream=stream)))[int(split.ids[0])]

    split = make_split([30])
    variants = [
        first(split),
        first(make_split([30], seed=1)),
        first(make_split([30], round=2)),
        first(make_split([30], ids=[1])),
        first(split, "second"),
    ]
    assert len({str(variant) for variant in variants}) == len(variants)
    assert first(make_split([30])) == first(split)


def test_a_named_stream_follows_its_name(make_split: MakeSplit) -> None:
    split = make_split([8])
    found = examples(collect(split.batches(LocalTraining(batch=8, steps=2), stream="outer")))
    assert found[0] == stream_of(split, 0, 2, "outer")


def test_first_examples_are_uniform_over_the_client(make_split: MakeSplit) -> None:
    """Over 600 clients of ten examples, each place comes first, and second, equally often."""
    split = make_split([10] * 600)
    steps = collect(split.batches(LocalTraining(batch=1, steps=2)))
    for step in range(2):
        places = Counter(owned(split, k).index(steps[k][step][0][0]) for k in range(600))
        assert stats.chisquare([places[i] for i in range(10)]).pvalue > 1e-4


# --- unequal steps


@pytest.mark.parametrize("steps", [[5, 3, 3, 1], [1, 4, 0, 2], [0, 0, 3, 3], [2, 2, 2, 2], [0, 0, 0, 0]])
@modes
def test_unequal_steps_are_those_of_each_client_alone(
    make_split: MakeSplit, training: LocalTraining, steps: list[int]
) -> None:
    split = make_split([6, 11, 2, 9])
    batches = split.batches(training, torch.tensor(steps))
    assert len(batches) == max(steps)
    found = collect(batches)
    for k, number in enumerate(steps):
        assert len(found[k]) == number
        alone = split.take(slice(k, k + 1)).batches(training, torch.tensor([number]))
        assert collect(alone)[k] == found[k]


@modes
def test_rows_are_slices_where_step_counts_fall(make_split: MakeSplit, training: LocalTraining) -> None:
    """theta[rows] is then a view, which training writes through."""
    split = make_split([30, 20, 10, 1])
    seen = [rows for rows, _ in split.batches(training, torch.tensor([4, 3, 3, 0]))]
    assert all(isinstance(rows, slice) for rows in seen)
    theta = torch.arange(4)
    assert [theta[rows].tolist() for rows in seen] == [[0, 1, 2], [0, 1, 2], [0, 1, 2], [0]]


@pytest.mark.parametrize("training", [LocalTraining(batch=4, steps=7), LocalTraining(batch=4, steps=None, epochs=3)])
def test_steps_ahead_are_of_the_same_clients(make_split: MakeSplit, training: LocalTraining) -> None:
    """Whoever prepares something for them can be sure that they come; of one client they are all known at once."""
    for sizes in ([9, 3, 0, 14], [14]):
        split = make_split(sizes)
        steps = training.num_steps(split.count) - torch.arange(len(sizes))
        batches = [batch for _, batch in split.batches(training, steps)]
        for number, batch in enumerate(batches):
            following = batches[number + 1 : number + 1 + batch.steps_ahead]
            assert [one.step for one in following] == [batch.step + 1 + i for i in range(batch.steps_ahead)]
            assert all(one.ids is batch.ids for one in following)
        if len(sizes) == 1:
            assert [batch.steps_ahead for batch in batches] == list(reversed(range(len(batches))))


def test_steps_of_any_integer_type(make_split: MakeSplit) -> None:
    split = make_split([6, 11])
    wanted = collect(split.batches(LocalTraining(), torch.tensor([1, 2])))
    assert collect(split.batches(LocalTraining(), torch.tensor([1, 2], dtype=torch.int32))) == wanted


@modes
def test_an_empty_cohort_has_no_batches(make_split: MakeSplit, training: LocalTraining) -> None:
    split = make_split([3, 4]).take(slice(0, 0))
    assert len(split.batches(training)) == 0
    assert list(split.batches(training)) == []
    assert list(split.in_order()) == []


@pytest.mark.parametrize("sizes", [[0], [0, 5], [5, 0], [0, 5, 0, 7, 0]])
@modes
def test_clients_without_examples_take_no_step(
    make_split: MakeSplit, training: LocalTraining, sizes: list[int]
) -> None:
    split = make_split(sizes, effort=torch.ones(len(sizes)))
    found = collect(split.batches(training))
    for k, n in enumerate(sizes):
        assert len(found[k]) == (int(training.num_steps(torch.tensor(n))) if n else 0)
    assert len(collect(split.batches(training, torch.full((len(sizes),), 3)))[0]) == (3 if sizes[0] else 0)


# --- stragglers


def test_stragglers_finish_a_share_of_their_work(make_split: MakeSplit) -> None:
    effort = torch.tensor([1.0, 0.5, 0.0, 0.31, 0.07], dtype=torch.float64)
    split = make_split([9] * 5, effort=effort)
    assert split.batches(LocalTraining(steps=10)).steps.tolist() == [10, 5, 1, 4, 1]
    assert split.batches(LocalTraining(steps=100)).steps.tolist() == [
        100,
        50,
        1,
        31,
        7,
    ]  # 0.07 * 100 > 7 in floating point
    single = make_split([9] * 5, effort=effort.to(torch.float32))
    assert torch.equal(single.batches(LocalTraining(steps=100)).steps, split.batches(LocalTraining(steps=100)).steps)
    assert split.batches(LocalTraining(batch=3, steps=None, epochs=2)).steps.tolist() == [6, 3, 1, 2, 1]
    assert split.batches(LocalTraining(), torch.tensor([0, 2, 3, 0, 1])).steps.tolist() == [0, 1, 1, 0, 1]
    assert split.take(torch.tensor([3, 1])).batches(LocalTraining(steps=10)).steps.tolist() == [4, 5]


def test_a_straggler_takes_the_first_steps_of_the_full_work(make_split: MakeSplit) -> None:
    full = collect(make_split([9, 9]).batches(LocalTraining(batch=4, steps=8)))
    cut = collect(make_split([9, 9], effort=torch.tensor([1.0, 0.5])).batches(LocalTraining(batch=4, steps=8)))
    assert cut[0] == full[0]
    assert cut[1] == full[1][:4]


# --- everything


@given(sizes=st.lists(st.integers(0, 40), min_size=1, max_size=6), width=st.integers(1, 50))
def test_everything_shows_each_example_once_in_order(make_split: MakeSplit, sizes: list[int], width: int) -> None:
    split = make_split(sizes)
    seen: dict[int, list[int]] = {k: [] for k in range(len(sizes))}
    for rows, batch in split.in_order(width):
        assert torch.equal(split.ids[rows], batch.ids)
        assert batch.y.shape[1] <= width
        assert set(batch.weight.unique().tolist()) <= {0.0, 1.0}
        for r, client in enumerate(batch.ids.tolist()):
            shown = batch.x[r, :, 0].to(torch.int64)
            assert torch.equal(split.labels[shown], batch.y[r])
            assert set(shown.tolist()) <= set(owned(split, client))
            seen[client] += shown[batch.weight[r] > 0].tolist()
    assert seen == {k: owned(split, k) for k in range(len(sizes))}


def test_small_clients_are_not_padded_to_the_largest(make_split: MakeSplit) -> None:
    split = make_split([1000, 300, 40, 10])
    shapes = [tuple(batch.y.shape) for _, batch in split.in_order()]
    assert shapes == [(4, 32), (3, 64), (2, 128), (2, 256), (1, 256), (1, 256), (1, 8)]
    assert all(isinstance(rows, slice) for rows, _ in split.in_order())  # the largest first: models need no copy
    scattered = [rows for rows, _ in make_split([10, 1000, 40, 300]).in_order()][1]
    assert scattered == slice(1, 4)
    assert [batch.y.shape[1] for _, batch in make_split([300]).in_order()] == [256, 44]


# --- Poisson


def test_poisson_batches_include_every_example_with_equal_chance(make_split: MakeSplit) -> None:
    n, size, steps = 12, 3, 2000
    split = make_split([n])
    training = LocalTraining(batch=size, steps=steps, poisson=True)
    joins = torch.zeros(steps, n, dtype=torch.float64)
    own = owned(split, 0)
    for step, (rows, weights) in enumerate(collect(split.batches(training))[0]):
        assert len(set(rows)) == len(rows)
        assert weights == pytest.approx([1 / size] * len(rows))
        joins[step, [own.index(row) for row in rows]] = 1
    q = size / n
    spread = (q * (1 - q)) ** 0.5
    assert float((joins.mean(0) - q).abs().max()) < 5 * spread / steps**0.5
    # Independent of each other and of the step before: sizes are binomial, correlations vanish.
    histogram = torch.bincount(joins.sum(1).to(torch.int64), minlength=n + 1)[:8]
    expected = torch.tensor([stats.binom.pmf(i, n, q) for i in range(8)]) * steps
    assert stats.chisquare(histogram, expected * histogram.sum() / expected.sum()).pvalue > 1e-4
    both = torch.cat([joins[1:], joins[:-1]], 1)
    correlation = torch.corrcoef(both.T) - torch.eye(2 * n, dtype=torch.float64)
    assert float(correlation.abs().max()) < 5 / steps**0.5


def test_poisson_with_a_batch_as_large_as_the_client_takes_all(make_split: MakeSplit) -> None:
    split = make_split([4, 1, 6])
    found = collect(split.batches(LocalTraining(batch=5, steps=3, poisson=True)))
    for k, n in ((0, 4), (1, 1)):
        assert all(sorted(rows) == sorted(owned(split, k)) for rows, _ in found[k])
        assert all(weights == pytest.approx([1 / n] * n) for _, weights in found[k])
    assert all(weights == pytest.approx([1 / 5] * len(weights)) for _, weights in found[2])


def test_an_empty_poisson_batch_is_all_padding(make_split: MakeSplit) -> None:
    split = make_split([1000])
    found = collect(split.batches(LocalTraining(batch=1, steps=60, poisson=True)))[0]
    sizes = [len(rows) for rows, _ in found]
    assert 0 in sizes
    assert max(sizes) > 1


# --- what a batch is made of


def test_images_are_cast_and_standardized_per_batch() -> None:
    raw = torch.arange(24, dtype=torch.uint8).reshape(6, 1, 2, 2)
    features = Features(raw, torch.tensor([[[10.0]]]), torch.tensor([[[4.0]]]))
    one = torch.zeros(1, dtype=torch.int64)
    split = Split(features, torch.zeros(6, dtype=torch.int64), one, one, one + 6, torch.arange(6), 0, 1)
    _, batch = next(iter(split.in_order()))
    assert batch.x.shape == (1, 6, 1, 2, 2)
    assert torch.allclose(batch.x[0], (raw.to(torch.float32) - 10) / 4, atol=1e-6)
    assert torch.equal(raw, torch.arange(24, dtype=torch.uint8).reshape(6, 1, 2, 2))


def test_rows_of_a_batch(make_split: MakeSplit) -> None:
    _, batch = next(iter(make_split([5, 6, 7]).batches(LocalTraining(batch=3))))
    some = batch.rows(torch.tensor([2, 0]))
    assert some.ids.tolist() == [2, 0]
    assert torch.equal(some.x, batch.x[[2, 0]])
    assert torch.equal(some.y, batch.y[[2, 0]])
    assert torch.equal(some.weight, batch.weight[[2, 0]])
    assert (len(some), some.step) == (2, batch.step)


# --- LocalTraining


def test_the_rate_decays_from_the_second_round_to_the_floor() -> None:
    training = LocalTraining(lr=0.1, lr_decay=0.5, lr_floor=0.02)
    assert [training.rate(r) for r in (0, 1, 2, 3, 4, 50)] == pytest.approx([0.1, 0.1, 0.05, 0.025, 0.02, 0.02])


def test_batches_carry_the_rate_of_their_round(make_split: MakeSplit) -> None:
    training = LocalTraining(lr=0.1, lr_decay=0.5)
    assert make_split([3], round=3).batches(training).lr == pytest.approx(0.025)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": None}, "either steps or epochs"),
        ({"epochs": 2}, "either steps or epochs"),
        ({"steps": 0}, "steps must be at least 1; got 0"),
        ({"steps": 2.5}, "steps must be a whole number"),
        ({"batch": 0}, "batch must be"),
        ({"steps": None, "epochs": 0}, "epochs must be"),
        ({"lr": 0.0}, "lr must be positive"),
        ({"lr": float("nan")}, "lr must be positive"),
        ({"lr": float("inf")}, "lr must be positive"),
        ({"lr_decay": 0.0}, "lr_decay"),
        ({"lr_decay": 1.1}, "lr_decay"),
        ({"lr_floor": 0.2}, "lr_floor must lie between 0 and lr=0.05; got 0.2"),
        ({"lr_floor": float("nan")}, "lr_floor"),
        ({"momentum": 1.0}, "momentum"),
        ({"momentum": -0.1}, "momentum"),
        ({"momentum": float("nan")}, "momentum"),
        ({"weight_decay": -1e-3}, "weight_decay"),
        ({"weight_decay": float("nan")}, "weight_decay"),
    ],
)
def test_work_refuses_what_cannot_train(options: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LocalTraining(**options)
