from __future__ import annotations

import io
import logging
import os
import re
import shutil
from pathlib import Path

import huggingface_hub
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from realdata import real_data
from sklearn.datasets import load_digits

from kinfed.core.cache import cache_folder
from kinfed.data.examples.features import Features
from kinfed.data.examples.problem import Problem
from kinfed.data.sources import SOURCES, hub, image_sets, load_source
from kinfed.data.sources.image_sets import standardized
from kinfed.data.sources.registered import names_clients
from kinfed.data.sources.source import Source
from kinfed.errors import ConfigError, DataError


def encoded(pixels: np.ndarray, kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind, **({"lossless": True} if kind == "WEBP" else {}))
    return buffer.getvalue()


def write_images(file: Path, pixels: np.ndarray, labels: list[int], image="image", label="label", kind="PNG") -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"bytes": encoded(one, kind), "path": None} for one in pixels]
    kinds = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    pq.write_table(pa.table({image: pa.array(rows, kinds), label: labels}), file)


@pytest.fixture(autouse=True)
def _own_folders(tmp_path, monkeypatch):
    monkeypatch.setenv("KINFED_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("KINFED_DATA", str(tmp_path / "data"))


@pytest.fixture
def tiny_mnist(tmp_path):
    """Six training and two test images, pixel values by formula."""
    folder = tmp_path / "data" / "mnist"
    train = np.arange(6 * 28 * 28).reshape(6, 28, 28).astype(np.uint8)
    write_images(folder / "train-00000-of-00001.parquet", train, [3, 1, 4, 1, 5, 9])
    write_images(folder / "test-00000-of-00001.parquet", 255 - train[:2], [2, 6])
    return folder


@pytest.fixture
def no_hub(monkeypatch):
    calls = []

    def offline(*args, **kwargs):
        calls.append(args)
        raise ConnectionError("no route to host\nsecond line")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    return calls


def test_digits_needs_no_file():
    source = load_source("digits")
    assert len(source) == 1797
    assert source.features.shape == (1, 8, 8)
    assert source.features.raw.dtype == torch.uint8
    x = source.features.gather(torch.arange(1797))
    assert (float(x.min()), float(x.max())) == (0.0, 1.0)
    assert torch.bincount(source.labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert not source.has_official_test
    theirs = load_digits()
    np.testing.assert_array_equal(source.features.raw[:, 0], theirs.images)
    np.testing.assert_array_equal(source.labels, theirs.target)


def test_images_decode_to_what_was_stored(tiny_mnist):
    source = load_source("mnist")
    assert source.features.raw.shape == (8, 1, 28, 28)
    expected = np.arange(6 * 28 * 28).reshape(6, 1, 28, 28).astype(np.uint8)
    assert torch.equal(source.features.raw[:6], torch.from_numpy(expected))
    assert source.labels.tolist() == [3, 1, 4, 1, 5, 9, 2, 6]
    assert source.is_test.tolist() == [False] * 6 + [True] * 2
    assert source.class_names == image_sets.DIGITS
    assert source.rows(test=True).tolist() == [6, 7]


def test_colour_images_put_channels_first(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (3, 32, 32, 3)).astype(np.uint8)
    for split in ("train", "test"):
        write_images(tmp_path / f"data/cifar10/{split}-00000-of-00001.parquet", pixels, [0, 1, 9], "img", kind="WEBP")
    source = load_source("cifar10")
    assert torch.equal(source.features.raw[3:], torch.from_numpy(pixels).permute(0, 3, 1, 2))
    x = source.features.gather(torch.arange(6))
    torch.testing.assert_close(x[0, 2, 3, 4], torch.tensor((pixels[0, 3, 4, 2] / 255 - 0.5) / 0.5, dtype=torch.float32))


def test_files_in_subfolders_are_found(tiny_mnist):
    (tiny_mnist / "mnist").mkdir()
    for file in tiny_mnist.glob("*.parquet"):
        file.rename(tiny_mnist / "mnist" / file.name)
    assert len(load_source("mnist")) == 8


def test_explicit_data_folder_wins(tiny_mnist, tmp_path, no_hub):
    assert len(load_source("mnist", tmp_path / "data")) == 8
    with pytest.raises(DataError, match=str(tmp_path / "elsewhere")):
        load_source("mnist", tmp_path / "elsewhere")


# Standardization.


def test_standardization_schemes_by_hand():
    raw = torch.tensor([0, 255], dtype=torch.uint8).reshape(2, 1, 1, 1).repeat(1, 3, 2, 2)
    raw[:, :, 0, 0] = 7  # a constant pixel
    in_order = torch.arange(2)

    def at(how, *place):
        return standardized(raw, how).gather(in_order)[(slice(None), *place)].tolist()

    assert at("unit", 0, 1, 1) == [0.0, 1.0]
    assert at("centred", 0, 1, 1) == [-1.0, 1.0]
    assert at("pixel", 0, 1, 1) == pytest.approx([-127.5 / 127.501, 127.5 / 127.501])
    assert at("pixel", 0, 0, 0) == [0.0, 0.0]
    assert at("imagenet", 1, 1, 1) == pytest.approx([-0.456 / 0.224, (1 - 0.456) / 0.224], rel=1e-5)
    with pytest.raises(ConfigError, match="colour images"):
        standardized(raw[:, :1], "imagenet")


def test_pixel_statistics_are_those_of_numpy(tiny_mnist):
    source = load_source("mnist", options={"standardize": "pixel"})
    raw = source.features.raw.numpy().astype(np.float64)
    expected = (raw - raw.mean(0)) / (raw.std(0) + 0.001)
    np.testing.assert_allclose(source.features.gather(torch.arange(8)).numpy(), expected, atol=2e-4)
    assert source.options == {"standardize": "pixel", "examples": None}


def test_fewer_examples_keep_their_labels_and_the_proportion_of_test_rows(tmp_path):
    pixels = np.arange(40, dtype=np.uint8)[:, None, None].repeat(4, 1).repeat(4, 2)
    labels = [i % 10 for i in range(40)]
    write_images(tmp_path / "data" / "mnist" / "train-00000-of-00001.parquet", pixels[:30], labels[:30])
    write_images(tmp_path / "data" / "mnist" / "test-00000-of-00001.parquet", pixels[30:], labels[30:])
    source = load_source("mnist", tmp_path / "data", 0, {"examples": 12})
    again = load_source("mnist", tmp_path / "data", 7, {"examples": 12})
    number = source.features.raw[:, 0, 0, 0].tolist()  # every image is its own number
    assert len(set(number)) == 12
    assert source.labels.tolist() == [n % 10 for n in number]
    assert source.is_test.tolist() == [n >= 30 for n in number]
    assert int(source.is_test.sum()) == 3  # a quarter, as of all
    assert torch.equal(again.features.raw, source.features.raw)  # one data set, whatever the seed
    assert "12 of the 40 images" in source.notes[-1]


@pytest.mark.parametrize("examples", [0, 9])
def test_examples_must_be_there(tiny_mnist, examples):
    with pytest.raises(ConfigError, match=rf"examples takes 1 to 8 images of mnist; got {examples}"):
        load_source("mnist", options={"examples": examples})


# The hub.


def test_missing_files_are_fetched_into_the_data_folder(tiny_mnist, tmp_path, monkeypatch):
    remote = tmp_path / "remote"
    shutil.move(tiny_mnist, remote)
    asked = []

    def snapshot_download(repo_id, *, repo_type, allow_patterns, local_dir, revision):
        asked.append((repo_id, repo_type, allow_patterns))
        shutil.copytree(remote, Path(local_dir) / "mnist")
        (Path(local_dir) / "mnist" / "extra-00000-of-00001.parquet").write_text("not wanted")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert load_source("mnist").labels.tolist() == [3, 1, 4, 1, 5, 9, 2, 6]
    assert asked == [("ylecun/mnist", "dataset", ["*.parquet"])]
    names = sorted(path.name for path in tiny_mnist.iterdir())
    assert names == ["test-00000-of-00001.parquet", "train-00000-of-00001.parquet"]
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["mnist"], "no temporary folder stays"
    load_source("mnist")
    assert len(asked) == 1


def test_a_failed_fetch_says_what_to_put_where_and_leaves_nothing(tmp_path, no_hub):
    with pytest.raises(DataError) as caught:
        load_source("fashion_mnist")
    message = str(caught.value)
    assert "zalando-datasets/fashion_mnist" in message
    assert "no route to host" in message
    assert "second line" not in message
    assert f"put train-*.parquet and test-*.parquet into {tmp_path / 'data' / 'fashion_mnist'}" in message
    assert not (tmp_path / "data").exists()


def test_a_hub_without_the_files_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *args, **kwargs: "")
    with pytest.raises(DataError, match=r"did not contain train-\*\.parquet"):
        load_source("mnist")


def test_a_missing_shard_is_named(tiny_mnist, no_hub):
    (tiny_mnist / "train-00000-of-00001.parquet").rename(tiny_mnist / "train-00001-of-00003.parquet")
    with pytest.raises(DataError, match=r"put train-00000-of-00003\.parquet and train-00002-of-00003\.parquet into"):
        load_source("mnist")


def test_cifar100_points_to_the_subset_and_the_subset_is_not_fetched(no_hub):
    with pytest.raises(DataError, match="cifar100_subset"):
        load_source("cifar100")
    with pytest.raises(DataError, match="put train"):
        load_source("cifar100_subset")
    assert len(no_hub) == 1


def test_cache_and_data_folders(monkeypatch, tmp_path):
    monkeypatch.delenv("KINFED_DATA")
    assert hub.data_folder(None) == tmp_path / "cache" / "data"
    monkeypatch.delenv("KINFED_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_folder() == Path("/x/kinfed")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/h")
    assert hub.data_folder(None) == Path("/h/.cache/kinfed/data")
    assert hub.data_folder(Path("~/d")) == Path("/h/d")


# The cache of decoded images.


@pytest.fixture
def decodings(monkeypatch):
    """How often images were decoded."""
    calls = []
    original = image_sets.decode
    monkeypatch.setattr(image_sets, "decode", lambda *args: calls.append(args[1]) or original(*args))
    return calls


def test_images_are_decoded_once(tiny_mnist, decodings, tmp_path):
    first, again = load_source("mnist"), load_source("mnist", options={"standardize": "centred"})
    assert len(decodings) == 2  # one per file
    assert torch.equal(first.features.raw, again.features.raw)
    assert torch.equal(first.is_test, again.is_test)
    assert not [p for p in (tmp_path / "cache").rglob("*") if p.is_file() and p.suffix != ".safetensors"]


def test_changed_files_are_decoded_anew(tiny_mnist, decodings):
    load_source("mnist")
    file = tiny_mnist / "test-00000-of-00001.parquet"
    write_images(file, np.zeros((2, 28, 28), np.uint8), [7, 7])
    assert load_source("mnist").labels.tolist()[6:] == [7, 7]
    assert len(decodings) == 4
    os.utime(file, ns=(1, 1))  # the same size, another time
    load_source("mnist")
    assert len(decodings) == 6


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty"])
def test_a_damaged_cache_is_rebuilt(tiny_mnist, decodings, tmp_path, damage, caplog):
    expected = load_source("mnist").features.raw
    (file,) = (tmp_path / "cache").rglob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    file.write_bytes({"cut": content[:-50], "flipped": content, "empty": b""}[damage])
    with caplog.at_level(logging.WARNING):
        assert torch.equal(load_source("mnist").features.raw, expected)
    assert "damaged" in caplog.text
    load_source("mnist")
    assert len(decodings) == 4, "rebuilt once, then read"


def test_loading_works_without_a_writable_cache(tiny_mnist, tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("KINFED_CACHE", str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING):
        assert len(load_source("mnist")) == 8
    assert re.search("mnist-.* will be made again next time", caplog.text)


# Bad files.


def test_a_damaged_parquet_file_is_named(tiny_mnist):
    (tiny_mnist / "test-00000-of-00001.parquet").write_bytes(b"PAR1 and nothing")
    with pytest.raises(DataError, match=r"cannot read .*test-00000-of-00001\.parquet as Parquet"):
        load_source("mnist")


def test_a_foreign_parquet_file_is_named(tiny_mnist):
    pq.write_table(pa.table({"text": ["a"], "label": [0]}), tiny_mnist / "test-00000-of-00001.parquet")
    with pytest.raises(DataError, match="has no column image; it has text, label"):
        load_source("mnist")


def test_labels_outside_the_classes_are_refused(tiny_mnist):
    write_images(tiny_mnist / "test-00000-of-00001.parquet", np.zeros((1, 28, 28), np.uint8), [10])
    with pytest.raises(DataError, match=r"labels must lie in 0\.\.9; found 1\.\.10"):
        load_source("mnist")


def test_missing_labels_are_refused(tiny_mnist):
    write_images(tiny_mnist / "test-00000-of-00001.parquet", np.zeros((2, 28, 28), np.uint8), [1, None])
    with pytest.raises(DataError, match="column label has empty cells"):
        load_source("mnist")


def test_files_with_other_image_sizes_are_refused(tiny_mnist):
    write_images(tiny_mnist / "test-00000-of-00001.parquet", np.zeros((1, 8, 8), np.uint8), [1])
    with pytest.raises(DataError, match="differ in size"):
        load_source("mnist")


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (b"not an image", "cannot decode the image in row 1"),
        (None, "the image in row 1 is missing"),
        (encoded(np.zeros((4, 5), np.uint8)), "row 1 is 5x4 gray, the first one 3x3 gray"),
        (encoded(np.zeros((3, 3, 3), np.uint8)), "row 1 is 3x3 RGB"),
        (encoded(np.zeros((3, 3), np.uint16)), "more than 8 bits"),
        (encoded(np.zeros((3, 3), np.uint8))[:40], "cannot decode the image in row 1"),
        (Path("/nowhere/x.png"), "/nowhere/x.png, does not exist"),
    ],
)
def test_bad_images_are_named(bad, message):
    with pytest.raises(DataError, match=f"here: .*{message}"):
        image_sets.decode([encoded(np.zeros((3, 3), np.uint8)), bad], "here")


# The catalogue.


def test_unknown_names_get_near_ones():
    with pytest.raises(ConfigError, match=r"unknown data set 'minst'; did you mean mnist.*\.csv"):
        load_source("minst")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("digits", {"standardize": "unit"}, "data set digits has no options"),
        ("mnist", {"standardise": "unit"}, "did you mean standardize"),
        ("mnist", {"standardize": "weird"}, r"standardize must be unit \| centred"),
        ("letters", {"letters": 1}, r"letters must be in \[2, 26\]; got 1"),
        ("letters", {"letters": "ten"}, "letters must be int; got 'ten'"),
    ],
)
def test_bad_options_are_explained(name, options, message):
    with pytest.raises(ConfigError, match=message):
        load_source(name, options=options)


def test_every_entry_is_documented():
    for entry in SOURCES.values():
        assert entry.summary
        assert all(option.text for option in entry.describe_options())


def test_the_registry_is_open():
    def load(options, data_dir, seed):
        features = Features(torch.full((4, 1), float(seed)))
        return Source("constant", features, torch.tensor([0, 1, 0, 1]), Problem.of_classes(2))

    try:
        SOURCES.register("constant", load, summary="a constant", names_clients=True)
        assert load_source("constant", seed=3).features.raw[0].item() == 3
        assert names_clients("constant")
        assert not names_clients("digits")
        with pytest.raises(ConfigError, match="registered already"):
            SOURCES.register("constant", load)
    finally:
        SOURCES.unregister("constant")


# Real files.


def test_letters_take_the_first_ten(tmp_path):
    folder = tmp_path / "data" / "ocr_letters_lowercase"
    write_images(folder / "all-00000-of-00001.parquet", np.zeros((4, 16, 8), np.uint8), [0, 9, 10, 25])
    ten, in_order = load_source("letters"), load_source("letters", options={"letters": 26})
    assert ten.labels.tolist() == [0, 9]
    assert ten.class_names == list("abcdefghij")
    assert in_order.labels.tolist() == [0, 9, 10, 25]
    assert any("stand-in" in note for note in ten.notes)


def test_real_cifar100_subset():
    source = load_source("cifar100_subset", real_data("cifar100_subset"))
    assert source.features.raw.shape == (2400, 3, 32, 32)
    assert source.num_classes == 20
    assert source.class_names[:3] == ["apple", "aquarium_fish", "baby"]
    assert torch.bincount(source.labels).tolist() == [120] * 20
    assert int(source.is_test.sum()) == 400
    assert any("not CIFAR-100 figures" in note for note in source.notes)


def test_real_mnist_test_images(tmp_path):
    """The published test file: first labels 7 2 1 0 4, mean pixel 0.1325."""
    official = real_data("mnist") / "mnist" / "test-00000-of-00001.parquet"
    for split in ("train", "test"):
        target = tmp_path / "data" / "mnist" / f"{split}-00000-of-00001.parquet"
        target.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pq.read_table(official).slice(0, 10_000 if split == "test" else 1), target)
    source = load_source("mnist")
    assert source.labels[1:6].tolist() == [7, 2, 1, 0, 4]
    assert float(source.features.gather(torch.arange(1, 10_001)).mean()) == pytest.approx(0.1325, abs=5e-5)


# FEMNIST: characters by writer.


def write_characters(file: Path, writers: list[str | None], characters: list[int]) -> None:
    """Images that are all as bright as their character's number."""
    pixels = np.stack([np.full((28, 28), character, np.uint8) for character in characters])
    write_images(file, pixels, characters, label="character")
    table = pq.read_table(file)
    pq.write_table(table.append_column("writer_id", pa.array(writers, pa.string())), file)


@pytest.fixture
def tiny_femnist(tmp_path: Path) -> Path:
    """Two files: digits, upper-case and lower-case letters of three writers."""
    folder = tmp_path / "data/femnist/data"
    write_characters(folder / "train-00000-of-00002.parquet", ["f9", "f10", "f9", "f9"], [0, 9, 10, 36])
    write_characters(folder / "train-00001-of-00002.parquet", ["f10", "é", "f10"], [35, 45, 61])
    return folder


def test_femnist_knows_its_writers(tiny_femnist):
    source = load_source("femnist")
    assert source.num_classes == 62
    assert [source.class_names[label] for label in source.labels.tolist()] == ["0", "9", "A", "a", "Z", "j", "z"]
    assert [source.owner_names[k] for k in source.owners.tolist()] == ["f9", "f10", "f9", "f9", "f10", "é", "f10"]
    assert source.features.raw[:, 0, 0, 0].tolist() == [0, 9, 10, 36, 35, 45, 61]
    assert source.is_test is None


@pytest.mark.parametrize(
    ("options", "characters", "writers"),
    [
        ({"characters": "lower"}, "ajz", ["f9", "é", "f10"]),
        ({"characters": "lower", "first": 10}, "aj", ["f9", "é"]),
        ({"characters": "upper"}, "AZ", ["f9", "f10"]),
        ({"characters": "digits", "first": 2}, "0", ["f9"]),
    ],
)
def test_femnist_of_one_kind_of_characters(tiny_femnist, options, characters, writers):
    """Writers of other characters alone are no clients."""
    source = load_source("femnist", options=options)
    assert "".join(source.class_names[label] for label in source.labels.tolist()) == characters
    assert [source.owner_names[k] for k in source.owners.tolist()] == writers
    assert sorted(source.owner_names) == sorted(writers)
    assert source.num_classes == options.get("first", 26)


def test_femnist_without_a_writer_or_a_character_is_told(tmp_path):
    file = tmp_path / "data/femnist/train-00000-of-00001.parquet"
    write_characters(file, ["f1", None], [0, 1])
    with pytest.raises(DataError, match="writer_id has empty cells"):
        load_source("femnist")
    write_characters(file, ["f1", "f2"], [0, 1])
    with pytest.raises(DataError, match="none of the characters a to z"):
        load_source("femnist", options={"characters": "lower"})


def test_femnist_that_is_not_what_it_should_be_is_told(tmp_path, tiny_femnist):
    with pytest.raises(ConfigError, match="characters=digits are 10; first=20 asks for more"):
        load_source("femnist", options={"characters": "digits", "first": 20})
    write_characters(tiny_femnist / "train-00001-of-00002.parquet", ["f1"], [62])
    with pytest.raises(DataError, match="numbers from 0 to 61; got 0 to 62"):
        load_source("femnist")
    write_images(tiny_femnist / "other.parquet", np.zeros((1, 14, 14), np.uint8), [0], label="character")
    table = pq.read_table(tiny_femnist / "other.parquet").append_column("writer_id", pa.array(["f1"]))
    pq.write_table(table, tiny_femnist / "train-00001-of-00002.parquet")
    with pytest.raises(DataError, match="images of its files differ in size"):
        load_source("femnist")


def test_femnist_is_fetched_where_it_is_missing(no_hub):
    with pytest.raises(DataError, match="flwrlabs/femnist"):
        load_source("femnist")
