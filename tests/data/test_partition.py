from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from realdata import real_data

from kinfed.core import rng
from kinfed.data.examples.features import Features
from kinfed.data.examples.problem import Problem
from kinfed.data.examples.ragged import Ragged
from kinfed.data.partitions import PARTITIONS, make_federation
from kinfed.data.partitions.base import deal, evenly, matching
from kinfed.data.partitions.label_skew import (
    Classes,
    Dirichlet,
    FirstComeFirstServed,
    Lognormal,
    Pathological,
    Powerlaw,
    consecutive_classes,
    dirichlet_logits,
)
from kinfed.data.sources import load_source
from kinfed.data.sources.source import Source
from kinfed.errors import ConfigError


def source_of(per_class, test_per_class=None, *, owners=None, seed=0):
    """A data set with so many training (and test) rows of every class, in random order."""
    counts = torch.tensor(per_class)
    labels = torch.repeat_interleave(torch.arange(len(counts)), counts)
    is_test = torch.zeros(len(labels), dtype=torch.bool)
    if test_per_class is not None:
        more = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(test_per_class))
        labels = torch.cat([labels, more])
        is_test = torch.cat([is_test, torch.ones(len(more), dtype=torch.bool)])
    order = rng.permutation(rng.root(seed, "test-order"), len(labels))
    named = None
    if owners is not None:
        named = torch.arange(len(labels)) % owners
    return Source(
        "toy",
        Features((order % 251).to(torch.uint8)[:, None]),
        labels[order],
        Problem.of_classes(len(counts)),
        is_test=is_test[order] if test_per_class is not None else None,
        owners=named,
        owner_names=None if owners is None else [f"o{k}" for k in range(owners)],
    )


def lists(ragged):
    return [part.tolist() for part in ragged.lists()]


def sizes(federation):
    return (federation.train.count + federation.test.count).tolist()


def held(federation):
    return federation.class_counts("train") + federation.class_counts("test")


# Properties that every partition has.

RULES = [name for name in PARTITIONS if not PARTITIONS[name].facts.get("names_clients")]
SMALL = {
    "pfedme_split": {"low": 3, "high": 6, "base": 2},
    "dirichlet": {"min_size": 2},
    "feature_shift": {"min_size": 2},
    "hidden_groups": {"groups": 1, "by": "labels"},
    "powerlaw": {"base": 2},
    "latent": {"groups": 2},
}


@settings(max_examples=120)
@given(
    st.sampled_from(list(PARTITIONS)),
    st.lists(st.integers(8, 60), min_size=2, max_size=6),
    st.sampled_from(["none", "auto", "official", "pooled", "train"]),
    st.integers(1, 9),
    st.integers(0, 1000),
)
def test_every_partition_is_disjoint_complete_and_repeatable(name, per_class, split, clients, seed):
    official = split != "none"
    tests = [max(n // 4, 1) for n in per_class] if official else None
    source = source_of(per_class, tests, owners=7)
    options = SMALL.get(name, {}) | ({"split": split} if official else {})
    if "classes" in PARTITIONS[name].options.__dataclass_fields__:
        options = options | {"classes": min(2, len(per_class))}
    try:
        f = make_federation(source, name, min(clients, 7), options, seed)
    except ConfigError:
        assume(False)
    assert f.num_clients == min(clients, 7)
    owned = torch.cat([f.train.rows, f.test.rows])
    assert len(owned.unique()) == len(owned), "no row has two owners, or is both training and test"
    assert bool((f.train.count >= 1).all())
    assert len(f.val.rows) == 0
    assert all(part == sorted(part) for part in lists(f.train) + lists(f.test))
    if official:
        in_test = source.is_test
        if PARTITIONS[name].target(**options).split in ("auto", "official"):
            assert not bool(in_test[f.train.rows].any())
            assert bool(in_test[f.test.rows].all())
        if split == "train":
            assert not bool(in_test[owned].any())
    again = make_federation(source, name, min(clients, 7), options, seed)
    assert torch.equal(again.train.rows, f.train.rows)
    assert torch.equal(again.train.offsets, f.train.offsets)
    assert torch.equal(again.test.rows, f.test.rows)
    assert f.description["partition"] == name
    assert f.description["seed"] == seed


@pytest.mark.parametrize("name", RULES)
def test_seeds_matter_and_the_global_generators_do_not(name):
    source = source_of([300] * 5)
    options = SMALL.get(name, {})
    torch.manual_seed(0)
    np.random.seed(0)
    a = make_federation(source, name, 6, options, seed=1)
    torch.manual_seed(9)
    np.random.seed(9)
    state = torch.get_rng_state()
    b = make_federation(source, name, 6, options, seed=1)
    c = make_federation(source, name, 6, options, seed=2)
    assert torch.equal(a.train.rows, b.train.rows)
    assert not torch.equal(a.train.rows, c.train.rows)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("name", RULES)
def test_defaults_work_on_digits_with_twenty_clients(name):
    f = make_federation(load_source("digits"), name, 20)
    assert f.num_clients == 20
    assert int(f.train.count.min()) >= 5
    assert int(f.test.count.min()) >= 1


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("clients", [0, -1, 10_000])
def test_impossible_numbers_of_clients_are_refused(name, clients):
    with pytest.raises(ConfigError, match="so there can be 1 to 50 clients; got"):
        make_federation(source_of([25, 25]), name, clients)


@pytest.mark.parametrize("name", RULES)
def test_a_number_of_clients_is_needed(name):
    with pytest.raises(ConfigError, match="needs a number of clients"):
        make_federation(source_of([25, 25, 25, 25, 25]), name, None)


@pytest.mark.parametrize("name", RULES)
def test_one_client_can_have_everything(name):
    options = {"groups": 1} if name == "latent" else SMALL.get(name)
    f = make_federation(source_of([40] * 5), name, 1, options)
    assert f.names == ["client-0"]


def test_official_split_needs_official_test_rows():
    with pytest.raises(ConfigError, match="toy has no official test split; use split = pooled"):
        make_federation(source_of([25, 25]), "iid", 2, {"split": "official"})


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("clases", {}, "did you mean classes"),
        ("iid", {"alpha": 1}, "unknown option of partition iid 'alpha'"),
        ("iid", {"test_fraction": 1}, r"test_fraction must be in \[0, 1\); got 1"),
        ("iid", {"split": "sideways"}, r"split must be auto \| official"),
        ("classes", {"classes": 0}, "classes must be at least 1"),
        ("classes", {"classes": "many"}, "classes must be int; got 'many'"),
        ("classes", {"classes": 4}, "classes = 4, but toy has 2 classes"),
        ("classes", {"min_size": 5}, "both min_size and max_size"),
        ("classes", {"min_size": 9, "max_size": 5}, "classes <= min_size <= max_size"),
        ("classes", {"classes": 2, "min_size": 40, "max_size": 50}, "needs 60 examples of class 0, but there are 25"),
        ("pathological", {"shards": 0}, "shards must be at least 1"),
        ("pathological", {"shards": 30}, "with 90 shards needs 45 examples of class 0, but there are 25"),
        ("powerlaw", {"base": 0}, "base must be at least 1"),
        ("powerlaw", {"sigma": float("nan")}, "sigma must be positive"),
        (
            "powerlaw",
            {"base": 9},
            "needs 27 examples of class 0, but there are 25; use fewer clients or a smaller base",
        ),
        ("pfedme_split", {"classes": 2, "low": 5, "high": 4}, "low <= high"),
        ("pfedme_split", {"classes": 2}, "needs 30 examples of class 0, but there are 25"),
        ("lognormal", {"sigma": -1}, "sigma must be positive"),
        ("lognormal", {"mean": 99}, r"mean must be in \[-20, 20\]; got 99"),
        ("dirichlet", {"alpha": 0}, "alpha must be positive"),
        ("dirichlet", {"min_size": 17}, "3 clients of min_size 17 need 51 examples, but there are 50"),
        ("dirichlet", {"alpha": 0.001, "min_size": 12}, "in 50 draws .* never had 12 .* fill = true"),
        ("column", {}, "toy names none"),
        ("column", {"min_size": 0}, "min_size must be at least 1"),
    ],
)
def test_bad_options_are_explained(name, options, message):
    with pytest.raises(ConfigError, match=message):
        make_federation(source_of([25, 25]), name, 3, options)


def test_text_from_a_command_line_is_understood():
    f = make_federation(
        source_of([50, 50, 50]), "classes", 3, {"classes": "2", "overlap": "false", "test_fraction": "0"}
    )
    assert f.description["options"]["classes"] == 2
    assert len(f.test.rows) == 0


def test_every_partition_and_option_is_documented():
    for entry in PARTITIONS.values():
        assert entry.summary
        assert entry.target.__doc__
        assert all(option.text for option in entry.describe_options())


def test_the_registry_is_open():
    class Alphabetical(Pathological):
        """For this test."""

    try:
        PARTITIONS.register("alphabetical", Alphabetical)
        f = make_federation(source_of([25, 25]), "alphabetical", 2, {"shards": 1})
        assert f.description["partition"] == "alphabetical"
        assert f.description["options"]["shards"] == 1
        with pytest.raises(ConfigError, match="registered already"):
            PARTITIONS.register("alphabetical", Alphabetical)
    finally:
        PARTITIONS.unregister("alphabetical")


def test_a_partition_may_be_an_object():
    source = source_of([50] * 5)
    named, direct = make_federation(source, "dirichlet", 4, {"alpha": 2}, 3), make_federation(source, Dirichlet(), 4)
    assert lists(make_federation(source, Dirichlet(alpha=2.0), 4, seed=3).train) == lists(named.train)
    assert direct.description["partition"] == "dirichlet"
    with pytest.raises(ConfigError, match="object that has its options"):
        make_federation(source, Dirichlet(), 4, {"alpha": 1})
    with pytest.raises(ConfigError, match="partition dirichlet: alpha must be positive"):
        Dirichlet(alpha=0)


# Dealing, by hand.


def test_deal_hands_out_in_order():
    classes = Ragged.of([[5, 3, 1], [0, 2, 4, 6]])
    counts = torch.tensor([[1, 2], [2, 0], [0, 1]])
    assert lists(deal(counts, classes)) == [[0, 2, 5], [1, 3], [4]]


def test_matching_gives_the_same_proportions():
    counts = torch.tensor([[10, 0], [20, 5], [30, 0]])
    matched = matching(counts, torch.tensor([60, 10]), torch.tensor([12, 4]))
    assert matched.tolist() == [[2, 0], [4, 2], [6, 0]], "class 1 is dealt half in both"


@given(st.lists(st.lists(st.integers(0, 20), min_size=2, max_size=2), min_size=1, max_size=6), st.integers(0, 50))
def test_matching_never_exceeds_the_pool(counts, other):
    counts = torch.tensor(counts)
    pool = torch.full((2,), other)
    exact = counts * other / counts.sum(0).clamp_min(1)
    matched = matching(counts, counts.sum(0), pool)
    assert bool((matched.sum(0) <= pool).all())
    assert bool((matched >= 0).all())
    assert float((matched - exact).abs().max()) < 1


def test_evenly_and_consecutive_classes():
    assert evenly(torch.tensor([7, 3, 0]), 3).tolist() == [[3, 2, 2], [1, 1, 1], [0, 0, 0]]
    slots = consecutive_classes(4, 3, source_of([1] * 4))
    assert slots.tolist() == [[0, 1, 2], [1, 2, 3], [2, 3, 0], [3, 0, 1]]


# iid.


def test_iid_parts_are_equal_and_cover_everything():
    f = make_federation(source_of([50, 53], [10, 9]), "iid", 4)
    assert f.train.count.tolist() == [26, 26, 26, 25]
    assert sorted(f.test.count.tolist()) == [4, 5, 5, 5]
    assert len(f.train.rows) + len(f.test.rows) == 122


def test_iid_clients_look_like_the_whole():
    f = make_federation(source_of([3000, 1000]), "iid", 4, {"test_fraction": 0})
    shares = f.class_counts()[:, 0] / 1000
    assert float((shares - 0.75).abs().max()) < 0.06  # 4 deviations of a sample of 1,000


# classes.


def test_classes_are_neighbours_in_equal_shares():
    f = make_federation(source_of([400] * 10), "classes", 20, {"classes": 3})
    counts = held(f)
    for u in range(20):
        mine = [(u + j) % 10 for j in range(3)]
        assert counts[u].nonzero().flatten().tolist() == sorted(mine)
        assert int(counts[u][mine].max() - counts[u][mine].min()) <= 1
    assert any("multiplied by" in note for note in f.notes)


def test_classes_scale_by_the_largest_factor_that_fits():
    source, available = source_of([100] * 4), torch.tensor([100] * 4)
    rule = Classes(classes=2, min_size=10, max_size=200)
    counts, (note,) = rule.counts(available, 8, 0, source)
    assert bool((counts.sum(0) <= 100).all())
    assert int(counts.sum(0).max()) >= 98, "one example more per client of a class would not fit"
    assert int(counts.sum(1).min()) >= 10
    factor = float(note.split("multiplied by ")[1].split()[0])
    drawn = 10 + (rng.uniform(rule.key(0, "sizes"), 8) * 191).to(torch.int64)
    expected = (drawn * factor).to(torch.int64).clamp_min(10)
    assert int((counts.sum(1) - expected).abs().max()) <= 1  # the note rounds the factor


def test_classes_that_fit_are_left_as_drawn():
    counts, notes = Classes(classes=2, min_size=10, max_size=12).counts(
        torch.tensor([99] * 3), 3, 0, source_of([99] * 3)
    )
    assert notes == []
    assert {10, 11, 12} >= set(counts.sum(1).tolist())


def test_classes_draw_sizes_from_the_whole_range():
    counts, _ = Classes(classes=1, min_size=1, max_size=4).counts(torch.tensor([10**6]), 4000, 0, source_of([1]))
    share = torch.bincount(counts.sum(1), minlength=5)[1:] / 4000
    assert float((share - 0.25).abs().max()) < 0.03


def test_classes_on_sixty_thousand_examples_as_in_cgpfl():
    """40 clients of U[400, 5000] cannot be had from 60,000 examples (P-25): all shrink, none below 400."""
    available = torch.tensor([5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949])  # MNIST's training split
    for seed in range(5):
        counts, (note,) = Classes(min_size=400, max_size=5000).counts(available, 40, seed, source_of([1] * 10))
        total = counts.sum(1)
        assert int(total.min()) >= 400
        assert int(total.max()) < 5000
        assert bool((counts.sum(0) <= available).all())
        assert int((available - counts.sum(0)).min()) <= 12, "the scarcest class is used up"
        assert "of 60,000 examples used" in note


def test_golden_rows_of_digits():
    """Pinned: a change here changes every published result that used this partition."""
    f = make_federation(load_source("digits"), "classes", 5)
    assert sizes(f) == [29, 131, 203, 209, 132]
    assert f.train[0][:5].tolist() == [244, 266, 307, 357, 386]
    assert f.test[4][:5].tolist() == [35, 58, 100, 121, 250]


@pytest.mark.parametrize("name", ["classes", "lognormal"])
@pytest.mark.parametrize("official", [False, True])
def test_overlap_shares_rows_but_never_trains_on_test_rows(name, official):
    source = source_of([60] * 4, [20] * 4 if official else None)
    options = {"overlap": True, "classes": 2, "split": "official" if official else "pooled"}
    if name == "classes":
        options |= {"min_size": 60, "max_size": 90}
    f = make_federation(source, name, 8, options)
    assert len(f.train.rows) > len(f.train.rows.unique())
    assert not set(f.train.rows.tolist()) & set(f.test.rows.tolist())
    for part in lists(f.train) + lists(f.test):
        assert len(set(part)) == len(part)
    assert bool(((held(f) > 0).sum(1) == 2).all())


def test_overlap_keeps_the_drawn_sizes():
    rule = Classes(classes=2, min_size=60, max_size=90, overlap=True)
    f = make_federation(
        source_of([100] * 4), "classes", 8, {"classes": 2, "min_size": 60, "max_size": 90, "overlap": True}
    )
    drawn = 60 + (rng.uniform(rule.key(0, "sizes"), 8) * 31).to(torch.int64)
    assert sizes(f) == drawn.tolist()


# pathological.


def test_pathological_with_fifteen_clients_has_three_shards_per_class():
    f = make_federation(source_of([600] * 10, [90] * 10), "pathological", 15)
    train, test = f.class_counts("train"), f.class_counts("test")
    assert set(train.flatten().tolist()) <= {0, 200, 400}
    assert train.sum(1).tolist() == [400] * 15
    assert torch.equal(test * 20, train * 3), "test classes in the same proportions"
    assert train.sum(0).tolist() == [600] * 10


def test_pathological_spreads_leftovers_one_by_one():
    counts, notes = Pathological().counts(torch.tensor([10, 11]), 3, 0, source_of([10, 11]))
    shards = sorted(counts[counts > 0].tolist())
    assert int(counts.sum()) == 21
    assert notes == []
    assert all(n in (3, 4, 6, 7, 8) for n in shards)


def test_pathological_uses_distinct_classes_for_the_odd_shards():
    counts, notes = Pathological(shards=1).counts(torch.tensor([8] * 5), 3, 0, source_of([8] * 5))
    assert sorted(counts.sum(0).tolist()) == [0, 0, 8, 8, 8]
    assert notes == ["16 examples of classes without a shard are unused"]
    many, _ = Pathological(shards=1).counts(torch.tensor([60] * 5), 7, 0, source_of([60] * 5))
    assert sorted((many > 0).sum(0).tolist()) == [1, 1, 1, 2, 2]


# powerlaw.


def test_powerlaw_divides_what_is_left_by_lognormal_weights():
    source, available = source_of([500] * 5), torch.tensor([500, 400, 300, 200, 100])
    rule = Powerlaw(classes=2, base=3, sigma=1.5)
    counts, _ = rule.counts(available, 10, 7, source)
    weight = torch.exp(1.5 * rng.normal(rule.key(7, "weights"), 20)).reshape(10, 2)
    for label in range(5):
        slots = [(u, j) for u in range(10) for j in range(2) if (u + j) % 5 == label]
        total = sum(float(weight[slot]) for slot in slots)
        for u, j in slots:
            extra = int(float(weight[u, j]) / total * (int(available[label]) - 3 * len(slots)))
            assert int(counts[u, label]) == 3 + extra


def mnist_labels():
    data = real_data("mnist") / "mnist"
    parts = [pq.read_table(data / f"{s}-00000-of-00001.parquet", columns=["label"])["label"] for s in ("train", "test")]
    labels = torch.tensor(np.concatenate([part.to_numpy() for part in parts]))
    is_test = torch.arange(len(labels)) >= len(parts[0])
    return Source(
        "mnist",
        Features(torch.zeros(len(labels), 1, dtype=torch.uint8)),
        labels,
        Problem.of_classes(10),
        is_test=is_test,
    )


def test_powerlaw_on_mnist_has_fedprox_statistics():
    """FedProx reports 1,000 devices, 69,035 samples, 69 per device.

    Its deviation of 106 is below anything its rule gives: 300 replays with NumPy's generator had 117 to 265."""
    source = mnist_labels()
    f = make_federation(source, "powerlaw", 1000)
    n = torch.tensor(sizes(f), dtype=torch.float64)
    assert int(n.sum()) == pytest.approx(69_035, abs=100)
    assert float(n.mean()) == pytest.approx(69, abs=0.5)
    assert 110 < float(n.std()) < 280
    assert int(n.min()) == 10
    assert f.train.count.tolist() == [int(0.9 * size + 1e-9) for size in n.tolist()]
    assert int((held(f) > 0).sum(1).max()) == 2


def test_many_clients_on_mnist():
    source = mnist_labels()
    for name in ("iid", "classes", "pathological", "lognormal"):
        f = make_federation(source, name, 10_000)
        assert f.num_clients == 10_000
        assert f.names[-1] == "client-9999"


# pfedme.


def test_pfedme_blocks_are_first_come_first_served():
    source, available = source_of([9] * 4), torch.tensor([200, 150, 120, 90])
    rule = FirstComeFirstServed(classes=2, base=4, low=5, high=20, factor=2)
    counts, notes = rule.counts(available, 8, 3, source)
    left = (available - 4 * 4).tolist()
    keys = rng.fold(rule.key(3, "weights"), torch.arange(4))
    weight = torch.exp(2 * rng.normal(keys, 16))
    uniform = rng.uniform(rule.key(3, "uniform"), 16)
    skipped = 0
    for u in range(8):
        for j in range(2):
            label = (u + j) % 4
            share = float(weight[label, 2 * u + j] / weight[label].sum()) * (int(available[label]) - 8)
            block = 2 * (int(share) + 5 + int(float(uniform[2 * u + j]) * 16))
            given = block if block < left[label] else 0
            left[label] -= given
            skipped += given == 0
            assert int(counts[u, label]) == 4 + given
    assert skipped > 0
    assert notes == [f"{skipped} of 16 blocks found too few examples and were left out, as in the original"]


def test_pfedme_on_cifar10_resembles_the_replayed_generator():
    """The replay with the original's seed: 54,572 examples, sizes 1,150 to 4,536, 7 of 60 blocks skipped."""
    totals, skips = [], []
    for seed in range(20):
        counts, _ = FirstComeFirstServed().counts(torch.tensor([6000] * 10), 20, seed, source_of([1] * 10))
        slots = consecutive_classes(20, 3, source_of([1] * 10))
        skips.append(int((torch.gather(counts, 1, slots) == 10).sum()))
        totals.append(int(counts.sum()))
    assert min(totals) < 54_572 < max(totals)
    assert min(skips) <= 7 <= max(skips)


# lognormal.


def test_lognormal_sizes_and_equal_classes():
    counts, notes = Lognormal().counts(torch.tensor([10**7] * 10), 4000, 0, source_of([1] * 10))
    assert notes == []
    assert bool(((counts > 0).sum(1) == 5).all())
    assert bool((counts.max(1).values * 5 == counts.sum(1)).all())
    n = counts.sum(1).to(torch.float64)
    # 5 + exp(N(4, 1)), less the rounding to a multiple of five (2) and to a whole number (0.5)
    assert float(n.mean()) == pytest.approx(5 + np.exp(4.5) - 2.5, rel=0.06)
    assert float((n + 2.5 - 5).log().mean()) == pytest.approx(4, abs=0.08)
    assert int(counts[counts > 0].min()) >= 2


def test_lognormal_shares_a_scarce_class_in_proportion():
    source = source_of([1] * 4)
    wide, _ = Lognormal(classes=2).counts(torch.tensor([10**6] * 4), 8, 0, source)
    tight, (note,) = Lognormal(classes=2).counts(torch.tensor([10**6, 10**6, 50, 10**6]), 8, 0, source)
    assert torch.equal(wide[:, [0, 1, 3]], tight[:, [0, 1, 3]])
    assert 50 - 4 < int(tight[:, 2].sum()) <= 50
    assert bool(((tight[:, 2] > 0) == (wide[:, 2] > 0)).all())
    assert note.startswith("too few examples of 2")


def test_lognormal_needs_one_example_per_holder():
    with pytest.raises(
        ConfigError, match=r"needs 4 examples of class 2, but there are 3; use fewer clients or overlap"
    ):
        Lognormal(classes=2).counts(torch.tensor([99, 99, 3, 99]), 8, 0, source_of([1] * 4))


# dirichlet.


@pytest.mark.parametrize("alpha", [0.05, 0.5, 5.0, 500.0])
def test_dirichlet_moments(alpha):
    """Mean 1/K and variance (1/K)(1 - 1/K)/(K alpha + 1) of every proportion."""
    parts, draws = 4, 20_000
    p = torch.softmax(dirichlet_logits(alpha, rng.root(0, "test"), draws, parts), 1)
    torch.testing.assert_close(p.sum(1), torch.ones(draws, dtype=torch.float64))
    variance = 0.25 * 0.75 / (parts * alpha + 1)
    error = (variance / draws) ** 0.5
    assert float((p.mean(0) - 0.25).abs().max()) < 4 * error
    torch.testing.assert_close(p.var(0), torch.full((4,), variance, dtype=torch.float64), rtol=0.08, atol=0)
    assert float(torch.corrcoef(p[:, :2].T)[0, 1]) == pytest.approx(-1 / 3, abs=0.03)


def test_dirichlet_survives_tiny_alpha():
    p = torch.softmax(dirichlet_logits(1e-4, rng.root(0, "test"), 50, 3), 1)
    assert bool(torch.isfinite(p).all())
    assert float(p.max(1).values.min()) > 0.99


def test_dirichlet_uses_every_example_and_respects_the_minimum():
    for seed in range(5):
        f = make_federation(source_of([200] * 5, [40] * 5), "dirichlet", 6, {"alpha": 0.3, "min_size": 25}, seed)
        assert len(f.train.rows) == 1000
        assert len(f.test.rows) == 200
        assert int(f.train.count.min()) >= 25


def test_dirichlet_with_large_alpha_is_nearly_even():
    counts, _ = Dirichlet(alpha=1e6).counts(torch.tensor([1000, 2000]), 10, 0, source_of([1, 1]))
    assert int((counts - torch.tensor([100, 200])).abs().max()) <= 3


def test_dirichlet_draws_again_until_it_fits():
    available, source = torch.tensor([100] * 3), source_of([1] * 3)
    rule = Dirichlet(alpha=0.5, min_size=12)
    first = rule._draw(rng.fold(rule.key(1, "proportions"), 0), available, 8)
    assert int(first.sum(1).min()) < 12, "choose another seed: this draw should fail"
    counts, _ = rule.counts(available, 8, 1, source)
    draws = [rule._draw(rng.fold(rule.key(1, "proportions"), i), available, 8) for i in range(50)]
    fitting = [draw for draw in draws if int(draw.sum(1).min()) >= 12]
    assert torch.equal(counts, fitting[0])


@given(st.integers(0, 100), st.integers(1, 12))
def test_dirichlet_fill_moves_examples_and_invents_none(seed, min_size):
    available = torch.tensor([40, 30, 50])
    counts, notes = Dirichlet(alpha=0.1, min_size=min_size, fill=True).counts(available, 10, seed, source_of([1] * 3))
    assert counts.sum(0).tolist() == [40, 30, 50]
    assert int(counts.min()) >= 0
    assert int(counts.sum(1).min()) >= min_size
    untouched = Dirichlet(alpha=0.1)._draw(rng.fold(Dirichlet().key(seed, "proportions"), 0), available, 10)
    assert bool(notes) == (int(untouched.sum(1).min()) < min_size)


# column.


def test_column_split_is_keyed_by_name():
    source = source_of([30, 30], owners=4)
    f = make_federation(source, "column", None, seed=5)
    assert f.names == ["o0", "o1", "o2", "o3"]
    assert [sorted(a + b) for a, b in zip(lists(f.train), lists(f.test), strict=True)] == [
        list(range(k, 60, 4)) for k in range(4)
    ]
    turned = replace(source, owners=3 - source.owners, owner_names=["o3", "o2", "o1", "o0"])
    g = make_federation(turned, "column", None, seed=5)
    assert g.names == f.names[::-1]
    assert lists(g.test) == lists(f.test)[::-1], "the order of clients does not matter"


def test_column_chooses_clients_at_random_but_repeatably():
    source = source_of([60, 60], owners=20)
    a = make_federation(source, "column", 5, seed=0)
    assert a.num_clients == 5
    assert a.names == make_federation(source, "column", 5, seed=0).names
    assert any(a.names != make_federation(source, "column", 5, seed=s).names for s in range(1, 5))
