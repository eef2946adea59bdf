"""Files: one checksum for all tensors, and writing that also works where open files cannot be renamed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import safetensors.torch
import torch

from kinfed.core import cache, storage
from kinfed.errors import StorageError

TENSORS = {
    "w": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "half": torch.ones(3, dtype=torch.bfloat16),
    "flag": torch.tensor(True),
}


def test_the_checksum_is_returned_stored_and_compared(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    checksum = storage.write_tensors(path, TENSORS, {"round": "3"})
    assert storage.read_metadata(path) == {"round": "3", storage.CHECKSUM: checksum}
    back = storage.read_tensors(path)
    assert storage.checksum(back) == checksum == storage.checksum(dict(reversed(TENSORS.items())))
    assert safetensors.torch.load_file(path).keys() == TENSORS.keys()


@pytest.mark.parametrize(
    "other",
    [
        TENSORS | {"w": TENSORS["w"].T},
        TENSORS | {"w": TENSORS["w"].to(torch.float64)},
        TENSORS | {"flag": torch.tensor([True])},
        {"v" if name == "w" else name: tensor for name, tensor in TENSORS.items()},
    ],
)
def test_a_checksum_tells_names_types_shapes_and_values_apart(other: dict[str, torch.Tensor]) -> None:
    assert storage.checksum(other) != storage.checksum(TENSORS)


def test_strides_and_blocks_do_not_change_a_checksum(monkeypatch: pytest.MonkeyPatch) -> None:
    base = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    whole = storage.checksum({"x": base.T.contiguous()})
    monkeypatch.setattr(storage, "BLOCK_BYTES", 1)
    assert storage.checksum({"x": base.T}) == whole


def test_a_file_without_a_checksum_is_refused(tmp_path: Path) -> None:
    safetensors.torch.save_file({"w": torch.ones(2)}, tmp_path / "foreign.safetensors")
    with pytest.raises(StorageError, match="does not match its checksum"):
        storage.read_tensors(tmp_path / "foreign.safetensors")


def test_json_files_hold_objects(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="does not exist; it should be the list of clients"):
        storage.read_json(tmp_path / "a.json", "the list of clients")
    (tmp_path / "a.json").write_text("[1]")
    with pytest.raises(StorageError, match="not the list of clients: it holds a list"):
        storage.read_json(tmp_path / "a.json", "the list of clients")


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs a list of open files")
def test_a_draft_is_closed_before_it_is_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows refuses to rename an open file."""
    real = os.replace

    def replace(source: Path, target: Path) -> None:
        opened = {os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink() and link.exists()}
        assert str(source) not in opened
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    storage.write_atomically(tmp_path / "a", b"content")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_folders_are_not_synced_where_they_cannot_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage.os, "name", "nt")
    monkeypatch.setattr(storage.os, "open", pytest.fail)
    storage.sync_folder(tmp_path)


def test_a_cached_name_stays_in_the_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name of a table's data set is the path of its file."""
    monkeypatch.setenv("KINFED_CACHE", str(tmp_path / "cache"))
    (tmp_path / "data").mkdir()
    calls = []

    def make() -> dict[str, torch.Tensor]:
        calls.append(1)
        return {"x": torch.ones(2)}

    for _ in range(2):
        assert cache.cached("embedded", f"{tmp_path}/data/mine.csv-1", make)["x"].tolist() == [1, 1]
    assert len(calls) == 1
    assert not any((tmp_path / "data").iterdir())
    assert len(list((tmp_path / "cache" / "embedded").iterdir())) == 1


def test_file_names_work_on_every_system() -> None:
    texts = ["a b", "a/b", "con", "CON.txt", "console", "nul", "com1", ".hidden", "..", "end.", "end%2E", "%63on", "ü"]
    names = [storage.file_name(text) for text in texts]
    assert len(set(names)) == len(texts)
    assert names[4] == "console"
    for name in names:
        assert not name.startswith(".")
        assert not name.endswith(".")
        assert name.partition(".")[0].lower() not in ("con", "nul", "com1")
        assert not set(name) & set('<>:"/\\|?* ')


def test_files_that_people_look_for_keep_their_letters() -> None:
    texts = ["Köln Süd", "Łódź", "Ko\u0308ln", "東京", " a ", "a/b", "con", "50 %", "A.", "Ω\u2126"]
    names = [storage.file_name(text, any_letters=True) for text in texts]
    assert names == [
        "Köln Süd", "Łódź", "Ko%CC%88ln", "東京", "%20a%20", "a%2Fb", "%63on", "50 %25", "A%2E", "Ω%E2%84%A6"
    ]  # fmt: skip


def test_the_digest_of_a_record_knows_no_order_of_keys_and_every_value() -> None:
    record = {"a": 1, "b": {"c": [1.5, None], "d": Path("x")}}
    again = {"b": {"d": "x", "c": [1.5, None]}, "a": 1}
    assert storage.record_digest(record) == storage.record_digest(again)
    assert storage.record_digest(record) != storage.record_digest(again | {"a": 2})
    assert len(storage.record_digest({})) == 64
