"""The draws are uniform, independent of each other in every direction, and a function of their key alone."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from kinfed.core import rng

MASK = (1 << 64) - 1
N = 100_000


def signed(x: int) -> int:
    x &= MASK
    return x - (1 << 64) if x >> 63 else x


def splitmix(x: int) -> int:
    """The finalizer of SplitMix64 on Python's unbounded integers."""
    x &= MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def draws_in_direction(direction: str) -> Tensor:
    """N draws that differ in one coordinate of their question only."""
    index = torch.arange(N)
    if direction == "position":
        return rng.bits(rng.fold(rng.root(0, "batches"), 3, 7), N)
    if direction == "client":
        return rng.at(rng.fold(rng.root(0, "batches"), 3, index), torch.tensor(0))
    if direction == "round":
        return rng.at(rng.fold(rng.root(0, "batches"), index, 7), torch.tensor(0))
    seeds = rng.root(index, "batches")  # type: ignore[arg-type]  # all seeds at once
    return rng.at(rng.fold(seeds, 3, 7), torch.tensor(0))


DIRECTIONS = ["position", "client", "round", "seed"]

GOLDEN_KEYS = [9148610426766033169, -310945899828986752]
GOLDEN_BITS = [
    [-5833797872315898569, -6630164987768411265],
    [-3693507886347311879, -8013893646818760821],
]
GOLDEN_UNIFORM = [0.6837491836496894, 0.640578035816208, 0.5954322653262284]
GOLDEN_NORMAL = [-1.6434445792061176, -0.7181311667127039, 0.3062390163346404]
GOLDEN_ORDER = [2, 1, 0, 3, 6, 4, 5, 7]
GOLDEN_CHOICE = [1, 18, 21, 34, 43]
GOLDEN_SEED = 869466385


# --- the hash itself


@given(st.integers(-(2**63), 2**63 - 1))
def test_mix_is_splitmix64_in_wrapping_arithmetic(x: int) -> None:
    assert int(rng._mix(torch.tensor(x))) == signed(splitmix(x))


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**40), st.integers(0, 2**20))
def test_fold_and_at_follow_their_formulas(key: int, value: int, position: int) -> None:
    golden = 0x9E3779B97F4A7C15
    folded = splitmix(splitmix(key + golden) ^ ((value * 0xBF58476D1CE4E5B9 + golden) & MASK))
    assert int(rng.fold(key, value)) == signed(folded)
    drawn = splitmix(splitmix(key + position * golden) + golden)
    assert int(rng.at(torch.tensor(key), torch.tensor(position))) == signed(drawn)


def test_golden_values() -> None:
    """Pinned: a change here changes every result ever reported."""
    key = rng.fold(rng.root(7, "batches"), 3, torch.tensor([0, 41]))
    assert key.tolist() == GOLDEN_KEYS
    assert rng.bits(key, 2).tolist() == GOLDEN_BITS
    assert rng.uniform(key[0], 3).tolist() == pytest.approx(GOLDEN_UNIFORM, abs=1e-15)
    assert rng.normal(key[1], 3).tolist() == pytest.approx(GOLDEN_NORMAL, abs=1e-12)
    assert rng.permutation(key[0], 8).tolist() == GOLDEN_ORDER
    assert rng.choose(key[1], 50, 5).tolist() == GOLDEN_CHOICE
    assert rng.numpy_seed(key[0]) == GOLDEN_SEED


# --- uniform and independent


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_draws_are_uniform(direction: str) -> None:
    unit = rng.to_unit(draws_in_direction(direction)).numpy()
    counts = np.bincount((unit * 256).astype(int), minlength=256)
    assert stats.chisquare(counts).pvalue > 1e-4
    assert stats.kstest(unit, "uniform").pvalue > 1e-4


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_every_bit_is_one_half_of_the_time(direction: str) -> None:
    draws = draws_in_direction(direction)
    ones = torch.stack([(draws >> bit) & 1 for bit in range(64)]).to(torch.float64).mean(1)
    assert float((ones - 0.5).abs().max()) < 5 * 0.5 / N**0.5


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("lag", [1, 2, 64])
def test_neighbours_are_uncorrelated(direction: str, lag: int) -> None:
    unit = rng.to_unit(draws_in_direction(direction)).numpy()
    assert abs(np.corrcoef(unit[:-lag], unit[lag:])[0, 1]) < 5 / N**0.5
    # Pairs fill the square evenly, which a correlation of zero alone does not say.
    cells = (unit[:-lag] * 16).astype(int) * 16 + (unit[lag:] * 16).astype(int)
    assert stats.chisquare(np.bincount(cells, minlength=256)).pvalue > 1e-4


@pytest.mark.parametrize("bit", [0, 1, 13, 31, 32, 62, 63])
def test_one_bit_of_a_folded_value_flips_half_of_the_key(bit: int) -> None:
    values = rng.bits(rng.root(1, "values"), 4096)
    key = rng.root(0, "avalanche")
    flipped = rng.fold(key, values) ^ rng.fold(key, values ^ (1 << bit if bit < 63 else -(1 << 63)))
    share = torch.stack([(flipped >> b) & 1 for b in range(64)]).to(torch.float64).mean(1)
    assert float((share - 0.5).abs().max()) < 5 * 0.5 / 4096**0.5


def test_streams_of_neighbouring_clients_are_uncorrelated() -> None:
    unit = rng.uniform(rng.fold(rng.root(0, "batches"), 1, torch.arange(40)), 5000)
    correlation = torch.corrcoef(unit) - torch.eye(40, dtype=torch.float64)
    assert float(correlation.abs().max()) < 5.5 / 5000**0.5


def test_keys_and_draws_of_one_client_are_uncorrelated() -> None:
    key = rng.fold(rng.root(0, "batches"), 1, torch.arange(N))
    unit = [rng.to_unit(rng.fold(key, 0)), rng.to_unit(rng.at(key, torch.tensor(0))), rng.to_unit(key)]
    unit.append(rng.to_unit(rng.at(key, torch.tensor(1))))
    correlation = torch.corrcoef(torch.stack(unit)) - torch.eye(4, dtype=torch.float64)
    assert float(correlation.abs().max()) < 5 / N**0.5


def test_a_million_draws_collide_no_more_than_chance() -> None:
    draws = rng.bits(rng.fold(rng.root(0, "batches"), torch.arange(1000)), 1000).flatten()
    assert len(torch.unique(draws)) == 10**6  # 3e-8 collisions are expected
    low = torch.unique(draws & 0xFFFFFFFF)
    assert abs((10**6 - len(low)) - 10**12 / 2**33) < 5 * (10**12 / 2**33) ** 0.5
    keys = rng.fold(rng.root(0, "batches"), torch.arange(1000)[:, None], torch.arange(1000)).flatten()
    assert len(torch.unique(torch.cat([keys, draws]))) == 2 * 10**6


# --- keys


def test_fold_tells_order_purpose_and_seed_apart() -> None:
    root = rng.root(0, "batches")
    keys = [
        root,
        rng.root(1, "batches"),
        rng.root(-1, "batches"),
        rng.root(0, "sampling"),
        rng.root(0, "batches "),
        rng.fold(root, 0),
        rng.fold(root, 0, 0),
        rng.fold(root, 1, 2),
        rng.fold(root, 2, 1),
        rng.fold(root, 12),
        rng.fold(root, 1),
        rng.fold(root, 2),
        rng.fold(root, -1),
    ]
    assert len({int(key) for key in keys}) == len(keys)


def test_folding_twice_is_folding_both() -> None:
    root = rng.root(0, "batches")
    assert torch.equal(rng.fold(rng.fold(root, 5), 6), rng.fold(root, 5, 6))


def test_numbers_and_tensors_of_any_width_give_the_same_keys() -> None:
    root = rng.root(0, "batches")
    ids = torch.tensor([0, 3, 200])
    wanted = torch.stack([rng.fold(root, int(i)) for i in ids])
    for dtype in (torch.int64, torch.int32, torch.int16, torch.uint8):
        assert torch.equal(rng.fold(root, ids.to(dtype)), wanted)
    assert torch.equal(rng.fold(int(root), 3), wanted[1])


def test_order_and_chunks_do_not_change_draws() -> None:
    ids = torch.tensor([9, 2, 500, 0, 77])
    key = rng.fold(rng.root(3, "batches"), 12, ids)
    whole = rng.bits(key, 31)
    for i in range(len(ids)):
        alone = rng.fold(rng.root(3, "batches"), 12, ids[i : i + 1])
        assert torch.equal(rng.bits(alone, 31)[0], whole[i])
        assert torch.equal(rng.at(key[i], torch.tensor([30, 4])), whole[i, [30, 4]])
    assert torch.equal(rng.bits(key.flip(0), 31), whole.flip(0))
    assert torch.equal(rng.bits(key, 7), whole[:, :7])
    assert torch.equal(rng.bits(key.reshape(5, 1), 31)[:, 0], whole)


def test_no_global_generator_is_read_or_moved() -> None:
    key = rng.fold(rng.root(0, "batches"), 1, torch.arange(4))

    def in_order() -> list[Tensor]:
        return [rng.uniform(key, 5), rng.normal(key, 5), rng.permutation(key[0], 9), rng.choose(key[1], 9, 3)]

    before = torch.get_rng_state(), np.random.get_state(), random.getstate()
    first = in_order()
    assert torch.equal(torch.get_rng_state(), before[0])
    assert all(np.array_equal(a, b) for a, b in zip(before[1], np.random.get_state(), strict=True))
    assert random.getstate() == before[2]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        assert all(torch.equal(a, b) for a, b in zip(first, in_order(), strict=True))


def test_results_live_where_the_key_lives() -> None:
    key = torch.empty(4, dtype=torch.int64, device="meta")  # a device that is certainly not the default one
    for out in (
        rng.fold(key, 3, torch.empty(4, dtype=torch.int64, device="meta")),
        rng.bits(key, 3),
        rng.uniform(key, 3),
        rng.normal(key, 3),
        rng.permutation(key[0], 5),
        rng.choose(key[0], 5, 2),
    ):
        assert out.device.type == "meta"


# --- distributions


def test_unit_interval_is_half_open() -> None:
    edge = rng.to_unit(torch.tensor([0, -1, 1 << 11, -(1 << 63)]))
    assert edge.dtype == torch.float64
    assert edge.tolist() == [0.0, 1 - 2.0**-53, 2.0**-53, 0.5]


@pytest.mark.parametrize("keys", ["one", "many"])
def test_normal_draws_are_normal(keys: str) -> None:
    root = rng.root(0, "noise")
    draws = rng.normal(root, N) if keys == "one" else rng.normal(rng.fold(root, torch.arange(N // 2)), 2).flatten()
    z = draws.numpy()
    assert draws.dtype == torch.float64
    assert np.isfinite(z).all()
    assert abs(z.mean()) < 5 / N**0.5
    assert abs(z.var() - 1) < 5 * (2 / N) ** 0.5
    assert abs(stats.skew(z)) < 5 * (6 / N) ** 0.5
    assert abs(stats.kurtosis(z)) < 5 * (24 / N) ** 0.5
    assert stats.kstest(z, "norm").pvalue > 1e-4


def test_both_halves_of_a_normal_pair_are_independent() -> None:
    z = rng.normal(rng.root(0, "noise"), N).reshape(-1, 2)
    for pair in (z, z.abs(), z.square()):
        assert abs(float(torch.corrcoef(pair.T)[0, 1])) < 5 / (N / 2) ** 0.5


@given(st.integers(0, 20), st.integers(0, 20))
def test_more_normal_draws_leave_the_first_ones_alone(few: int, more: int) -> None:
    key = rng.fold(rng.root(0, "noise"), torch.arange(2))
    longer = rng.normal(key, few + more)
    assert longer.shape == (2, few + more)
    assert torch.equal(longer[:, :few], rng.normal(key, few))


@given(st.integers(0, 300), st.integers(0, 2**32))
def test_a_permutation_is_one(count: int, seed: int) -> None:
    order = rng.permutation(rng.root(seed, "order"), count)
    assert torch.equal(order.sort().values, torch.arange(count))


def test_all_permutations_are_equally_likely() -> None:
    keys = rng.fold(rng.root(0, "order"), torch.arange(6000))
    seen = [tuple(rng.permutation(key, 4).tolist()) for key in keys]
    _, counts = np.unique(np.array(seen), axis=0, return_counts=True)
    assert len(counts) == 24
    assert stats.chisquare(counts).pvalue > 1e-4


@given(st.integers(1, 200), st.data())
def test_chosen_members_are_distinct_and_ascending(population: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(0, population))
    chosen = rng.choose(rng.root(data.draw(st.integers(0, 99)), "sampling"), population, count).tolist()
    assert len(chosen) == count
    assert chosen == sorted(set(chosen))
    assert all(0 <= member < population for member in chosen)


def test_members_and_pairs_are_chosen_equally_often() -> None:
    population, count, rounds = 10, 3, 6000
    keys = rng.fold(rng.root(0, "sampling"), torch.arange(rounds))
    member = torch.zeros(rounds, population, dtype=torch.float64)
    for i, key in enumerate(keys):
        member[i, rng.choose(key, population, count)] = 1
    p = count / population
    assert float((member.mean(0) - p).abs().max()) < 5 * (p * (1 - p) / rounds) ** 0.5
    together = member.T @ member / rounds
    p2 = count * (count - 1) / (population * (population - 1))
    off = ~torch.eye(population, dtype=torch.bool)
    assert float((together[off] - p2).abs().max()) < 5 * (p2 * (1 - p2) / rounds) ** 0.5
    # One round says nothing about the next: fresh draws, not the same clients again.
    overlap = (member[1:] * member[:-1]).sum(1).mean()
    assert abs(float(overlap) - count * p) < 5 * 0.7 / rounds**0.5


def test_choosing_more_than_there_are_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot choose 6 distinct members of 5"):
        rng.choose(rng.root(0, "sampling"), 5, 6)


def test_seeds_for_other_libraries_fit_32_bits_and_differ() -> None:
    seeds = [rng.numpy_seed(key) for key in rng.fold(rng.root(0, "k-means"), torch.arange(2000))]
    assert all(0 <= seed < 2**32 for seed in seeds)
    assert len(set(seeds)) == 2000
    np.random.RandomState(seeds[0])


@pytest.mark.parametrize(("population", "count"), [(1, 1), (7, 0), (50, 50), (40_000, 100), (40_000, 39_999)])
def test_choosing_is_the_beginning_of_a_permutation(population: int, count: int) -> None:
    """Without sorting all: the draws of 40,000 members are made in three blocks."""
    key = rng.root(5, "choose")
    assert torch.equal(rng.choose(key, population, count), rng.permutation(key, population)[:count].sort().values)


@given(st.lists(st.integers(-2, 2), min_size=1, max_size=12), st.data())
def test_of_equal_draws_the_first_are_chosen(draws: list[int], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(draws)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rng, "_many_bits", lambda key, population: np.array(draws, np.int64))
        chosen = rng.choose(rng.root(0, "ties"), len(draws), count)
    assert torch.equal(chosen, torch.argsort(torch.tensor(draws), stable=True)[:count].sort().values)
