"""Settings from TOML, command line and Python are one validated configuration."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kinfed
from kinfed.algorithms import ALGORITHMS
from kinfed.algorithms.ditto import Ditto
from kinfed.algorithms.fedavg import FedAvg
from kinfed.config.config import RunConfig
from kinfed.config.config_fields import flat_settings
from kinfed.config.config_reading import make_config
from kinfed.core import storage
from kinfed.core.options import option
from kinfed.data.examples.batches import LocalTraining
from kinfed.errors import ConfigError


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
        ({"validation": 1.2}, (), ["validation", "auto or a number in [0, 1)", "1.2"]),
        ({"validation": "most"}, (), ["validation", "auto or a number in [0, 1)", "most"]),
        ({"rounds": "many"}, (), ["rounds", "whole number of at least 1", "many"]),
        ({"pool": "swimming"}, (), ["pool", "local or ray"]),
        ({"dataset": 3}, (), ["dataset", "a name"]),
        ({"algorithms": 3}, (), ["kinfed.Algorithm", "3"]),
        ({"algorithms": [Ditto]}, (), ["call the class"]),
        ({"algorithms": {"ditto": {"lam": math.nan}}}, (), ["ditto.lam", "NaN"]),
        ({"algorithms": {"ditto": {"lam": object()}}}, (), ["ditto.lam", "plain value"]),
        ({"partition": {"name": "iid", "x": {1, 2}}}, (), ["iid.x", "plain value"]),
        ({"plugins": 3}, (), ["plugins", "3"]),
        ({"plugins": ["nowhere.py"]}, (), ["nowhere.py"]),
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
    with pytest.raises(FrozenInstanceError):
        RunConfig().rounds = 3  # type: ignore[misc]


def test_all_methods_but_some() -> None:
    every = make_config(None, {"algorithms": "all"}).algorithms
    assert list(every) == list(ALGORITHMS)
    fewer = make_config(None, {"algorithms": "all,-mocha,weak=ditto"}).algorithms
    assert set(fewer) == (set(ALGORITHMS) | {"weak"}) - {"mocha"}
    named = make_config(None, {"algorithms": "all,mocha"}).algorithms
    assert set(named) == set(ALGORITHMS)
    assert [label for label, choice in named.items() if "optional" not in choice] == ["mocha"]
    with pytest.raises(ConfigError, match="mocah cannot be left out"):
        make_config(None, {"algorithms": "all,-mocah"})


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_seeds_have_a_range(seed: int) -> None:
    with pytest.raises(ConfigError, match="from 0 to 2"):
        make_config(None, {"seeds": [seed]})


# Everything a configuration may hold survives the way through its file.

TEXTS = st.text(st.characters(codec="utf-8"), max_size=8)
VALUES = st.recursive(
    st.floats(allow_nan=False) | st.integers(-(2**70), 2**70) | TEXTS | st.booleans() | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=5,
)
OPTIONS = st.dictionaries(st.from_regex("o_[a-z]{1,6}", fullmatch=True), VALUES, max_size=4)
NON_NEGATIVE = st.floats(0, allow_nan=False)
SETTINGS = st.fixed_dictionaries(
    {},
    optional={
        "dataset": OPTIONS.map(lambda options: {"name": "some.csv", **options}),
        "partition": OPTIONS.map(lambda options: {"name": "some", **options}),
        "model": OPTIONS.map(lambda options: {"name": "some", **options}),
        "algorithms": st.dictionaries(st.sampled_from(["a", "b.1", "c-2"]), OPTIONS, min_size=1),
        "largest_norm": NON_NEGATIVE,
        "validation": st.just("auto") | st.floats(0, 1, exclude_max=True),
        "seeds": st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=3, unique=True),
        "weight_decay": st.floats(0, 1e300),
        "clients": st.none() | st.integers(1, 100),
        "data": TEXTS.filter(lambda text: "\0" not in text).map(Path),
        "client_column": TEXTS,
        "foreign_targets": st.booleans(),
        "save_models": st.booleans(),
        "pool": st.sampled_from(["local", "ray"]),
    },
)


@given(SETTINGS)
def test_what_a_configuration_holds_survives_its_file(settings: dict[str, Any]) -> None:
    config = make_config(None, settings)
    text = storage.to_json(config.dump(), sort_keys=False)
    assert json.dumps(json.loads(text), allow_nan=False)
    again = make_config(None, json.loads(text))
    assert again == config
    assert again.fingerprint() == config.fingerprint()


@pytest.mark.parametrize("infinity", [math.inf, "inf"])
def test_an_infinite_option_runs_and_resumes(infinity: float | str, tmp_path: Path) -> None:
    settings = {
        "algorithms": {"selffl": {"r_max": infinity}}, "rounds": 2, "clients": 4, "model": "mlr", "seeds": [0],
    }  # fmt: skip
    first = kinfed.run(out=tmp_path / "run", **settings)
    assert first.config.algorithms["selffl"]["r_max"] == math.inf
    record = json.loads((tmp_path / "run" / "config.json").read_text(), parse_constant=pytest.fail)
    assert record["config"]["algorithms"]["selffl"]["r_max"] == "inf"
    again = kinfed.run(make_config(None, record["config"]), out=tmp_path / "run", resume=True)
    assert again.result("selffl").personal == first.result("selffl").personal


# Doors: plugins and objects.


@dataclass(frozen=True)
class Mine(FedAvg):
    """FedAvg under another name."""

    share: float = option(0.5, "an option of a test")
    parts: Any = option(None, "another one")
    hidden: int = 0


@pytest.fixture
def registry() -> Iterator[Any]:
    """What a test registers is forgotten after it."""
    before = set(ALGORITHMS)
    yield ALGORITHMS
    for name in set(ALGORITHMS) - before:
        ALGORITHMS.unregister(name)


def test_objects_become_names_and_options(registry: Any) -> None:
    training = LocalTraining(lr=0.25, epochs=2, steps=None)
    config = make_config(
        None, {"algorithms": [Mine(), "ditto", Ditto(lam=0.25), Mine(training=training, parts=(1, 2))]}
    )
    assert config.algorithms == {
        "mine": {"method": "mine"},
        "ditto": {"method": "ditto"},
        "ditto-2": {"method": "ditto", "lam": 0.25},
        "mine-2": {"method": "mine", "lr": 0.25, "steps": None, "epochs": 2, "parts": [1, 2]},
    }
    assert registry["mine"].target is Mine
    assert registry["mine"].summary == "FedAvg under another name."
    assert make_config(None, config.dump()) == config
    labelled = make_config(None, {"algorithms": {"own": Mine(share=1.0), "weak": "ditto"}}).algorithms
    assert labelled == {"own": {"method": "mine", "share": 1.0}, "weak": {"method": "ditto"}}
    assert make_config(None, {"algorithms": Ditto()}).algorithms == {"ditto": {"method": "ditto"}}


def test_an_object_runs_beside_the_others(registry: Any) -> None:
    result = kinfed.run(
        algorithms=[Mine(share=0.25, training=LocalTraining(lr=0.02)), "fedavg"], rounds=1, clients=4, seeds=(0,),
        model="mlr",
    )  # fmt: skip
    assert result.config.algorithms["mine"] == {"method": "mine", "lr": 0.02, "share": 0.25}
    assert result.result("mine").personal["accuracy"] != result.result("fedavg").personal["accuracy"]


def test_a_class_that_is_defined_again_takes_its_own_place(registry: Any) -> None:
    """As in a notebook; but not the place of another class of that name."""
    make_config(None, {"algorithms": [Mine()]})
    again = dataclass(frozen=True)(type("Mine", (FedAvg,), {"__module__": __name__, "__qualname__": "Mine"}))
    make_config(None, {"algorithms": [again()]})
    assert registry["mine"].target is again
    other = type("Ditto", (Mine,), {"__module__": "elsewhere"})
    with pytest.raises(ConfigError, match=r"another algorithm ditto.*kinfed\.register"):
        make_config(None, {"algorithms": [other()]})


def test_options_of_objects_are_plain_values(registry: Any) -> None:
    with pytest.raises(ConfigError, match=r"mine\.parts must be a plain value.*object"):
        make_config(None, {"algorithms": [Mine(parts=object())]})
    with pytest.raises(ConfigError, match=r"Mine\.hidden is 3 and not declared as an option.*option\(0"):
        make_config(None, {"algorithms": [Mine(hidden=3)]})


PLUGIN = """
import kinfed
from kinfed.algorithms.fedavg import FedAvg

@kinfed.register("algorithm", "{name}", summary="of a plugin")
class Method(FedAvg):
    pass
"""


def test_plugins_are_loaded_recorded_and_part_of_the_identity(registry: Any, tmp_path: Path) -> None:
    file = tmp_path / "plugin.py"
    file.write_text(PLUGIN.format(name="from_file"))
    settings = {"algorithms": "from_file,local", "rounds": 1, "clients": 4, "model": "mlr", "seeds": (0,)}
    result = kinfed.run(plugins=[file], out=tmp_path / "run", **settings)
    assert "from_file" in registry
    record = json.loads((tmp_path / "run" / "config.json").read_text())["config"]
    assert record["plugins"] == [str(file)]
    assert kinfed.run(make_config(None, record), out=tmp_path / "run", resume=True).result("from_file")
    file.write_text(file.read_text() + "# changed\n")
    assert (
        make_config(None, record).fingerprint()
        != json.loads((tmp_path / "run" / "config.json").read_text())["fingerprint"]
    )
    assert result.config.fingerprint() != make_config(None, settings).fingerprint()


def test_names_of_plugins_are_among_all(registry: Any, tmp_path: Path) -> None:
    file = tmp_path / "another.py"
    file.write_text(PLUGIN.format(name="another"))
    assert "another" in make_config(None, {"plugins": str(file), "algorithms": "all"}).algorithms
    assert "another" in RunConfig(plugins=[file], algorithms="all,-ditto").algorithms


def test_settings_without_nesting() -> None:
    assert dict(flat_settings({"a": 1, "b": {"c": {"d": 2}, "e": {}}})) == {"a": 1, "b.c.d": 2, "b.e": {}}
