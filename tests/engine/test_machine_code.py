"""Machine code that is compiled once and kept (kinfed.engine.compiled.machine_code)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from numba import types
from test_rooms import modules, users_of

import kinfed
from kinfed.engine.compiled import machine_code
from kinfed.engine.compiled.fused_kernels import compile_function
from kinfed.engine.compiled.machine_code import CODE_FILES, KEPT_DAYS, Kernel, MachineCode, kept_kernel
from kinfed.errors import ModelError

pytestmark = pytest.mark.timeout(400)  # some compile

SINGLES, TABLE = types.float32[::1], types.int64[:, ::1]


def add_rows(pair, scale, negative, out):  # type: ignore[no-untyped-def]
    """out[i] += ± scale * Σ_j table[i, j] + shift."""
    table, shift = pair.table, pair.shift
    for i in range(len(table)):
        total = 0
        for j in range(table.shape[1]):
            total += table[i, j]
        out[i] += (-scale if negative else scale) * total + shift


class Pair(NamedTuple):
    table: np.ndarray
    shift: int


ARGUMENTS = (types.NamedTuple((TABLE, types.int64), Pair), types.intp, types.boolean, SINGLES)


@pytest.fixture(scope="module")
def code() -> MachineCode:
    return compile_function(add_rows, ARGUMENTS)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KINFED_CACHE", str(tmp_path))
    return tmp_path / "machine-code"


def test_a_kernel_counts_as_compiled_once_it_is_in_the_folder_or_in_memory(
    code: MachineCode, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_code, "_LOADED", {})
    kind = ("dense", "classes")
    assert not machine_code.is_compiled("train", *kind)
    machine_code._keep("train-dense-classes", code)
    assert machine_code.is_compiled("train", *kind)
    assert not machine_code.is_compiled("score", *kind)
    kernel = machine_code.compiled_kernel("train", *kind)
    shutil.rmtree(folder)
    assert machine_code.is_compiled("train", *kind)
    assert machine_code.compiled_kernel("train", *kind) is kernel


def never() -> MachineCode:
    raise AssertionError("compiled again")


def makes(code: MachineCode, made: list[MachineCode]) -> Callable[[], MachineCode]:
    def make() -> MachineCode:
        made.append(code)
        return code

    return make


def works(kernel: Kernel) -> bool:
    out = np.zeros(1, np.float32)
    kernel((np.array([[3, 4]]), 1), 2, False, out)
    return out.tolist() == [15]


def test_whole_numbers_arrays_and_named_tuples_arrive_as_they_are(code: MachineCode) -> None:
    out, table = np.ones(3, np.float32), np.arange(6).reshape(3, 2)
    kernel = Kernel("rows", MachineCode.from_bytes(code.as_bytes("x"), "x") or never())
    kernel((table, 5), 2, True, out)
    assert out.tolist() == [1 - 2 + 5, 1 - 10 + 5, 1 - 18 + 5]
    kernel((table[:0], -5), -(2**40), False, out)  # no rows
    assert out.tolist() == [4, -4, -12]


def test_wrong_arguments_are_refused_before_anything_is_read(code: MachineCode) -> None:
    kernel, table = Kernel("rows", code), np.arange(6).reshape(3, 2)
    out, fixed = np.zeros(3, np.float32), table.copy()
    fixed.flags.writeable = False
    for wrong in (table.astype(np.int32), np.asfortranarray(table), table.ravel(), table[:, :1], fixed):
        with pytest.raises(
            TypeError, match=r"pair\.table should be an array of int64 in C order that can be written, 2-"
        ):
            kernel((wrong, 5), 2, True, out)
    with pytest.raises(ValueError, match="zip"):
        kernel((table, 5), 2, True)
    with pytest.raises(TypeError, match="integer"):
        kernel((table, 5), 2.5, True, out)
    assert not out.any()


def test_what_words_cannot_carry_is_not_compiled() -> None:
    for kind in (types.float64, types.float32[:], types.Tuple((types.float64,))):
        with pytest.raises(TypeError, match="a kernel's argument cannot be"):
            compile_function(add_rows, (kind,))


def test_an_error_inside_a_kernel_is_raised() -> None:
    def fails(number):  # type: ignore[no-untyped-def]
        if number > 1:
            raise ValueError("too many")

    kernel = Kernel("fails", compile_function(fails, (types.intp,)))
    kernel(1)
    with pytest.raises(RuntimeError, match="the compiled call fails ended with status"):
        kernel(2)


def test_threads_call_at_the_same_time(code: MachineCode) -> None:
    kernel = Kernel("rows", code)

    def call(number: int) -> list[float]:
        out, table = np.zeros(500, np.float32), np.full((500, 20), number)
        for _ in range(50):
            kernel((table, 0), 1, False, out)
        return list(np.unique(out))

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(call, range(40))) == [[50 * 20 * number] for number in range(40)]


def test_code_is_compiled_once_and_again_where_its_file_is_damaged(code: MachineCode, folder: Path) -> None:
    made: list[MachineCode] = []
    assert works(kept_kernel("rows", makes(code, made)))
    (file,) = folder.iterdir()
    content = file.read_bytes()
    assert works(kept_kernel("rows", never))
    header = content.index(b"symbol")
    for damaged in (b"", b"broken", content[:-1], content[:header] + b"X" + content[header + 1 :]):
        file.write_bytes(damaged)
        assert works(kept_kernel("rows", makes(code, made)))
        assert file.read_bytes() == content
    file.rename(folder / file.name.replace("rows", "other"))
    assert works(kept_kernel("other", makes(code, made)))  # a file is good under its own name alone
    assert len(made) == 1 + 4 + 1


def test_what_cannot_be_linked_is_compiled_again_and_then_refused(code: MachineCode, folder: Path) -> None:
    strange = MachineCode(code.symbol, code.arguments, b"no object file")
    with pytest.raises(ModelError, match="use backend = stacked"):
        kept_kernel("rows", lambda: strange)
    assert not folder.exists()  # nothing is kept that was never linked
    machine_code._keep("rows", strange)
    assert works(kept_kernel("rows", lambda: code))
    assert works(kept_kernel("rows", never))


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="the system has no owners of files")
def test_code_that_others_can_write_is_not_run(code: MachineCode, folder: Path) -> None:
    kept_kernel("rows", lambda: code)
    (file,) = folder.iterdir()
    assert file.stat().st_mode & 0o077 == 0
    file.chmod(0o660)
    made: list[MachineCode] = []
    kept_kernel("rows", makes(code, made))
    assert made


def test_a_folder_that_cannot_be_used_costs_time_alone(
    code: MachineCode, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder.write_text("a file")
    assert works(kept_kernel("rows", lambda: code))
    assert "rows will be compiled again next time" in caplog.text
    for name in ("KINFED_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert works(kept_kernel("rows", lambda: code))
    assert "set KINFED_CACHE" in caplog.text


def no_home() -> Path:
    raise RuntimeError("Could not determine home directory.")


def test_code_of_files_that_change_meanwhile_is_not_kept(
    code: MachineCode, folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    text = tmp_path / "kernels.py"
    text.write_text("before")
    monkeypatch.setattr(machine_code, "CODE_FILES", [text])
    machine_code._identity.cache_clear()

    def compile_it() -> MachineCode:
        text.write_text("after")
        return code

    assert works(kept_kernel("rows", compile_it))
    assert not folder.exists()
    machine_code._identity.cache_clear()


def test_threads_compile_one_after_the_other(code: MachineCode, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While numba begins to compile in one thread, another would see half of its types."""
    monkeypatch.setattr(machine_code, "_LOADED", {})
    begun, ended = threading.Event(), threading.Event()
    order = []

    def slowly() -> MachineCode:
        begun.set()
        ended.wait(0.2)
        order.append("first")
        return code

    def quickly() -> MachineCode:
        order.append("second")
        ended.set()
        return code

    first = threading.Thread(target=machine_code.loaded_kernel, args=("one", slowly))
    first.start()
    begun.wait()
    assert works(machine_code.loaded_kernel("trees-other", quickly))
    first.join()
    assert order == ["first", "second"]


def test_old_code_of_other_versions_goes(code: MachineCode, folder: Path) -> None:
    folder.mkdir()
    for name, days in (("rows-old", KEPT_DAYS + 1), ("rows-new", KEPT_DAYS - 1), ("other-old", KEPT_DAYS + 1)):
        (folder / f"{name}.code").write_bytes(b"x")
        then = (folder / f"{name}.code").stat().st_mtime - days * 24 * 3600
        os.utime(folder / f"{name}.code", (then, then))
    kept_kernel("rows", lambda: code)
    assert {file.name.partition(".")[0] for file in folder.iterdir()} >= {"rows-new", "other-old"}
    assert not (folder / "rows-old.code").exists()


def test_all_that_code_depends_on_is_part_of_its_identity(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from llvmlite import binding

    class Features(dict[str, bool]):
        def flatten(self) -> str:
            return "+none"

    def identity() -> str:
        return machine_code._identity.__wrapped__()

    normal = identity()
    assert identity() == normal
    changes: list[Callable[[pytest.MonkeyPatch], None]] = [
        lambda patch: patch.setenv("NUMBA_OPT", "1"),
        lambda patch: patch.setattr(binding, "get_host_cpu_name", lambda: "another"),
        lambda patch: patch.setattr(binding, "get_host_cpu_features", Features),
        lambda patch: patch.setattr(machine_code, "version", lambda name: "0" if name == "numba" else "0.50.0"),
        lambda patch: patch.setattr(machine_code, "version", lambda name: "0" if name == "llvmlite" else "0.68.1"),
        lambda patch: patch.setattr(np, "__version__", "0"),
    ]
    for number in range(len(CODE_FILES)):
        texts = [tmp_path / f"{number}-{place}" for place in range(len(CODE_FILES))]
        for place, (text, name) in enumerate(zip(texts, CODE_FILES, strict=True)):
            original = name.read_bytes()
            text.write_bytes(original + b"#" if place == number else original)
        changes.append(lambda patch, texts=texts: patch.setattr(machine_code, "CODE_FILES", texts))  # type: ignore[misc]
    seen = {normal}
    for change in changes:
        with monkeypatch.context() as patch:
            change(patch)
            seen.add(identity())
    assert len(seen) == 1 + len(changes)
    monkeypatch.setenv("NUMBA_CACHE_DIR", "elsewhere")
    assert identity() == normal


# What files of kernels import from other rooms and takes no part in them: types, and how arguments get there.
NOT_COMPILED = {"core/cache.py", "core/storage.py", "errors.py"}


def test_every_file_that_goes_into_kernels_is_part_of_the_identity() -> None:
    numba = users_of("numba") | {"engine.compiled.fused_recurrent"}
    needed = {name for user in numba for name in modules()[user].at_once & modules().keys()} | numba
    files = {f"{name.replace('.', '/')}.py" for name in needed} - NOT_COMPILED
    package = Path(kinfed.__file__ or "").parent
    assert files <= {file.relative_to(package).as_posix() for file in CODE_FILES}


_TRAIN = """
import json, sys
import kinfed
result = kinfed.run(dataset="digits", clients=4, algorithms="apfl", backend="fused", rounds=2, steps=2, batch=4)
print(json.dumps({"numba": "numba" in sys.modules, "model": result.result().server_model.tolist()}))
"""

_LINK = """
import itertools, json, sys
from kinfed.engine.compiled.machine_code import compiled_kernel
for name, types in itertools.product(
    ("train", "program", "step", "score"), (("dense", "classes"), ("recurrent", "numbers"))
):
    compiled_kernel(name, *types)
print(json.dumps({"numba": "numba" in sys.modules}))
"""


def answer(program: str, folder: Path) -> dict[str, Any]:
    """Of a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, cwd=folder, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def test_a_second_process_needs_no_numba(folder: Path, tmp_path: Path) -> None:
    """Nor does it compile: kernels that move and score come from the folder."""
    first = answer(_TRAIN, tmp_path)
    files = {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}
    assert first["numba"]
    assert {name.split("-")[0] for name in files} >= {"program", "score"}
    second = answer(_TRAIN, tmp_path)
    assert not second["numba"]
    assert second["model"] == first["model"]
    assert {file.name: file.stat().st_mtime_ns for file in folder.iterdir()} == files


def test_kernels_link_without_numba(tmp_path: Path) -> None:
    """Of every kind, from the usual folder, where other tests find them, too."""
    answer(_LINK, tmp_path)
    assert not answer(_LINK, tmp_path)["numba"]
