"""Settings from TOML, command line and Python are one validated configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from kinfed.algorithms import ALGORITHMS
from kinfed.errors import ConfigError
from kinfed.runs.config import RunConfig, make_config


def test_defaults_are_the_demo() -> None:
    config = make_config()
    assert config.dataset.name == "digits"
    assert config.training.steps == 20
    assert "local" in config.algorithms


def test_toml_is_overridden_by_settings_and_those_by_sets(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        'rounds = 7\nlr = 0.5\nalgorithms = ["local"]\n[partition]\nname = "dirichlet"\nalpha = 0.3\n', "utf-8"
    )
    config = make_config(file, {"lr": 0.25, "algorithms": "local,weak=ditto"}, ("weak.lam=0.125", "partition.alpha=2"))
    assert (config.rounds, config.lr) == (7, 0.25)
    assert config.algorithms["weak"] == {"method": "ditto", "lam": 0.125}
    assert config.partition is not None
    assert (config.partition.name, config.partition.options) == ("dirichlet", {"alpha": 2})


def test_algorithm_tables_in_toml(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[algorithms.local]\n[algorithms.firm]\nmethod = "ditto"\nlam = 2.0\n', "utf-8")
    config = make_config(file)
    assert config.algorithms == {"local": {"method": "local"}, "firm": {"method": "ditto", "lam": 2.0}}


def test_a_dumped_configuration_is_read_back_equal() -> None:
    config = make_config(None, {"partition": "iid", "seeds": (3, 4), "epochs": 2}, ("partition.test_fraction=0.5",))
    again = make_config(None, config.dump())
    assert again == config
    assert again.fingerprint() == config.fingerprint()


def test_fingerprint_ignores_how_and_notices_what() -> None:
    base = make_config()
    assert make_config(None, {"workers": 1, "checkpoint_every": 3}).fingerprint() == base.fingerprint()
    for change in ({"lr": 0.1}, {"rounds": 3}, {"seeds": (0,)}, {"model": "mlr"}, {"participation": 0.25}):
        assert make_config(None, change).fingerprint() != base.fingerprint(), change


@pytest.mark.parametrize(
    ("settings", "sets", "words"),
    [
        ({"participation": 1.5}, (), ["participation", "(0, 1]", "1.5"]),
        ({"participation": 0.0}, (), ["participation"]),
        ({"rounds": 0}, (), ["rounds", "0"]),
        ({"round": 3}, (), ["round", "rounds"]),
        ({"seeds": ()}, (), ["seeds"]),
        ({"seeds": (1, 1)}, (), ["distinct"]),
        ({"steps": 3, "epochs": 3}, (), ["steps", "epochs"]),
        ({"algorithms": "ditto,ditto"}, (), ["twice"]),
        ({"algorithms": ""}, (), ["at least one"]),
        ({"algorithms": "a/b=ditto"}, (), ["labels"]),
        ({"validation": 1.0}, (), ["validation"]),
        ({"dropout": 1.0}, (), ["dropout"]),
        ({"lr": -1.0}, (), ["lr", "positive"]),
        ({}, ("lam",), ["owner.option=value"]),
        ({}, ("dito.lam=1",), ["dito", "ditto"]),
        ({}, ("partition.alpha=1",), ["--partition"]),
    ],
)
def test_bad_settings_are_refused_in_one_sentence(settings: dict[str, object], sets: tuple[str, ...], words) -> None:
    with pytest.raises(ConfigError) as error:
        make_config(None, settings, sets)
    text = str(error.value)
    assert "\n" not in text
    for word in words:
        assert word in text


def test_unreadable_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml"):
        make_config(tmp_path / "nowhere.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("rounds = = 3", "utf-8")
    with pytest.raises(ConfigError, match="not valid TOML"):
        make_config(broken)


def test_configuration_cannot_be_changed_by_accident() -> None:
    with pytest.raises(ValueError, match="frozen"):
        RunConfig().rounds = 3  # type: ignore[misc]


def test_all_methods_but_some() -> None:
    every = make_config(None, {"algorithms": "all"}).algorithms
    assert list(every) == list(ALGORITHMS)
    fewer = make_config(None, {"algorithms": "all,-mocha,weak=ditto"}).algorithms
    assert set(fewer) == (set(ALGORITHMS) | {"weak"}) - {"mocha"}
    with pytest.raises(ConfigError, match="mocah cannot be left out"):
        make_config(None, {"algorithms": "all,-mocah"})


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_seeds_have_a_range(seed: int) -> None:
    with pytest.raises(ConfigError, match="from 0 to 2"):
        make_config(None, {"seeds": [seed]})
