"""The options of papers, where defaults are others: all at once, beneath those of the user, and written down."""

from __future__ import annotations

import json
from math import inf
from pathlib import Path

import pytest
from command_line import kinfed as command

import kinfed
from kinfed.algorithms.algorithm_names import ALGORITHMS, PUBLISHED, UNPUBLISHED, make_algorithm
from kinfed.analysis.comparison import single_run
from kinfed.config.config import RunConfig
from kinfed.config.config_reading import make_config
from kinfed.config.published import is_as_published, published_notes
from kinfed.data.examples.batches import LocalTraining
from kinfed.errors import ConfigError
from kinfed.records.compare import growth_differences, same_results
from kinfed.records.reader import load_run
from kinfed.report.sentences import facts

SMALL = {"clients": 4, "rounds": 1, "steps": 1, "seeds": [0], "model": "mlr", "participation": 1.0}


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_option_of_a_paper_exists_and_is_not_the_default(name: str) -> None:
    published = make_algorithm(name, LocalTraining(), PUBLISHED[name])  # which checks types and ranges
    default = make_algorithm(name, LocalTraining())
    for option, value in PUBLISHED[name].items():
        assert getattr(published, option) == value != getattr(default, option)


def test_words_are_of_methods_that_exist() -> None:
    assert UNPUBLISHED.keys() <= set(ALGORITHMS)


def test_all_methods_get_the_options_of_their_papers_at_once() -> None:
    config = RunConfig(algorithms=list(PUBLISHED), as_published=True)
    assert {label: dict(choice) for label, choice in config.algorithms.items()} == {
        name: {"method": name, **PUBLISHED[name]} for name in PUBLISHED
    }
    assert all(map(is_as_published, config.algorithms.values()))


def test_options_that_are_set_win() -> None:
    config = make_config(
        None, {"algorithms": "qffl,own=pfedfda,fedavg", "as_published": True}, ("qffl.curvature=work", "own.beta=0.5")
    )
    assert config.algorithms["qffl"] == {"method": "qffl", "curvature": "work"}
    assert config.algorithms["own"] == {"method": "pfedfda", "ridge": 1e-4, "beta": 0.5}
    assert config.algorithms["fedavg"] == {"method": "fedavg"}
    assert published_notes(config.algorithms)[0] == "qffl is not as published, with curvature=step"
    assert published_notes(config.algorithms)[1:] == ["own is as published, with ridge=0.0001"]


def test_a_variant_by_its_options_is_that_variant() -> None:
    cosine = {"method": "fedamp", "attention": "cosine"}  # that is heurfedamp
    config = RunConfig(algorithms={"close": cosine}, as_published=True)
    assert config.algorithms["close"] == cosine
    assert published_notes(config.algorithms) == []


def test_without_the_setting_a_run_keeps_its_identity() -> None:
    config, settings = RunConfig(algorithms="qffl,apple"), {"algorithms": "qffl,apple"}
    assert config.algorithms == {"qffl": {"method": "qffl"}, "apple": {"method": "apple"}}
    before = {name: value for name, value in config.dump().items() if name != "as_published"}
    assert kinfed.config.run_fingerprint(before, {}) == config.fingerprint()
    assert RunConfig(**settings, as_published=True).fingerprint() != config.fingerprint()


def test_what_was_recorded_is_read_back() -> None:
    config = RunConfig(algorithms="selffl,apple", as_published=True)
    text = json.dumps(config.dump(), allow_nan=False)
    again = make_config(None, json.loads(text))
    assert again == config
    assert again.algorithms["selffl"]["r_max"] == inf
    assert published_notes(json.loads(text)["algorithms"])[0] == "selffl is as published, with r_max=inf, reduction=sum"


def test_what_no_option_makes_as_published_is_said() -> None:
    config = RunConfig(algorithms="heterofl,apple,fedavg", as_published=True)
    hetero, apple = published_notes(config.algorithms)
    assert hetero.startswith("heterofl is not as published: hidden outputs are not scaled")
    assert apple.startswith("apple is as published, with core_step=paper, but: relations begin at 1/N")


def test_a_name_that_nothing_has_is_refused() -> None:
    with pytest.raises(ConfigError, match="qfll"):
        RunConfig(algorithms="qfll", as_published=True)
    with pytest.raises(ConfigError, match="at least one algorithm"):
        RunConfig(algorithms="", as_published=True)


def test_a_run_computes_and_marks_what_the_options_alone_compute(tmp_path: Path) -> None:
    settings = {**SMALL, "steps": 3}  # with one step both lengths are the same
    kinfed.run(**settings, algorithms="qffl,fedavg", as_published=True, out=tmp_path / "marked")
    kinfed.run(**settings, algorithms={"qffl": {"curvature": "step"}, "fedavg": {}}, out=tmp_path / "plain")
    kinfed.run(**settings, algorithms="qffl,fedavg", out=tmp_path / "default")
    assert same_results(tmp_path / "marked", tmp_path / "plain", config=False) == []
    assert same_results(tmp_path / "marked", tmp_path / "default", config=False)
    run = load_run(tmp_path / "marked", "a")
    assert [method.label for method in single_run(run).methods] == ["q-FFL (as published)", "FedAvg"]
    assert facts(run)["As published"].startswith("qffl is as published, with curvature=step")
    assert "As published" not in facts(load_run(tmp_path / "plain", "b"))


def test_a_run_of_before_the_setting_grows() -> None:
    then, now = RunConfig(algorithms="qffl").dump(), RunConfig(algorithms="qffl,fedavg")
    del then["as_published"]
    assert growth_differences({"config": then}, now.dump(), {}, None) == []
    switched = RunConfig(algorithms="qffl,fedavg", as_published=True)
    changes = growth_differences({"config": then}, switched.dump(), {}, None)
    assert any(change.startswith("qffl.curvature") for change in changes)
    assert any(change.startswith("as_published") for change in changes)


def test_the_list_says_what_changes(tmp_path: Path) -> None:
    shown = command("list", "apple", cwd=tmp_path).stdout
    assert "--as-published: core_step=paper" in shown
    assert "whatever the options: relations begin at 1/N" in shown
    assert "published" not in command("list", "fedavg", cwd=tmp_path).stdout
