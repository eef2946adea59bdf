"""The command line as a user meets it: output, exit status, and one clear sentence for every mistake."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from command_line import kinfed
from safetensors.torch import load_file
from torch import nn

from kinfed.cli.app import app

QUICK = ["--clients", "5", "--model", "mlr", "--rounds", "2", "--seeds", "0", "--algorithms", "local,ditto"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    done = kinfed("run", *QUICK, "--out", "run", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "personal %" in done.stdout
    assert "report.html" in done.stdout
    return folder / "run"


def test_a_run_leaves_a_page_that_needs_no_network(finished: Path) -> None:
    page = (finished / "report.html").read_text("utf-8")
    assert "ditto" in page
    assert 'src="http' not in page


def test_export_writes_what_plain_torch_loads(finished: Path) -> None:
    names = json.loads((finished / "federation-0.json").read_text())["names"]
    done = kinfed(
        "export", finished, "--client", names[2], "--algorithm", "ditto", "-o", "m.safetensors", cwd=finished.parent
    )
    assert done.returncode == 0, done.stderr
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    module.load_state_dict(load_file(finished.parent / "m.safetensors"))
    saved = load_file(finished / "models" / "ditto-0.safetensors")["personal"][2]
    assert torch.equal(torch.cat([p.reshape(-1) for p in module.state_dict().values()]), saved)


def test_report_of_two_runs(finished: Path) -> None:
    shutil.copytree(finished, finished.parent / "second")
    done = kinfed("report", finished, "second", "-o", "both.html", cwd=finished.parent)
    assert done.returncode == 0, done.stderr
    assert (finished.parent / "both.html").exists()


def test_describe_shows_who_holds_what(tmp_path: Path) -> None:
    done = kinfed("describe", "--clients", "6", "--save", "fed", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "EMD" in done.stdout
    again = kinfed("run", *QUICK[2:], "--dataset", "fed", "--out", "run", cwd=tmp_path)
    assert again.returncode == 0, again.stderr


def test_compare_tells_equal_runs_from_others(finished: Path) -> None:
    again = kinfed("run", *QUICK, "--out", "again", cwd=finished.parent)
    assert again.returncode == 0, again.stderr
    assert kinfed("compare", finished, "again", cwd=finished.parent).stdout.strip() == "same results"
    assert kinfed("run", *QUICK, "--lr", "0.04", "--out", "other", cwd=finished.parent).returncode == 0
    differs = kinfed("compare", finished, "other", cwd=finished.parent)
    assert differs.returncode == 1
    assert "lr" in differs.stdout


def test_bench_runs(tmp_path: Path) -> None:
    done = kinfed("bench", "user-mlp", "--quick", "--repeats", "1", "--threads", "1", "--json", "b.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "b.json").read_text())["steps"]


def test_gain_of_a_table_and_of_a_run(tmp_path: Path, finished: Path) -> None:
    (tmp_path / "t.csv").write_text("client,estimate,variance,n\na,1.0,0.1,10\nb,1.2,0.1,200\nc,0.9,0.1,15\n")
    done = kinfed("gain", "t.csv", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "alone" in done.stdout
    by_scores = kinfed("gain", finished, cwd=tmp_path)  # of a run without Self-FL, by the clients' scores
    assert by_scores.returncode == 0, by_scores.stderr
    assert "helps" in by_scores.stdout
    assert (
        kinfed(
            "run", *QUICK[:4], "--rounds", "6", "--seeds", "0", "--algorithms", "selffl", "--out", "s", cwd=tmp_path
        ).returncode
        == 0
    )
    done = kinfed("gain", "s", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "clients" in done.stdout


def test_own_table(tmp_path: Path) -> None:
    lines = ["hospital,age,pressure,outcome"]
    lines += [
        f"{'north' if i % 2 else 'south'},{20 + i % 50},{100 + i % 37},{'ill' if i % 3 else 'well'}" for i in range(80)
    ]
    (tmp_path / "visits.csv").write_text("\n".join(lines))
    done = kinfed(
        "run", "--dataset", "visits.csv", "--client-column", "hospital", "--label-column", "outcome", *QUICK[2:],
        "--out", "r", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "r/federation-0.json").read_text())["names"] == ["north", "south"]


def test_ctrl_c_stops_cleanly_and_says_how_to_go_on(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "kinfed", "run", *QUICK[:4], "--rounds", "5000", "--seeds", "0", "--algorithms", "ditto",
         "--eval-every", "0", "--out", "long"],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 120
    journal = tmp_path / "long/rounds.jsonl"
    while time.monotonic() < deadline and not (journal.exists() and journal.stat().st_size):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert "kinfed run --out long --resume" in out
    assert "Traceback" not in err
    assert any((tmp_path / "long/checkpoints").rglob("*.safetensors"))


BAD = [
    (["run", "--algorithms", "dito"], ["dito", "ditto"]),
    (["run", "--dataset", "digit"], ["digit", "digits"]),
    (["run", "--partition", "dirichle"], ["dirichlet"]),
    (["run", "--model", "mpl"], ["mlp"]),
    (["run", "--model", "cnn"], ["16x16", "[1, 8, 8]"]),
    (["run", "--participation", "0"], ["participation", "(0, 1]"]),
    (["run", "--participation", "1.5"], ["participation"]),
    (["run", "--set", "ditto.lamda=1"], ["lamda", "lam"]),
    (["run", "--set", "ditto.lam=much"], ["ditto: lam", "much"]),
    (["run", "--set", "partition.classes=3"], ["--partition"]),
    (["run", "--seeds", "a"], ["seeds", "whole numbers"]),
    (["run", "--resume"], ["--out"]),
    (["run", "--algorithms", "cgpfl", "--clients", "3"], ["contexts", "3"]),
    (["run", "--dataset", "nowhere.csv", "--label-column", "y"], ["nowhere.csv"]),
    (["run", "--label-column", "y"], ["--label-column"]),
    (["run", "--device", "quantum"], ["quantum"]),
    (["run", "absent.toml"], ["absent.toml"]),
    (["report", "absent"], ["absent"]),
    (["export", "absent", "--client", "0"], ["absent"]),
    (["list", "modls"], ["model", "models"]),
    (["run", "--validation", "1.2"], ["validation", "auto or a number in [0, 1)", "1.2"]),
    (["run", "--validation", "most"], ["validation", "auto or a number"]),
    (["run", "--rounds", "many"], ["rounds", "whole number of at least 1", "many"]),
    (["run", "--roundz", "3"], ["--roundz", "kinfed run --help"]),
    (["run", "--pool", "swimming"], ["pool", "local or ray"]),
    (["run", "--plugin", "absent.py"], ["absent.py"]),
    (["list", "--plugin", "absent.py"], ["absent.py"]),
    (["run", "--dataset", "[/bold].csv", "--label-column", "y"], ["[/bold].csv"]),
    (["export"], ["FOLDER", "kinfed export --help"]),
]


@pytest.mark.parametrize(("arguments", "words"), BAD, ids=[" ".join(arguments) for arguments, _ in BAD])
def test_mistakes_get_one_sentence_and_leave_nothing(arguments: list[str], words: list[str], tmp_path: Path) -> None:
    done = kinfed(*arguments, cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    for word in words:
        assert word in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ("c,x,y\na,1,0\na,nan,1\n", ["x has the same value in all training rows"]),
        ("c,x,y\na,1,0\na,red,1\n", ["x"]),
        ("c,x\na,1\n", ["'y'", "c, x"]),
        ("", ["t.csv"]),
    ],
)
def test_bad_tables_are_explained(table: str, words: list[str], tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(table)
    done = kinfed("run", "--dataset", "t.csv", "--client-column", "c", "--label-column", "y", cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr, done.stderr


def test_missing_data_says_which_file_and_where(tmp_path: Path) -> None:
    done = kinfed("run", "--dataset", "mnist", "--data", tmp_path / "data", cwd=tmp_path, HF_HUB_OFFLINE="1",
                  KINFED_CACHE=str(tmp_path / "cache"))  # fmt: skip
    assert done.returncode == 2, done.stdout
    assert "parquet" in done.stderr
    assert str(tmp_path / "data") in done.stderr.replace("\n", "")


def test_a_folder_of_another_run_is_not_touched(finished: Path) -> None:
    def contents() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in finished.rglob("*") if path.is_file() and path.name != ".lock"}

    before = contents()
    other = kinfed("run", *QUICK, "--lr", "0.9", "--out", finished, cwd=finished.parent)
    assert other.returncode == 2
    assert "lr" in other.stderr
    same = kinfed("run", *QUICK, "--out", finished, cwd=finished.parent)
    assert same.returncode == 2
    assert "--resume" in same.stderr
    assert contents() == before


def test_a_full_disk_costs_no_data(tmp_path: Path) -> None:
    """A file-size limit stands in for the full disk: models cannot be written, what came before stays readable."""
    limit = (
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000)); "
        "from kinfed.cli.app import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", limit, "run", *QUICK, "--out", "full"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    resumed = kinfed("run", "--out", "full", "--resume", "--workers", "1", cwd=tmp_path, KINFED_DATA=str(tmp_path))
    assert resumed.returncode == 0, resumed.stderr


def test_help_and_lists_need_no_torch() -> None:
    """In a process of its own, where nothing else has imported anything."""
    program = """
import sys
from kinfed.cli.app import app
forms = ["--help", "list", *(f"list {kind}" for kind in ("algorithms", "datasets", "partitions", "models", "recipes"))]
for form in forms:
    try:
        app(form.split(), standalone_mode=False)
    except SystemExit:
        pass
    heavy = {"torch", "scipy", "sklearn", "numpy", "pandas", "pyarrow", "plotly"} & sys.modules.keys()
    assert not heavy, (form, heavy)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for name in ("ditto", "fashion_mnist", "dirichlet", "resnet18", "cgpfl-table1"):
        assert name in done.stdout


def test_a_list_may_be_named_in_the_singular_and_methods_name_their_papers(capsys: pytest.CaptureFixture[str]) -> None:
    for word, name in (("method", "ditto"), ("methods", "ditto"), ("model", "resnet18"), ("recipe", "cgpfl-table1")):
        app(["list", word], standalone_mode=False)
        assert name in capsys.readouterr().out, word
    for name, paper in (("ditto", "ICML 2021"), ("feddpa", "NeurIPS 2024"), ("fedsa_lora", "ICLR 2025")):
        app(["list", name], standalone_mode=False)
        assert paper in capsys.readouterr().out, name
