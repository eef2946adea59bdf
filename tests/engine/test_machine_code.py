"""Machine code that is compiled once and kept (kinfed.engine.machine_code)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numba import types
from test_rooms import OPTIONAL

from kinfed.engine import machine_code
from kinfed.engine.fused_kernels import compile_function
from kinfed.engine.machine_code import CODE_FILES, Kernel, MachineCode, kept_code

SINGLES, TABLE = types.float32[::1], types.int64[:, ::1]


def add_rows(pair, scale, negative, out):  # type: ignore[no-untyped-def]
    """out[i] += ± scale * Σ_j table[i, j] + shift."""
    table, shift = pair
    for i in range(len(table)):
        total = 0
        for j in range(table.shape[1]):
            total += table[i, j]
        out[i] += (-scale if negative else scale) * total + shift


ARGUMENTS = (types.Tuple((TABLE, types.int64)), types.intp, types.boolean, SINGLES)


@pytest.fixture(scope="module")
def code() -> MachineCode:
    return compile_function(add_rows, ARGUMENTS)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KINFED_CACHE", str(tmp_path))
    return tmp_path / "machine-code"


def never() -> MachineCode:
    raise AssertionError("compiled again")


def test_whole_numbers_arrays_and_tuples_arrive_as_they_are(code: MachineCode) -> None:
    out, table = np.ones(3, np.float32), np.arange(6).reshape(3, 2)
    kernel = Kernel("rows", MachineCode.from_bytes(code.as_bytes()) or never())
    kernel((table, 5), 2, True, out)
    assert out.tolist() == [1 - 2 + 5, 1 - 10 + 5, 1 - 18 + 5]
    kernel((table[:0], -5), -(2**40), False, out)  # no rows
    assert out.tolist() == [4, -4, -12]


def test_wrong_arguments_are_refused_before_anything_is_read(code: MachineCode) -> None:
    kernel, table = Kernel("rows", code), np.arange(6).reshape(3, 2)
    out = np.zeros(3, np.float32)
    for wrong in (table.astype(np.int32), np.asfortranarray(table), table.ravel(), table[:, :1]):
        with pytest.raises(TypeError, match="wanted an array of int64, 2-dimensional"):
            kernel((wrong, 5), 2, True, out)
    with pytest.raises(ValueError, match="zip"):
        kernel((table, 5), 2, True)
    with pytest.raises(TypeError, match="integer"):
        kernel((table, 5), 2.5, True, out)
    assert not out.any()


def test_code_is_made_once_and_again_where_its_file_is_damaged(code: MachineCode, folder: Path) -> None:
    assert kept_code("rows", lambda: code) == code
    (file,) = folder.iterdir()
    content = file.read_bytes()
    assert kept_code("rows", never) == code
    for damaged in (b"", b"broken", content[:-1], content[:100] + bytes([content[100] ^ 1]) + content[101:]):
        file.write_bytes(damaged)
        made: list[MachineCode] = []
        assert kept_code("rows", lambda made=made: made.append(code) or code) == code  # type: ignore[misc]
        assert made == [code]
        assert file.read_bytes() == content


def test_a_folder_that_cannot_be_written_costs_time_alone(
    code: MachineCode, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder.write_text("a file")
    assert kept_code("rows", lambda: code) == code
    assert "rows will be compiled again next time" in caplog.text


def test_each_processor_and_setting_has_code_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    from llvmlite import binding

    def identity() -> str:
        machine_code._identity.cache_clear()
        return machine_code._identity()

    seen = [identity(), identity()]
    assert seen[0] == seen[1]
    monkeypatch.setenv("NUMBA_OPT", "1")
    seen.append(identity())
    monkeypatch.setattr(binding, "get_host_cpu_name", lambda: "another")
    seen.append(identity())
    monkeypatch.setattr(machine_code, "version", lambda name: "0.0")
    seen.append(identity())
    machine_code._identity.cache_clear()
    assert len(set(seen)) == 4


def test_all_that_numba_compiles_is_part_of_the_identity() -> None:
    assert {f"{name.replace('.', '/')}.py" for name in OPTIONAL["numba"]} <= set(CODE_FILES)


_TRAIN = """
import json, sys
import kinfed
result = kinfed.run(dataset="digits", clients=4, algorithms="apfl", backend="fused", rounds=2, steps=2, batch=4)
print(json.dumps({"numba": "numba" in sys.modules, "model": result.result().server_model.tolist()}))
"""


def test_a_second_process_needs_no_numba(folder: Path, tmp_path: Path) -> None:
    """Nor does it compile: kernels that train, move and score come from the folder."""

    def train() -> dict[str, Any]:
        done = subprocess.run(
            [sys.executable, "-c", _TRAIN], capture_output=True, text=True, timeout=120, cwd=tmp_path, check=False
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]

    first = train()
    files = {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}
    assert first["numba"]
    assert {name.split("-")[0] for name in files} >= {"move", "score"}
    second = train()
    assert not second["numba"]
    assert second["model"] == first["model"]
    assert {file.name: file.stat().st_mtime_ns for file in folder.iterdir()} == files
