"""`kinfed deploy up` with real processes: python -m pytest -m flower"""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kinfed.config.config_reading import make_config
from kinfed.deploy.node.vault import Vault
from kinfed.deploy.operator.trial import DEFAULTS
from kinfed.deploy.server.status import DONE, read_status
from kinfed.runs import experiment

pytest.importorskip("flwr", reason="the extra flower is not installed: pip install 'kinfed[flower]'")
pytestmark = [
    pytest.mark.flower,
    pytest.mark.skipif("KINFED_TEST_TRIAL" not in os.environ, reason="takes two minutes: set KINFED_TEST_TRIAL=1"),
]

PATIENCE = float(os.environ.get("KINFED_TEST_DEADLINE", "60"))  # seconds; more on a machine that is busy otherwise
SETTINGS = {"dataset": "digits", "model": "mlr", "rounds": 2, "steps": 2}


def processes_of(folder: Path) -> list[str]:
    """Command lines that name the folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue  # it has ended
        if str(folder) in command and path.parent.name != str(os.getpid()):
            found.append(command)
    return found


def accuracies(folder: Path) -> list[str]:
    with (folder / "clients.csv").open(newline="") as file:
        return [row["personal_accuracy"] for row in csv.DictReader(file)]


def test_one_command_does_it_all_and_leaves_no_process(tmp_path: Path) -> None:
    """Through a superlink with TLS and two nodes with warm workers: the results of a simulation, a page, models
    in the vaults; nothing runs any more, and no key is left.

    Not in every run of the tests: a dozen programs that import Flower cost more than a minute of a core, and beside
    other tests that takes two to three. tests/deploy/test_deploy_flower.py starts the same server and nodes."""
    folder = tmp_path / "trial"
    options = [text for name, value in SETTINGS.items() for text in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "kinfed", "deploy", "up", "--local", "2", "--out", str(folder)]
    done = subprocess.run(
        [*command, "--seconds", str(10 * PATIENCE), *options], capture_output=True, text=True, timeout=12 * PATIENCE,
        cwd=tmp_path, check=False, env=os.environ | {"TMPDIR": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    status = read_status(folder / "run")
    assert status is not None
    assert status.state == DONE
    assert processes_of(folder) == []
    assert {path.name for path in folder.iterdir()} == {"run", "sites", "logs"}
    assert list(tmp_path.glob("kinfed-*")) == []  # sockets of the workers
    assert (folder / "run" / "report.html").exists()
    for client in ("client-0", "client-1"):
        assert Vault(folder / "sites" / client / "vault").entries()[0].has_model
        log = (folder / "logs" / f"node-{client}.log").read_text(errors="replace")
        assert "warm worker: does what flwr-clientapp" in log
        assert "cannot be reached" not in log
    config = make_config(None, DEFAULTS | SETTINGS | {"clients": 2})
    experiment.run(config, out=tmp_path / "simulation")
    assert accuracies(folder / "run") == accuracies(tmp_path / "simulation")
