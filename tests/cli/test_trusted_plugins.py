"""Reading a folder runs no code: the plugins that it has recorded are run only if the user names or confirms them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import Done, kinfed
from manifests import change_settings

import kinfed as package
from kinfed.algorithms import ALGORITHMS
from kinfed.board.board_server import BoardServer
from kinfed.core import plugins
from kinfed.engine import MODELS
from kinfed.errors import ConfigError, KinfedError
from kinfed.records.run_files import RunFiles

TABLE = "c,u,y\n" + "".join(f"{'ab'[i % 2]},{i % 7},{'yn'[i // 2 % 2]}\n" for i in range(40))
ROLES = ("--client-column", "c", "--label-column", "y")
QUICK = ("--dataset", "t.csv", *ROLES, "--rounds", "2", "--seeds", "0", "--no-report")
EVIL = "import pathlib\npathlib.Path(__file__).with_name('ran').touch()\n"
HELPER = "STEP = 1.0\n"
PLUGIN = """
import kinfed
from torch import nn
from kinfed.algorithms.fedavg import FedAvg

@kinfed.register("algorithm", "trusted", summary="FedAvg of a plugin")
class Trusted(FedAvg):
    def helped(self):
        from trusted_helper import STEP
        return STEP

@kinfed.register("model", "trusted_net", summary="a layer")
def trusted_net(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(shape[0], classes))
"""


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of a run and a tuning that name a plugin which leaves a trace where it is run."""
    place = tmp_path_factory.mktemp("stranger")
    (place / "t.csv").write_text(TABLE)
    (place / "evil.py").write_text(EVIL)
    run = ("run", *QUICK, "--algorithms", "local,fedavg", "--participation", "1", "--out")
    assert kinfed(*run, "run", cwd=place).returncode == 0
    assert kinfed(*run, "other", cwd=place).returncode == 0
    tune = ("--algorithms", "fedavg", "--trials", "1", "--out", "tuned")
    done = kinfed("tune", *(word for word in QUICK if word != "--no-report"), *tune, cwd=place)
    assert done.returncode == 0, done.stderr
    for name in ("run", "tuned"):
        change_settings(place / name, plugins=[str(place / "evil.py")])
    then = "2026-01-01T00:00:00+00:00"
    status = {"method": "fedavg", "state": "done", "doing": "done", "since": then, "written": then, "rounds": 2}
    (place / "run" / "status.json").write_text(json.dumps(status | {"clients": {}, "nodes": [], "reason": ""}))
    return place


READERS = [
    ("export", "run", "--algorithm", "fedavg", "--out", "m.safetensors"),
    ("predict", "t.csv", "--run", "run", "--algorithm", "fedavg", "--out", "p.csv"),
    ("predict", "t.csv", "--run", "run", "--algorithm", "fedavg", "--client-column", "c", "--out", "p.csv"),
    ("run", "--out", "run", "--resume", "--no-report"),
    ("run", "--out", "run", "--extend", "--rounds", "3", "--no-report"),
    ("adopt", "run", "--table", "t.csv", "--label-column", "y", "--algorithm", "fedavg"),
    ("report", "run"),
    ("report", "run", "other", "--out", "both.html"),
    ("compare", "run", "run"),
    ("gain", "run"),
    ("runs", "."),
    ("tune", "--out", "tuned", "--resume"),
    ("deploy", "status", "run"),
]
ASKING = {"adopt", "--resume", "--extend", "status"}  # these need the run's plugins, and say how to name them


@pytest.mark.parametrize("arguments", READERS, ids=" ".join)
def test_no_command_runs_a_plugin_that_only_a_folder_names(stranger: Path, arguments: tuple[str, ...]) -> None:
    done = kinfed(*arguments, cwd=stranger)
    assert not (stranger / "ran").exists()
    assert "Traceback" not in done.stderr
    if ASKING & set(arguments):
        assert done.returncode == 2, done.stdout + done.stderr
        assert f"--plugin {stranger / 'evil.py'}" in " ".join(done.stderr.split())
    else:
        assert done.returncode == 0, done.stdout + done.stderr


def test_no_road_from_python_runs_a_plugin_that_only_a_folder_names(stranger: Path) -> None:
    folder = stranger / "run"
    result = package.load(folder)
    result.history(), result.report(stranger / "page.html")
    assert result.personal_model("a", "fedavg").predict({"u": [1.0]})
    for needs_config in (
        lambda: result.config,
        lambda: package.run(out=folder, extend=True, rounds=3),
        lambda: RunFiles(folder).config,
    ):
        with pytest.raises(ConfigError, match="reading a folder runs no code"):
            needs_config()
    with BoardServer(stranger, 0) as board:
        assert board.url
    assert not (stranger / "ran").exists()


def test_a_recorded_plugin_without_a_hash_cannot_be_confirmed(stranger: Path) -> None:
    done = kinfed("run", "--out", "run", "--resume", "--trust-plugins", cwd=stranger)
    refused(done, "its hash was not recorded", "--plugin FILE")
    assert not (stranger / "ran").exists()


def test_a_plugin_that_is_no_path_is_refused(stranger: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((stranger / "run" / "config.json").read_bytes())
    change_settings(tmp_path, plugins={"a": 1})
    with pytest.raises(KinfedError, match="was it written by kinfed"):
        RunFiles(tmp_path).config  # noqa: B018


# A plugin of one's own


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("own")
    (place / "t.csv").write_text(TABLE)
    (place / "trusted_plugin.py").write_text(PLUGIN)
    (place / "trusted_helper.py").write_text(HELPER)
    done = kinfed(
        "run", *QUICK, "--plugin", "trusted_plugin.py", "--algorithms", "trusted", "--model", "trusted_net", "--out",
        "run", cwd=place,
    )  # fmt: skip
    forget()
    assert done.returncode == 0, done.stderr
    return place


@pytest.fixture
def place(own: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy of the run and its plugin, as a new process finds them."""
    place = tmp_path / "copy"
    for file in own.rglob("*"):
        if file.is_file() and "__pycache__" not in file.parts:
            target = place / file.relative_to(own)
            target.parent.mkdir(parents=True, exist_ok=True)
            os.link(file, target) if target.suffix == ".safetensors" else target.write_bytes(file.read_bytes())
    yield place
    forget()


def forget() -> None:
    plugins._loaded.clear()
    ALGORITHMS.unregister("trusted")
    MODELS.unregister("trusted_net")


def refused(done: Done, *words: str) -> None:
    assert done.returncode == 2, done.stdout + done.stderr
    for word in words:
        assert word in " ".join(done.stderr.split())


PREDICT = ("predict", "t.csv", "--run", "run", "--client", "a", "--out", "p.csv")
EXTEND = ("run", "--out", "run", "--extend", "--rounds", "3", "--no-report")
RESUME = ("run", "--out", "run", "--resume", "--no-report")


@pytest.mark.parametrize("arguments", [PREDICT, EXTEND, RESUME], ids=["predict", "extend", "resume"])
def test_a_plugin_is_named_again_wherever_it_lies(place: Path, own: Path, arguments: tuple[str, ...]) -> None:
    refused(kinfed(*arguments, cwd=place), "--trust-plugins", f"--plugin {own / 'trusted_plugin.py'}")
    done = kinfed(*arguments, "--plugin", "trusted_plugin.py", cwd=place)
    assert done.returncode == 0, done.stderr


def test_a_confirmed_plugin_is_named_with_its_hash(place: Path, own: Path) -> None:
    done = kinfed(*PREDICT, "--trust-plugins", cwd=place)
    assert done.returncode == 0, done.stderr
    recorded = json.loads((place / "run" / "config.json").read_text())["contents"]["code of plugin trusted_plugin.py"]
    assert f"plugin   {own / 'trusted_plugin.py'} (sha256 {recorded})" in " ".join(done.stdout.split("\n"))
    assert package.load(place / "run").config.plugins == (own / "trusted_plugin.py",)


@pytest.mark.parametrize("arguments", [PREDICT, EXTEND, RESUME], ids=["predict", "extend", "resume"])
@pytest.mark.parametrize("changed", ["trusted_plugin.py", "trusted_helper.py"])
def test_a_plugin_or_a_module_beside_it_that_changed_is_refused(
    place: Path, changed: str, arguments: tuple[str, ...]
) -> None:
    """A constant of the file or of a helper, which is imported inside a function: the class's text is as it was."""
    file = place / changed
    file.write_text(file.read_text() + "SCALE = -100\n")
    refused(kinfed(*arguments, "--plugin", "trusted_plugin.py", cwd=place), "trusted_plugin.py", "changed", "sha256")


def test_a_recorded_plugin_that_changed_is_not_confirmed(place: Path) -> None:
    change_settings(place / "run", plugins=[str(place / "trusted_plugin.py")])
    (place / "trusted_helper.py").write_text("STEP = -100.0\n")
    refused(kinfed(*PREDICT, "--trust-plugins", cwd=place), "it is not what it was")
    assert not plugins._loaded


def test_the_text_of_a_plugin_is_run_and_not_a_compiled_file_beside_it(tmp_path: Path) -> None:
    import importlib.util
    import py_compile

    file = tmp_path / "two_faces.py"
    file.write_text("FACE = 'bad'\n")
    status = file.stat()
    py_compile.compile(str(file), cfile=importlib.util.cache_from_source(str(file)))
    file.write_text("FACE = 'ok!'\n")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))  # size and time are those of the compiled one
    assert plugins.load(file).FACE == "ok!"
