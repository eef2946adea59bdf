"""The recipe `tables`: one split for all families, differences paired by it, and the tables that we lose first."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import kinfed
from kinfed.config import make_config
from kinfed.data.sources.registered import SOURCES
from kinfed.runs import build_federation
from kinfed.tabular.fit_settings import FitSettings
from kinfed.tabular.fitting import SiteFit, load_sites
from kinfed_papers.measure import reproduce
from kinfed_papers.recipe import SCALES, Results
from kinfed_papers.recipes.tables import BENCHES, EFFORTS, RECIPE, RIVAL, SMOKE, arranged, figures, losers_first
from kinfed_papers.result_tables import fill
from kinfed_papers.studies.boosted_references import GPBoost, LightGBM

BENCH = SMOKE["breast_cancer"]


def test_every_table_is_one_with_sites_and_has_ten_splits_or_the_published_one() -> None:
    for name, bench in BENCHES.items():
        assert SOURCES[bench.dataset].facts["names_clients"]
        assert len(bench.seeds) == (10 if bench.split == "drawn" else 3), name
        if bench.split == "published":
            assert BENCHES[name.removesuffix("-published")].options["split"] == "rows"


@pytest.mark.parametrize("scale", SCALES)
def test_effort_is_the_same_for_references_and_fit(scale: str) -> None:
    effort = EFFORTS[scale]  # type: ignore[index]
    if scale != "smoke":
        assert effort.tries == FitSettings(**effort.fit).trials


def test_rows_of_a_seed_are_divided_as_a_fit_divides_them() -> None:
    data = build_federation(make_config(None, BENCH.settings({})), 3)
    own = SiteFit(load_sites("breast_cancer", BENCH.options, None, 3), FitSettings(seed=3)).data
    assert data.test.rows.tolist() == own.test.rows.tolist()
    assert data.train.rows.tolist() == own.train.rows.tolist()


def test_figures_of_references_are_those_of_runs() -> None:
    settings = BENCH.settings({}) | {"algorithms": "local", "rounds": 1, "seeds": [0], "save_models": True}
    outcome = kinfed.run(**settings)
    (result,), data = outcome.results, outcome.federations[0]
    models = outcome.result().evaluation.models
    assert models is not None
    z = np.zeros((len(data.test.rows), 2))
    for k in range(data.num_clients):
        rows = data.test[k]
        task = outcome.task
        z[data.test.owner == k] = task.logits(models[k : k + 1], data.features.gather(rows)[None])[0].detach()
    own = figures(torch.from_numpy(z), data, BENCH, 0)
    for name in ("personal.auroc_mean", "personal.auroc", "personal.log_loss_mean"):
        assert own[name][0] == pytest.approx(result.all_clients["personal"][name.removeprefix("personal.")], rel=1e-5)


def test_families_are_measured_and_joined(tmp_path: Path) -> None:
    recipe = RECIPE.limited_to(["breast_cancer", "breast_cancer-mixed", "breast_cancer-trees"], "smoke")
    done = reproduce(recipe, "smoke", tmp_path, seeds=(0,))
    for row in ("local", "one_model", "kin", "mixed", "trees"):
        (value,) = done.results.get("breast_cancer", row, "personal.auroc_mean").values()
        assert 0.5 <= value <= 1.0


def results(leads: dict[str, float]) -> Results:
    """Where fit is so much better than the rival, in AUROC or by so much less error."""
    parts = {}
    for name, value in leads.items():
        bench = BENCHES[name]
        sign = 1.0 if bench.measure.higher_is_better else -1.0
        metric = f"personal.{bench.metric}_mean"
        parts[name] = {"fit": {metric: {s: 0.8 + sign * value + s / 1e3 for s in (0, 1)}},
                       RIVAL: {metric: {s: 0.8 + s / 1e3 for s in (0, 1)}}}  # fmt: skip
    return Results(parts, RECIPE.aliases)


def test_tables_that_we_lose_come_first() -> None:
    measured = results({"heart_disease": 0.1, "contraception": -0.1, "exam65_london": -0.2, "chem97": 0.05})
    assert list(losers_first(measured)) == ["exam65_london", "contraception", "chem97", "heart_disease"]
    shown = [fill(table, measured) for table in arranged(RECIPE.tables, measured)]
    titles = [table.table.title for table in shown if table is not None]
    assert [title.partition(":")[0] for title in titles[:2]] == ["Difference to pooled trees with the site, tuned"] * 2
    assert titles[2:] == [BENCHES[name].title for name in losers_first(measured)]
    first = shown[0]
    assert first is not None
    assert [column.part for column in first.columns] == ["contraception", "heart_disease"]
    (difference, _), (name, cells) = first.rows[0][1], first.rows[0]
    assert name.startswith("kinfed fit")
    assert difference.ours is not None
    assert difference.ours.mean == pytest.approx(-0.1)
    assert difference.reach == pytest.approx(0.0, abs=1e-12)
    assert cells[0] is difference


@pytest.mark.parametrize(("package", "make"), [
    ("lightgbm", lambda classes: LightGBM(classes, 0, n_estimators=60)),
    ("gpboost", lambda classes: GPBoost(classes, 0, 60, learning_rate=0.1, num_leaves=4)),
])  # fmt: skip
def test_other_packages_learn_sites(package: str, make: object) -> None:
    pytest.importorskip(package)
    draw = np.random.default_rng(0)
    site = np.tile(np.arange(6), 60).astype(float)
    x = np.column_stack([draw.normal(size=(360, 2)), site])
    level = 2 * site + x[:, 0]
    numbers = make(0).fit(x[:240], level[:240]).predict(x[240:])  # type: ignore[operator]
    assert np.corrcoef(numbers, level[240:])[0, 1] > 0.9
    y = (level > level.mean()).astype(np.int64)
    model = make(2).fit(x[:240], y[:240])  # type: ignore[operator]
    p = model.predict_proba(x[240:])
    np.testing.assert_allclose(p.sum(1), 1)
    assert (p.argmax(1) == y[240:]).mean() > 0.8
