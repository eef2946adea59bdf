"""The commented file of `kinfed init` gives the configuration that it was made from."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kinfed.config.config import RunConfig
from kinfed.config.config_reading import config_toml, make_config, toml_text, toml_value
from kinfed.config.setting_groups import DEFAULTS

CHOSEN: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({}, ()),
    ({"epochs": 2, "seeds": "3,4", "largest_norm": "inf", "save_models": False}, ()),
    ({"dataset": "visits \"of\" 'us'.csv", "client_column": "a\\b", "label_column": "ü"}, ()),
    ({"partition": "dirichlet", "algorithms": "local,weak=ditto"}, ("partition.alpha=0.1", "weak.lam=0.1")),
    ({"algorithms": "local,weak=ditto", "compress": "qsgd:4", "betas": "0.8,0.99", "optimizer": "adam"}, ()),
]


@pytest.mark.parametrize(("settings", "sets"), CHOSEN)
def test_the_file_gives_the_same_configuration(settings: dict[str, Any], sets: tuple[str, ...], tmp_path: Path) -> None:
    config = make_config(None, settings, sets)
    file = tmp_path / "run.toml"
    file.write_text(config_toml(config), "utf-8")
    assert make_config(file) == config


def test_every_setting_stands_in_the_file_and_defaults_are_what_they_say(tmp_path: Path) -> None:
    text = config_toml(RunConfig())
    assert not [line for line in text.splitlines() if line and not line.startswith("#")]
    assert set(re.findall(r"^# (\w+) =", text, re.M)) == set(DEFAULTS)
    in_force = re.sub(r"^# (\w+ = .)", r"\1", text, flags=re.M)
    (tmp_path / "all.toml").write_text(in_force, "utf-8")
    assert make_config(tmp_path / "all.toml") == make_config()


def test_the_examples_at_the_head_are_accepted(tmp_path: Path) -> None:
    examples = re.findall(r"^#     (\w+ = .*)", config_toml(RunConfig()), re.M)
    assert len(examples) == 2
    (tmp_path / "examples.toml").write_text("\n".join(examples), "utf-8")
    config = make_config(tmp_path / "examples.toml")
    assert config.algorithms["far"] == {"method": "ditto", "lam": 1}


@given(
    st.recursive(
        st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=6,
    )
)
def test_values_are_read_as_they_were_written(value: Any) -> None:
    assert toml_value(toml_text(value)) == value
