"""Every row of the table of exclusions refuses wherever its settings exist, in simulations, deployments, tuning and on
the command line, with the same sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from command_line import kinfed as command

import kinfed
from kinfed.config.config_reading import make_config
from kinfed.config.excludes import EXCLUDES, Where, refuse_exclusions
from kinfed.config.setting_groups import DEFAULTS
from kinfed.deploy.settings import SETTINGS, Deployment
from kinfed.errors import ConfigError
from kinfed.tuning import tune, tune_while_training

# Settings that ask for what a row speaks of, by its name there; of others the name and the value are in the row.
ASKING: dict[str, dict[str, Any]] = {
    "dp_": {"dp_noise": 1.0},
    "user_": {"user_noise": 1.0},
    "dp_strict": {"dp_strict": True, "dp_noise": 1.0},
    "user_quantile": {"user_quantile": 0.5, "user_noise": 1.0},
    "folds": {"folds": 2},
    "foreign_targets": {"foreign_targets": True},
    "models": {"models": "phone=mlr,server=mlp"},
    "frozen": {"frozen": "1.*"},
    "preset": {"preset": "tuned"},
    "pretrain": {"pretrain": 1},
    "dp_epsilon": {"dp_epsilon": 3.0},
    "warm_start": {"warm_start": 1},
    "robust": {"robust": "median"},
    "largest_norm": {"largest_norm": 1.0},
    "secure_sum": {"secure_sum": True},
    "compress": {"compress": "qsgd:7"},
    "mode": {"mode": "fedbuff"},
    "clock": {"clock": "equal"},
    "quorum": {"quorum": 2},
    "early_stopping": {"early_stopping": 3},
    "stopped_models": {"early_stopping": 3, "stopped_models": True},
}
ROWS = [(where, settings) for where, rows in EXCLUDES.items() for settings in rows]


def asking(settings: tuple[str, ...]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for term in settings:
        name, equals, value = term.partition(" = ")
        values |= {name: value} if equals else ASKING[term]
    return values


def sentence(where: Where, settings: tuple[str, ...]) -> str:
    return f"{', '.join(settings)}: {EXCLUDES[where][settings]}"


def rows_of(*places: Where) -> list[tuple[Where, tuple[str, ...]]]:
    return [row for row in ROWS if row[0] in places]


@pytest.mark.parametrize(("where", "settings"), rows_of(""))
def test_simulations_and_the_command_line_refuse(where: Where, settings: tuple[str, ...], tmp_path: Path) -> None:
    values = asking(settings)
    with pytest.raises(ConfigError) as error:
        kinfed.run(**values)
    assert str(error.value) == sentence(where, settings)
    words = [
        word
        for name, value in values.items()
        for word in (f"--{name.replace('_', '-')}", *([] if value is True else [str(value)]))
    ]
    done = command("run", *words, cwd=tmp_path)
    assert done.returncode == 2
    assert sentence(where, settings) in " ".join(done.stderr.split())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("where", "settings"), rows_of("", "deployment"))
def test_deployments_refuse(where: Where, settings: tuple[str, ...]) -> None:
    values = asking(settings)
    if not where and not values.keys() <= {*SETTINGS}:
        pytest.skip("a deployment has no such setting")
    if "models" in values:
        pytest.skip("a deployment's models are those that a search tries")
    with pytest.raises(ConfigError) as error:
        Deployment.parse({"method": "fedavg", "scaling": "none", **values})
    assert str(error.value) == sentence(where, settings)


@pytest.mark.parametrize(("where", "settings"), rows_of("tuning", "tuning while training"))
def test_tuning_refuses(where: Where, settings: tuple[str, ...], tmp_path: Path) -> None:
    search = tune if where == "tuning" else tune_while_training
    with pytest.raises(ConfigError) as error:
        search(make_config(None, asking(settings)), 2, tmp_path / "tuned")
    assert str(error.value) == sentence(where, settings)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("where", [*EXCLUDES])
def test_defaults_are_refused_nowhere(where: Where) -> None:
    refuse_exclusions(DEFAULTS, where)
