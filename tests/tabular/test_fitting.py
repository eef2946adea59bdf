"""`kinfed fit`: nested validation, refits, files, kills, time, and what people read."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import kinfed
from kinfed.core import storage
from kinfed.errors import ConfigError, DataError
from kinfed.serving.pipeline import ModelPipeline
from kinfed.tabular import search
from kinfed.tabular.decision import decide
from kinfed.tabular.fit_result import Estimate, FitResult
from kinfed.tabular.fit_settings import FitSettings
from kinfed.tabular.fitting import SiteFit, load_sites, sent_message
from kinfed.tabular.portfolio import contenders_of, make_try, methods_of
from kinfed.tabular.search import NEVER, assign_folds, fold_federation, fold_rows, outputs_on_test
from kinfed.tabular.site_page import common_reach, write_page
from kinfed.tabular.site_sentences import Wording
from tests.command_line import kinfed as command
from tests.tabular.conftest import COLUMNS, SITES, SMALL, make_table

Table = dict[str, list[Any]]


@pytest.fixture(scope="module")
def folder(table: Table, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fit") / "fitted"
    kinfed.fit(table, **COLUMNS, **SMALL, out=folder)
    return folder


@pytest.fixture(scope="module")
def result(folder: Path) -> FitResult:
    return FitResult.read(folder)


# ---- the portfolio ----


def test_every_portfolio_has_what_sites_are_compared_with() -> None:
    assert methods_of("ditto", 3) == ("local", "fedavg", "ditto")
    assert methods_of("auto", 1) == ("local",)
    assert methods_of("auto", 3)[:4] == ("local", "fedavg", "fedavg_intercept", "fedavg_recalibrated")
    assert methods_of("auto", 3, "regression")[:3] == ("local", "lmm", "fedavg")
    assert methods_of("auto", 3, "survival")[:3] == ("local", "cox", "fedavg")
    assert methods_of("auto", 3)[-5:] == ("ditto", "selffl", "cgpfl", "fedfomo", "kin")
    assert [one.name for one in contenders_of("fedavg")] == ["one_model", "fine_tuned"]
    with pytest.raises(ConfigError, match="did you mean"):
        methods_of("dito", 3)


class Listener(search.Unobserved):
    """Keeps what is said, in order."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def step(self, text: str) -> None:
        self.said.append(text)

    def note(self, text: str) -> None:
        self.said.append(text)


def test_a_first_answer_is_told_before_slower_methods_are_tried(table: Table) -> None:
    """By rows that folds left out, and again only where something is better."""
    heard = Listener()
    kinfed.fit(table, **COLUMNS, **SMALL | {"algorithms": "glmm,ditto"}, observer=heard)
    told = [place for place, text in enumerate(heard.said) if text.startswith("so far")]
    assert told[0] < next(place for place, text in enumerate(heard.said) if text.startswith("ditto"))
    found = [re.search(r"(.*) leads on rows that folds left out, Log loss ([\d.]+)", heard.said[i]) for i in told]
    losses = [float(one[2]) for one in found if one is not None]
    assert len(losses) == len(told)
    assert losses == sorted(losses, reverse=True)


def test_all_methods_get_the_same_learning_rate_in_a_try() -> None:
    tries = [make_try(5, method, ("mlr", "mlp"), 4, 0) for method in ("local", "ditto", "fedfomo")]
    assert len({one.options["lr"] for one in tries}) == 1
    assert {one.model for one in tries} == {"mlp"}
    assert make_try(1, "ditto", ("mlr", "mlp"), 4, 0).options == {}
    assert make_try(0, "cgpfl", ("mlr",), 3, 0).options == {"contexts": 3}
    rates = sorted(make_try(n, "local", ("mlr",), 4, 0).options["lr"] for n in range(1, 9))
    gaps = np.diff(np.log(rates))
    assert gaps.max() < 2.5 * np.log(1000) / 8  # evenly over three decades


# ---- folds ----


def test_folds_are_even_in_every_class_and_hold_no_test_row(table: Table) -> None:
    source = load_sites(table, COLUMNS, None, 0)
    data = kinfed.Federation.from_table(table, **COLUMNS)
    fold_of = assign_folds(data, 3, 0)
    for k in range(data.num_clients):
        mine = (data.train.owner == k).nonzero().squeeze(1)
        for label in range(2):
            counts = torch.bincount(fold_of[mine][data.labels[data.train.rows[mine]] == label], minlength=3)
            assert int(counts.max() - counts.min()) <= 1
    part = fold_federation(source, data, fold_of, 1, 0)
    assert len(part.features) == len(data.train.rows)
    assert part.names == data.names
    places = fold_rows(data, fold_of, 1)
    assert torch.equal(part.labels[part.test.rows], data.labels[data.train.rows[places]])
    assert bool((fold_of[places] == 1).all())


def test_the_only_row_of_a_site_always_trains(table: Table) -> None:
    more = {name: [*values, values[0]] for name, values in table.items()}
    more["site"][-1] = "hut"
    data = kinfed.Federation.from_table(more, **COLUMNS)
    fold_of = assign_folds(data, 2, 0)
    assert fold_of[data.train.owner == data.names.index("hut")].tolist() == [NEVER]
    result = kinfed.fit(more, **COLUMNS, **SMALL | {"trials": 1})
    hut = result.site("hut")
    assert (hut.validated_rows, hut.test_rows) == (0, 0)
    assert "no test rows" in Wording(result).sentence(hut)
    assert len(result.model("hut").predict({name: values[:3] for name, values in more.items()})) == 3


# ---- what is chosen ----


def test_test_rows_choose_nothing(table: Table) -> None:
    """Other labels of the test rows change what is measured, and nothing else."""
    marks = ["test" if place % 4 == 0 else "train" for place in range(len(table["site"]))]
    marked = {**table, "part": marks}
    turned = {"ill": "well", "well": "ill"}
    labels = [turned[y] if m == "test" else y for y, m in zip(table["outcome"], marks, strict=True)]
    results = [
        kinfed.fit(
            {**marked, "outcome": outcome}, **COLUMNS, split_column="part", **SMALL | {"trials": 1, "deploy": "chosen"}
        )
        for outcome in (table["outcome"], labels)
    ]
    first, other = results
    assert [site.chosen for site in first.sites] == [site.chosen for site in other.sites]
    assert first.contenders == other.contenders
    for site in SITES:
        one, two = (result.model(site).module.state_dict() for result in results)
        assert all(torch.equal(one[name], two[name]) for name in one)
    assert [s.alone.value for s in first.sites] != [s.alone.value for s in other.sites]


def test_a_site_that_is_different_does_not_take_the_model_of_all(result: FitResult) -> None:
    assert result.site("lake").chosen != "one_model"  # which is wrong there


def test_outputs_are_what_the_exported_models_say(table: Table) -> None:
    data = kinfed.Federation.from_table(table, **COLUMNS)
    run = kinfed.run(federation=data, algorithms="local,fedavg", model="mlr", rounds=2, seeds=(0,), participation=1.0)
    rows = {name: values for name, values in table.items() if name not in ("site", "outcome")}
    for label, one in (("local", contenders_of("local")[0]), ("fedavg", contenders_of("fedavg")[0])):
        outputs = torch.softmax(outputs_on_test(run, label, one), 1)
        for k, site in enumerate(data.names):
            mine = data.test[k]
            model = run.server_model(label) if one.model == "server" else run.personal_model(site, label)
            assert model is not None
            part = {name: [values[row] for row in mine.tolist()] for name, values in rows.items()}
            expected = model.predict_proba(part)
            begin, end = data.test.offsets[k], data.test.offsets[k + 1]
            np.testing.assert_allclose(outputs[begin:end].numpy(), expected, atol=1e-5)


def test_numbers_are_judged_in_their_own_unit(table: Table) -> None:
    prices = [1000 + 100 * dose for dose in table["dose"]]
    result = kinfed.fit({**table, "outcome": prices}, **COLUMNS, **SMALL | {"metric": "auto", "rounds": 10})
    assert result.metric == "rmse"
    north = result.site("north")
    assert north.alone.value is not None
    assert 0 < north.alone.value < 150
    assert 900 < float(np.mean(np.asarray(result.predict(table, "north")))) < 1100
    assert "RMSE" in Wording(result).sentence(north)


@pytest.mark.parametrize("regression", [False, True])
def test_the_best_try_of_all_rows_counts(table: Table, regression: bool) -> None:
    """Outputs by hand: alone is right in try 1 only, the model of all in try 0 only, and right at one site."""
    changed = {**table, "outcome": [10 * dose for dose in table["dose"]]} if regression else table
    metric = "rmse" if regression else "accuracy"
    job = SiteFit(load_sites(changed, COLUMNS, None, 0), FitSettings(folds=2, metric=metric, models="mlr"))
    budget = search.TimeBudget(None)
    tried = job._make_search(search.FoldStore(None), budget)
    labels = job.data.labels[job.data.train.rows]
    right = labels[:, None] if regression else 4.0 * torch.nn.functional.one_hot(labels, 2).double()
    wrong = -right
    mixed = torch.where((job.data.train.owner == job.data.names.index("south"))[:, None], right, wrong)
    half = (right + wrong) / 2 if regression else torch.where(torch.arange(len(right))[:, None] % 2 == 0, right, wrong)
    outputs = {("alone", 0): wrong, ("alone", 1): half, ("one_model", 0): mixed, ("one_model", 1): wrong}
    decision = decide(tried, search.Tries(("local", "fedavg"), 2, {}, outputs), job.metric)
    assert {name: one.number for name, one in decision.tries.items()} == {"alone": 1, "one_model": 0}
    assert dict(zip(job.data.names, decision.chosen, strict=True)) == {
        "lake": "alone", "north": "alone", "south": "one_model"
    }  # fmt: skip
    assert {one.name for one in decision.fitted} == {"alone", "one_model"}


# ---- files ----


def test_models_take_rows_as_they_come(folder: Path, table: Table, result: FitResult) -> None:
    model = ModelPipeline.read(folder / "models" / "sites" / "north.safetensors")
    whole = {name: table[name] for name in ("age", "dose", "group")}
    expected = model.predict_proba(whole)
    turned = {name: whole[name] for name in ("group", "dose", "age")} | {"unknown": [1] * len(table["site"])}
    np.testing.assert_array_equal(model.predict_proba(turned), expected)  # another order, and a column too many
    assert set(model.predict(whole)) <= {"ill", "well"}
    new = model.predictions({**whole, "group": ["c"] * len(table["site"])})
    assert "c" in " ".join(new.notes)
    absent = model.predictions({name: whole[name] for name in ("dose", "group")})  # training rows had gaps in age
    assert "no column age" in " ".join(absent.notes)
    with pytest.raises(DataError, match="lacks 1 of the models' 3 columns: dose"):
        model.predict({name: whole[name] for name in ("age", "group")})
    server = result.model()
    assert server.predict_proba(whole).shape == (len(table["site"]), 2)
    assert result.model("south").about["client"] == "south"
    with pytest.raises(ConfigError, match="did you mean north"):
        result.model("nort")


def test_the_page_has_a_sentence_and_rows_for_every_site(folder: Path, result: FitResult) -> None:
    page = (folder / "fit.html").read_text("utf-8")
    words = Wording(result)
    for site in result.sites:
        assert f"<strong>{site.site}</strong>{words.sentence(site).removeprefix(site.site)} " in page
        assert f">{site.test_rows}<" in page
        assert f"models/sites/{site.site}.safetensors" in page
    assert "Never a row" in page or all(site.chosen == "alone" for site in result.sites)
    assert "<script" not in page


def test_names_are_text_on_the_page(result: FitResult, tmp_path: Path) -> None:
    hostile = "</script><img src=x onerror=alert(1)>"
    first, *others = result.sites
    write_page(replace(result, table=hostile, sites=(replace(first, site=hostile), *others)), tmp_path)
    page = (tmp_path / "fit.html").read_text("utf-8")
    assert "<img src=x" not in page
    assert "&lt;img src=x onerror=alert(1)&gt;" in page
    write_page(replace(result, table="caf\udce9.csv"), tmp_path)  # a name whose bytes are no text
    assert "caf?.csv" in (tmp_path / "fit.html").read_text("utf-8")


def test_several_files_are_one_site_each(table: Table, tmp_path: Path) -> None:
    for site in SITES:
        rows = [place for place, name in enumerate(table["site"]) if name == site]
        names = [name for name in table if name != "site" and not (site == "lake" and name == "age")]
        lines = [",".join(names), *(",".join(str(table[n][r] or "") for n in names) for r in rows)]
        (tmp_path / f"{site}.csv").write_text("\n".join(lines) + "\n")
    files = [tmp_path / f"{site}.csv" for site in SITES]
    source = load_sites(files, {"label_column": "outcome"}, None, 0)
    assert source.owner_names == sorted(SITES)
    assert len(source) == sum(SITES.values())
    with pytest.raises(ConfigError, match="leave --client-column out"):
        load_sites(files, COLUMNS, None, 0)
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "lake.csv").write_text("age,outcome\n1,ill\n")
    with pytest.raises(DataError, match="two files are called lake"):
        load_sites([*files, tmp_path / "more" / "lake.csv"], {"label_column": "outcome"}, None, 0)


def test_a_killed_fit_goes_on_where_it_was(folder: Path, tmp_path: Path) -> None:
    """A process that ends itself by SIGKILL in the middle of the search, and its continuation in this one."""
    script = """
import os, signal, sys
import kinfed
from tests.tabular.conftest import COLUMNS, SMALL, make_table

class Killer:
    steps = 0
    def begin(self, steps): pass
    def note(self, text): pass
    def step(self, text):
        self.steps += 1
        if self.steps == 6:
            os.kill(os.getpid(), signal.SIGKILL)

kinfed.fit(make_table(), **COLUMNS, **SMALL, out=sys.argv[1], observer=Killer())
"""
    out = tmp_path / "killed"
    environment = {**os.environ, "PYTHONPATH": f"{Path(__file__).parents[2]}"}
    ended = subprocess.run([sys.executable, "-c", script, str(out)], env=environment, timeout=120)
    assert ended.returncode == -signal.SIGKILL
    kept = {path.name: path.stat().st_mtime_ns for path in (out / "search").iterdir()}
    assert len(kept) == 5
    assert not (out / "fit.json").exists()
    kinfed.fit(make_table(), **COLUMNS, **SMALL, out=out, resume=True)
    assert (out / "fit.json").read_bytes() == (folder / "fit.json").read_bytes()
    assert all((out / "search" / name).stat().st_mtime_ns == time for name, time in kept.items())
    again = kinfed.fit(make_table(), **COLUMNS, **SMALL, out=out, resume=True)  # finished: read, not fitted again
    assert [site.chosen for site in again.sites] == [site.chosen for site in FitResult.read(folder).sites]
    with pytest.raises(kinfed.KinfedError, match="holds another run"):
        kinfed.fit(make_table(seed=1), **COLUMNS, **SMALL, out=out, resume=True)


# ---- time ----


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second passes whenever somebody looks at the clock."""
    ticks = itertools.count()
    monkeypatch.setattr(search, "now", lambda: float(next(ticks)))
    monkeypatch.setattr(search, "PAGE_SECONDS", 0.0)


def test_a_bound_of_time_leaves_equal_tries_for_all_and_is_on_record(
    clock: None, table: Table, folder: Path, tmp_path: Path
) -> None:
    more = {**SMALL, "trials": 40}
    bounded = kinfed.fit(table, **COLUMNS, **more, minutes=1.8, out=tmp_path / "bounded")
    assert 1 <= bounded.trials < 40
    assert not bounded.left_out
    plan = json.loads((tmp_path / "bounded" / "plan.json").read_text())
    assert plan["trials"] == bounded.trials
    assert bounded.trials == SMALL["trials"]  # so that the fit without a bound is the same
    free = FitResult.read(folder)
    assert replace(bounded, settings={}, folder=None).to_json() == replace(free, settings={}).to_json()


def test_methods_without_a_try_are_left_out_by_name(clock: None, table: Table) -> None:
    result = kinfed.fit(table, **COLUMNS, **SMALL | {"algorithms": "ditto,fedprox,apfl", "folds": 3}, minutes=1.2)
    assert result.trials == 1
    assert "apfl" in result.left_out
    assert {one.method for one in result.contenders}.isdisjoint(result.left_out)
    with pytest.raises(ConfigError, match="time was up before learning alone"):
        kinfed.fit(table, **COLUMNS, **SMALL, minutes=0.05)


# ---- bad input ----


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"minutes": 0}, "minutes must be above 0"),
        ({"folds": 1}, "folds must be a whole number of at least 2"),
        ({"folds": 1000}, "the largest site has [0-9]+ training rows; take fewer folds"),
        ({"test_fraction": 0.0}, "test_fraction must be"),
        ({"models": "mlq"}, "did you mean"),
        ({"metric": "rmse"}, "metric rmse is not for binary"),
        ({"client_column": None}, "names the site of each row. Give it with --client-column"),
        ({"label_column": "outcom"}, "did you mean outcome"),
        ({"depth": 3}, "depth"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_written(
    change: dict[str, Any], message: str, table: Table, tmp_path: Path
) -> None:
    with pytest.raises(kinfed.KinfedError, match=message):
        kinfed.fit(table, out=tmp_path / "out", **{**COLUMNS, **SMALL, **change})
    assert not (tmp_path / "out").exists()


def test_a_metric_that_no_site_can_tell_is_refused() -> None:
    one_class = {"site": ["a"] * 8 + ["b"] * 8, "x": list(range(16)), "y": ["no"] * 8 + ["yes"] * 8}
    with pytest.raises(DataError, match="AUROC is undefined at every site"):
        kinfed.fit(one_class, client_column="site", label_column="y", **SMALL | {"metric": "auroc", "trials": 1})


def test_one_site_has_nothing_to_choose(table: Table) -> None:
    mine = {
        name: [v for v, s in zip(values, table["site"], strict=True) if s == "north"] for name, values in table.items()
    }
    result = kinfed.fit(mine, **COLUMNS, **SMALL)
    assert [site.chosen for site in result.sites] == ["alone"]
    assert "no other to learn with" in Wording(result).overall()
    with pytest.raises(ConfigError, match="no model of all sites"):
        result.model()


def test_records_of_other_versions_are_refused(folder: Path, tmp_path: Path) -> None:
    record = storage.read_json(folder / "fit.json")
    storage.write_json(tmp_path / "fit.json", {**record, "format": 99})
    with pytest.raises(ConfigError, match="another version"):
        FitResult.read(tmp_path)


def test_who_needs_validation_rows_takes_them_from_nobody_else(table: Table, tmp_path: Path) -> None:
    job = SiteFit(load_sites(table, COLUMNS, None, 0), FitSettings(**SMALL | {"algorithms": "fedfomo", "trials": 1}))
    search_ = job._make_search(search.FoldStore(None), search.TimeBudget(None))
    decision = decide(search_, search_.run(), job.metric)
    fitted = job._fit_all(replace(decision, chosen=["fedfomo"] * 3), None, search.TimeBudget(None))
    rows = {name: int(result.federations[0].train.count.sum()) for name, result in fitted.items()}
    assert rows["alone"] == rows["one_model"] == int(job.data.train.count.sum()) > rows["fedfomo"]


# ---- weights ----


def with_strays(table: Table) -> Table:
    """The table, and beside every row one with the other outcome that counts next to nothing."""
    other = ["well" if value == "ill" else "ill" for value in table["outcome"]]
    twice = {name: [*values, *values] for name, values in table.items()} | {"outcome": [*table["outcome"], *other]}
    return twice | {"trust": [1.0] * len(other) + [0.001] * len(other)}


def test_rows_count_by_their_weights_in_training_choice_and_figures(table: Table) -> None:
    weighted = kinfed.fit(with_strays(table), **COLUMNS, weight_column="trust", **SMALL | {"steps": 20})
    strays = kinfed.fit(with_strays(table), **COLUMNS, ignore="trust", **SMALL)
    north = weighted.site("north")
    assert north.alone.value is not None
    assert north.alone.value > 0.85
    assert weighted.contender("alone").validation < 0.5 < strays.contender("alone").validation  # log loss
    assert weighted.weights == "rows count by the column trust, in training and in all figures"
    assert weighted.statistics_bytes == strays.statistics_bytes + 16  # a sum and a number


def test_equal_weights_change_nothing(table: Table, result: FitResult) -> None:
    same = kinfed.fit(table | {"one": [3.0] * len(table["site"])}, **COLUMNS, weight_column="one", **SMALL)
    assert same.sites == result.sites
    assert [one.validation for one in same.contenders] == [one.validation for one in result.contenders]


def test_class_weights_reach_folds_and_models(table: Table) -> None:
    def share_of_ill(result: FitResult) -> float:
        return float(np.mean([label == "ill" for label in result.predict(table, "north")]))

    plain, leaning = (
        kinfed.fit(table, **COLUMNS, class_weights=rule, **SMALL | {"algorithms": "fedavg", "deploy": "chosen"})
        for rule in ("none", "ill=30,well=1")
    )
    assert share_of_ill(leaning) > share_of_ill(plain) + 0.2
    assert leaning.contender("alone").validation != plain.contender("alone").validation
    assert leaning.weights == "classes count in training by the rule ill=30,well=1"
    problem = kinfed.Federation.from_arrays(np.eye(3), [0, 1, 2], ["a"] * 3).problem
    assert FitSettings().metric_for(problem).name == "accuracy"
    assert FitSettings(class_weights="balanced").metric_for(problem).name == "balanced_accuracy"


def test_class_weights_that_cannot_be_meant_are_refused_before_training(table: Table) -> None:
    with pytest.raises(ConfigError, match="unknown class in class_weights 'sick'"):
        kinfed.fit(table, **COLUMNS, class_weights="sick=2")
    with pytest.raises(ConfigError, match="without classes"):
        kinfed.fit(table, client_column="site", label_column="dose", class_weights="balanced")


# ---- what it takes no model to reach, and what leaves ----


def test_the_baseline_is_the_most_frequent_class_of_the_sites_own_rows(table: Table, result: FitResult) -> None:
    data = SiteFit(load_sites(table, COLUMNS, None, 0), FitSettings(**SMALL)).data
    for k, site in enumerate(result.sites):
        own, test = (torch.bincount(data.labels[rows.lists()[k]], minlength=2) for rows in (data.train, data.test))
        assert site.baseline.value == pytest.approx(float(test[own.argmax()] / test.sum()))
    assert result.baseline == "majority class"


def test_sites_choose_by_a_metric_of_ones_own(table: Table, missed: str, tmp_path: Path) -> None:
    result = kinfed.fit(table, **COLUMNS, **SMALL | {"metric": missed, "trials": 1}, out=tmp_path / "fit")
    assert result.metric == missed
    for site in result.sites:
        assert site.alone.value is not None
        assert site.deployed.value is not None
        assert site.gain.value == pytest.approx(site.alone.value - site.deployed.value)
    assert "Missed" in (tmp_path / "fit" / "fit.html").read_text()


def test_a_message_is_told_by_what_is_in_it(table: Table) -> None:
    data = kinfed.Federation.from_table(table, **COLUMNS)
    common = {"federation": data, "model": "mlr", "rounds": 2, "steps": 2, "seeds": (0,), "participation": 1.0}
    run = kinfed.run(algorithms="fedavg,fedfomo", **common)
    average, fomo = (sent_message(run, label) for label in ("fedavg", "fedfomo"))
    assert (average["sends"], average["hands_on"]) == (("delta", "count"), False)
    assert (fomo["sends"], fomo["hands_on"]) == (("theta", "w"), True)
    assert average["bytes_up"] == 4 * run.task.num_params + 4


def test_the_page_says_who_sees_a_model(result: FitResult) -> None:
    words, ditto = Wording(result), result.contender("one_model")
    assert "the change of its model and the number of its training rows. Never a row." in words.leaves(ditto)
    assert "hands the model on to other sites as it is" in words.leaves(replace(ditto, hands_on=True))


def test_who_is_clearly_worse_off_is_named_too(result: FitResult) -> None:
    def with_gains(*gains: tuple[float, float, float]) -> str:
        sites = [
            replace(result.sites[0], site=f"s{k}", chosen="ditto", gain=Estimate(*gain)) for k, gain in enumerate(gains)
        ]
        return Wording(replace(result, sites=tuple(sites), overall=Estimate(0.0, -0.1, 0.1))).overall()

    up, down, open_ = (0.2, 0.1, 0.3), (-0.2, -0.3, -0.1), (0.0, -0.1, 0.1)
    assert "; at no single site is the difference beyond chance." in with_gains(open_, open_)
    assert "; the gain is clear at 1 (s0), and 1 are clearly worse off (s1)." in with_gains(up, down, open_)
    assert "; by chance alone, about 1 on either side would look clear." in with_gains(up, *[open_] * 39)
    assert Wording(result).interval(Estimate(*up)) == "95 % interval +10.0 to +30.0"


def test_a_few_wide_intervals_do_not_flatten_all_others() -> None:
    assert common_reach([-0.1, 0.2] * 9 + [5.0, -5.0]) == 0.2
    assert common_reach([-0.1, 0.3]) == 0.3
    assert common_reach([]) == common_reach([0.0, 0.0]) == 0.0


def test_commands_on_the_folder_of_a_fit(folder: Path, table: Table, tmp_path: Path) -> None:
    """Who gains, the server's model as a file, and a table in place of a file of settings."""
    done = command("gain", folder, cwd=tmp_path)
    assert all(f"- {site} takes " in done.stdout for site in SITES), done.stderr
    assert "holds the choice of every site" in command("gain", folder, "--algorithm", "ditto", cwd=tmp_path).stderr
    assert command("export", folder, cwd=tmp_path).returncode == 0
    server = ModelPipeline.read(tmp_path / "server.safetensors")
    rows = {name: values[:4] for name, values in table.items()}
    assert server.predict(rows) == FitResult.read(folder).model().predict(rows)
    cells = zip(*table.values(), strict=True)
    lines = [",".join(table), *(",".join("" if value is None else str(value) for value in row) for row in cells)]
    (tmp_path / "visits.csv").write_text("\n".join(lines))
    columns = ["--client-column", "site", "--label-column", "outcome"]
    done = command("describe", "visits.csv", *columns, cwd=tmp_path)
    assert "3 clients, binary classification" in done.stdout, done.stderr
    assert "two data sets" in command("describe", "visits.csv", "--dataset", "digits", cwd=tmp_path).stderr


def test_rows_of_several_sites_are_predicted_by_the_model_of_each(
    folder: Path, table: Table, result: FitResult, tmp_path: Path
) -> None:
    mixed = np.random.default_rng(0).permutation(len(table["site"]))[:12]  # the sites in turns, not one after the other
    some = {name: [values[place] for place in mixed] for name, values in table.items()}
    some["site"] = ["elsewhere", *some["site"][1:]]
    pq.write_table(pa.table(some), tmp_path / "new.parquet")
    asked = ("predict", "new.parquet", "--client-column", "site")
    done = command(*asked, "--run", folder, cwd=tmp_path)
    assert "rows of clients that were not there (elsewhere) are predicted by the server's model" in done.stderr
    predicted = [line.split(",")[1] for line in done.stdout.splitlines()[1:]]
    for place, site in enumerate(some["site"]):
        row = {name: values[place : place + 1] for name, values in some.items()}
        model = result.model(None if site == "elsewhere" else site)
        assert [predicted[place]] == model.predict(row)
    run = folder / "runs" / "mlr"
    alone = command(*asked, "--run", run, "--algorithm", "one_model", cwd=tmp_path)
    assert len(alone.stdout.splitlines()) == len(some["site"]) + 1, alone.stderr
    assert "has no model of the server's" in command(*asked, "--run", run, "--algorithm", "alone", cwd=tmp_path).stderr
    assert "give --run DIR" in command(*asked, cwd=tmp_path).stderr


def test_other_work_takes_nothing_of_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second of the clock is one of the processor, and never faster than time itself."""
    wall, worked = iter((0.0, 10.0, 12.0, 20.0)), iter((0.0, 2.0, 8.0, 8.0))
    monkeypatch.setattr(search.time, "monotonic", lambda: next(wall))
    monkeypatch.setattr(search.time, "process_time", lambda: next(worked))
    clock = search.WorkClock()
    assert [clock(), clock(), clock()] == [2.0, 4.0, 4.0]
