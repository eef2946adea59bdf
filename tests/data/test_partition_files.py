"""Partition files, and the field's own partitions and files."""

from __future__ import annotations

import json
import os
import pickle

import numpy as np
import pytest
import torch
from command_line import kinfed

from kinfed.data import Federation, make_federation
from kinfed.data.examples.features import Features
from kinfed.data.examples.problem import Problem
from kinfed.data.sources import load_source
from kinfed.data.sources.plain_pickle import read_plain_pickle
from kinfed.data.sources.source import Source
from kinfed.errors import ConfigError, DataError


def classes_of(examples, num_classes=10):
    labels = torch.arange(examples) % num_classes
    return Source("toy", Features(torch.zeros(examples, 1)), labels, Problem.of_classes(num_classes))


def held(federation):
    return federation.class_counts("train") + federation.class_counts("test")


def entropy(counts):
    shares = counts / counts.sum(1, keepdim=True)
    return float(-(shares * torch.log(shares.clamp_min(1e-300))).sum(1).mean())


def test_the_closing_dirichlet_has_the_law_of_pfllib():
    """Figures of PFLlib's own rule over 20 seeds: 4.24 classes, top class 0.72, entropy 0.70."""
    source = classes_of(60_000)
    figures = []
    for seed in range(20):
        counts = held(make_federation(source, "pfllib_dirichlet", 100, seed=seed)).double()
        top = float((counts.amax(1) / counts.sum(1)).mean())
        figures.append((float((counts > 0).sum(1).double().mean()), top, entropy(counts)))
    classes, top, spread = np.mean(figures, 0)
    assert abs(classes - 4.24) < 0.12
    assert abs(top - 0.72) < 0.012
    assert abs(spread - 0.70) < 0.03


def test_a_client_with_its_share_of_the_examples_is_closed():
    counts = held(make_federation(classes_of(6_000), "pfllib_dirichlet", 20, {"alpha": 0.1}, seed=3))
    assert int(counts.sum()) == 6_000
    before = torch.cumsum(counts, 1) - counts
    assert int((counts[before >= 6_000 / 20]).sum()) == 0


def reference_dirichlet(rng, alpha, clients, labels):
    """The same rule with numpy's generator, one client list at a time, as an oracle of the law."""
    sizes, counts = np.zeros(clients), np.zeros((clients, labels.max() + 1))
    for label in range(labels.max() + 1):
        shares = rng.dirichlet(np.full(clients, alpha)) * (sizes < len(labels) / clients)
        cuts = (np.cumsum(shares / shares.sum()) * (labels == label).sum()).astype(int)
        counts[:, label] = np.diff(np.append(0, np.append(cuts[:-1], (labels == label).sum())))
        sizes += counts[:, label]
    return counts


@pytest.mark.parametrize("alpha", [0.3, 1.0])
def test_other_concentrations_agree_with_the_rule_by_hand(alpha):
    draws, generator, labels = 60, np.random.default_rng(0), np.arange(2_000) % 5
    theirs = [reference_dirichlet(generator, alpha, 12, labels) for _ in range(draws)]
    source = classes_of(2_000, 5)
    ours = [
        held(make_federation(source, "pfllib_dirichlet", 12, {"alpha": alpha}, seed=s)).double().numpy()
        for s in range(draws)
    ]
    for figure in (
        lambda c: (c > 0).sum(1).mean(),
        lambda c: c.sum(1).std(),
        lambda c: (c.max(1) / c.sum(1).clip(1)).mean(),
    ):
        a, b = np.array([figure(c) for c in ours]), np.array([figure(c) for c in theirs])
        assert abs(a.mean() - b.mean()) < 4 * np.sqrt((a.var() + b.var()) / draws)


def test_class_blocks_are_pfllibs():
    counts = held(make_federation(classes_of(1_000), "pfllib_pat", 20, {"classes": 2, "balanced": True}))
    assert bool(((counts > 0).sum(1) == 2).all())
    assert counts[:4].nonzero()[:, 1].tolist() == [0, 1] * 4  # the first four clients share the first two classes
    assert counts[counts > 0].unique().tolist() == [25]
    uneven = held(make_federation(classes_of(10_000), "pfllib_pat", 20, {"classes": 2}))
    assert int(uneven.sum()) == 10_000
    blocks = uneven[:4, 0]
    assert bool((blocks[:3] >= 25).all() & (blocks[:3] <= 250).all())
    assert int(blocks[3]) == 1_000 - int(blocks[:3].sum())
    with pytest.raises(ConfigError, match="would hold no example"):
        make_federation(classes_of(20, 2), "pfllib_pat", 19, {"classes": 1})


def lists(ragged):
    return [part.tolist() for part in ragged.lists()]


def test_a_partition_file_gives_the_same_clients(tmp_path):
    x, y = np.random.default_rng(0).normal(size=(300, 4)), np.arange(300) % 3
    file = tmp_path / "three.json"
    first = Federation.partition(x, y, "dirichlet", clients=6, alpha=0.5, seed=4, save_partition=file)
    again = Federation.partition(x, y, "file", path=str(file))
    assert again.digest() == first.digest()
    record = json.loads(file.read_text())
    assert record["origin"] == {"partition": "dirichlet", "options": first.description["options"], "seed": 4}
    assert record["data"]["examples"] == 300
    assert "raw" not in file.read_text()


def test_a_partition_file_is_refused_for_other_data(tmp_path):
    x, y = np.random.default_rng(0).normal(size=(300, 4)), np.arange(300) % 3
    file = tmp_path / "three.json"
    Federation.partition(x, y, "iid", clients=6, save_partition=file)
    for other_x, other_y in ((x + 1e-3, y), (x, (y + 1) % 3), (x[:200], y[:200])):
        with pytest.raises(DataError, match="was made for arrays with 300 examples"):
            Federation.partition(other_x, other_y, "file", path=str(file))
    record = json.loads(file.read_text())
    record["clients"][0]["train"][0], record["clients"][1]["train"][0] = 298, 299
    file.write_text(json.dumps(record))
    with pytest.raises(DataError, match="was changed after it was written"):
        Federation.partition(x, y, "file", path=str(file))
    with pytest.raises(ConfigError, match="needs its path"):
        Federation.partition(x, y, "file")


def test_a_partition_that_changes_examples_has_no_file(tmp_path):
    with pytest.raises(ConfigError, match="changes the examples"):
        make_federation(load_source("digits"), "hidden_groups", 8, save_partition=tmp_path / "groups.json")


def test_the_command_line_shares_a_partition(tmp_path):
    make = ("--partition", "pathological", "--clients", "10", "--save-partition", "digits.json")
    assert "digits.json" in kinfed("describe", *make, cwd=tmp_path).stdout
    options = ("--partition", "file", "--set", "partition.path=digits.json")
    one_round = ("--algorithms", "local", "--rounds", "1", "--seeds", "0")
    assert kinfed("run", *options, *one_round, "--out", "run", cwd=tmp_path).returncode == 0
    assert "digest" in kinfed("describe", *options, cwd=tmp_path).stdout
    assert "has 10 clients" in kinfed("describe", *options, "--clients", "5", cwd=tmp_path).stderr
    assert "names its test rows" in kinfed("run", *options, *one_round, "--folds", "3", cwd=tmp_path).stderr


def test_partitions_of_flbench_are_read(tmp_path):
    source, file = classes_of(40, 2), tmp_path / "partition.pkl"
    rows = np.arange(40)
    indices = {k: {"train": rows[k::4][:6], "val": rows[k::4][6:7], "test": rows[k::4][7:]} for k in range(4)}
    file.write_bytes(pickle.dumps({"separation": {"total": 4}, "data_indices": indices}))
    federation = make_federation(source, "file", None, {"path": str(file)})
    assert lists(federation.train) == [sorted(part["train"].tolist()) for part in indices.values()]
    assert lists(federation.val) == [part["val"].tolist() for part in indices.values()]
    with pytest.raises(DataError, match="names rows that toy with 20 examples does not have"):
        make_federation(classes_of(20, 2), "file", None, {"path": str(file)})


class Evil:
    def __reduce__(self):
        return os.mkdir, ("was-here",)


def test_a_pickle_that_would_run_code_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "partition.pkl"
    file.write_bytes(pickle.dumps({"data_indices": Evil()}))
    with pytest.raises(DataError, match=r"mkdir.*nothing of it was run"):
        make_federation(classes_of(40, 2), "file", None, {"path": str(file)})
    assert not (tmp_path / "was-here").exists()


class Forged:
    """Pickled as a call of numpy, with a state."""

    def __init__(self, function, *arguments, state=None):
        self.pickled = (function, arguments, state)

    def __reduce__(self):
        return self.pickled


@pytest.mark.parametrize("content", [b"cnumpy._core.multiarray\nscalar\n.", b"cnumpy\ndtype\n(S'f8'\ntR.",
    b"cnumpy._core.multiarray\nscalar\n(N}(S'__doc__'\nS'x'\nutb."])  # fmt: skip
def test_what_makes_arrays_is_no_content(content, tmp_path):
    with pytest.raises(DataError, match="a function or a type"):
        read_plain_pickle(content, tmp_path / "partition.pkl")


ADDRESS = b"A" * 8  # of an object, if somebody takes it for one
FIELDS = {"a": (np.dtype("O"), 0)}
FORGED = {
    "an array of objects over bytes": Forged(np.ndarray, (1,), "O", ADDRESS),
    "a scalar with a field that is an object": Forged(
        np._core.multiarray.scalar, Forged(np.dtype, "V8", state=(3, "|", None, ("a",), FIELDS, 8, 1, 0)), ADDRESS
    ),
    "objects whose type says it has none": Forged(
        np._core.multiarray._reconstruct, np.ndarray, (0,), b"b",
        state=(1, (1,), Forged(np.dtype, "O", state=(3, "|", None, None, None, -1, -1, 0)), False, ADDRESS),
    ),
    "more than the memory": Forged(np.ndarray, (10**13,), "d"),
}  # fmt: skip


@pytest.mark.parametrize("forged", FORGED.values(), ids=FORGED)
def test_bytes_of_a_pickle_are_no_addresses(forged, tmp_path):
    with pytest.raises(DataError, match="nothing of it was run"):
        read_plain_pickle(pickle.dumps({"data_indices": forged}, 4), tmp_path)


@pytest.mark.parametrize("protocol", [3, 4])
def test_arrays_in_pickles_are_what_they_were(protocol, tmp_path):
    values = {
        "float": np.arange(6.0).reshape(2, 3),
        "columns": np.asfortranarray(np.arange(6, dtype=np.int16).reshape(2, 3)),
        "other end": np.arange(3, dtype=">i4"),
        "objects": np.array([{"x": [np.arange(2), 1]}, None, (True,)], dtype=object),
        "bool": np.array([True, False]),
        "none": np.zeros((0, 4), np.float32),
        "numbers": (np.int64(5), np.float32(0.5), 7, "text"),
    }
    result = read_plain_pickle(pickle.dumps(values, protocol), tmp_path)
    assert result.keys() == values.keys()
    assert result["numbers"] == values["numbers"]
    for name in ("float", "columns", "other end", "bool", "none"):
        assert result[name].dtype == values[name].dtype
        np.testing.assert_array_equal(result[name], values[name])
        assert result[name].flags.writeable
    first, second, third = result["objects"]
    assert first["x"][0].tolist() == [0, 1]
    assert (first["x"][1], second, third) == (1, None, (True,))


def pfllib_folder(folder):
    generator, parts = np.random.default_rng(1), {}
    for part, count in (("train", 6), ("test", 2)):
        (folder / part).mkdir(parents=True)
        for client in range(3):
            data = {
                "x": generator.normal(size=(count, 1, 4, 4)).astype(np.float32),
                "y": generator.integers(0, 2, count),
            }
            parts[client, part] = data
            np.savez_compressed(folder / part / f"{client}.npz", data=data)
    (folder / "config.json").write_text(json.dumps({"num_clients": 3, "num_classes": 2}))
    return parts


def test_a_folder_of_pfllib_is_a_data_set(tmp_path):
    parts = pfllib_folder(tmp_path / "MNIST")
    source = load_source("pfllib", options={"folder": str(tmp_path / "MNIST")})
    federation = make_federation(source, "column", None)
    for client in range(3):
        for name, split in (("train", federation.train), ("test", federation.test)):
            x = federation.features.raw[split[client]].numpy()
            np.testing.assert_array_equal(x, parts[client, name]["x"])
            np.testing.assert_array_equal(federation.labels[split[client]].numpy(), parts[client, name]["y"])
    np.savez_compressed(tmp_path / "MNIST" / "train" / "1.npz", data=np.array(Evil(), dtype=object))
    with pytest.raises(DataError, match="nothing of it was run"):
        load_source("pfllib", options={"folder": str(tmp_path / "MNIST")})
    (tmp_path / "MNIST" / "train" / "1.npz").unlink()
    with pytest.raises(DataError, match="is no file of PFLlib"):
        load_source("pfllib", options={"folder": str(tmp_path / "MNIST")})
