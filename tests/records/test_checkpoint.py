"""Snapshots: exact round trips, damage found and explained, and no moment at which a crash loses the old state."""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from kinfed.core import storage
from kinfed.errors import CheckpointError, StorageError
from kinfed.records.checkpoint import Checkpoints

LABEL = "ditto-0"


def state(round: int) -> dict[str, Tensor]:
    return {"w": torch.full((7,), float(round)), "steps": torch.tensor(round)}


def saved(folder: Path, rounds: int = 3, keep: int = 2) -> Checkpoints:
    checkpoints = Checkpoints(folder, "mine", keep)
    for round in range(1, rounds + 1):
        checkpoints.save(LABEL, round, state(round), {"seconds": 0.5 * round})
    return checkpoints


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / LABEL).iterdir())


def assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        bits = found[name].contiguous().view(-1).view(torch.uint8), tensor.contiguous().view(-1).view(torch.uint8)
        assert torch.equal(*bits), name


# What comes back


def test_every_kind_of_tensor_comes_back_bit_for_bit(tmp_path: Path) -> None:
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    tensors = {
        "float32": base,
        "float64": torch.tensor([0.1, -0.0, torch.inf, torch.nan], dtype=torch.float64),
        "float16": base.half(),
        "bfloat16": base.bfloat16(),
        "int64": torch.tensor([-(2**63), 2**63 - 1]),
        "int32": torch.tensor([1], dtype=torch.int32),
        "int16": torch.tensor([[-3]], dtype=torch.int16),
        "int8": torch.tensor([-1], dtype=torch.int8),
        "uint8": torch.tensor([255], dtype=torch.uint8),
        "bool": torch.tensor([True, False, True]),
        "scalar": torch.tensor(3.5),
        "flag": torch.tensor(True),
        "empty": torch.zeros(0),
        "no rows": torch.zeros(0, 5, dtype=torch.int64),
        "no columns": torch.zeros(5, 0),
        "transposed": base.T,
        "strided": base[:, ::2],
        "expanded": torch.tensor([1.0, 2.0]).expand(3, 2),
        "shared": base,
        "parameter": torch.nn.Parameter(base[1]),
        "nested.name/with ünicode": torch.tensor([1.0]),
    }
    checkpoints = Checkpoints(tmp_path, "mine")
    checkpoints.save(LABEL, 5, tensors, {})
    snapshot = checkpoints.latest(LABEL)
    assert snapshot is not None
    assert snapshot.round == 5
    assert_equal(snapshot.tensors, {name: tensor.detach() for name, tensor in tensors.items()})
    assert all(tensor.is_contiguous() for tensor in snapshot.tensors.values())


def test_small_values_come_back_exactly(tmp_path: Path) -> None:
    extra = {"sum": 0.1 + 0.2, "count": 2**70, "none": None, "deep": {"list": [1, [True, "ü\n"]]}, "big": float("inf")}
    checkpoints = Checkpoints(tmp_path, "mine")
    checkpoints.save(LABEL, 0, {}, extra | {"nan": float("nan"), "low": -float("inf"), "tuple": (1, 2)})
    snapshot = checkpoints.latest(LABEL)
    assert snapshot is not None
    assert snapshot.tensors == {}
    nan = snapshot.extra.pop("nan")
    assert nan != nan
    assert snapshot.extra == extra | {"low": -float("inf"), "tuple": [1, 2]}
    [record] = [name for name in names(tmp_path) if name.endswith(".json")]
    json.loads((tmp_path / LABEL / record).read_text(), parse_constant=pytest.fail)  # no NaN or Infinity literal


def test_what_json_would_change_is_refused(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, "mine")
    with pytest.raises(TypeError, match=r"extra\.best is a Tensor"):
        checkpoints.save(LABEL, 1, {}, {"best": torch.tensor(1)})
    with pytest.raises(TypeError, match="extra has the key 3"):
        checkpoints.save(LABEL, 1, {}, {3: 1})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match=r"cannot store 'c' of type torch\.complex64"):
        checkpoints.save(LABEL, 1, {"c": torch.zeros(1, dtype=torch.complex64)}, {})
    assert checkpoints.latest(LABEL) is None
    assert names(tmp_path) == []


@settings(max_examples=30)
@given(
    shapes=st.lists(st.lists(st.integers(0, 5), max_size=3), max_size=5),
    block=st.integers(1, 64),
    flip=st.booleans(),
)
def test_blocks_do_not_change_the_file(
    tmp_path_factory: pytest.TempPathFactory, shapes: list[list[int]], block: int, flip: bool
) -> None:
    """Any block size, also smaller than a row, writes what the safetensors library reads back."""
    folder = tmp_path_factory.mktemp("blocks")
    tensors = {}
    for index, shape in enumerate(shapes):
        tensor = torch.randn(shape).to(torch.float64 if index % 2 else torch.float32)
        tensors[f"t{index}"] = tensor.T if flip and tensor.dim() == 2 else tensor
    storage.write_tensors(folder / "whole", tensors)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "BLOCK_BYTES", block)
        storage.write_tensors(folder / "pieces", dict(reversed(tensors.items())), {})
        assert (folder / "pieces").read_bytes() == (folder / "whole").read_bytes()
    assert_equal(load_file(folder / "pieces"), tensors)


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, rounds=5)
    assert [name[:8] for name in names(tmp_path)] == ["00000004", "00000004", "00000005", "00000005"]
    saved(tmp_path / "one", rounds=3, keep=1)
    assert len(names(tmp_path / "one")) == 2
    assert checkpoints.latest(LABEL).round == 5  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="keep=0"):
        Checkpoints(tmp_path, "mine", keep=0)


def test_labels_do_not_see_each_other(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    checkpoints = Checkpoints(folder, "mine")
    labels = ["ditto", "ditto-0", "ditto-0-1", "../ditto", "a/b", "a%2Fb", ".", "..", "Größe 1"]
    for round, label in enumerate(labels):
        checkpoints.save(label, round, state(round), {})
    for round, label in enumerate(labels):
        assert checkpoints.latest(label).round == round  # type: ignore[union-attr]
    assert list(tmp_path.iterdir()) == [folder]
    assert len(list(folder.iterdir())) == len(labels)
    assert Checkpoints(tmp_path / "absent", "mine").latest(LABEL) is None


def test_saving_a_round_again_replaces_it(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path)
    before = names(tmp_path)
    checkpoints.save(LABEL, 3, state(3), {"seconds": 9.0})
    assert names(tmp_path) == before
    checkpoints.save(LABEL, 3, state(99), {"seconds": 9.0})
    assert len(names(tmp_path)) == 4
    assert_equal(checkpoints.latest(LABEL).tensors, state(99))  # type: ignore[union-attr]


def test_a_run_does_not_save_backwards(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path)
    with pytest.raises(CheckpointError, match=r"cannot save round 2 .* already holds round 3; resume from it"):
        checkpoints.save(LABEL, 2, state(2), {})
    with pytest.raises(ValueError, match="got -1"):
        checkpoints.save("other", -1, state(2), {})


# Damage


def files(folder: Path, round: int) -> tuple[Path, Path]:
    [tensors] = (folder / LABEL).glob(f"{round:08d}-*.safetensors")
    return folder / LABEL / f"{round:08d}.json", tensors


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 4
    path.write_bytes(data)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def other_document(path: Path) -> None:
    path.write_text("[]")


def changed_value(path: Path) -> None:
    path.write_text(path.read_text().replace('"seconds": 1.5', '"seconds": 2.5'))


def future_format(path: Path) -> None:
    path.write_text(path.read_text().replace('"format": 1', '"format": 7'))


@pytest.mark.parametrize(
    ("which", "damage", "said"),
    [
        (1, cut, "it has .* bytes instead of"),
        (1, flip, "does not match its checksum"),
        (1, empty, "it has 0 bytes instead of"),
        (1, os.unlink, "its tensor file .* is missing"),
        (0, cut, "not a complete JSON document"),
        (0, empty, "not a complete JSON document"),
        (0, other_document, "not a complete JSON document"),
        (0, changed_value, "does not match its checksum"),
        (0, future_format, "has format 7 .* reads format 1"),
    ],
)
def test_damage_is_named_with_the_way_out(
    tmp_path: Path, which: int, damage: Callable[[Path], None], said: str
) -> None:
    checkpoints = saved(tmp_path)
    damage(files(tmp_path, 3)[which])
    record = files(tmp_path, 3)[0] if which == 0 else tmp_path / LABEL / "00000003.json"
    with pytest.raises(CheckpointError, match=said) as caught:
        checkpoints.latest(LABEL)
    assert str(tmp_path) in str(caught.value)
    assert f"round 2 is intact: delete {record}, then resume to continue from round 2" in str(caught.value)
    record.unlink()  # as told
    snapshot = checkpoints.latest(LABEL)
    assert snapshot is not None
    assert (snapshot.round, snapshot.extra) == (2, {"seconds": 1.0})
    checkpoints.save(LABEL, 3, state(3), {})
    assert checkpoints.latest(LABEL).round == 3  # type: ignore[union-attr]


def test_damage_of_all_snapshots(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, rounds=4, keep=3)
    flip(files(tmp_path, 4)[1])
    cut(files(tmp_path, 3)[0])
    with pytest.raises(CheckpointError, match=r"00000004\.json and .*00000003\.json, then resume .* round 2"):
        checkpoints.latest(LABEL)
    cut(files(tmp_path, 2)[1])
    with pytest.raises(CheckpointError, match=r"no older snapshot of this run is intact: delete .*ditto-0"):
        checkpoints.latest(LABEL)


@pytest.mark.parametrize(
    ("label", "round", "said"),
    [
        ("local-0", 3, "is of label ditto-0, but is stored as local-0"),
        (LABEL, 4, "is of round 3, but is stored"),
    ],
)
def test_a_snapshot_in_the_place_of_another_is_refused(tmp_path: Path, label: str, round: int, said: str) -> None:
    checkpoints = saved(tmp_path)
    (tmp_path / label).mkdir(exist_ok=True)
    for file in files(tmp_path, 3):
        shutil.copy(file, tmp_path / label / file.name.replace("00000003", f"{round:08d}"))
    with pytest.raises(CheckpointError, match=said):
        checkpoints.latest(label)


def test_a_foreign_snapshot_is_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    with pytest.raises(CheckpointError, match=r"another configuration \(fingerprint mine; this run has yours\)"):
        Checkpoints(tmp_path, "yours").latest(LABEL)


def test_no_flipped_bit_goes_unnoticed(tmp_path: Path) -> None:
    """A bit of every byte of both files, one at a time; which bit rotates from byte to byte."""
    checkpoints = Checkpoints(tmp_path, "mine", keep=1)
    checkpoints.save(LABEL, 1, {"w": torch.tensor([1.0])}, {"nan": [float("nan")], "x": 0.5})
    for path in files(tmp_path, 1):
        good = path.read_bytes()
        for position in range(len(good)):
            bad = bytearray(good)
            bad[position] ^= 1 << position % 8
            path.write_bytes(bad)
            with pytest.raises(CheckpointError):
                checkpoints.latest(LABEL)
        path.write_bytes(good)
    assert checkpoints.latest(LABEL) is not None


# Disks


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO])
@pytest.mark.parametrize("call", ["open", "write", "fsync", "replace"])
@pytest.mark.parametrize("nth", [1, 2])
def test_a_failing_disk_keeps_the_previous_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int, nth: int
) -> None:
    checkpoints = saved(tmp_path)
    before = names(tmp_path)
    real, calls = getattr(os, call), 0

    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == nth:
            raise OSError(code, os.strerror(code))
        return real(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing)
        with pytest.raises(StorageError, match=rf"cannot .*ditto-0.*: {os.strerror(code)}"):
            checkpoints.save(LABEL, 4, state(4), {})
    assert names(tmp_path) == before
    assert checkpoints.latest(LABEL).round == 3  # type: ignore[union-attr]
    checkpoints.save(LABEL, 4, state(4), {})
    assert checkpoints.latest(LABEL).round == 4  # type: ignore[union-attr]


def test_a_file_that_outgrows_the_limit(tmp_path: Path) -> None:
    """A real error of the system in the middle of the tensor data."""
    checkpoints = saved(tmp_path)
    before, limits = names(tmp_path), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(StorageError, match=r"save round 4 in .*: File too large; raise the limit"):
            checkpoints.save(LABEL, 4, {"w": torch.zeros(100_000)}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert names(tmp_path) == before
    assert checkpoints.latest(LABEL).round == 3  # type: ignore[union-attr]


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "kinfed-test", str(disk)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting a small file system needs more rights")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk(tiny_disk: Path) -> None:
    checkpoints = Checkpoints(tiny_disk / "checkpoints", "mine")
    w = torch.randn(60_000)  # 240 kB: two are kept, a third is in the making, a fourth does not fit
    for round in range(1, 6):
        checkpoints.save(LABEL, round, {"w": w + round}, {})
    before = names(tiny_disk / "checkpoints")
    with pytest.raises(StorageError, match="No space left on device; free some space"):
        checkpoints.save(LABEL, 6, {"w": torch.randn(200_000)}, {})
    assert names(tiny_disk / "checkpoints") == before
    assert_equal(checkpoints.latest(LABEL).tensors, {"w": w + 5})  # type: ignore[union-attr]


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"cannot create the folder .*: Not a directory"):
        Checkpoints(tmp_path / "file" / "checkpoints", "mine").save(LABEL, 1, state(1), {})


# Crashes


class Killed(BaseException):
    """The process ends here: nothing after it has an effect, not even clean-up."""


def test_a_crash_at_any_system_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Die before the first call that changes the disk, the second, ...: always the old state or the new one."""
    reached = set()
    for fatal in range(1, 100):
        folder = tmp_path / str(fatal)
        checkpoints = saved(folder)
        calls = 0

        def mortal(name: str, fatal: int = fatal) -> Callable[..., Any]:
            real = getattr(os, name)

            def call(*args: Any, **kwargs: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls == fatal and name == "write":
                    real(args[0], args[1][: len(args[1]) // 2])  # half of it arrived
                if calls >= fatal:
                    raise Killed
                return real(*args, **kwargs)

            return call

        with monkeypatch.context() as patch:
            for name in ("open", "write", "fsync", "replace", "unlink", "close", "mkdir", "rmdir"):
                patch.setattr(os, name, mortal(name))
            try:
                checkpoints.save(LABEL, 4, state(4), {})
                survived = True
            except Killed:
                survived = False
        snapshot = checkpoints.latest(LABEL)
        assert snapshot is not None
        reached.add(snapshot.round)
        assert_equal(snapshot.tensors, state(snapshot.round))
        checkpoints.save(LABEL, 5, state(5), {})
        leftovers = [name for name in names(folder) if int(name[:8]) < 4 and snapshot.round == 4]
        assert leftovers == []
        assert not list((folder / LABEL).glob(".*"))
        if survived:
            break
    assert survived
    assert fatal > 12
    assert reached == {3, 4}


def test_content_is_on_disk_before_its_name_and_names_before_deletions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a power failure may undo is what was not synced, so the order of syncs is what counts."""
    checkpoints = saved(tmp_path)
    events: list[str] = []

    def logged(name: str, describe: Callable[..., str]) -> None:
        real = getattr(os, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            result = real(*args, **kwargs)
            events.append(describe(*args))
            return result

        monkeypatch.setattr(os, name, call)

    def kind(path: Any) -> str:
        name = Path(os.fspath(path)).name
        return "draft" if name.startswith(".draft") else name.partition(".")[2]

    def target(file: int) -> str:
        path = os.readlink(f"/proc/self/fd/{file}")
        return "folder" if os.path.isdir(path) else "draft"

    logged("fsync", lambda file: f"sync {target(file)}")
    logged("replace", lambda source, goal: f"name {kind(goal)}")
    logged("unlink", lambda path, **_: f"delete {kind(path)}")
    checkpoints.save(LABEL, 4, state(4), {})
    monkeypatch.undo()
    assert events == [
        *("sync draft", "name safetensors", "sync folder"),
        *("sync draft", "name json", "sync folder"),
        *("delete json", "sync folder", "delete safetensors"),
    ]


_SAVER = """
import os, random, signal, sys, time
import torch
from pathlib import Path
from kinfed.records.checkpoint import Checkpoints

torch.set_num_threads(1)
folder, kills, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
draw = random.Random(seed)
checkpoints = Checkpoints(folder, "mine")

def state(round):
    return {"w": torch.full((20_000,), float(round)), "round": torch.tensor(round)}

last = 0
for kill in range(kills):
    ready, tell = os.pipe()
    child = os.fork()
    if child == 0:
        round = last
        while True:
            os.write(tell, b"!")
            round += 1
            checkpoints.save("ditto-0", round, state(round), {"round": round})
    begun = draw.randint(1, 3)
    for _ in range(begun):
        os.read(ready, 1)
    time.sleep(draw.uniform(0, 0.01))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(ready), os.close(tell)
    snapshot = checkpoints.latest("ditto-0")
    if snapshot is None:
        assert last == 0 and begun == 1
        continue
    assert snapshot.round >= last + begun - 1, (snapshot.round, last, begun)
    assert snapshot.extra == {"round": snapshot.round}
    wanted = state(snapshot.round)
    assert all(torch.equal(snapshot.tensors[name], wanted[name]) for name in wanted)
    last = snapshot.round
checkpoints.save("ditto-0", last + 1, state(last + 1), {"round": last + 1})
files = sorted(path.name for path in (folder / "ditto-0").iterdir())
assert len(files) == 4, files
"""


def test_kill_9_at_random_moments(tmp_path: Path) -> None:
    """Processes that save in a loop, killed 25 times; what they finished saving is there, and the next continues."""
    seed = random.randrange(10**6)
    done = subprocess.run(
        [sys.executable, "-c", _SAVER, str(tmp_path), "25", str(seed)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, f"seed {seed}: {done.stderr}"
