from __future__ import annotations

import io
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from kinfed.cli.federation_view import MOST_CLIENTS, FederationView
from kinfed.data.examples.features import Features
from kinfed.data.examples.problem import Problem
from kinfed.data.examples.ragged import Ragged
from kinfed.data.federations.description import Description, describe, emd, emd_code
from kinfed.data.federations.federation import Federation
from kinfed.data.partitions import make_federation
from kinfed.data.sources import load_source
from kinfed.errors import StorageError


def clients_with(classes_each, num_classes: int = 10, per_class: int = 6, class_names=None, **more) -> Federation:
    """Client k holds `per_class` training examples of each of its classes, and one test example."""
    labels, train, test = [], [], []
    for mine in classes_each:
        rows = range(len(labels), len(labels) + per_class * len(mine))
        train.append(list(rows))
        labels += [label for label in mine for _ in range(per_class)] + [mine[0]]
        test.append([len(labels) - 1])
    names = [f"c{k}" for k in range(len(train))]
    return Federation(
        Features(torch.zeros(len(labels), 1)), torch.tensor(labels), Problem.of_classes(num_classes, class_names),
        Ragged.of(train), Ragged.empty(len(train)), Ragged.of(test), names, **more,
    )  # fmt: skip


def printed(description, width=100, **options) -> str:
    console = Console(file=io.StringIO(), width=width, **options)
    console.print(FederationView(description))
    return console.file.getvalue()


def test_emd_of_one_class_of_ten():
    """P-11: 1.80 by the definition, 2.70 by FedFomo's code (the published value for ten distributions)."""
    d = describe(clients_with([[c] for c in range(10)]))
    assert d.emd == pytest.approx([1.8] * 10)
    assert d.emd_code == pytest.approx([2.7] * 10)
    assert (d.mean_emd, d.mean_emd_code) == (pytest.approx(1.8), pytest.approx(2.7))


def test_emd_of_two_classes_of_ten():
    d = describe(clients_with([[c, (c + 1) % 10] for c in range(10)]))
    assert d.emd == pytest.approx([1.6] * 10)
    assert d.emd_code == pytest.approx([2.4] * 10)


def test_emd_of_the_whole_is_zero():
    d = describe(clients_with([list(range(10))] * 3))
    assert d.emd == pytest.approx([0] * 3)
    assert d.emd_code == pytest.approx([0] * 3)


@given(st.lists(st.lists(st.integers(0, 9), min_size=4, max_size=4), min_size=1, max_size=5))
def test_emd_against_plain_loops(counts):
    counts = np.array(counts) + np.eye(len(counts), 4, dtype=int)  # nobody is empty
    counts = counts + (counts.sum(1, keepdims=True) == 0)
    whole = counts.sum(0) / counts.sum()
    for k, row in enumerate(counts):
        own = row / row.sum()
        proper = sum(abs(own[y] - whole[y]) for y in range(4))
        code = sum(abs(own[y] - whole[y]) for y in range(4) if own[y] > 0)
        code += sum(abs(own[y] - whole[y]) for y in range(4) if whole[y] > 0)
        assert float(emd(torch.tensor(counts))[k]) == pytest.approx(proper)
        assert float(emd_code(torch.tensor(counts))[k]) == pytest.approx(code)
        assert 0 <= proper <= 2
        assert proper <= code + 1e-12 <= 3 + 1e-9


def test_description_is_json_with_the_agreed_fields():
    f = make_federation(load_source("digits"), "classes", 6).with_validation(0.2, 0)
    d = describe(f)
    content = json.loads(json.dumps(d.to_json()))
    assert content.keys() >= {
        "names", "problem", "targets", "train", "val", "test", "groups", "group_names",
        "emd", "emd_code", "mean_emd", "description", "notes",
    }  # fmt: skip
    assert content["train"] == f.class_counts("train").tolist()
    assert content["val"] == f.class_counts("val").tolist()
    assert content["test"] == f.class_counts("test").tolist()
    assert d.sizes("train") == f.train.count.tolist()
    assert d.classes_held == [3] * 6
    assert content["description"]["partition"] == "classes"


@pytest.mark.parametrize("groups", [None, torch.tensor([0, 1, 1])])
def test_a_description_reads_itself_back(groups):
    d = describe(clients_with([[0], [1, 2], [0, 9]], groups=groups, group_names=None if groups is None else ["x", "y"]))
    assert Description.from_json(json.loads(json.dumps(d.to_json())), "federation-0.json") == d
    assert d.class_labels == [str(number) for number in range(10)]
    assert replace(d, problem=Problem.of_classes(2, ["a", "b"])).class_labels == ["a", "b"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"names": None}, "names should be a valid list"),
        ({"problem": {"kind": "many"}}, "problem"),
        ({"train": [[1, 2]]}, r"train should hold 2 clients with 3 counts each, got 1 clients with \[2\] counts"),
        ({"groups": [0]}, "1 groups given for 2 clients"),
        ({"problem": {"kind": "multiclass", "num_classes": 3, "class_names": ["a"]}}, "3 classes but 1 class names"),
    ],
)
def test_what_does_not_describe_a_federation_is_refused(change, message):
    content = describe(clients_with([[0], [1, 2]], num_classes=3)).to_json()
    with pytest.raises(StorageError, match=f"here.*{message}"):
        Description.from_json(content | change, "here")
    del content["emd"]
    with pytest.raises(StorageError, match="emd is missing"):
        Description.from_json(content, "here")


def test_picture_shows_who_holds_what():
    text = printed(describe(clients_with([[0], [0, 9], list(range(10))])))
    lines = {line.split()[0]: line for line in text.splitlines() if line.strip().startswith("c") and "." in line}
    assert lines["c0"].split()[4:] == ["█"] + ["·"] * 9
    assert lines["c1"].split()[4:] == ["▓"] + ["·"] * 8 + ["▓"]
    assert lines["c2"].split()[4:] == ["▒"] * 10
    assert lines["c2"].split()[1:3] == ["60", "1"]
    assert "3 clients, classification, 10 classes, 78 train + 3 test examples" in text


def test_picture_without_colour_or_unicode():
    class Ascii(io.StringIO):
        encoding = "ascii"

    d = describe(clients_with([[0], [1, 2]]))
    console = Console(file=Ascii(), width=90)
    console.print(FederationView(d))
    text = console.file.getvalue()
    assert text.isascii()
    assert "# . . ." in text
    assert "\x1b[" not in printed(d)
    assert "\x1b[" in printed(d, force_terminal=True, color_system="standard")


def test_many_clients_are_sampled_from_largest_to_smallest():
    classes = [[k % 10] for k in range(100)]
    f = clients_with(classes)
    keep = torch.arange(100) % 6 + 1  # unequal sizes
    train, _ = f.train.split_at(keep)
    d = describe(
        Federation(
            f.features, f.labels, Problem.of_classes(10), train, f.val, f.test, f.names, notes=["something to know"]
        )
    )
    text = printed(d)
    assert f"{MOST_CLIENTS} of 100 clients, from the largest to the smallest" in text
    shown = [line for line in text.splitlines() if line.strip().startswith("c") and "·" in line]
    sizes = [int(line.split()[1]) for line in shown]
    assert len(shown) == MOST_CLIENTS
    assert sizes == sorted(sizes, reverse=True)
    assert (sizes[0], sizes[-1]) == (6, 1)
    assert "note: something to know" in text


@pytest.mark.parametrize("width", [40, 80, 100, 200])
@pytest.mark.parametrize("num_classes", [2, 26, 100, 1000])
def test_picture_fits_the_terminal(width, num_classes):
    f = clients_with([[0, num_classes - 1], [1]], num_classes, class_names=[f"name {c}" for c in range(num_classes)])
    for line in printed(describe(f), width).splitlines():
        assert len(line) <= width


def test_alike_names_are_replaced_by_numbers():
    f = clients_with([[0], [1]], 40, class_names=[f"same {c}" for c in range(40)])
    text = printed(describe(f), 130)
    assert "0 1 2 3 4 5 6 7 8 9 0 1" in text
    assert "s s s" not in text


def test_groups_are_shown():
    f = clients_with([[0], [1]], groups=torch.tensor([1, 0]), group_names=["laptop", "phone"])
    text = printed(describe(f))
    assert "phone" in next(line for line in text.splitlines() if line.strip().startswith("c0"))
