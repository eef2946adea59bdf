"""Runs that grow: the same results as asked for at once, and nothing else."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import kinfed
from kinfed.data.federations.federation import Federation
from kinfed.engine import task_factory as tasks
from kinfed.errors import ConfigError, KinfedError, StorageError
from kinfed.records.compare import same_results
from kinfed.records.run_files import RunFiles
from kinfed.records.run_folder import RunFolder
from kinfed.runs.experiment import run
from kinfed.runs.growth import grown_config
from kinfed.runs.method_run import Interrupted

SETTINGS: dict[str, Any] = {
    "model": "mlr", "eval_every": 2, "steps": 2, "batch": 5, "participation": 0.5, "workers": 1, "backend": "stacked",
}  # fmt: skip
SMALL: dict[str, Any] = {"algorithms": "local,fedavg", "rounds": 3, "seeds": (0,)}
LARGE: dict[str, Any] = {"algorithms": "local,fedavg,ditto", "rounds": 6, "seeds": (0, 4)}


@pytest.fixture(scope="module")
def data() -> Federation:
    x = torch.randn(80, 4, generator=torch.Generator().manual_seed(0))
    return Federation.from_arrays(x, (x[:, 0] > 0).to(torch.int64), [f"c{i % 5}" for i in range(80)])


@pytest.fixture(scope="module")
def at_once(data: Federation, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("once") / "run"
    run(federation=data, out=folder, **SETTINGS, **LARGE)
    return folder


@pytest.fixture(scope="module")
def small_run(data: Federation, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small") / "run"
    run(federation=data, out=folder, **SETTINGS, **SMALL)
    return folder


@pytest.fixture
def small(small_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(small_run, tmp_path / "run"))


def journal(folder: Path) -> list[tuple[Any, ...]]:
    return [(r["seed"], r["algorithm"], r["round"], r["personal"] is None) for r in RunFiles(folder).records()]


def files_of(folder: Path) -> dict[str, bytes]:
    names = (path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".lock"))
    return {str(path.relative_to(folder)): path.read_bytes() for path in names}


def test_steps_of_growth_give_what_was_asked_for_at_once(data: Federation, small: Path, at_once: Path) -> None:
    """Round 3 is evaluated as the last one, and is not among every second: of the long run its line has no metrics."""
    assert journal(small)[2] == (0, "local", 3, False)
    for more in ({"rounds": 6}, {"seeds": "4"}, {"algorithms": "ditto"}):
        run(federation=data, out=small, extend=True, **more)
    assert same_results(small, at_once) == []
    assert journal(small) == journal(at_once)
    assert journal(small)[2] == (0, "local", 3, True)
    assert len(RunFiles(small).envelope["grown_from"]) == 3
    # What is grown is a run like any other: finished, to be resumed, adopted from and loaded.
    run(federation=data, out=small, resume=True, **SETTINGS, **LARGE)
    assert same_results(small, at_once) == []
    assert RunFiles(small).final_state("fedavg-0", 6)
    assert len(kinfed.load(small).to_frame()) == 6


def test_all_at_once_in_one_growth_and_by_the_public_door(data: Federation, small: Path, at_once: Path) -> None:
    result = kinfed.run(federation=data, out=small, extend=True, **LARGE)
    assert same_results(small, at_once) == []
    assert len(result.history()) == 3 * 2 * 6


@pytest.mark.parametrize("after", [0, 1, 4, 9])
def test_a_growth_that_is_stopped_is_resumed(data: Federation, small: Path, at_once: Path, after: int) -> None:
    calls = iter(range(100))
    with pytest.raises(Interrupted):
        run(federation=data, out=small, extend=True, should_stop=lambda: next(calls) >= after, **LARGE)
    assert not (small / "summary.json").exists()
    assert not all(trial.finished for trial in kinfed.load(small).run.trials)
    run(federation=data, out=small, resume=True, **SETTINGS, **LARGE)
    assert same_results(small, at_once) == []


@pytest.mark.parametrize("moment", ["replace_last", "sort_rounds", "append_clients", "write_summary"])
def test_a_growth_that_is_killed_is_resumed(
    data: Federation, small: Path, at_once: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """In particular between a snapshot that knows of the line to come, and that line."""

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, moment, killed)
        with pytest.raises(KeyboardInterrupt):
            run(federation=data, out=small, extend=True, **LARGE)
    run(federation=data, out=small, extend=True, **LARGE)  # the same again: goes on
    assert same_results(small, at_once) == []


def test_folds_grow_too(data: Federation, tmp_path: Path) -> None:
    settings = {**SETTINGS, "folds": 2, "eval_every": 0}
    run(federation=data, out=tmp_path / "a", **settings, algorithms="fedavg", rounds=1, seeds=(0,))
    run(federation=data, out=tmp_path / "a", extend=True, algorithms="local", rounds=2, seeds=(1,))
    run(federation=data, out=tmp_path / "b", **settings, algorithms="fedavg,local", rounds=2, seeds=(0, 1))
    assert same_results(tmp_path / "a", tmp_path / "b") == []


def test_warm_starts_and_asynchronous_rounds_grow(data: Federation, tmp_path: Path) -> None:
    settings = {**SETTINGS, "warm_start": 1, "mode": "fedbuff", "algorithms": "fedavg"}
    run(federation=data, out=tmp_path / "a", **settings, rounds=2, seeds=(0,))
    run(federation=data, out=tmp_path / "a", extend=True, rounds=5, seeds=(1,))
    run(federation=data, out=tmp_path / "b", **settings, rounds=5, seeds=(0, 1))
    assert same_results(tmp_path / "a", tmp_path / "b") == []


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"lr": 0.3}, r"cannot grow into this run \(lr: 0.05 there, 0.3 now\)"),
        ({"rounds": 2}, "rounds: 3 there, 2 now, but rounds can only be added"),
        ({"algorithms": {"fedavg": {"weights": "equal"}}}, "fedavg.weights: absent there"),
        ({"algorithms": {"local": "ditto"}}, 'local.method: "local" there, "ditto" now'),
        ({"algorithms": "fedfomo"}, "need validation examples, a share of 0.2 of the training rows instead of 0"),
        ({"algorithms": "fedmd"}, "need public examples, a share of 0.1"),
        ({"seeds": "x"}, "seeds must be whole numbers"),
        ({"eval_every": 1}, "eval_every: 2 there, 1 now"),
        ({"backend": "rows"}, 'backend: "stacked" there, "rows" now'),
    ],
)
def test_what_would_have_been_otherwise_is_refused_and_costs_nothing(
    data: Federation, small: Path, more: dict[str, Any], message: str
) -> None:
    before = files_of(small)
    with pytest.raises(KinfedError, match=message):
        run(federation=data, out=small, extend=True, **more)
    assert files_of(small) == before


def test_other_data_are_refused(data: Federation, small: Path) -> None:
    before = files_of(small)
    other = Federation.from_arrays(data.features.raw + 1, data.labels, [f"c{i % 5}" for i in range(80)])
    with pytest.raises(StorageError, match=r"cannot grow into this run \(other data of seed 0\)"):
        run(federation=other, out=small, extend=True, rounds=9)
    assert files_of(small) == before


def test_rounds_under_privacy_do_not_grow_and_seeds_do(data: Federation, tmp_path: Path) -> None:
    settings = {**SETTINGS, "algorithms": "fedavg", "dp_noise": 1.0}
    run(federation=data, out=tmp_path / "a", **settings, rounds=1, seeds=(0,))
    with pytest.raises(ConfigError, match="planned for 1 rounds"):
        run(federation=data, out=tmp_path / "a", extend=True, rounds=2)
    run(federation=data, out=tmp_path / "a", extend=True, seeds=(1,))
    run(federation=data, out=tmp_path / "b", **settings, rounds=1, seeds=(0, 1))
    assert same_results(tmp_path / "a", tmp_path / "b") == []


def test_rounds_do_not_grow_where_an_epsilon_of_clients_was_planned_and_do_where_the_noise_is_given(
    data: Federation, tmp_path: Path
) -> None:
    pytest.importorskip("dp_accounting", reason="the extra dp is not installed")
    settings = {**SETTINGS, "algorithms": "fedavg", "sampling": "poisson", "seeds": (0,)}
    run(federation=data, out=tmp_path / "a", **settings, user_epsilon=4.0, rounds=1)
    with pytest.raises(ConfigError, match="planned for 1 rounds"):
        run(federation=data, out=tmp_path / "a", extend=True, rounds=2)
    run(federation=data, out=tmp_path / "b", **settings, user_noise=2.0, rounds=1)
    run(federation=data, out=tmp_path / "b", extend=True, rounds=2)


def test_another_sample_of_evaluated_clients_is_refused(data: Federation, tmp_path: Path) -> None:
    settings = {**SETTINGS, "algorithms": "fedavg", "eval_clients": 2, "participation": 0.2, "seeds": (2,)}
    run(federation=data, out=tmp_path / "a", **settings, rounds=1)
    with pytest.raises(ConfigError, match="eval_clients: the sample"):
        run(federation=data, out=tmp_path / "a", extend=True, rounds=20)


def test_a_run_whose_size_asks_for_another_backend_says_how_to_stay(
    data: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("numba")
    examples = (
        6.0 * 10 * 2 * 5 * 3 * 2
    )  # multiplications per parameter: ten parameters, two steps of five, three clients
    monkeypatch.setattr(tasks, "FUSED_FROM", 2 * examples)  # reached with four rounds
    settings = {**SETTINGS, "algorithms": "fedavg", "backend": "auto", "seeds": (0,)}
    run(federation=data, out=tmp_path / "a", **settings, rounds=2)
    assert RunFiles(tmp_path / "a").layout()["backend"] == "stacked"
    with pytest.raises(StorageError, match=r"the backend stacked, and a run of this size .*: --backend stacked"):
        run(federation=data, out=tmp_path / "a", extend=True, rounds=8)
    run(federation=data, out=tmp_path / "a", extend=True, rounds=8, backend="stacked")
    run(federation=data, out=tmp_path / "b", **{**settings, "backend": "stacked"}, rounds=8)
    assert same_results(tmp_path / "a", tmp_path / "b") == []


def test_what_a_growth_is_told(small: Path, tmp_path: Path) -> None:
    file = tmp_path / "more.toml"
    file.write_text('rounds = 8\nseeds = [4, 0]\nalgorithms = "fedavg,weak=ditto"\n')
    config = grown_config(small, file, {"workers": 2}, ("weak.lam=0.1",))
    assert (config.rounds, config.seeds, config.workers) == (8, (0, 4), 2)
    assert list(config.algorithms) == ["local", "fedavg", "weak"]
    assert config.algorithms["weak"] == {"method": "ditto", "lam": 0.1}
    assert config.lr == 0.05
    with pytest.raises(ConfigError, match="say which one with out"):
        run(extend=True, rounds=3)
    with pytest.raises(StorageError, match="no run folder"):
        run(out=tmp_path / "nothing", extend=True, rounds=3)
