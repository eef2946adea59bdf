"""Presets: what tuning found, taken where the user says nothing, written down, and never guessed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import presets as search
import pytest
from command_line import kinfed as command
from torch import nn

import kinfed
from kinfed.algorithms import make_algorithm, tuning_space
from kinfed.config.config import RunConfig
from kinfed.config.config_reading import make_config
from kinfed.config.preset_files import PRESETS, preset_families, preset_methods
from kinfed.core.options import Range
from kinfed.data.examples.batches import LocalTraining
from kinfed.errors import ConfigError, StorageError
from kinfed.records.compare import same_results
from kinfed.records.reader import load_run
from kinfed.records.run_files import RunFiles
from kinfed.runs.experiment import Experiment
from kinfed.tuning.tuner import read_tuning, tune

SMALL = {"clients": 4, "rounds": 1, "steps": 1, "seeds": [0], "model": "mlr", "participation": 1.0}


@pytest.fixture
def ours(tmp_path: Path) -> Iterator[str]:
    """A preset of a user's own, for models of the families mlr and mlp."""
    folder = tmp_path / "presets"
    folder.mkdir()
    (folder / "mlr.toml").write_text("[methods.ditto]\nlr = 0.5\nlam = 0.25\n[methods.local]\nlr = 0.75\n", "utf-8")
    (folder / "mlp.toml").write_text("[methods.ditto]\nlr = 0.125\n", "utf-8")
    kinfed.register("preset", "ours", folder, summary="of a test")
    yield "ours"
    PRESETS.unregister("ours")


def test_a_preset_is_for_the_family_of_the_model(ours: str) -> None:
    by_model = {m: make_config(None, {"preset": ours, "model": m, "algorithms": "ditto"}) for m in ("mlr", "mlp")}
    assert by_model["mlr"].algorithms["ditto"] == {"method": "ditto", "lr": 0.5, "lam": 0.25}
    assert by_model["mlp"].algorithms["ditto"] == {"method": "ditto", "lr": 0.125}
    named = make_config(None, {"preset": "ours:mlp", "model": "lstm", "algorithms": "weak=ditto"})
    assert named.algorithms["weak"] == {"method": "ditto", "lr": 0.125}
    assert RunConfig(preset=ours, model="mlr", algorithms="ditto") == by_model["mlr"]


def test_what_the_user_says_wins(ours: str) -> None:
    settings = {"preset": ours, "model": "mlr", "algorithms": "ditto,local"}
    config = make_config(None, settings, ("ditto.lam=2",))
    assert config.algorithms["ditto"] == {"method": "ditto", "lr": 0.5, "lam": 2}
    config = make_config(None, {**settings, "lr": 0.01})
    assert config.algorithms == {"ditto": {"method": "ditto", "lam": 0.25}, "local": {"method": "local"}}
    assert config.preset is not None
    assert config.preset.options == {"ditto": {"lam": 0.25}, "local": {}}
    assert config.preset.notes() == ["preset ours, for mlr: ditto lam=0.25"]


def test_methods_without_a_setting_are_named(ours: str) -> None:
    config = make_config(None, {"preset": ours, "model": "mlr", "algorithms": "ditto,apfl,fedavg"})
    assert config.preset is not None
    assert config.preset.notes() == [
        "preset ours, for mlr: ditto lr=0.5, lam=0.25",
        "no ours setting for apfl, fedavg on mlr: defaults, not on equal terms with methods that have one",
    ]
    config = make_config(None, {"preset": ours, "model": "lstm", "algorithms": "ditto"})
    assert config.preset is not None
    assert config.preset.notes() == ["no ours setting for ditto on lstm, which belongs to no family: defaults"]


def test_a_recorded_configuration_does_not_change_with_the_files(ours: str) -> None:
    config = make_config(None, {"preset": ours, "model": "mlr", "algorithms": "ditto,apfl"})
    recorded = json.loads(json.dumps(config.dump()))
    (PRESETS[ours].target / "mlr.toml").write_text("[methods.ditto]\nlr = 9.0\nfinetune = 3\n", "utf-8")
    PRESETS.unregister(ours)  # another process need not know it
    again = make_config(None, recorded)
    assert again == config
    assert again.fingerprint() == config.fingerprint()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"preset": "tunde"}, ["preset", "tunde", "tuned"]),
        ({"preset": "ours:nlp"}, ["family of preset ours", "nlp", "mlp"]),
        ({"preset": 3}, ["preset", "3"]),
        ({"preset": "ours", "momentum": 0.9}, ["plain SGD", "ditto", "momentum = 0.9", "lr"]),
        ({"preset": "ours", "optimizer": "adam"}, ["plain SGD", "optimizer = adam"]),
        ({"preset": "ours", "algorithms": {"ditto": {"momentum": 0.5}}}, ["momentum = 0.5"]),
    ],
)
def test_bad_presets_are_refused(ours: str, settings: dict[str, object], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        make_config(None, {"algorithms": "ditto", **settings})
    assert all(word in str(error.value) for word in words), error.value


def test_a_rate_of_ones_own_goes_with_any_optimizer(ours: str) -> None:
    config = make_config(
        None, {"preset": ours, "optimizer": "adam", "lr": 0.001, "algorithms": "ditto", "model": "mlr"}
    )
    assert config.algorithms["ditto"] == {"method": "ditto", "lam": 0.25}


def test_a_broken_file_is_named(ours: str) -> None:
    file = PRESETS[ours].target / "cnn.toml"
    file.write_text("methods = 3 4", "utf-8")
    with pytest.raises(ConfigError, match=r"cnn\.toml is no file of a preset"):
        make_config(None, {"preset": ours, "model": "cnn"})


def test_the_family_of_a_network_of_ones_own_is_not_guessed(ours: str) -> None:
    settings = {**SMALL, "algorithms": "ditto", "model": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10))}
    with pytest.raises(ConfigError, match='preset = "ours:cnn"'):
        kinfed.run(preset=ours, **settings)
    result = kinfed.run(preset="ours:mlr", **settings)
    assert result.config.algorithms["ditto"]["lam"] == 0.25


def test_the_run_says_which_settings_it_has(ours: str, tmp_path: Path) -> None:
    """In the terminal, in config.json and on the page; methods that "all" cannot run are none of them."""
    from kinfed.report.sentences import facts

    file = tmp_path / "run.toml"
    file.write_text('clients = 4\nrounds = 1\nsteps = 1\nseeds = [0]\nmodel = "mlr"\npreset = "ours"\n', "utf-8")
    done = command("run", file, "--algorithms", "ditto,apfl", "--out", "run", cwd=tmp_path, COLUMNS="300")
    assert done.returncode == 0, done.stderr
    assert "preset ours, for mlr: ditto lr=0.5, lam=0.25" in done.stdout
    assert "no ours setting for apfl on mlr: defaults" in done.stdout
    run = load_run(tmp_path / "run", "run")
    assert run.config["algorithms"]["ditto"] == {"method": "ditto", "lr": 0.5, "lam": 0.25}
    assert run.config["preset"]["options"] == {"ditto": {"lr": 0.5, "lam": 0.25}}
    assert facts(run)["Preset"] == (
        "preset ours, for mlr: ditto lr=0.5, lam=0.25; no ours setting for apfl on mlr: defaults, not on equal terms "
        "with methods that have one"
    )
    page = (tmp_path / "run" / "report.html").read_text("utf-8")
    assert "no ours setting for apfl on mlr: defaults" in page
    assert command("run", "--out", "run", "--resume", cwd=tmp_path).returncode == 0


def test_methods_that_join_a_run_get_their_settings_too(ours: str, tmp_path: Path) -> None:
    out, settings = tmp_path / "run", {**SMALL, "preset": ours}
    kinfed.run(out=out, algorithms="ditto", **settings)
    kinfed.run(out=out, algorithms="local,apfl", preset=ours, extend=True)
    once = kinfed.run(out=tmp_path / "once", algorithms="ditto,local,apfl", **settings)
    assert same_results(out, tmp_path / "once") == []
    config = RunFiles(out).config
    assert config == once.config
    assert config.algorithms["local"] == {"method": "local", "lr": 0.75}
    assert config.preset is not None
    assert config.preset.missing == ("apfl",)
    with pytest.raises(StorageError, match="preset"):
        kinfed.run(out=out, preset="ours:mlp", extend=True)


def test_methods_that_all_cannot_run_leave_the_preset(ours: str) -> None:
    config = Experiment(make_config(None, {**SMALL, "preset": ours, "algorithms": "ditto,all"})).config
    assert config.preset is not None
    assert "fedper" not in config.algorithms  # mlr has no layers to keep
    assert set(config.preset.missing) == config.algorithms.keys() - {"ditto", "local"}


def test_tuning_starts_from_a_preset_and_varies_its_options(ours: str, tmp_path: Path) -> None:
    config = make_config(None, {**SMALL, "preset": ours, "algorithms": "ditto"})
    result = tune(config, 2, tmp_path / "tuned")
    (tuned,) = result.methods
    assert set(tuned.space) == {"lr", "lam"}
    assert set(tuned.trials[1].settings) == {"lr", "lam"}
    assert read_tuning(tmp_path / "tuned").config.preset == config.preset
    best = make_config(result.file)
    assert best.preset is None
    assert best.algorithms["ditto"] == {"method": "ditto", "lr": 0.5, "lam": 0.25, **tuned.best.settings}


def test_lists_name_presets_and_their_settings(ours: str, tmp_path: Path) -> None:
    listed = command("list", "presets", cwd=tmp_path).stdout
    assert "tuned" in listed
    assert "of a test" in listed
    table = command("list", ours, cwd=tmp_path).stdout
    assert "lr=0.5, lam=0.25" in table
    assert "lr=0.125" in table


# ---- those that kinfed brings ----


def test_tuned_presets_are_what_the_log_of_the_search_says() -> None:
    for family in preset_families("tuned"):
        lines = search.read_log(family)
        text = (PRESETS["tuned"].target / f"{family}.toml").read_text("utf-8")
        assert text == search.preset_toml(family, lines)
        for line in lines:
            if "trials" in line:
                trials = [search.Trial(settings, scores and tuple(scores)) for settings, scores in line["trials"]]
                assert line["chosen"].items() >= search.chosen_trial(line["method"], trials).settings.items()
                assert trials[0].settings == {}


def test_tuned_presets_are_settings_that_the_methods_take() -> None:
    assert preset_families("tuned")
    for family in preset_families("tuned"):
        for method, options in preset_methods("tuned", family).items():
            make_algorithm(method, LocalTraining(), options)
            assert options.keys() <= tuning_space(method).keys()


def test_the_python_of_the_page_on_presets_runs() -> None:
    text = (Path(__file__).parents[2] / "docs/presets.md").read_text("utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", text, re.S)
    exec(compile(block, "presets.md", "exec"), {})


# ---- the search ----

SPACE = {"lr": Range(1e-3, 1.0), "lam": Range(0.01, 1.9)}
DEFAULTS = {"lr": 0.05, "lam": 1.0}


def run_search(
    scores: dict[tuple[float, float], float], space: dict[str, Range] = SPACE, trials: int = 6
) -> list[search.Trial]:
    """Scores by (lr, lam); 0.5 where none is given."""

    def score(settings: dict[str, float]) -> tuple[float, ...]:
        return (scores.get((settings.get("lr", 0.05), settings.get("lam", 1.0)), 0.5),)

    return list(search.search(space, {name: DEFAULTS[name] for name in space}, trials, score))


def test_the_search_doubles_the_rate_while_that_helps_and_goes_on_from_the_best() -> None:
    trials = run_search({(0.1, 1.0): 0.6, (0.2, 1.0): 0.61, (0.2, 0.14): 0.7})
    assert [t.settings.get("lr") for t in trials] == [None, 0.1, 0.2, 0.4, 0.2, 0.2]
    assert [t.settings.get("lam") for t in trials] == [None, None, None, None, 0.029, 0.14]
    assert search.best_trial(trials).settings == {"lr": 0.2, "lam": 0.14}


def test_the_search_halves_the_rate_where_doubling_does_not_help() -> None:
    trials = run_search({(0.025, 1.0): 0.6, (0.025, 0.67): 0.65})
    assert [t.settings.get("lr") for t in trials] == [None, 0.1, 0.025, 0.013, 0.025, 0.025]
    assert [t.settings.get("lam") for t in trials[4:]] == [0.029, 0.14]


def test_what_is_better_by_less_than_the_margin_stays_at_its_default() -> None:
    trials = run_search({(0.1, 1.0): 0.502, (0.05, 0.14): 0.5029})
    assert search.best_trial(trials).settings == {}
    assert len(trials) == 6


def test_a_method_without_options_looks_closer_at_the_rate() -> None:
    trials = run_search({(0.1, 1.0): 0.6}, {"lr": SPACE["lr"]})
    assert [t.settings.get("lr") for t in trials] == [None, 0.1, 0.2, 0.071, 0.14, 0.084]


def test_a_range_that_ends_at_the_default_is_searched_below_it() -> None:
    trials = run_search({}, {"lr": Range(1e-3, 0.05)})
    assert [t.settings.get("lr") for t in trials][:3] == [None, 0.025, 0.035]


def test_refused_settings_count_as_trials_and_are_never_chosen() -> None:
    trials = list(search.search(SPACE, DEFAULTS, 6, lambda s: (0.5,) if s.get("lr", 0.05) < 0.1 else None))
    assert len(trials) == 6
    assert search.best_trial(trials).settings == {}


def test_methods_that_use_validation_examples_do_not_choose_their_options_by_them() -> None:
    trials = [
        search.Trial({}, (0.5,)),
        search.Trial({"lr": 0.1}, (0.6,)),
        search.Trial({"lr": 0.1, "lam": 0.2}, (0.9,)),
    ]
    assert search.chosen_trial("ditto", trials).settings == {"lr": 0.1, "lam": 0.2}
    assert search.chosen_trial("kin", trials).settings == {"lr": 0.1}


def test_an_option_that_follows_another_one_is_tried_and_may_stay_so() -> None:
    trials = list(search.search(SPACE, {"lr": 0.05, "lam": None}, 6, lambda s: (0.5,)))
    assert [t.settings.get("lam") for t in trials] == [None, None, None, 0.029, 0.67, 0.14]


def test_nothing_to_vary_is_one_trial() -> None:
    assert [t.settings for t in search.search({}, {}, 6, lambda s: (0.5,))] == [{}]
