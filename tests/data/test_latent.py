"""Latent distributions: embeddings, clusters, and how their rows reach the clients."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from realdata import real_data
from sklearn.decomposition import PCA
from torch import Tensor

from kinfed.data.examples.features import Features
from kinfed.data.examples.problem import Problem
from kinfed.data.federations.description import describe
from kinfed.data.partitions import latent, make_federation
from kinfed.data.partitions.latent import Embedder, Latent, principal_components, small_cnn, vgg11
from kinfed.data.sources import load_source
from kinfed.data.sources.source import Source
from kinfed.errors import ConfigError


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("KINFED_CACHE", str(tmp_path))
    return tmp_path


def blobs(per_blob: int = 40, kinds: int = 3, *, official: bool = True, side: int = 8) -> tuple[Source, Tensor]:
    """Images that are bright in one of several corners, and which one; labels say something else."""
    draw = np.random.default_rng(0)
    kind = draw.permutation(np.repeat(np.arange(kinds), per_blob))
    raw = draw.integers(0, 40, (len(kind), 1, side, side))
    half = side // 2
    for k in range(kinds):
        y, x = divmod(k, 2)
        raw[kind == k, :, y * half : (y + 1) * half, x * half : (x + 1) * half] += 180
    labels = torch.from_numpy(draw.integers(0, 2, len(kind)))
    is_test = torch.from_numpy(draw.random(len(kind)) < 0.25) if official else None
    features = Features(torch.from_numpy(raw.astype(np.uint8)), None, torch.tensor(255.0))
    return Source("blobs", features, labels, Problem.of_classes(2), is_test), torch.from_numpy(kind)


def members(rows: Tensor, kind: Tensor) -> set[int]:
    return set(kind[rows].tolist())


# Sharing out.


@pytest.mark.parametrize("official", [True, False])
def test_clients_of_a_group_share_one_cluster_equally(official: bool) -> None:
    source, kind = blobs(official=official)
    federation = make_federation(source, "latent", 7, {"groups": 3}, seed=4)
    assert federation.groups is not None
    assert federation.groups.tolist() == [0, 0, 0, 1, 1, 2, 2]
    assert federation.group_names == ["distribution 0", "distribution 1", "distribution 2"]
    found = []
    for group in range(3):
        clients = (federation.groups == group).nonzero().squeeze(1).tolist()
        kinds = [members(torch.cat([federation.train[k], federation.test[k]]), kind) for k in clients]
        assert len(kinds[0]) == 1
        assert all(one == kinds[0] for one in kinds)
        found += kinds[0]
        for split in (federation.train, federation.test):
            sizes = [len(split[k]) for k in clients]
            assert max(sizes) - min(sizes) <= 1
    assert sorted(found) == [0, 1, 2]
    everyone = torch.cat([federation.train.rows, federation.test.rows])
    assert sorted(everyone.tolist()) == list(range(len(source)))
    if official:
        assert source.is_test is not None
        assert bool(source.is_test[federation.test.rows].all())
        assert not bool(source.is_test[federation.train.rows].any())


def test_seeds_deal_the_rows_of_the_same_clusters() -> None:
    source, kind = blobs()
    one, other = (make_federation(source, "latent", 6, {"groups": 3}, seed=s) for s in (0, 1))
    assert not torch.equal(one.train.rows, other.train.rows)
    for client in range(6):
        assert members(one.train[client], kind) == members(other.train[client], kind)


def test_classes_can_be_the_distributions() -> None:
    federation = make_federation(load_source("digits"), "latent", 20, {"groups": 10, "by_label": True})
    counts = federation.class_counts("train")
    assert bool(((counts > 0).sum(1) == 1).all())
    assert counts.argmax(1).tolist() == [k // 2 for k in range(20)]
    assert federation.group_names == [str(c) for c in range(10)]
    summary = describe(federation)
    assert summary.mean_emd == pytest.approx(1.8, abs=0.01)
    assert summary.mean_emd_code == pytest.approx(2.7, abs=0.01)  # what the published tables show for D = 10


@pytest.mark.parametrize(
    ("options", "clients", "message"),
    [
        ({"groups": 4}, 3, "at least as many clients"),
        ({"groups": 0}, 3, "groups must be at least 1"),
        ({"groups": 5, "by_label": True}, 9, "has 2 classes"),
        ({"embedder": "resnet"}, 9, "embedder"),
        ({"components": 0}, 9, "at least 1"),
        ({"epochs": 0}, 9, "at least 1"),
        ({"embedder": "vgg11", "image_size": 16}, 9, "at least 32"),
        ({"groups": 3}, 100, "training examples for"),
    ],
)
def test_what_cannot_be_shared_out_is_refused(options: dict[str, Any], clients: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_federation(blobs()[0], "latent", clients, options)


def test_too_few_kinds_of_examples_are_refused() -> None:
    raw = torch.tensor([[0.0]] * 10 + [[1.0]] * 10)
    source = Source("two", Features(raw), torch.zeros(20, dtype=torch.int64), Problem.of_classes(1))
    with pytest.raises(ConfigError, match="only 2 kinds"):
        make_federation(source, "latent", 5, {"groups": 3})


def test_networks_and_tokens_have_their_limits() -> None:
    table = Source("table", Features(torch.rand(30, 4)), torch.zeros(30, dtype=torch.int64), Problem.of_classes(1))
    with pytest.raises(ConfigError, match="is for images"):
        make_federation(table, "latent", 5, {"groups": 2, "embedder": "cnn"})
    words = replace(table, features=Features(torch.ones(30, 4, dtype=torch.int64)))
    with pytest.raises(ConfigError, match="tokens"):
        make_federation(words, "latent", 5, {"groups": 2})


def test_a_table_is_scaled_before_it_is_embedded() -> None:
    """Two kinds differ in a feature whose unit is tiny beside the other's."""
    draw = np.random.default_rng(1)
    kind = np.repeat([0, 1], 50)
    x = np.stack([1e4 * draw.normal(size=100), kind + 0.01 * draw.normal(size=100)], 1).astype(np.float32)
    features, labels = Features(torch.from_numpy(x)), torch.zeros(100, dtype=torch.int64)
    for scaled in (True, False):
        source = Source("table", features, labels, Problem.of_classes(1), standardize=scaled)
        label, _ = Latent(groups=2)._clusters(source)
        agree = float((label.numpy() == kind).mean())
        assert (max(agree, 1 - agree) > 0.9) == scaled


# Embeddings.


@given(st.integers(2, 40), st.integers(1, 12), st.integers(1, 15), st.integers(0, 99))
def test_principal_components_are_scikit_learns(n: int, width: int, components: int, seed: int) -> None:
    x = np.random.default_rng(seed).normal(3.0, 2.0, (n, width)).astype(np.float32)
    ours = principal_components(lambda rows: torch.from_numpy(x)[rows], n, components)
    kept = min(components, n, width)
    assert ours.shape == (n, kept)
    theirs = PCA(kept, svd_solver="full").fit_transform(x.astype(np.float64))
    distance = torch.cdist(torch.from_numpy(theirs), torch.from_numpy(theirs))
    torch.testing.assert_close(torch.cdist(ours, ours).to(torch.float64), distance, rtol=1e-2, atol=2e-2)


def test_principal_components_are_taken_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.from_numpy(np.random.default_rng(2).normal(size=(50, 6)).astype(np.float32))
    whole = principal_components(lambda rows: x[rows], 50, 3)
    monkeypatch.setattr(latent, "ROWS_AT_ONCE", 7)
    parts = principal_components(lambda rows: x[rows], 50, 3)
    torch.testing.assert_close(parts.abs(), whole.abs(), rtol=1e-4, atol=1e-5)


def test_vgg11_is_the_network_of_the_paper() -> None:
    """At 224 pixels 132.9 million parameters in 8 convolutions and 3 dense layers; the embedding has 4096 numbers."""
    with torch.device("meta"):
        body, head = vgg11(3, 224, 1000)
    convolutions = [m for m in body.modules() if isinstance(m, torch.nn.Conv2d)]
    dense = [m for part in (body, head) for m in part.modules() if isinstance(m, torch.nn.Linear)]
    assert [c.out_channels for c in convolutions] == [64, 128, 256, 256, 512, 512, 512, 512]
    assert [(d.in_features, d.out_features) for d in dense] == [(25088, 4096), (4096, 4096), (4096, 1000)]
    weights = sum(p.numel() for m in [*convolutions, *dense] for name, p in m.named_parameters() if name == "weight")
    assert weights == 132_851_392
    assert body(torch.zeros(1, 3, 224, 224, device="meta")).shape == (1, 4096)
    with torch.device("meta"):
        small, _ = vgg11(1, 32, 10)
        tiny, _ = small_cnn(1, 8, 10)
    assert small(torch.zeros(2, 1, 32, 32, device="meta")).shape == (2, 4096)
    assert tiny(torch.zeros(2, 1, 8, 8, device="meta")).shape == (2, 256)


def test_a_network_learns_repeats_and_leaves_the_global_generator_alone() -> None:
    digits = load_source("digits")
    held_out = torch.zeros(len(digits), dtype=torch.bool)
    held_out[::4] = True
    embed = Embedder("cnn", components=16, epochs=3)
    state = torch.get_rng_state()
    first = embed(digits.features, digits.labels, 10, held_out)
    assert torch.equal(torch.get_rng_state(), state)
    vectors, accuracy = first
    assert vectors.shape == (len(digits), 16)
    assert accuracy > 0.8
    torch.manual_seed(99)
    assert torch.equal(embed(digits.features, digits.labels, 10, held_out)[0], vectors)


def test_held_out_rows_are_not_learned_from() -> None:
    """Their labels are wrong throughout, and the network does not notice."""
    digits = load_source("digits")
    held_out = torch.zeros(len(digits), dtype=torch.bool)
    held_out[::3] = True
    wrong = torch.where(held_out, (digits.labels + 1) % 10, digits.labels)
    _, accuracy = Embedder("cnn", components=8, epochs=2)(digits.features, wrong, 10, held_out)
    assert accuracy < 0.1


def test_vgg11_on_a_handful_of_coloured_images(cache: Path) -> None:
    source, kind = blobs(8, 2, side=16)
    source.features = Features(source.features.raw.expand(-1, 3, -1, -1).contiguous(), None, torch.tensor(255.0))
    options = {"groups": 2, "embedder": "vgg11", "epochs": 1, "components": 4}
    federation = make_federation(source, "latent", 2, options)
    assert federation.num_clients == 2
    (note,) = [note for note in federation.notes if "vgg11" in note]
    assert "on test rows" in note
    assert len(kind) == 16
    assert len(list((cache / "embedded").glob("*-embedding.safetensors"))) == 1


def test_notes_say_what_the_clusters_rest_on() -> None:
    source, _ = blobs(official=False)
    (note,) = make_federation(source, "latent", 6, {"groups": 3}).notes
    assert "stand-in for the VGG-11 embeddings" in note
    (note,) = make_federation(source, "latent", 6, {"groups": 3, "embedder": "cnn", "epochs": 1}).notes
    assert "cnn embeddings" in note
    assert "on held-out rows" in note
    assert "at least 85%" in note


# The cache.


def test_an_embedding_is_made_once(cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:  # fmt: skip # noqa: E501
    source, _ = blobs()
    made: list[str] = []
    original = latent._embed

    def counted(*arguments: Any) -> Any:
        made.append("embedding")
        return original(*arguments)

    monkeypatch.setattr(latent, "_embed", counted)
    monkeypatch.setattr(latent, "CACHED_FROM", 1)
    first = make_federation(source, "latent", 6, {"groups": 3})
    again = make_federation(source, "latent", 6, {"groups": 3})
    assert len(made) == 1
    assert torch.equal(first.train.rows, again.train.rows)
    make_federation(source, "latent", 6, {"groups": 2})  # other clusters of the same embedding
    assert len(made) == 1
    make_federation(source, "latent", 6, {"groups": 3, "components": 2})
    assert len(made) == 2
    changed, _ = blobs()
    changed.features.raw[0, 0, 0, 0] += 1
    make_federation(changed, "latent", 6, {"groups": 3})
    assert len(made) == 3
    for file in (cache / "embedded").glob("*"):
        file.write_bytes(b"damaged")
    with caplog.at_level(logging.WARNING):
        repaired = make_federation(source, "latent", 6, {"groups": 3})
    assert "making it again" in caplog.text
    assert torch.equal(repaired.train.rows, first.train.rows)


def test_quick_embeddings_are_not_kept(cache: Path) -> None:
    make_federation(blobs()[0], "latent", 6, {"groups": 3})
    assert not (cache / "embedded").exists()


def test_real_images(monkeypatch: pytest.MonkeyPatch) -> None:
    data = real_data("cifar100_subset")
    source = load_source("cifar100_subset", data)
    federation = make_federation(source, "latent", 10, {"groups": 5, "components": 32})
    assert int(federation.train.count.min()) >= 20
    assert source.is_test is not None
    assert bool(source.is_test[federation.test.rows].all())
    assert 0.1 < describe(federation).mean_emd < 1.9
