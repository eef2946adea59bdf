from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kinfed.core import rng, storage
from kinfed.data.examples.features import Features, fingerprint
from kinfed.data.examples.problem import Problem
from kinfed.data.examples.ragged import Ragged, hold_out
from kinfed.data.federations.federation import Federation
from kinfed.errors import ConfigError, DataError, StorageError

LISTS = st.lists(st.lists(st.integers(0, 50), max_size=7), min_size=1, max_size=6)


def small(**changes):
    """Three clients, ten rows of two features."""
    fields = {
        "features": Features(torch.arange(20, dtype=torch.float32).reshape(10, 2)),
        "labels": torch.tensor([0, 1, 2, 0, 1, 2, 0, 1, 2, 0]),
        "problem": Problem.of_classes(3),
        "train": Ragged.of([[0, 1, 2], [4, 5], [7]]),
        "val": Ragged.empty(3),
        "test": Ragged.of([[3], [6], [8, 9]]),
        "names": ["a", "b", "c"],
    }
    return Federation(**(fields | changes))


# Ragged: every operation against lists of lists.


@given(LISTS)
def test_ragged_is_a_list_of_lists(lists):
    ragged = Ragged.of(lists)
    assert [part.tolist() for part in ragged.lists()] == lists
    assert [ragged[k].tolist() for k in range(len(ragged))] == lists
    assert ragged.count.tolist() == [len(part) for part in lists]
    assert ragged.owner.tolist() == [k for k, part in enumerate(lists) for _ in part]
    assert ragged.position.tolist() == [i for part in lists for i in range(len(part))]
    assert [part.tolist() for part in ragged.ascending().lists()] == [sorted(part) for part in lists]


@given(LISTS, st.integers(0, 5), st.randoms(use_true_random=False))
def test_cut_and_take_and_join(lists, head, random):
    ragged = Ragged.of(lists)
    heads = torch.tensor([random.randint(0, head) for _ in lists])
    first, rest = ragged.split_at(heads)
    assert [p.tolist() for p in first.lists()] == [p[:h] for p, h in zip(lists, heads.tolist(), strict=True)]
    assert [p.tolist() for p in rest.lists()] == [p[h:] for p, h in zip(lists, heads.tolist(), strict=True)]
    assert [p.tolist() for p in first.joined(rest).lists()] == lists
    ids = [random.randrange(len(lists)) for _ in range(4)]
    assert [p.tolist() for p in ragged.take(torch.tensor(ids)).lists()] == [lists[k] for k in ids]
    even = [p.tolist() for p in ragged.filter(ragged.rows % 2 == 0).lists()]
    assert even == [[row for row in part if row % 2 == 0] for part in lists]


@given(LISTS, st.integers(0, 10))
def test_shuffled_is_a_permutation_per_client(lists, seed):
    keys = rng.fold(rng.root(seed, "test"), torch.arange(len(lists)))
    shuffled = Ragged.of(lists).shuffled(keys)
    for k, part in enumerate(lists):
        expected = torch.tensor(part, dtype=torch.int64)[rng.permutation(keys[k], len(part))]
        assert shuffled[k].tolist() == expected.tolist()


@given(LISTS, st.sampled_from([0.0, 0.1, 0.25, 0.9]))
def test_hold_out_trains_the_rounded_down_share_and_at_least_one(lists, fraction):
    keys = rng.fold(rng.root(0, "test"), torch.arange(len(lists)))
    train, test = hold_out(Ragged.of(lists), fraction, keys)
    for k, part in enumerate(lists):
        trained = min(max(int((1 - fraction) * len(part) + 1e-9), 1), len(part))
        assert len(train[k]) == trained
        assert sorted(train[k].tolist() + test[k].tolist()) == sorted(part)


# Features.


def test_gather_standardizes_in_float32():
    raw = torch.tensor([[[0, 255]], [[51, 102]]], dtype=torch.uint8)
    features = Features(raw, torch.tensor([[51.0, 0.0]]), torch.tensor(51.0))
    assert features.gather(torch.tensor([[1], [0]])).tolist() == [[[[0.0, 2.0]]], [[[-1.0, 5.0]]]]
    assert raw.tolist() == [[[0, 255]], [[51, 102]]], "the raw array must not change"
    assert features.example_bytes == 8


def test_gather_leaves_float_raw_and_tokens_alone():
    table = torch.tensor([[1.0, 2.0]])
    assert Features(table, None, torch.tensor(2.0)).gather(torch.tensor([0])).tolist() == [[0.5, 1.0]]
    assert table.tolist() == [[1.0, 2.0]]
    tokens = Features(torch.tensor([[7, 8]]))
    assert tokens.gather(torch.tensor([0])).dtype == torch.int64
    assert tokens.example_bytes == 16


@pytest.mark.parametrize("mean", [torch.zeros(3), torch.zeros(1, 1, 2)])
def test_mean_that_does_not_fit_is_refused(mean):
    with pytest.raises(DataError, match="does not fit examples of shape"):
        Features(torch.zeros(4, 2), mean)


def test_zero_std_is_refused():
    with pytest.raises(DataError, match="std must be positive"):
        Features(torch.zeros(4, 2), None, torch.tensor([1.0, 0.0]))


def test_standardized_uses_the_given_rows_only_and_survives_constants_and_offsets():
    generator = np.random.default_rng(0)
    table = generator.normal(size=(9000, 3)).astype(np.float32)
    table[:, 1] = 2019  # constant
    table[:, 2] = 1e5 + 0.25 * table[:, 2]  # far from zero: the one-pass formula would lose the variance
    table[-1] = 1e9
    rows = torch.arange(8999)
    gathered = Features(torch.from_numpy(table)).standardized(rows).gather(rows)
    expected = (table[:-1].astype(np.float64) - table[:-1].mean(0, dtype=np.float64)) / np.array(
        [table[:-1, 0].std(dtype=np.float64), 1.0, table[:-1, 2].std(dtype=np.float64)]
    )
    assert np.abs(gathered.numpy() - expected)[:, :2].max() < 1e-5
    # float32 holds the mean of column 2 to 0.004, which is 0.016 deviations
    assert np.abs(gathered.numpy() - expected)[:, 2].max() < 0.02


# Federation.


def test_class_counts_by_hand():
    assert small().class_counts().tolist() == [[1, 1, 1], [0, 1, 1], [0, 1, 0]]
    assert small().class_counts("test").tolist() == [[1, 0, 0], [1, 0, 0], [1, 0, 1]]
    with pytest.raises(ConfigError, match="train, val, test"):
        small().class_counts("dev")


@pytest.mark.parametrize(("n", "held"), [(2, 1), (3, 1), (4, 1), (5, 1), (9, 1), (10, 2), (100, 20)])
def test_validation_share_of_one_client(n, held):
    federation = Federation.from_arrays(np.zeros((n, 1)), np.zeros(n, int), ["a"] * n, test_fraction=0)
    split = federation.with_validation(0.2, seed=1)
    assert split.val.count.tolist() == [held]
    assert sorted(split.train.rows.tolist() + split.val.rows.tolist()) == list(range(n))


def test_below_five_examples_exactly_one_validates():
    federation = Federation.from_arrays(np.zeros((4, 1)), np.zeros(4, int), ["a"] * 4, test_fraction=0)
    assert federation.with_validation(0.6, seed=0).val.count.tolist() == [1]


def test_validation_never_takes_the_last_training_example():
    federation = Federation.from_arrays(np.zeros((6, 1)), np.zeros(6, int), ["a"] * 6, test_fraction=0)
    assert federation.with_validation(0.99, seed=0).train.count.tolist() == [1]


def test_client_with_one_example_validates_on_it_and_says_so():
    split = small().with_validation(0.5, seed=0)
    assert split.train[2].tolist() == split.val[2].tolist() == [7]
    assert "1 client(s) with one example validate on that example" in split.notes
    assert split.with_validation(0, seed=0) is split


def test_validation_rows_that_exist_are_kept():
    federation = small(train=Ragged.of([[0, 1], [4, 5], [7]]), val=Ragged.of([[2], [], []]))
    split = federation.with_validation(0.5, seed=0)
    assert split.val[0].tolist() == [2]
    assert split.train[0].tolist() == [0, 1]
    assert split.val.count.tolist() == [1, 1, 1]


@given(st.integers(0, 20))
def test_foreign_targets_permute_val_and_test_together(seed):
    federation = small(train=Ragged.of([[0], [4], [7]]), val=Ragged.of([[1, 2], [5], []]))
    moved = federation.with_foreign_targets(seed)
    order = moved.description["target_of"]
    assert sorted(order) == [0, 1, 2]
    for k, target in enumerate(order):
        assert moved.val[k].tolist() == federation.val[target].tolist()
        assert moved.test[k].tolist() == federation.test[target].tolist()
        assert moved.train[k].tolist() == federation.train[k].tolist()


def test_cohort_sees_its_clients_only():
    federation = small(groups=torch.tensor([0, 1, 0]), group_names=["x", "y"])
    cohort = federation.cohort(torch.tensor([2, 0]), seed=0, round=1)
    assert cohort.train.count.tolist() == [1, 3]
    assert cohort.test.count.tolist() == [2, 1]
    assert cohort.groups.tolist() == [0, 0]
    batches = {tuple(batch.y[row, :1].tolist()) for _, batch in cohort.train.in_order() for row in range(2)}
    assert batches == {(1,), (0,)}
    assert federation.population(0).num_groups == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train": Ragged.empty(0)}, "at least one client"),
        ({"val": Ragged.empty(2)}, "split val lists 2 clients"),
        ({"test": Ragged.of([[10], [], []])}, "split test points outside the 10 examples"),
        ({"train": Ragged.of([[-1], [4], [7]])}, "split train points outside"),
        ({"labels": torch.zeros(9, dtype=torch.int64)}, "10 examples but 9 labels"),
        ({"names": ["a", "a", "b"]}, "a name of its own"),
        ({"problem": Problem.of_classes(2)}, r"labels must lie in 0\.\.1; found 0\.\.2"),
        ({"groups": torch.zeros(2, dtype=torch.int64)}, "2 group labels"),
        ({"train": Ragged.of([[0], [], [7]])}, r"1 client\(s\) have no training example \(b\)"),
        ({"test": Ragged.of([[3], [0], [8]])}, r"test example\(s\) are training examples too \(first: row 0\)"),
        ({"features": Features(torch.tensor([[1.0]] * 9 + [[float("nan")]]))}, r"NaN or infinite.*row 9"),
    ],
)
def test_a_broken_federation_is_refused(changes, message):
    with pytest.raises(DataError, match=message):
        small(**changes)


# Federation.from_arrays.


def test_from_arrays_with_text_labels_and_text_clients():
    f = Federation.from_arrays(
        [[1.0], [2.0], [3.0], [4.0]], ["dog", "cat", "dog", "cow"], ["zoe", "al", "zoe", "al"], test_fraction=0
    )
    assert f.names == ["al", "zoe"]
    assert f.class_names == ["cat", "cow", "dog"]
    assert f.labels.tolist() == [2, 0, 2, 1]
    assert [part.tolist() for part in f.train.lists()] == [[1, 3], [0, 2]]


def test_from_arrays_keeps_whole_number_labels_and_orders_number_clients_by_size():
    f = Federation.from_arrays(np.zeros((3, 2)), [0, 3, 1], [10, 9, 2], num_classes=5, test_fraction=0)
    assert f.labels.tolist() == [0, 3, 1]
    assert f.num_classes == 5
    assert f.class_names is None
    assert f.names == ["2", "9", "10"]


def test_from_arrays_keeps_images_as_bytes_and_turns_whole_numbers_into_features():
    images = Federation.from_arrays(np.full((2, 1, 4, 4), 255, np.uint8), [0, 1], [0, 1])
    assert images.features.raw.dtype == torch.uint8
    assert images.features.gather(torch.tensor([0])).max() == 255
    whole = np.arange(4).reshape(2, 2)
    assert Federation.from_arrays(whole, [0, 1], [0, 1]).features.raw.dtype == torch.float32
    assert Federation.from_arrays(whole, [0, 1], [0, 1], tokens=True).features.is_tokens
    assert Federation.from_arrays([1, 2], [0, 1], [0, 1]).features.shape == (1,)


def test_from_arrays_marked_test_rows_and_groups():
    f = Federation.from_arrays(
        np.zeros((5, 1)), [0, 1, 0, 1, 0], ["a", "a", "b", "b", "b"],
        test_rows=[False, True, False, False, True], groups={"a": "phone", "b": "laptop"},
    )  # fmt: skip
    assert [part.tolist() for part in f.train.lists()] == [[0], [2, 3]]
    assert [part.tolist() for part in f.test.lists()] == [[1], [4]]
    assert f.group_names == ["laptop", "phone"]
    assert f.groups.tolist() == [1, 0]


def test_from_arrays_client_with_one_example_trains_on_it():
    f = Federation.from_arrays(np.zeros((4, 1)), [0, 0, 1, 1], ["a", "b", "b", "b"], test_fraction=0.5)
    assert f.train.count.tolist() == [1, 1]
    assert f.test.count.tolist() == [0, 2]


def test_a_clients_split_does_not_depend_on_the_other_clients():
    x, y = np.zeros((30, 1)), np.zeros(30, int)
    clients = np.array(["m"] * 20 + ["z"] * 10)
    both = Federation.from_arrays(x, y, clients, seed=3)
    renamed = Federation.from_arrays(x, y, np.where(clients == "z", "a", clients), seed=3)
    assert both.test[0].tolist() == renamed.test[1].tolist()
    other_seed = Federation.from_arrays(x, y, clients, seed=4)
    assert both.test[0].tolist() != other_seed.test[0].tolist()


def test_from_arrays_standardizes_by_training_rows():
    f = Federation.from_arrays(
        [[0.0], [2.0], [100.0]], [0, 1, 0], ["a"] * 3, test_rows=[False, False, True], standardize=True
    )
    assert f.features.gather(torch.arange(3)).flatten().tolist() == [-1.0, 1.0, 99.0]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([["x"]], [0], ["a"]), DataError, "x should hold numbers"),
        ((3.0, [0], ["a"]), DataError, "one row per example"),
        (([[1.0]], [0, 1], ["a"]), DataError, "got 1, 2, 1"),
        (([[1.0]], [[0]], ["a"]), DataError, "y should be one value per example"),
        (([[1.0], [2.0]], [0, 1], ["a", None]), DataError, "clients has 1 missing value.*entry 1"),
        (([[1.0]], [-1], ["a"]), DataError, "labels must lie in"),
        ((np.zeros((0, 2)), [], []), DataError, "empty"),
        (([[np.inf]], [0], ["a"]), DataError, "NaN or infinite"),
    ],
)
def test_from_arrays_refuses_bad_input(arguments, error, message):
    with pytest.raises(error, match=message):
        Federation.from_arrays(*arguments)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"test_fraction": 1.0}, ConfigError, "test_fraction"),
        ({"test_rows": [True]}, DataError, "test_rows must be 2 booleans"),
        ({"test_rows": [0, 1]}, DataError, "test_rows must be 2 booleans"),
        ({"test_rows": [True, True]}, DataError, "no training example"),
        ({"groups": {"a": 1}}, DataError, r"groups lacks 1 of 2 clients \(first: b\)"),
        ({"tokens": True}, DataError, "tokens are whole numbers"),
    ],
)
def test_from_arrays_refuses_bad_options(options, error, message):
    with pytest.raises(error, match=message):
        Federation.from_arrays([[1.0], [2.0]], [0, 1], ["a", "b"], **options)


# Saving and loading.


def same(a: Federation, b: Federation) -> bool:
    index = torch.arange(len(a.labels))
    return (
        torch.equal(a.features.gather(index), b.features.gather(index))
        and a.features.raw.dtype == b.features.raw.dtype
        and torch.equal(a.labels, b.labels)
        and all(
            torch.equal(getattr(a.split(s), part), getattr(b.split(s), part))
            for s in ("train", "val", "test")
            for part in ("offsets", "rows")
        )
        and (a.groups is None) == (b.groups is None)
        and (a.groups is None or torch.equal(a.groups, b.groups))
        and (a.names, a.group_names, a.class_names, a.num_classes, a.description, a.notes)
        == (b.names, b.group_names, b.class_names, b.num_classes, b.description, b.notes)
    )


def rich_federation() -> Federation:
    return small(
        features=Features(
            torch.arange(40, dtype=torch.uint8).reshape(10, 1, 2, 2), torch.tensor(3.0), torch.tensor(2.0)
        ),
        groups=torch.tensor([0, 1, 0]),
        group_names=["x", "ÿ"],
        problem=Problem.of_classes(3, ["u", "v", "w"]),
        description={"dataset": "toy", "options": {"alpha": 0.5}},
        notes=["a note"],
    )


@pytest.mark.parametrize("federation", [small(), rich_federation()], ids=["bare", "rich"])
def test_saved_federation_comes_back(federation, tmp_path):
    federation.save(tmp_path / "deep" / "folder")
    assert same(Federation.load(tmp_path / "deep" / "folder"), federation)


def test_saving_again_replaces_and_leaves_nothing_behind(tmp_path):
    small().save(tmp_path)
    rich_federation().save(tmp_path)
    assert same(Federation.load(tmp_path), rich_federation())
    assert len(list(tmp_path.iterdir())) == 2


def test_a_save_that_fails_midway_keeps_the_old_federation(tmp_path, monkeypatch):
    small().save(tmp_path)

    def fail(path, content):
        raise StorageError("disk full")

    monkeypatch.setattr(storage, "write_json", fail)
    with pytest.raises(StorageError, match="disk full"):
        rich_federation().save(tmp_path)
    assert same(Federation.load(tmp_path), small())


def test_fingerprint_tells_values_shapes_and_labels_apart():
    raw, labels = torch.arange(8, dtype=torch.uint8).reshape(4, 2), torch.tensor([0, 1, 0, 1])
    prints = {
        fingerprint(Features(raw), labels),
        fingerprint(Features(raw.flip(0)), labels),
        fingerprint(Features(raw.reshape(4, 1, 2)), labels),
        fingerprint(Features(raw.to(torch.float32)), labels),
        fingerprint(Features(raw), labels.flip(0)),
    }
    assert len(prints) == 5
    assert fingerprint(Features(raw, None, torch.tensor(2.0)), labels) in prints


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_damaged_byte_is_noticed(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("saved")
    rich_federation().save(folder)
    file = next(folder.glob("arrays-*"))
    content = bytearray(file.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] ^= 1 << data.draw(st.integers(0, 7))
    file.write_bytes(content)
    try:
        loaded = Federation.load(folder)
    except StorageError:
        return
    assert same(loaded, rich_federation()), "only padding of the header may change unnoticed"


def test_cut_missing_and_foreign_files_are_refused(tmp_path):
    with pytest.raises(StorageError, match="does not exist"):
        Federation.load(tmp_path)
    small().save(tmp_path)
    file, record = next(tmp_path.glob("arrays-*")), tmp_path / "federation.json"
    content, text = file.read_bytes(), record.read_text()
    file.write_bytes(content[:-9])
    with pytest.raises(StorageError, match="damaged"):
        Federation.load(tmp_path)
    file.unlink()
    with pytest.raises(StorageError, match="No such file"):
        Federation.load(tmp_path)
    storage.write_tensors(file, {"labels": torch.zeros(3)})
    with pytest.raises(StorageError, match="different federations"):
        Federation.load(tmp_path)
    file.write_bytes(content)
    for broken, message in [
        (text[: len(text) // 2], "not valid JSON"),
        ("[]", "not an object"),
        (json.dumps(json.loads(text) | {"version": 99}), "version 99"),
        (json.dumps({k: v for k, v in json.loads(text).items() if k != "names"}), "names missing"),
    ]:
        record.write_text(broken)
        with pytest.raises(StorageError, match=message):
            Federation.load(tmp_path)


def test_some_clients_keep_their_rows_names_and_groups() -> None:
    x, owner = np.arange(24, dtype=np.float32).reshape(12, 2), np.repeat(["a", "b", "c"], 4)
    whole = Federation.from_arrays(x, np.arange(12) % 2, owner, groups={"a": "u", "b": "v", "c": "u"})
    part = whole.take(torch.tensor([2, 0]))
    assert part.names == ["c", "a"]
    assert part.train[0].tolist() == whole.train[2].tolist()
    assert part.test[1].tolist() == whole.test[0].tolist()
    assert part.groups is not None
    assert part.groups.tolist() == [0, 0]


def test_a_call_with_too_little_is_refused_in_words() -> None:
    x, y = torch.rand(4, 2), torch.tensor([0, 1, 0, 1])
    with pytest.raises(DataError, match="y and clients are missing"):
        Federation.from_arrays((x, y))
    with pytest.raises(DataError, match=r"labels and the client of each; clients are missing"):
        Federation.from_arrays(x, y)
