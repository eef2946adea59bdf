"""Tuning: on validation data only, with one budget for all, the same after a stop as without, ready to run."""

from __future__ import annotations

import itertools
import json
import re
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
from command_line import kinfed as command

import kinfed
from kinfed.algorithms import ALGORITHMS, make_algorithm, tuning_space
from kinfed.config.config import RunConfig
from kinfed.config.config_reading import make_config
from kinfed.core.options import Range
from kinfed.data.examples.batches import LocalTraining
from kinfed.data.federations.federation import Federation
from kinfed.errors import ConfigError, DataError, KinfedError, StorageError
from kinfed.records.run_index import find_runs
from kinfed.runs.experiment import Experiment
from kinfed.runs.method_run import Interrupted
from kinfed.runs.observer import NullObserver
from kinfed.server.loop import Loop
from kinfed.tuning.tuner import read_tuning, tune
from kinfed.tuning.tuning_job import Tuned, TuningTrial, parse_ranges, space_of

SMALL: dict[str, Any] = {
    "model": "mlr", "rounds": 3, "seeds": [0], "workers": 1, "eval_every": 1, "participation": 1.0, "steps": 3,
    "batch": 5,
}  # fmt: skip


@pytest.fixture(scope="module")
def data() -> Federation:
    numbers = np.random.default_rng(1)
    owner = np.repeat(np.arange(4), 30)
    x = numbers.normal(size=(len(owner), 4))
    y = (x @ np.array([1.0, -1.0, 0.5, 0.0]) + 0.5 * (owner - 1.5) > 0).astype(int)
    return Federation.from_arrays(x, y, owner, num_classes=2)


def config(algorithms: Any = "fedavg,ditto", **settings: Any) -> RunConfig:
    return make_config(None, {**SMALL, "algorithms": algorithms, **settings})


def files(folder: Path) -> tuple[str, str]:
    return (folder / "tuning.json").read_text(), (folder / "best.toml").read_text()


def test_every_method_has_a_space_whose_corners_it_accepts() -> None:
    for name in ALGORITHMS:
        space = tuning_space(name)
        for ends in itertools.product(*((r.low, r.high) for r in space.values())):
            options = {k: int(v) if space[k].whole else v for k, v in zip(space, ends, strict=True)}
            make_algorithm(name, LocalTraining(), options)
        if ALGORITHMS[name].tuning is None:
            assert not set(space) & set(ALGORITHMS[name].preset), f"{name} is what it is by its preset"


class Ear(NullObserver):
    def __init__(self) -> None:
        self.started_with: list[Any] = []
        self.notes: list[str] = []

    def started(self, *what: Any) -> None:
        self.started_with.append(what)

    def note(self, text: str) -> None:
        self.notes.append(text)


def test_every_method_gets_its_trials_and_the_first_is_as_configured(tmp_path: Path, data: Federation) -> None:
    ear = Ear()
    result = tune(config(), 3, tmp_path / "a", federation=data, observer=ear)
    assert ear.started_with == [("fedavg", 0, 0, 3), ("ditto", 0, 0, 3)]
    assert [note.partition(":")[0] for note in ear.notes] == [
        f"{label} trial {number}/3" for label in ("fedavg", "ditto") for number in (1, 2, 3)
    ]
    for tuned in result.methods:
        assert len(tuned.trials) == 3
        assert tuned.trials[0].settings == {}
        assert [set(trial.settings) for trial in tuned.trials[1:]] == [set(tuning_space(tuned.method))] * 2
        for trial in tuned.trials[1:]:
            assert all(value in tuning_space(tuned.method)[name] for name, value in trial.settings.items())
        assert tuned.best.value == max(trial.value for trial in tuned.trials if trial.value is not None)
        assert tuned.default <= (tuned.best.value or 0)


def test_settings_are_chosen_by_a_metric_of_ones_own(tmp_path: Path, data: Federation, missed: str) -> None:
    result = tune(config("fedavg", metric=missed), 3, tmp_path / "a", federation=data)
    (tuned,) = result.methods
    assert tuned.metric == missed
    assert tuned.best.value == min(trial.value for trial in tuned.trials if trial.value is not None)
    assert "mean client missed" in result.file.read_text()


def test_the_value_of_a_trial_is_the_mean_client_accuracy_on_validation_data(tmp_path: Path, data: Federation) -> None:
    """Trained again by hand with the settings of a trial, over both seeds."""
    settings = config("ditto", seeds=[0, 1])
    result = tune(settings, 2, tmp_path / "a", federation=data)
    for trial in result.methods[0].trials:
        values = []
        for seed in (0, 1):
            federation = data.with_validation(0.2, seed)
            algorithm = make_algorithm("ditto", settings.training, trial.settings)
            loop = kinfed.simulate(federation, "mlr", algorithm, seed=seed, workers=1)
            for _ in loop.rounds(3):
                pass
            score = loop.evaluate("val").personal
            assert score is not None
            values.append(float((score.correct / score.count).mean()))
        assert trial.value == pytest.approx(sum(values) / 2, abs=1e-12)


def test_test_data_are_never_touched(tmp_path: Path, data: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other test labels give the same choice, byte for byte; and the test split is never scored."""
    labels = data.labels.clone()
    labels[data.test.rows] = 1 - labels[data.test.rows]
    other = replace(data, labels=labels)
    splits: list[str] = []
    evaluate = Loop.evaluate

    def watched(self: Loop, split: str = "test", **options: Any) -> Any:
        splits.append(split)
        return evaluate(self, split, **options)

    monkeypatch.setattr(Loop, "evaluate", watched)
    tune(config(), 3, tmp_path / "a", federation=data)
    tune(config(), 3, tmp_path / "b", federation=other)
    assert files(tmp_path / "a") == files(tmp_path / "b")
    assert set(splits) == {"val"}


@pytest.mark.parametrize("prune", [False, True])
def test_a_study_that_was_stopped_is_the_one_that_was_not(tmp_path: Path, data: Federation, prune: bool) -> None:
    """Stopped in the middle of a trial, its last line cut and a lock left behind, then extended by more trials."""
    whole = tune(config(), 11, tmp_path / "whole", federation=data, prune=prune)
    rounds = 0

    def stop() -> bool:
        nonlocal rounds
        rounds += 1
        return rounds == 3 * 9 + 2  # in the tenth trial

    with pytest.raises(Interrupted):
        tune(config(), 10, tmp_path / "parts", federation=data, prune=prune, should_stop=stop)
    journal = tmp_path / "parts" / "study.jsonl"
    journal.write_bytes(journal.read_bytes() + b'{"op_code": 5, "tri')
    (tmp_path / "parts" / "study.jsonl.lock").symlink_to(journal)
    with pytest.raises(StorageError, match="add --resume"):
        tune(config(), 10, tmp_path / "parts", federation=data, prune=prune)
    tune(config(), 10, tmp_path / "parts", federation=data, prune=prune, resume=True)
    parts = tune(config(), 11, tmp_path / "parts", federation=data, prune=prune, resume=True)
    assert parts.methods == whole.methods
    assert files(tmp_path / "parts") == files(tmp_path / "whole")
    settings = [tuple(trial.settings.items()) for trial in whole.methods[1].trials]
    assert len(set(settings)) == 11


def test_what_runs_is_what_is_written_down(tmp_path: Path, data: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three digits, in the trial and in the record of it."""
    ran: list[dict[str, Any]] = []
    make_loop = Experiment.make_loop

    def watched(self: Experiment, algorithm: Any, seed: int) -> Loop:
        ran.append({"lr": algorithm.training.lr, "lam": algorithm.lam})
        return make_loop(self, algorithm, seed)

    monkeypatch.setattr(Experiment, "make_loop", watched)
    (tuned,) = tune(config("ditto"), 4, tmp_path / "a", federation=data).methods
    assert ran[1:] == [trial.settings for trial in tuned.trials[1:]]
    assert all(value == float(f"{value:.3g}") for trial in tuned.trials for value in trial.settings.values())


def test_another_seed_or_method_draws_other_trials(tmp_path: Path, data: Federation) -> None:
    drawn = [
        tune(config(name, seeds=[seed]), 2, tmp_path / f"{name}-{seed}", federation=data).methods[0].trials[1].settings
        for name, seed in (("fedavg", 0), ("fedavg", 1), ("local", 0))
    ]
    assert len({setting["lr"] for setting in drawn}) == 3


def test_other_settings_do_not_continue_a_study(tmp_path: Path, data: Federation) -> None:
    tune(config(), 1, tmp_path / "a", federation=data)
    with pytest.raises(StorageError, match="rounds"):
        tune(config(rounds=4), 1, tmp_path / "a", federation=data, resume=True)
    with pytest.raises(StorageError, match="high"):
        tune(
            config(), 1, tmp_path / "a", federation=data, resume=True, ranges={"ditto": {"lam": Range(0.1, 1.0)}}
        )  # fmt: skip
    labels = data.labels.clone()
    labels[data.train.rows[0]] = 1 - labels[data.train.rows[0]]
    with pytest.raises(StorageError, match="other data"):
        tune(config(), 1, tmp_path / "a", federation=replace(data, labels=labels), resume=True)


def test_the_choice_is_a_configuration_that_runs(tmp_path: Path, data: Federation) -> None:
    """best.toml with labels, options of a partition and fixed settings of its own, run as it is."""
    chosen = make_config(
        None,
        {"clients": 4, "partition": {"name": "dirichlet", "alpha": 1.0},
         "algorithms": {"weak.one": {"method": "ditto", "personal_steps": 2}, "fedem": {"components": 2}}, **SMALL},
    )  # fmt: skip
    result = tune(chosen, 3, tmp_path / "a", ranges={"weak.one": {"lam": Range(0.5, 0.6)}})
    assert [entry.state for entry in find_runs(tmp_path)] == ["finished"]
    read = make_config(result.file)
    assert read.algorithms == result.config.algorithms
    assert read.validation == 0.2
    assert read.partition is not None
    assert read.partition.options == {"alpha": 1.0}
    assert read.seeds == RunConfig().seeds
    assert read.algorithms["weak.one"]["personal_steps"] == 2
    assert read.algorithms["fedem"]["components"] == 2
    for trial in result.methods[0].trials[1:]:
        assert 0.5 <= trial.settings["lam"] <= 0.6
    assert all("components" not in trial.settings for trial in result.methods[1].trials)
    run = kinfed.run(result.file, out=tmp_path / "run")
    assert {r.label for r in run.results} == {"weak.one", "fedem"}


def test_settings_a_method_refuses_are_trials_without_a_value(tmp_path: Path, data: Federation) -> None:
    """lr * lam >= 2 is refused by Ditto; of the range given all is."""
    result = tune(
        config({"ditto": {"lr": 0.9}}), 3, tmp_path / "a", federation=data,
        ranges={"ditto": {"lam": Range(5.0, 9.0)}},
    )  # fmt: skip
    (tuned,) = result.methods
    assert [trial.value is None for trial in tuned.trials] == [False, True, True]
    assert "unstable" in tuned.trials[1].reason
    assert tuned.best.settings == {}
    assert result.config.algorithms["ditto"] == {"method": "ditto", "lr": 0.9}


def test_nothing_to_vary_is_one_trial(tmp_path: Path, data: Federation) -> None:
    (tuned,) = tune(config({"fedavg": {"lr": 0.1}}), 5, tmp_path / "a", federation=data).methods
    assert len(tuned.trials) == 1
    assert tuned.default == tuned.best.value


def test_a_default_outside_its_range_is_a_trial_all_the_same(tmp_path: Path, data: Federation) -> None:
    """Per-FedAvg's alpha is by default no number; the study starts without it."""
    (tuned,) = tune(config("perfedavg"), 3, tmp_path / "a", federation=data).methods
    assert [bool(trial.settings) for trial in tuned.trials] == [False, True, True]
    record = json.loads((tmp_path / "a" / "tuning.json").read_text())
    assert record["methods"]["perfedavg"]["default"] == tuned.default


def test_hopeless_trials_are_stopped_early(tmp_path: Path, data: Federation) -> None:
    result = tune(config("fedavg", rounds=6), 12, tmp_path / "a", federation=data, prune=True)
    stopped = [trial for trial in result.methods[0].trials if trial.value is None]
    assert stopped
    assert all("median" in trial.reason for trial in stopped)
    assert result.methods[0].best.value is not None


def test_a_warm_start_is_made_once(tmp_path: Path, data: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds: list[str] = []
    once = Loop.round

    def watched(self: Loop) -> Any:
        rounds.append(type(self.algorithm).__name__)
        return once(self)

    monkeypatch.setattr(Loop, "round", watched)
    tune(config("ditto", warm_start=2), 2, tmp_path / "a", federation=data)
    assert rounds == ["FedAvg"] * 2 + ["Ditto"] * 6


@pytest.mark.parametrize(
    ("settings", "trials", "match"),
    [
        ({"validation": 0.0}, 2, "never chosen on test data"),
        ({}, 0, "trials must be at least 1"),
        ({"dp_noise": 1.0}, 2, "dp_ and user_ settings"),
        ({"algorithms": {"ditto": {"lam": 100}}}, 2, "unstable"),
        ({"algorithms": "fedavg,mocha", "model": "mlp"}, 2, "linear models"),
    ],
)
def test_what_cannot_be_tuned_is_refused_before_a_folder_exists(
    tmp_path: Path, data: Federation, settings: dict[str, Any], trials: int, match: str
) -> None:
    with pytest.raises(KinfedError, match=match):
        tune(config(**settings), trials, tmp_path / "a", federation=data)
    assert not (tmp_path / "a").exists()


def test_without_validation_examples_there_is_nothing_to_tune_by(tmp_path: Path, data: Federation) -> None:
    class Never(Federation):
        def with_validation(self, fraction: float, seed: int, *, stratify: bool = False) -> Federation:
            return self

    with pytest.raises(DataError, match="validation examples"):
        tune(config(), 2, tmp_path / "a", federation=Never(**vars(data)))


def test_ranges() -> None:
    assert 0.5 in Range(0.1, 1)
    assert all(value not in Range(0.1, 1) for value in (0.05, 2, None, "x", True))
    assert 3 in Range(1, 5, whole=True)
    assert 3.5 not in Range(1, 5, whole=True)
    assert [Range(0.01, 1).at_edge(v) for v in (0.011, 0.1, 0.9)] == [True, False, True]
    assert [Range(0, 1, log=False).at_edge(v) for v in (0.01, 0.5, 0.99)] == [True, False, True]
    assert [Range(1, 5, whole=True).at_edge(v) for v in (1, 2, 5)] == [True, False, True]
    assert str(Range(1, 5, whole=True)) == "whole numbers 1 to 5, logarithmic"
    for bad in ({"low": 2, "high": 1}, {"low": 0, "high": 1}, {"low": 0.5, "high": 3, "whole": True}):
        with pytest.raises(ConfigError, match="range"):
            Range(**bad)  # type: ignore[arg-type]
    methods = {"a.b": "ditto", "f": "fedfomo"}
    found = parse_ranges(["a.b.lam=0.1:2", "f.epsilon=0:0.5", "f.models=2:4"], methods)
    assert found == {
        "a.b": {"lam": Range(0.1, 2)},
        "f": {"epsilon": Range(0, 0.5, log=False), "models": Range(2, 4, log=False, whole=True)},
    }
    for text in ("ditto.lam=1:2", "a.b.mu=1:2", "a.b.lam=1", "a.b.lam", "a.b.lam=x:2", "a.b.lam=3:2"):
        with pytest.raises(ConfigError):
            parse_ranges([text], methods)
    with pytest.raises(ConfigError, match="fixed"):
        space_of("ditto", {"lam": 1}, {"lam": Range(0.1, 2)})


def test_of_equal_trials_the_first_is_chosen_and_edges_are_named() -> None:
    trials = (
        TuningTrial({}, 0.5),
        TuningTrial({"lr": 0.98}, 0.7),
        TuningTrial({"lr": 0.1}, 0.7),
        TuningTrial({"lr": 0.2}, None, "why"),
    )
    tuned = Tuned("a", "fedavg", tuning_space("fedavg"), trials)
    assert tuned.best.settings == {"lr": 0.98}
    assert tuned.at_edge == ["lr"]


def test_the_command(tmp_path: Path) -> None:
    options = ["--clients", "4", "--model", "mlr", "--rounds", "2", "--workers", "1"]
    first = command("tune", "--algorithms", "fedavg,ditto", "--trials", "2", *options, "--out", "t", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    for text in ("1 seed; 2 trials per method", "ditto trial 2/2", "as configured", "kinfed run t/best.toml"):
        assert text in first.stdout
    again = command("tune", "--out", "t", "--resume", "--trials", "3", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert "trial 3/3" in again.stdout
    assert "trial 2/3" not in again.stdout
    assert read_tuning(tmp_path / "t").trials == 3
    done = command("run", "t/best.toml", "--seeds", "0", "--no-report", "--out", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert tomllib.loads((tmp_path / "t" / "best.toml").read_text())["clients"] == 4
    for arguments, sentence in (
        (["tune", "--resume"], "--resume needs --out"),
        (["tune", "--out", "t", *options], "holds another run"),
        (["tune", "--out", "run", "--resume"], "holds a run, not a tuning"),
        (["tune", "--algorithms", "ditto", "--range", "ditto.lam=2"], "--range takes label.option=low:high"),
        (["tune", "--validation", "none"], "validation must be auto or a number"),
    ):
        failed = command(*arguments, cwd=tmp_path)
        assert failed.returncode == 2
        assert sentence in failed.stderr.replace("\n", " ")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"study_id"', '"study"', "is damaged: KeyError"),
        ('"param_value_internal":', '"param_value_internal":1e9,"x":', "settings that no trial can have"),
    ],
)
def test_a_changed_journal_is_refused(tmp_path: Path, data: Federation, old: str, new: str, message: str) -> None:
    tune(config("ditto"), 2, tmp_path / "a", federation=data)
    journal = tmp_path / "a" / "study.jsonl"
    text = journal.read_text()
    assert old in text
    journal.write_text(text.replace(old, new))
    with pytest.raises(StorageError, match=message):
        tune(config("ditto"), 3, tmp_path / "a", federation=data, resume=True)


def test_the_journal_is_one_that_optuna_reads(tmp_path: Path, data: Federation) -> None:
    tune(config("ditto"), 3, tmp_path / "a", federation=data)
    backend = optuna.storages.journal.JournalFileBackend(str(tmp_path / "a" / "study.jsonl"))
    study = optuna.load_study(study_name="ditto", storage=optuna.storages.JournalStorage(backend))
    assert len(study.trials) == 3
    assert study.direction == optuna.study.StudyDirection.MAXIMIZE


def test_the_page_on_tuning_names_every_range_and_its_python_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (Path(__file__).parents[2] / "docs" / "tuning.md").read_text("utf-8")
    rows = [line.split("|")[1:3] for line in text.splitlines() if line.startswith("| ") and "`" in line]
    for name in ALGORITHMS:
        space = tuning_space(name)
        told = " ".join(what for who, what in rows if f"`{name}`" in who or "all but" in who)
        if name.startswith("selffl"):
            told += "l_max 10 to 100"
        for option, r in space.items():
            assert option in told, f"{name}.{option}"
            assert f"{r.high:g}" in told, f"{name}.{option} to {r.high:g}"
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(r"```python\n(.*?)```", text, re.S)
    exec(compile(block, "tuning.md", "exec"), {})
    assert capsys.readouterr().out.startswith("local 0.")
