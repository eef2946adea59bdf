"""Recipes: every one of them is well formed at every scale, and some run from end to end."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from scipy.stats import t as student
from typer.testing import CliRunner

from kinfed.analysis.statistics import Interval, interval
from kinfed.cli.app import app
from kinfed.errors import ConfigError, DataError, StorageError
from kinfed.records.run_record import FinalRecord, RoundRecord, RunRecord, TrialRecord
from kinfed.report.drawing.chart import Figure
from kinfed.report.panels import Panel
from kinfed.runs.method_run import Interrupted
from kinfed.runs.run_inputs import RunInputs
from kinfed_papers import (
    Claim,
    Question,
    Recipe,
    ResultColumn,
    Results,
    ResultTable,
    RunPart,
    Study,
    Untestable,
    parse_published,
    recipes,
)
from kinfed_papers.benchmark_index import write_site
from kinfed_papers.benchmark_records import BenchmarkRecord, count_once, read_records
from kinfed_papers.benchmark_tables import (
    certainty_table,
    claim_sections,
    main_claims,
    main_counts,
    question_sections,
    summary_sentences,
    tally,
)
from kinfed_papers.judge import NO_COMMON_SEED, verdicts
from kinfed_papers.markdown_page import commands
from kinfed_papers.measure import (
    Reproduction,
    done_share,
    home,
    is_done,
    measurements_of_summary,
    read_reproduction,
    reproduce,
)
from kinfed_papers.part_records import PartRecord, part_config, settings_hash
from kinfed_papers.publishing import publish
from kinfed_papers.recipe import PAPERS, SCALES, Measurements, RecipeFigure, Scale, difference, either_way
from kinfed_papers.recipe_figures import beside_published
from kinfed_papers.recipe_page import write_reproduction
from kinfed_papers.recipes import RECIPES, load_recipe, summary
from kinfed_papers.recipes.cgpfl_contexts import (
    DISTANCE,
    GRADIENT,
    LATE_GRADIENT,
    ROUNDS_TO_LEVEL,
    convergence,
    rounds_of,
)
from kinfed_papers.recipes.selffl_metrics import ROUGHNESS, roughness
from kinfed_papers.result_tables import fill
from kinfed_papers.verdict import Verdict, by_chance, certainty, firm_verdicts, interval_text, margin_text


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_well_formed(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.name == name
    assert recipe.paper.name in PAPERS
    by_scale = {scale: recipe.parts(scale) for scale in SCALES}
    known = {part.name for parts in by_scale.values() for part in parts}
    labels: set[str] = set(recipe.aliases)
    for parts in by_scale.values():
        assert len({part.name for part in parts}) == len(parts)
        for part in parts:
            if isinstance(part, RunPart):
                config = part_config(part, None, {})  # that `kinfed run` would take, and all methods with their options
                labels |= set(RunInputs(config).algorithms)
    for table in recipe.tables:
        assert {column.part for column in table.columns} <= known
        headings = {column.heading for column in table.columns}
        assert all(row in table.rows and heading in headings for row, heading in table.published)
    if labels:  # what runs is shown
        assert labels & {row for table in recipe.tables for row in table.rows}
    for row, (label, _) in recipe.aliases.items():
        assert row != label
    assert "smoke" in recipe.stand_ins, "what smoke replaces is said on its page"
    assert {part for part, _ in recipe.method_figures} <= known


@pytest.mark.parametrize("name", RECIPES)
def test_every_claim_says_where_its_paper_makes_it(name: str) -> None:
    """Abstract, section, remark, theorem, appendix, figure or table; a question of ours has no place in a paper."""
    claims = [claim for claim in load_recipe(name).claims if isinstance(claim, Claim)]
    for claim in claims:
        if isinstance(claim, Question):
            assert not claim.place, claim.text
        else:
            place = r"\bAbstract\b|\b(Section|Remark|Theorem|Appendix|Figure|Table)s? [A-Z0-9]"
            assert re.search(place, claim.place), claim.text


@pytest.mark.parametrize("name", RECIPES)
def test_claims_without_measurements_are_not_judged(name: str) -> None:
    for verdict in verdicts(load_recipe(name), Results({}), "paper"):
        assert verdict.status in ("not judged", "not testable")


def test_every_file_with_a_recipe_is_listed() -> None:
    folder = Path(recipes.__path__[0])
    data = {path.stem for path in folder.glob("*.toml")} - {"shared"}
    code = {path.stem.replace("_", "-") for path in folder.glob("*.py") if "\nRECIPE = " in path.read_text("utf-8")}
    assert data | code == set(RECIPES)
    assert not data & code


def test_smoke_uses_only_data_that_is_always_there() -> None:
    for name in RECIPES:
        for part in load_recipe(name).parts("smoke"):
            if isinstance(part, RunPart):
                always = ("digits", "wakeword", "sentiment140_subset", "breast_cancer")
                assert part_config(part, None, {}).dataset.name in always, (name, part.name)


def test_interval_by_hand() -> None:
    found = interval({0: 1.0, 1: 2.0, 2: 3.0})
    assert found is not None
    # mean 2, standard error 1/sqrt(3), t(0.975, 2) = 4.302653
    assert (found.mean, found.n) == (2.0, 3)
    assert found.low == pytest.approx(2 - 4.302653 / math.sqrt(3), abs=1e-5)
    assert found.high == pytest.approx(2 + 4.302653 / math.sqrt(3), abs=1e-5)
    assert interval({0: 1.0}) is None
    assert interval({0: 1.0, 1: math.nan}) is None


def recipe_of(measured: Measurements, **more: object) -> Recipe:
    table = ResultTable(
        "Accuracy | all",
        {"a": "Method A", "b": "Method_B", "gone": "Never run"},
        [ResultColumn("One", "p"), ResultColumn("Two", "p", "server.accuracy"), ResultColumn("Elsewhere", "q")],
        parse_published("method | One | Two\n a | 90.5 ± 0.5 | -\n b | 80 | 70"),
    )
    claims = [
        Claim.above("a above b", "p", "a", ["b"]),
        Claim.above("b above a", "p", "b", ["a"]),
        Claim.above("a above b by 25 points", "p", "a", ["b"], limit=0.25),
        Claim.above("a far above c, which is not there", "p", "a", ["c"]),
        Untestable("the moon is cheese", "no moon here"),
    ]
    return Recipe(
        name="toy",
        paper=PAPERS["Self-FL"],
        reproduces="Table 0",
        title="A toy",
        about="About.",
        parts=lambda scale: [Study("p", lambda seeds, settings: measured)],
        tables=[table],
        claims=claims,
        stand_ins={"smoke": "nothing"},
        **more,  # type: ignore[arg-type]
    )


MEASURED: Measurements = {
    "a": {"personal.accuracy": {0: 0.9, 1: 0.92, 2: 0.91}, "server.accuracy": {0: 0.5, 1: 0.5, 2: 0.5}},
    "b": {"personal.accuracy": {0: 0.7, 1: 0.71, 2: 0.72}},
}


def test_verdicts_by_hand() -> None:
    said = verdicts(recipe_of(MEASURED), Results({"p": MEASURED}), "paper")
    expected = ["holds", "does not hold", "does not hold", "not judged", "not testable"]
    assert [v.status for v in said] == expected
    # differences 20, 21, 19 points: mean 20, interval 20 -+ 4.3027 * 1 / sqrt(3)
    assert said[0].sentence == "+20.0 [+17.5, +22.5] points (3 seeds, 95 % interval)"
    assert said[1].sentence.startswith("−20.0")
    assert said[2].sentence == "+20.0 [+17.5, +22.5] points (limit +25) (3 seeds, 95 % interval)"
    assert said[2].margin is not None
    assert said[2].margin.mean == pytest.approx(-5.0)  # beyond the limit
    assert said[4].sentence == "no moon here"


def test_smoke_judges_nothing_and_one_seed_is_no_evidence() -> None:
    results = Results({"p": MEASURED})
    assert {v.status for v in verdicts(recipe_of(MEASURED), results, "smoke")} == {
        "not judged",
        "not testable",
    }
    single: Measurements = {row: {metric: {0: by[0]} for metric, by in m.items()} for row, m in MEASURED.items()}
    first = verdicts(recipe_of(single), Results({"p": single}), "paper")[0]
    assert first.status == "not judged"
    assert first.sentence == "one seed is no evidence: +20.0 points"
    limited = replace(recipe_of(single), claims=[Claim.above("a not far below b", "p", "a", ["b"], limit=-0.02)])
    (allowed,) = verdicts(limited, Results({"p": single}), "paper")
    assert allowed.sentence == "one seed is no evidence: +20.0 points (limit −2)"  # the difference itself


def test_figures_that_are_not_finite_are_called_so() -> None:
    diverged = {**MEASURED, "b": {"personal.accuracy": {0: 0.7, 1: math.nan, 2: 0.72}}}
    first = verdicts(recipe_of(diverged), Results({"p": diverged}), "paper")[0]
    assert (first.status, first.sentence) == ("not judged", "not all figures are finite: not finite points")


def test_what_has_diverged_has_no_figure_and_decides_nothing() -> None:
    """Neither for a claim nor against it, and not as what others are compared with; bytes were sent all the same."""
    measured = {
        "a": MEASURED["a"],
        "b": {**MEASURED["b"], "bytes": {0: 1.0, 1: 1.0, 2: 1.0}, "diverged": {1: 1.0}},
    }
    results = Results({"p": measured}, {"b-server": ("b", "server")})
    assert results.diverged("p", "b") == results.diverged("p", "b-server") == [1]
    assert results.diverged("p", "a") == results.diverged("q", "b") == []
    said = verdicts(recipe_of(measured), results, "paper")
    assert [verdict.status for verdict in said[:3]] == ["not judged"] * 3
    assert said[0].sentence == "Method_B has diverged with seed 1 (p): its figures mean nothing"
    both = Claim.above("a above b and c", "p", "a", ["b", "c"])
    for level, status in ((0.1, "not judged"), (0.99, "does not hold")):  # c below a, and c above it, whatever b is
        third: Measurements = {**measured, "c": {"personal.accuracy": dict.fromkeys(range(3), level)}}
        (verdict,) = verdicts(replace(recipe_of(third), claims=[both]), Results({"p": third}), "paper")
        assert verdict.status == status
    columns = [ResultColumn("One", "p"), ResultColumn("Lead", "p", against="b"), ResultColumn("Sent", "p", "bytes", 1)]
    table = fill(ResultTable("T", {"a": "A", "b": "B"}, columns), results)
    assert table is not None
    assert table.text_table().markdown().splitlines()[2:] == [
        "| A | 91.0 ± 1.0 | diverged (1 seed) | – |",
        "| B | diverged (1 seed) | diverged (1 seed) | 1.0 ± 0.0 |",
    ]


def test_a_rival_in_the_way_is_named() -> None:
    three = {**MEASURED, "c": {"personal.accuracy": {0: 0.95, 1: 0.95, 2: 0.95}}}
    claim = Claim.above("a above all", "p", "a", ["b", "c"])
    recipe = recipe_of(three)
    object.__setattr__(recipe, "claims", [claim])
    verdict = verdicts(recipe, Results({"p": three}), "small")[0]
    assert verdict.status == "does not hold"
    assert verdict.sentence.startswith("worse in 1 and better in 1 of 2 comparisons: −4.0")
    assert "against c" in verdict.sentence
    assert verdict.rival == "c"


def verdict_of(*margins: tuple[float, ...]) -> Verdict:
    """On a claim with these margins by seed, in points."""
    by_rival = {f"r{k}": {seed: value / 100 for seed, value in enumerate(margin)} for k, margin in enumerate(margins)}
    recipe = replace(recipe_of(MEASURED), claims=[Claim("x", lambda results: by_rival, place="Table 9")])
    return verdicts(recipe, Results({"p": MEASURED}), "small")[0]


def test_an_interval_with_zero_in_it_is_undecided_and_says_how_many_seeds_would_decide() -> None:
    """Differences 0, 2, 4: mean 2, standard deviation 2. With n seeds the interval reaches t(n - 1) 2 / sqrt(n), which
    is 2.1 for n = 6 and 1.85 for n = 7."""
    verdict = verdict_of((0, 2, 4))
    assert verdict.status == "unknown"
    assert "about 7 seeds would decide" in verdict.sentence
    assert verdict.place == "Table 9"
    assert verdict.margin is not None
    assert verdict.margin.mean == pytest.approx(2.0)
    # One margin below zero is enough to contradict, so the nearer of the two negative ones counts, at 1 - 0.05 / 3: the
    # interval reaches 2.15 for n = 9 and 1.98 for n = 10.
    assert "about 10 seeds would decide" in verdict_of((0, 2, 4), (0, -2, -4), (0, -1, 0.9)).sentence
    # All must rise above zero, so the slower one counts: mean 1, standard deviation sqrt(3), 0.96 for n = 15.
    assert "about 15 seeds would decide" in verdict_of((0, 2, 4), (-1, 2, 2)).sentence
    assert "not even 100 seeds" in verdict_of((-1, 1, 0)).sentence


def test_comparisons_that_were_not_run_cannot_reproduce_a_claim_but_the_others_can_contradict_it() -> None:
    def judged(*margins: tuple[float, ...]) -> Verdict:
        by_rival = {f"r{k}": dict(enumerate(margin)) for k, margin in enumerate(margins)}
        recipe = replace(recipe_of(MEASURED), claims=[Claim("x", lambda results: by_rival, factor=1.0)])
        return verdicts(recipe, Results({"p": MEASURED}), "small")[0]

    above = judged((19, 20, 21), (), ())
    assert (above.status, above.rival, above.outlook) == ("unknown", "r0", "2 of 3 comparisons were not run")
    assert above.sentence.startswith("+20.0 [+17.5, +22.5] points against r0; 2 of 3 comparisons were not run")
    assert judged((0, 0, 0), ()).status == "unknown"
    assert judged((19, 20, 21), (), (29, 30, 31)).sentence.startswith("better in all 2 comparisons; least sure: +20.0")
    below = judged((-19, -20, -21), ())
    assert (below.status, below.outlook) == ("does not hold", "")
    assert judged((), ()).status == "not judged"
    measured = {"a": MEASURED["a"], "b": MEASURED["b"]}
    claim = Claim.above("a above b and c, which was not run", "p", "a", ["b", "c"])
    recipe = replace(recipe_of(measured), claims=[claim])
    assert verdicts(recipe, Results({"p": measured}), "small")[0].status == "unknown"


def test_a_claim_is_as_sure_as_its_least_sure_margin_and_as_wrong_as_its_surest() -> None:
    """Half a point in every seed is nearer to zero than 5, 10, 15, and far surer."""
    assert verdict_of((9.0, 10.0, 11.0), (0.49, 0.5, 0.51)).rival == "r0"  # t of 17 against 87
    against = verdict_of((-18.0, -20.0, -22.0), (-0.49, -0.5, -0.51), (1.0, 2.0, 3.0))
    assert (against.status, against.rival) == ("does not hold", "r1")
    assert verdict_of((0, 2, 4), (0, -2, -4), (0, -1, 0.9)).rival == "r1"  # open: the one whose seeds are counted


def test_one_of_several_comparisons_contradicts_only_if_all_were_taken_into_account() -> None:
    """Differences -4, -6, -8: mean -6, standard error 2 / sqrt(3), and 95 % of Student's t with two degrees of freedom
    reach 4.30 of them. Of three comparisons each has to have 1 - 0.05 / 3, which reach 7.65: from -14.8 to +2.8."""
    alone, other = (-4, -6, -8), (20, 21, 22)
    assert (verdict_of(alone).status, verdict_of(alone, other, other).status) == ("does not hold", "unknown")
    open_one = verdict_of(alone, other, other)
    assert open_one.margin is not None
    assert (open_one.margin.low, open_one.margin.high) == (
        pytest.approx(-14.83, abs=0.01),
        pytest.approx(2.83, abs=0.01),
    )
    assert open_one.confidence == pytest.approx(1 - 0.05 / 3)
    assert open_one.sentence == (
        "better in 2 of 3 comparisons; open: −6.0 [−14.8, +2.8] points against r0; about 4 seeds would decide (3 "
        "seeds, intervals at 95 % for all 3 comparisons together)"
    )
    assert verdict_of((4, 6, 8), other, other).status == "holds"  # all must hold: no chances to be taken off


def test_a_comparison_with_few_seeds_is_the_least_sure_and_makes_nothing_firm() -> None:
    """t is larger with two seeds (29 ± 1) than with ten, and says less."""
    ten = tuple(5.0 + (-1) ** k for k in range(10))
    verdict = verdict_of(ten, (28.0, 30.0))
    assert (verdict.status, verdict.rival, verdict.fewest_seeds) == ("holds", "r1", 2)
    assert firm_verdicts([verdict]) == []
    assert firm_verdicts([verdict_of(ten)]) != []
    assert firm_verdicts([verdict_of(ten, (29.9999, 30.0001))]) == []  # even where the surer one decides


def test_intervals_in_a_sentence_say_which_of_them_are_wider() -> None:
    mixed = verdict_of((0, 2, 4), (0, -2, -4))
    assert mixed.sentence.endswith(
        "(3 seeds, 95 % intervals, those against the claim at 95 % for all 2 comparisons together)"
    )


def test_what_floating_point_leaves_of_zero_is_zero() -> None:
    assert verdict_of((0.1, 0.2, -0.3)).sentence.startswith("0 [")
    assert interval_text(Interval(2.0 + 1e-13, 1.0, 3.0, n=3), "points", -2.0).startswith("0 [−1.0, +1.0]")


def test_certainty_of_a_verdict_by_itself() -> None:
    """Without a spread there is nothing to judge by."""
    assert certainty(verdict_of((-4, -6, -8))) == certainty(verdict_of((4, 6, 8), (20, 21, 22))) == "95 %"
    assert certainty(verdict_of((0, 2, 4))) == "about 7 seeds"
    assert certainty(verdict_of((0, 0, 0))) == "–"
    same = verdict_of((3, 3, 3, 3, 3))
    assert (same.status, certainty(same), firm_verdicts([same])) == ("holds", "same in every seed", [])


@pytest.mark.parametrize(
    ("interval", "limit", "text"),
    [
        ((2.0, -3.04, 7.04), 0.0, "+2.0 [−3.0, +7.0] points"),
        ((0.022, -0.1, 0.144), 0.0, "+0.02 [−0.10, +0.14] points"),
        ((22.3, 12.1, 32.5), 0.0, "+22.3 [+12.1, +32.5] points"),
        ((8.1, 0.001, 16.2), 0.0, "+8.1 [+0.001, +16.2] points"),
        ((-0.00103, -0.00104, -0.00102), 0.0, "−0.001030 [−0.001040, −0.001020] points"),
        ((1.8, 1.0, 2.6), -2.0, "−0.20 [−1.00, +0.60] points (limit −2)"),
        ((0.5, 0.5, 0.5), 0.0, "+0.50 [+0.50, +0.50] points"),
    ],
)
def test_figures_of_a_difference_have_the_same_decimals(
    interval: tuple[float, float, float], limit: float, text: str
) -> None:
    assert interval_text(Interval(*interval, n=3), "points", limit) == text


@pytest.mark.parametrize(
    ("sizes", "status", "sentence"),
    [
        ((0.01, 0.012, 0.014), "holds", "1.20 [0.70, 1.70] points (at most 2) (3 seeds, 95 % interval)"),
        ((0.04, 0.042, 0.044), "does not hold", "4.20 [3.70, 4.70] points (at most 2) (3 seeds, 95 % interval)"),
        (
            (0.02, 0.02, 0.02),
            "exact tie",
            "at its limit in every seed: 2.0 [2.0, 2.0] points (at most 2) (3 seeds, 95 % interval)",
        ),
        ((0.01,), "not judged", "one seed is no evidence: 1.0 points (at most 2)"),
    ],
)
def test_what_may_be_at_most_so_much(sizes: tuple[float, ...], status: str, sentence: str) -> None:
    """By hand: a deviation of 0.2 points over three seeds is an interval of 4.303 · 0.2 / √3 = 0.497 on either side.
    Shown is what was measured; the margin is how far it stays below the limit."""
    claim = Claim("they hardly differ", lambda results: {"": dict(enumerate(sizes))}, limit=0.02, at_most=True)
    (verdict,) = verdicts(replace(recipe_of(MEASURED), claims=[claim]), Results({"p": MEASURED}), "small")
    assert (verdict.status, verdict.sentence) == (status, sentence)
    assert (verdict.limit, verdict.at_most) == (2.0, True)
    if verdict.margin is not None:
        assert verdict.margin.mean == pytest.approx(2 - 100 * sum(sizes) / 3)
        assert margin_text(verdict) in sentence


@pytest.mark.parametrize("name", RECIPES)
def test_a_limit_is_known_to_the_claim_that_speaks_of_it(name: str) -> None:
    """So that what was measured is shown beside it, and a claim made a question keeps it."""
    claims = [claim for claim in load_recipe(name).claims if isinstance(claim, Claim)]
    for claim in claims:
        if " limit of ours" in claim.text or "at most" in claim.text:
            assert claim.limit != 0, claim.text
    assert not {claim.text for claim in claims if "margin to" in claim.text}


def test_a_claim_as_a_question_is_judged_in_the_same_way() -> None:
    claim = Claim(
        "they hardly differ", lambda results: {"": {}}, "%", 1.0, "Table 1", main=True, limit=2.0, at_most=True
    )
    question = claim.as_question("another reading")
    assert question == Question("they hardly differ, another reading", claim.margins, "%", 1.0, limit=2.0, at_most=True)


def test_two_methods_that_differ_in_nothing_but_seeds_are_alike() -> None:
    """Differences of either sign: their size would be two points on average, their mean is zero."""
    by_seed = dict(enumerate((0.02, -0.02, 0.02, -0.02, 0.02, -0.02, 0.02, -0.02, 0.02, -0.02)))
    cases = either_way(by_seed, "more", "less")
    assert cases["less"][0] == -0.02
    claim = Claim("they hardly differ", lambda results: cases, limit=0.01, at_most=True)
    (verdict,) = verdicts(replace(recipe_of(MEASURED), claims=[claim]), Results({"p": MEASURED}), "small")
    assert verdict.status == "unknown"  # ± 1.5 points
    assert "holds in 0 of 2 comparisons; open: 0 [−1.5, 1.5] points" in verdict.sentence
    assert " for more; " in verdict.sentence
    wide = replace(claim, limit=0.02)
    (verdict,) = verdicts(replace(recipe_of(MEASURED), claims=[wide]), Results({"p": MEASURED}), "small")
    assert verdict.status == "holds"


def test_the_draws_of_a_part_are_those_of_its_methods_run_apart_too() -> None:
    digits: dict[str, Any] = {"rounds": 1, "algorithms": "fedavg"}
    parts = [RunPart("p", digits), RunPart("more", {**digits, "algorithms": "ditto"}, merge_into="p")]
    recipe = replace(recipe_of(MEASURED), parts=lambda scale: parts)
    for draws in ((3, 1), (1, 3)):
        records = {
            part.name: PartRecord(MEASURED, settings_hash(part), "", 0.0, None, draw)
            for part, draw in zip(parts, draws, strict=True)
        }
        assert Reproduction(recipe, "small", records).draws == {"p": 3}


def test_cgpfl_is_compared_with_a_rival_that_did_not_diverge() -> None:
    """At the lower rate, where that was run."""
    values = {"personal.accuracy": {0: 0.4, 1: 0.41}, "server.accuracy": {0: 0.2, 1: 0.21}}
    rows = ["fedavg", "ifca-kmeans", "l2sgd", "apfl", "pfedme", "ditto"]
    own: Measurements = {"cgpfl_heur": {"personal.accuracy": {0: 0.5, 1: 0.51}}} | {row: values for row in rows}
    claim = claim_of("cgpfl-cifar10", "CGPFL-Heur above all competitors")
    aliases = {"fedavg_global": ("fedavg", "server")}
    fast, slow = {"perfedavg_hf": values | {"diverged": {0: 1.0}}}, {"perfedavg_hf-slow": values}
    for rivals, expected in ((fast, "perfedavg_hf"), (fast | slow, "perfedavg_hf-slow")):
        margins = claim.margins(Results({"cifar10-cnn": own | rivals}, aliases))
        assert len(margins) == 7
        assert {rival for rival in margins if rival.startswith("perfedavg")} == {expected}


def test_a_row_without_figures_is_no_row_with_other_seeds() -> None:
    measured: Measurements = {**MEASURED, "c": {}}
    claim = Claim.above("a above b and c", "p", "a", ["b", "c"])
    (verdict,) = verdicts(replace(recipe_of(measured), claims=[claim]), Results({"p": measured}), "small")
    assert verdict.outlook == "1 of 2 comparisons were not run"


def test_a_rival_with_other_seeds_takes_no_contradiction_away() -> None:
    measured: Measurements = {
        "a": {"personal.accuracy": {0: 0.5, 1: 0.51, 2: 0.5}},
        "b": {"personal.accuracy": {0: 0.9, 1: 0.91, 2: 0.9}},
        "c": {"personal.accuracy": {7: 0.1, 8: 0.1}},
    }
    for one, status in (("a", "does not hold"), ("b", "not judged")):
        claim = Claim.above("above the others", "p", one, [row for row in "abc" if row != one])
        (verdict,) = verdicts(replace(recipe_of(measured), claims=[claim]), Results({"p": measured}), "small")
        assert verdict.status == status
    assert verdict.sentence == NO_COMMON_SEED


def test_infinite_figures_of_either_sign_are_not_finite() -> None:
    claim = Claim("a above b", lambda results: {"b": {0: math.inf, 1: -math.inf}})
    (verdict,) = verdicts(replace(recipe_of(MEASURED), claims=[claim]), Results({"p": MEASURED}), "small")
    assert (verdict.status, verdict.sentence.partition(":")[0]) == ("not judged", "not all figures are finite")


@pytest.mark.parametrize(
    ("margin", "limit", "text"),
    [
        ((0.0, 0.0, 0.0), 0.055, "0.055 [0.055, 0.055] (at most 0.055)"),
        ((0.01, 0.01, 0.01), 1.01, "1.00 [1.00, 1.00] (at most 1.01)"),
        ((9.43, 9.28, 9.58), 10.0, "0.57 [0.42, 0.72] (at most 10)"),
    ],
)
def test_what_lies_at_its_limit_does_not_look_beyond_it(
    margin: tuple[float, float, float], limit: float, text: str
) -> None:
    assert interval_text(Interval(*margin, n=3), "", limit, at_most=True) == text


def test_a_second_draw_had_two_chances() -> None:
    """Firm once, and no longer if it was drawn often enough."""
    sure = replace(verdict_of(five(4.0)), claim="sure")
    assert firm_verdicts([sure]) == [sure]
    lucky = replace(sure, draws=100)
    assert firm_verdicts([lucky]) == []
    assert by_chance([sure, lucky]) == pytest.approx(0.025 * 2)  # the interval of `lucky` is wide enough for its draws
    assert certainty(replace(sure, draws=2)) == "95 % in draw 2"
    assert certainty(sure) == "95 %"
    claim = Claim.above("a above b", "p", "a", ["b"])
    recipe = replace(recipe_of(MEASURED), claims=[claim])
    (verdict,) = verdicts(recipe, Results({"p": MEASURED}), "small", draws={"p": 3, "q": 9})
    assert verdict.draws == 3


def test_intervals_hold_for_all_draws_together() -> None:
    """The mean of 20 points and its standard error, from three seeds: Student's t with two degrees of freedom at
    1 - 0.05 / 3 in place of 0.95."""
    claim = Claim.above("a above b", "p", "a", ["b"])
    recipe, results = replace(recipe_of(MEASURED), claims=[claim]), Results({"p": MEASURED})
    (once,), (thrice,) = (verdicts(recipe, results, "small", draws={"p": draws}) for draws in (1, 3))
    assert once.margin is not None
    assert thrice.margin is not None
    reach = (once.margin.high - once.margin.mean, thrice.margin.high - thrice.margin.mean)
    assert reach[1] / reach[0] == pytest.approx(student.ppf(1 - 0.05 / 6, 2) / student.ppf(0.975, 2))
    assert "(3 seeds of 3 draws, 95 % interval for all draws together)" in thrice.sentence


def test_a_fraction_of_the_papers_rounds_refutes_nothing() -> None:
    """A claim that fails at a tenth of the rounds is unknown, at half of them it does not hold."""

    def at(rounds: int, row: str, rival: str) -> Verdict:
        recipe = replace(
            recipe_of(MEASURED),
            claims=[Claim.above("c", "p", row, [rival])],
            parts=lambda scale: [RunPart("p", {"rounds": 400 if scale == "paper" else rounds})],
        )
        return verdicts(recipe, Results({"p": MEASURED}), "small")[0]

    short, half, holds = at(40, "b", "a"), at(200, "b", "a"), at(40, "a", "b")
    assert (short.status, short.outlook) == ("unknown", "not at the paper’s length: 40 of 400 rounds")
    assert certainty(short) == short.outlook
    assert (half.status, half.length) == ("does not hold", "200 of 400 rounds")
    assert (holds.status, holds.length) == ("holds", "40 of 400 rounds")


def test_floating_point_decides_nothing() -> None:
    """A method exactly two points below, with a tolerance of two points."""
    measured: Measurements = {
        "a": {"personal.accuracy": {0: 0.8, 1: 0.7, 2: 0.6}},
        "b": {"personal.accuracy": {0: 0.82, 1: 0.72, 2: 0.62}},
    }
    claim = Claim.above("a at most 2 points below b", "p", "a", ["b"], limit=-0.02)
    (verdict,) = verdicts(replace(recipe_of(measured), claims=[claim]), Results({"p": measured}), "small")
    assert verdict.status == "exact tie"


def test_a_part_that_is_missing_takes_no_contradiction_away() -> None:
    """b is below a, whatever c in the other part is; a above both would need c."""

    def above_both(one: str, other: str) -> Claim:
        def margins(results: Results) -> dict[str, dict[int, float]]:
            own, beaten, elsewhere = (
                results.get(part, row, "personal.accuracy") for part, row in (("p", one), ("p", other), ("q", "c"))
            )
            return {other: difference(own, beaten), "c": difference(own, elsewhere)}

        return Claim(f"{one} above {other} and c", margins)

    claims = [above_both("b", "a"), above_both("a", "b")]
    recipe = replace(recipe_of(MEASURED), claims=claims)
    wrong, open_one = verdicts(recipe, Results({"p": MEASURED}), "small", {"q": "q has not been measured yet"})
    assert (wrong.status, wrong.rival) == ("does not hold", "Method A")
    assert (open_one.status, open_one.sentence) == ("not judged", "q has not been measured yet")


def test_exact_ties_are_ties() -> None:
    assert verdict_of((0, 0, 0)).status == "exact tie"
    assert verdict_of((0, 0, 0), (1, 1.1, 1.2)).status == "exact tie"
    assert verdict_of((0, 0, 0), (0, 2, 4)).status == "unknown"
    assert verdict_of((0, 0, 0), (-1, -1.1, -1.2)).status == "does not hold"


def test_what_chance_alone_would_give() -> None:
    """An interval of no difference lies above zero with chance 1/40, and one of several below it with no more: they are
    widened for that."""
    judged = [verdict_of((0, 2, 4), (0, 2, 4)), verdict_of((1, 1, 1.1)), verdict_of((0, 0, 0))]
    assert by_chance(judged) == pytest.approx(0.075)
    assert by_chance([]) == 0


def test_tables_as_text() -> None:
    table = fill(recipe_of(MEASURED).tables[0], Results({"p": MEASURED}))
    assert table is not None
    assert [column.heading for column in table.columns] == ["One", "Two"]  # the third column's part was not run
    assert [name for name, _ in table.rows] == ["Method A", "Method_B"]
    assert table.text_table().markdown().splitlines() == [
        "|  | One | One, paper | Two | Two, paper |",
        "|---|---:|---:|---:|---:|",
        "| Method A | 91.0 ± 1.0 | 90.5 ± 0.5 | 50.0 ± 0.0 | – |",
        "| Method_B | 71.0 ± 1.0 | 80 | – | 70 |",
    ]
    latex = table.text_table().latex()
    assert r"Method\_B & 71.0 $\pm$ 1.0 & 80 & -- & 70 \\" in latex
    assert latex.count(r"\begin{tabular}{lrrrr}") == 1


def test_a_column_against_a_row_shows_paired_differences_with_their_interval() -> None:
    """Of -1, 0 and 4 points: mean 1, standard deviation sqrt(7), Student's 4.303 with two degrees of freedom."""
    seeds = {"a": {0: 0.80, 1: 0.70, 2: 0.60}, "b": {0: 0.79, 1: 0.70, 2: 0.64}, "c": {0: 0.5, 7: 0.5}}
    measured = {row: {"personal.accuracy": values} for row, values in seeds.items()}
    rows = {"a": "A", "b": "B", "c": "C"}
    table = fill(ResultTable("T", rows, [ResultColumn("lead", "p", against="a")]), Results({"p": measured}))
    assert table is not None
    assert [str(row[1]) for row in table.page_table().rows] == ["1.0 ± 6.6", "−30.0"]
    assert [name for name, _ in table.rows] == ["B", "C"]  # a row is not compared with itself


def five(mean: float) -> tuple[float, ...]:
    """Margins of five seeds with this mean and a standard deviation of 1."""
    return (mean - math.sqrt(2), mean, mean, mean, mean + math.sqrt(2))


def test_the_index_says_how_sure_its_verdicts_are() -> None:
    """Margins of 30 and 1.5 standard deviations hold with 5 seeds, only the first of them for all four together
    (test_firm_verdicts_are_holms); by chance, a fortieth of the judged would."""
    claims = [replace(verdict_of(five(mean)), claim=str(mean)) for mean in (1.5, 30.0, 0.5, -20.0)]
    asked = replace(claims[1], source="kinfed")
    unknown = Verdict("later", "not judged", "not measured yet", "paper", "Table 2")
    open_question = replace(unknown, claim="what else?", source="kinfed", place="")
    record = BenchmarkRecord("r", "T", "Self-FL", "Table 1", "paper", (*claims, unknown, asked, open_question))
    glance = certainty_table([record]).markdown().splitlines()
    assert glance[0] == (
        "|  | Claims of the papers: all | Claims of the papers: firm | Claims of the papers: by chance | "
        "Claims of the papers: at scale paper | Our questions: all | Our questions: firm | Our questions: by chance | "
        "Our questions: at scale paper |"
    )
    assert glance[2:6] == [
        "| Holds | 2 | 1 | 0.1 | 2 | 1 | 1 | 0.0 | 1 |",
        "| Does not hold | 1 | 1 | 0.1 | 1 | 0 | 0 | 0.0 | 0 |",
        "| Unknown | 1 | – | – | 1 | 0 | – | – | 0 |",
        "| Exact tie | 0 | – | – | 0 | 0 | – | – | 0 |",
    ]
    assert glance[6] == "| Not judged | 1 | – | – | – | 1 | – | – | – |"
    (holds, table), *_ = claim_sections([record], "{page}.md")
    *_, (last, not_measured) = question_sections([record], "{page}.md")
    assert last == "Our questions: not judged (1)"
    assert [str(cell) for cell in not_measured.rows[0]] == ["what else?", "not measured yet"]
    assert not_measured.rows[0][0].link == "r-paper.md"
    assert holds == "What holds (2)"
    assert [str(row[0]) for row in table.rows] == ["30.0", "1.5"]  # the surest first
    assert [str(cell) for cell in table.rows[0][3:]] == ["+30.0 [+28.8, +31.2] points", "", "5", "firm", "paper"]
    summary = summary_sentences([replace(record, verdicts=tuple(replace(v, other_data=True) for v in record.verdicts))])
    assert summary == [
        "Claims that can be tested here: 5. Tested: 4, of which 2 hold, 1 does not, 1 is unknown. With the published "
        "settings: 4, and 4 of these on other data than the paper’s."
    ]


HELD = "+30.0 [+28.8, +31.2] points"


def test_the_index_begins_with_the_papers_main_claims() -> None:
    """Papers in the order of their recipes, every claim with its verdict and the comparison that decides, and beside
    them the control that explains them; what has not been measured is there too, and what is no main claim is not."""
    below, above = verdict_of(five(-20), five(5)), verdict_of(five(30))
    missing = Verdict("c", "not judged", "not measured yet", "paper", "Table 2", main=True)
    control = replace(above, claim="a above the control", source="kinfed", main=True)
    first = (control, missing, replace(below, claim="a", main=True), replace(above, claim="aside"))
    records = [
        BenchmarkRecord("r", "T", "Self-FL", "Table 1", "paper", first),
        BenchmarkRecord("s", "T", "Ditto", "Table 1", "small", (replace(above, claim="d", main=True),)),
        BenchmarkRecord("t", "T", "Self-FL", "Table 1", "small", (replace(above, claim="b", main=True),)),
    ]
    (self_fl, claims, questions), (ditto, of_ditto, nothing) = main_claims(records, "{page}.md")
    assert (self_fl, ditto, nothing.rows) == ("Self-FL", "Ditto", ())
    assert [[str(cell) for cell in row] for row in claims.rows] == [
        ["c", "not judged", "", "", "", "–", "–", "paper"],
        ["a", "does not hold", "", "−20.0 [−21.6, −18.4] points", "r0", "5", "firm", "paper"],
        ["b", "holds", "", HELD, "", "5", "firm", "small"],
    ]
    assert [row[0].link for row in claims.rows] == ["r-paper.md", "r-paper.md", "t.md"]
    assert [row[2].interval is None for row in claims.rows] == [True, False, False]
    assert [str(cell) for cell in questions.rows[0]] == [
        "a above the control",
        "holds",
        "",
        HELD,
        "",
        "5",
        "firm",
        "paper",
    ]
    assert [str(row[0]) for row in of_ditto.rows] == ["d"]
    assert main_counts(records).markdown().splitlines()[2:4] == [
        "| Self-FL | 1 | 1 | 0 | 1 |",
        "| Ditto | 1 | 0 | 0 | 0 |",
    ]
    assert summary_sentences(records)[0] == (
        "Of 4 main claims of the papers, 2 hold, 1 does not, 0 are unknown, and 1 was not judged. With the "
        "published settings and data, 0 hold, 1 does not, 0 are unknown; 2 had less data, fewer rounds or "
        "smaller networks."
    )
    letters = [replace(records[0], verdicts=tuple(replace(v, other_data=True) for v in first)), *records[1:]]
    assert summary_sentences(letters)[0].endswith(
        "0 hold, 0 do not, 0 are unknown; 1 had another data set, and 2 less data, fewer rounds or smaller networks."
    )


def test_every_paper_with_claims_says_which_it_stands_on() -> None:
    claims: dict[str, list[Claim]] = {}
    for name in RECIPES:
        recipe = load_recipe(name)
        claims.setdefault(recipe.paper.name, []).extend(c for c in recipe.claims if isinstance(c, Claim))
    for paper, made in claims.items():
        own = [claim.main for claim in made if not isinstance(claim, Question)]
        assert not own or any(own), paper
        assert own or not any(claim.main for claim in made), f"{paper}: a control of no claim"


def test_a_question_is_judged_like_a_claim_and_counted_apart() -> None:
    question = Question.above("a above b?", "p", "a", ["b"])
    recipe = replace(recipe_of(MEASURED), claims=[Claim.above("a above b", "p", "a", ["b"]), question])
    claimed, asked = verdicts(recipe, Results({"p": MEASURED}), "paper")
    assert (claimed.source, asked.source) == ("paper", "kinfed")
    assert claimed.sentence == asked.sentence
    assert tally([claimed, asked]) == (1, 0, 0, 0, 0, 1, 0, 0)


def test_a_page_keeps_ours_and_the_papers_under_one_heading() -> None:
    table = fill(recipe_of(MEASURED).tables[0], Results({"p": MEASURED}))
    assert table is not None
    page = table.page_table()
    assert page.groups == [("One", 2), ("Two", 2)]
    assert [str(cell) for cell in page.rows[0]] == ["Method A", "91.0 ± 1.0", "90.5 ± 0.5", "50.0 ± 0.0", "–"]
    figure = beside_published(table)
    assert figure is not None
    rings, discs = figure.data[:2]
    assert (rings["x"], discs["x"]) == ([90.5, 80], [91.0, 71.0])


def test_a_narrow_terminal_cuts_no_figure() -> None:
    table = fill(recipe_of(MEASURED).tables[0], Results({"p": MEASURED}))
    assert table is not None
    console = Console(width=30, record=True, file=io.StringIO())
    console.print(table.console_table())
    assert {"91.0", "90.5", "50.0", "71.0", "80", "70", "1.0", "0.5", "0.0"} <= set(console.export_text().split())


def test_texts_of_a_recipe_are_escaped_on_its_page(tmp_path: Path) -> None:
    hostile = "<script>alert('x')</script>"
    recipe = replace(recipe_of(MEASURED), title=hostile, about=hostile, notes=[hostile], stand_ins={"paper": hostile})
    recipe = replace(recipe, claims=[Claim.above(hostile, "p", "a", ["b"])])
    done = reproduce(recipe, "paper", tmp_path / "toy")
    for page in (write_reproduction(done), write_site([done], tmp_path)):
        assert "<script>alert" not in page.read_text("utf-8")
        assert "&lt;script&gt;alert" in page.read_text("utf-8")


def test_aliases_are_other_models_of_a_method() -> None:
    results = Results({"p": MEASURED}, {"a_global": ("a", "server")})
    assert results.get("p", "a_global", "personal.accuracy") == {0: 0.5, 1: 0.5, 2: 0.5}
    assert results.get("p", "nobody", "personal.accuracy") == {}


def test_published_numbers_must_fill_their_row() -> None:
    with pytest.raises(ConfigError, match="has 1 numbers for 2 columns"):
        parse_published("m | A | B\n x | 1")


def test_files_of_a_reproduction(tmp_path: Path) -> None:
    done = reproduce(recipe_of(MEASURED), "paper", tmp_path / "toy-paper")
    page = write_reproduction(done).read_text("utf-8")
    assert "kinfed reproduce toy --scale paper" in page
    assert re.findall(r'(?:src|href)="(?!#|data:|parts/)', page.split("<script>")[0]) == []  # nothing from outside
    rows = list(csv.DictReader((tmp_path / "toy-paper" / "results.csv").read_text("utf-8").splitlines()))
    one = next(row for row in rows if row["method"] == "Method A" and row["column"] == "One")
    assert (one["mean"], one["sd"], one["seeds"], one["paper"], one["paper_spread"]) == ("91", "1", "3", "90.5", "0.5")
    assert r"\toprule" in (tmp_path / "toy-paper" / "results.tex").read_text("utf-8")
    site = write_site([done], tmp_path).read_text("utf-8")
    assert 'href="toy-paper/index.html"' in site
    index = publish([done], tmp_path / "docs", {"toy": done.recipe}).read_text("utf-8")
    assert "[toy](toy-paper.md) | Self-FL: Table 0 | 1 | 2 | 0 | 0 | 2 | 0 | 0 | 0 | 3 | 0 seconds | paper |" in index
    assert "Claims that can be tested here: 4. Tested: 3, of which 1 holds, 2 do not" in index
    # drawn from -22.5 to 22.5 on 17 characters: 17.5 and 22.5 are at places 14 and 16, the mean of 20 between them
    assert "| `········┊·····├●┤` | +20.0 [+17.5, +22.5] points |  | 3 |" in index
    assert site.count('<svg class="interval"') == 3  # one for each claim that was judged
    assert "a above b | holds | +20.0" in (tmp_path / "docs" / "toy-paper.md").read_text("utf-8")


def test_publishing_one_recipe_keeps_the_others_in_the_index(tmp_path: Path) -> None:
    toy = recipe_of(MEASURED)
    for name in ("toy", "other", "toy"):  # the second time, toy's record is replaced
        done = reproduce(replace(toy, name=name), "paper", tmp_path / f"{name}-paper")
        recipes_now = {name: replace(toy, name=name) for name in ("other", "toy", "later")}
        index = publish([done], tmp_path / "docs", recipes_now).read_text("utf-8")
    records = read_records(tmp_path / "docs", ["other", "toy"])
    assert [record.recipe for record in records] == ["other", "toy"]
    assert list(records[0].verdicts) == verdicts(toy, done.results, "paper")  # intervals survive being written
    assert "Claims that can be tested here: 8. Tested: 6, of which 2 hold, 4 do not" in index
    assert "Recipes without a page, whose claims are not counted: later." in index
    assert "With the published settings: 6" in index
    html = (tmp_path / "docs" / "claims.html").read_text("utf-8")
    assert html.count('<svg class="interval"') == 6
    assert 'href="toy-paper.md"' in html


def test_a_claim_counts_once_at_the_largest_scale_that_judged_it(tmp_path: Path) -> None:
    """At the scale paper with one of two parts: its claims stand for those of small, the other part's stay."""

    def toy_of(scale: Scale) -> Recipe:
        studies = [Study(name, lambda seeds, settings: MEASURED) for name in ("p", "q")]
        on_q = Claim.above("a above b elsewhere", "q", "a", ["b"])
        toy = replace(recipe_of(MEASURED), parts=lambda scale: studies)
        toy = replace(toy, claims=[*toy.claims, on_q])
        return toy if scale == "small" else toy.limited_to(["p"], scale)

    scales: tuple[Scale, ...] = ("paper", "small")  # small is published later and takes nothing away
    for scale in scales:
        done = reproduce(toy_of(scale), scale, tmp_path / f"toy-{scale}")
        index = publish([done], tmp_path / "docs", {"toy": done.recipe}).read_text("utf-8")
    at_paper, at_small = count_once(read_records(tmp_path / "docs", ["toy"]))
    assert (at_paper.scale, len(at_paper.verdicts)) == ("paper", 5)  # what neither judged stays with the larger
    assert [verdict.claim for verdict in at_small.verdicts] == ["a above b elsewhere"]
    assert "Claims that can be tested here: 5. Tested: 4, of which 2 hold, 2 do not" in index
    assert "With the published settings: 3" in index
    assert "## Not judged (1)" in index
    assert "| [the moon is cheese](toy-paper.md) | Self-FL: Table 0 | no moon here |" in index
    assert "| 3 | 95 % | small |" in index
    assert "To measure it again: `kinfed reproduce toy --scale paper --only p`" in (
        tmp_path / "docs/toy-paper.md"
    ).read_text("utf-8")


def test_firm_verdicts_are_holms() -> None:
    """Five seeds, mean m and standard deviation 1: t = m sqrt(5) with 4 degrees of freedom, for which P(|T| <= t) is
    sin a (1 + cos² a / 2) with tan a = t / 2."""

    def chance(mean: float) -> float:
        angle = math.atan(mean * math.sqrt(5) / 2)
        return 1 - math.sin(angle) * (1 + math.cos(angle) ** 2 / 2)

    claims = {mean: verdict_of(five(mean)) for mean in (30.0, 1.9, 1.5, 0.5)}
    assert [verdict.status for verdict in claims.values()] == ["holds"] * 3 + ["unknown"]
    assert chance(30.0) < 0.05 / 4
    assert 0.05 / 4 < chance(1.9) < 0.05 / 3  # the second smallest is held against a third of the level
    assert chance(1.5) > 0.05 / 2
    assert firm_verdicts(list(claims.values())) == [claims[30.0], claims[1.9]]
    twice = verdict_of(five(-1.9), five(9.0))  # below one of two rivals: two chances to be so
    assert twice.status == "does not hold"
    assert firm_verdicts([twice]) == [twice]
    assert firm_verdicts([twice], level=1.9 * chance(1.9)) == []
    assert firm_verdicts([verdict_of((29.0, 30.0, 31.0))]) == []  # three seeds: two degrees of freedom


def test_a_part_is_measured_once_and_never_with_other_settings(tmp_path: Path) -> None:
    calls: list[object] = []

    def recipe(repeats: int) -> Recipe:
        def measure(seeds: object, settings: object) -> Measurements:
            calls.append(seeds)
            return MEASURED

        return Recipe("r", PAPERS["Self-FL"], "-", "-", "-", lambda scale: [Study("p", measure, {"repeats": repeats})])

    first = reproduce(recipe(1), "paper", tmp_path)
    assert reproduce(recipe(1), "paper", tmp_path).results == first.results
    assert calls == [None]
    assert not read_reproduction(recipe(1), "paper", tmp_path).missing
    assert "other settings" in read_reproduction(recipe(2), "paper", tmp_path).missing["p"]
    with pytest.raises(StorageError, match="measured with other settings"):
        reproduce(recipe(2), "paper", tmp_path)


def test_work_that_is_done_by_seed_goes_on_where_it_was(tmp_path: Path) -> None:
    calls: list[int] = []

    def measure(seeds: Sequence[int] | None, settings: object) -> Measurements:
        (seed,) = seeds or ()
        if seed == 2 and calls.count(2) == 0:
            calls.append(2)
            raise KeyboardInterrupt
        calls.append(seed)
        return {"a": {"personal.accuracy": {seed: seed / 10}}}

    def recipe(rounds: int) -> Recipe:
        study = Study("p", measure, {"rounds": rounds}, (0, 1, 2), by_seed=True)
        return Recipe("r", PAPERS["Self-FL"], "-", "-", "-", lambda scale: [study])

    with pytest.raises(KeyboardInterrupt):
        reproduce(recipe(1), "small", tmp_path)
    done = reproduce(recipe(1), "small", tmp_path)
    assert done.results.get("p", "a", "personal.accuracy") == {0: 0.0, 1: 0.1, 2: 0.2}
    more = reproduce(recipe(1), "small", tmp_path, seeds=(1, 2, 3))
    assert more.results.get("p", "a", "personal.accuracy") == {1: 0.1, 2: 0.2, 3: 0.3}
    assert calls == [0, 1, 2, 2, 3]
    with pytest.raises(StorageError, match="measured with other settings"):
        reproduce(recipe(2), "small", tmp_path)
    with pytest.raises(Interrupted, match="before seed 4"):
        reproduce(recipe(1), "small", tmp_path, seeds=(4,), should_stop=lambda: True)
    with pytest.raises(ConfigError, match="needs seeds"):
        Study("p", measure, by_seed=True)


def test_an_interrupted_part_leaves_no_record(tmp_path: Path) -> None:
    def fails(seeds: object, settings: object) -> Measurements:
        raise KeyboardInterrupt

    recipe = Recipe("r", PAPERS["Self-FL"], "-", "-", "-", lambda scale: [Study("p", fails)])
    with pytest.raises(KeyboardInterrupt):
        reproduce(recipe, "smoke", tmp_path)
    assert read_reproduction(recipe, "smoke", tmp_path).parts == {}


def test_figures_of_a_panel_share_a_heading_and_a_text() -> None:
    one, two = Figure("one", [], {}), Figure("two", [], {})
    assert RecipeFigure.from_panel(Panel("Steps", "Look.", (one, two))) == [
        RecipeFigure("Steps", one),
        RecipeFigure("", two, "Look."),
    ]
    assert RecipeFigure.from_panel(Panel("Steps", "Look.", (one,)), "Other") == [RecipeFigure("Other", one, "Look.")]
    assert RecipeFigure.from_panel(Panel("Steps", "Nothing to see.")) == []


def test_summary_becomes_measurements() -> None:
    result = {
        "algorithm": "x",
        "seed": 3,
        "rounds": 4,
        "personal": {"accuracy": 0.9},  # of clients that took part; a recipe judges all
        "server": None,
        "alternatives": {"before": {"accuracy": 0.8}},
        "all_clients": {
            "personal": {"accuracy": 0.5},
            "server": None,
            "alternatives": {"before": {"accuracy": 0.25}},
        },
        "bytes_down": 8,
        "bytes_up": 4,
        "seconds": 2.0,
        "privacy": {"epsilon": [1.0, 2.5]},
    }
    measured = {"personal.accuracy": 0.5, "before.accuracy": 0.25, "bytes": 3.0, "bytes_up": 1.0, "seconds": 0.5}
    measured |= {"epsilon": 2.5}
    assert measurements_of_summary([result]) == {"x": {metric: {3: value} for metric, value in measured.items()}}
    assert measurements_of_summary([result | {"diverged": False}]) == measurements_of_summary([result])
    assert measurements_of_summary([result | {"diverged": True}])["x"]["diverged"] == {3: 1.0}


@pytest.mark.parametrize("name", ["selffl-ablation", "cgpfl-contexts"])
def test_smoke_from_end_to_end_and_again(name: str, tmp_path: Path) -> None:
    command = ["reproduce", name, "--scale", "smoke", "--out", str(tmp_path), "--publish", str(tmp_path / "docs")]
    first = CliRunner().invoke(app, command)
    assert first.exit_code == 0, first.output
    folder = tmp_path / f"{name}-smoke"
    assert (folder / "index.html").exists()
    assert (tmp_path / "docs" / f"{name}-smoke.md").exists()  # a trial replaces no measured page
    assert not list(folder.glob("parts/*/checkpoints"))
    records = {path: path.read_bytes() for path in folder.glob("parts/*.json")}
    again = CliRunner().invoke(app, command)
    assert again.exit_code == 0
    assert {path: path.read_bytes() for path in folder.glob("parts/*.json")} == records
    measured = json.loads(next(iter(records.values())))["measured"]
    assert all(len(by_seed) == 2 for metrics in measured.values() for by_seed in metrics.values())


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["selffl-mnits"], "did you mean selffl-mnist"),
        (["selffl-mnist", "--scale", "large"], "unknown scale"),
        ([], "name one recipe"),
        (["selffl-mnist", "--all"], "name one recipe"),
        (["--all", "--workers", "2"], "one core each"),
        (["selffl-mnist", "--processes", "2"], "--processes is for --all"),
        (["selffl-mnist", "--seeds", "one"], "--seeds takes whole numbers"),
        (["selffl-mnist", "--scale", "smoke", "--only", "nothing"], "unknown part"),
    ],
)
def test_mistakes_are_told(arguments: list[str], complaint: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["reproduce", *arguments, "--out", str(tmp_path / "out")])
    assert result.exit_code != 0
    assert complaint in str(result.exception)
    assert not (tmp_path / "out").exists()


def test_only_some_parts(tmp_path: Path) -> None:
    recipe = load_recipe("cgpfl-table1")
    scale: Scale = "paper"
    assert [part.name for part in recipe.limited_to(["mnist-dnn"], scale).parts(scale)] == ["mnist-dnn"]


def test_the_page_has_all_parts_of_its_folder(tmp_path: Path) -> None:
    """Measured one after the other; a part with other settings, and one that is only begun, are named."""
    studies = {name: Study(name, lambda seeds, settings: MEASURED) for name in ("p", "q")}
    whole = replace(recipe_of(MEASURED), parts=lambda scale: list(studies.values()))
    reproduce(whole.limited_to(["q"], "paper"), "paper", tmp_path)
    begun = write_reproduction(read_reproduction(whole, "paper", tmp_path)).read_text("utf-8")
    assert "Not on this page: the part p has not been measured yet." in begun
    assert "kinfed reproduce toy --scale paper --only q" in begun
    reproduce(whole.limited_to(["p"], "paper"), "paper", tmp_path)
    page = write_reproduction(read_reproduction(whole, "paper", tmp_path)).read_text("utf-8")
    assert "Not on this page" not in page
    assert "--only" not in page
    studies["q"] = Study("q", lambda seeds, settings: MEASURED, {"rounds": 2})
    changed = write_reproduction(read_reproduction(whole, "paper", tmp_path)).read_text("utf-8")
    assert "with other settings than the recipe has now" in changed


def test_recipes_are_listed() -> None:
    result = CliRunner().invoke(app, ["list", "recipes"])
    assert result.exit_code == 0
    assert all(name in result.output for name in RECIPES)


def test_roughness_is_how_much_a_curve_bends_over_its_second_half() -> None:
    """Moves of the late four: 0.1, 0.1 (a steady rise does not bend) and -0.2."""
    accuracies = [0.1, 0.9, 0.2, 0.9, 0.5, 0.6, 0.7, 0.5]
    rounds = tuple(
        RoundRecord(number, 0.0, 1, 0, 0.0, 0.0, {"personal": {"accuracy": value}}, {})
        for number, value in enumerate(accuracies, 1)
    )
    unscored = RoundRecord(9, 0.0, 1, 0, 0.0, 0.0, {}, {})
    final = FinalRecord(label="selffl", seed=3, rounds=8)
    trial = TrialRecord("selffl", 3, (*rounds, unscored), (), final, finished=True)
    run = RunRecord(Path("r"), "r", {}, "", {}, "", (trial,), {})
    assert roughness(run) == {"selffl": {ROUGHNESS: {3: pytest.approx(0.15)}}}


def test_every_rival_sets_the_level_at_which_its_convergence_is_compared() -> None:
    """95 % of what each method ends with: 0.855 of CGPFL's 0.9 (with ten contexts 0.76 of 0.8), 0.57 of the slow one's,
    and 0.95 of the best one's, which CGPFL never has: one round after the last, then."""
    curves = {
        "cgpfl-4": [0.4, 0.7, 0.6, 0.9],
        "cgpfl-10": [0.6, 0.7, 0.8, 0.8],
        "slow": [0.1, 0.2, 0.3, 0.6],
        "best": [0.9, 0.95, 1.0, 1.0],
    }

    def figures(label: str, number: int) -> dict[str, Any]:
        apart = {"clients": {"squared_distance_to_context": [1.0, 3.0]}, "squared_step": 5.0 - number}
        return apart if label == "cgpfl-4" else {}

    trials = tuple(
        TrialRecord(
            label,
            0,
            tuple(
                RoundRecord(5 * n, 0.0, 1, 0, 0.0, 0.0, {"personal": {"accuracy": a}}, figures(label, n))
                for n, a in enumerate(curve, 1)
            ),
            (),
            FinalRecord(label=label, seed=0, rounds=4),
            finished=True,
        )
        for label, curve in curves.items()
    )
    four, ten = rounds_of("cgpfl-4"), rounds_of("cgpfl-10")
    assert convergence(RunRecord(Path("r"), "r", {}, "", {}, "", trials, {})) == {
        "cgpfl-4": {ROUNDS_TO_LEVEL: {0: 20.0}, four: {0: 20.0}, ten: {0: 21.0}, DISTANCE: {0: 2.0}}
        | {GRADIENT: {0: 2.5}, LATE_GRADIENT: {0: 1.5}},
        "cgpfl-10": {ROUNDS_TO_LEVEL: {0: 15.0}, four: {0: 20.0}, ten: {0: 15.0}},
        "slow": {ROUNDS_TO_LEVEL: {0: 20.0}, four: {0: 10.0}, ten: {0: 5.0}},
        "best": {ROUNDS_TO_LEVEL: {0: 10.0}, four: {0: 21.0}, ten: {0: 21.0}},
    }


def claim_of(recipe: str, opening: str) -> Claim:
    """The first claim of a recipe that begins so."""
    return next(c for c in load_recipe(recipe).claims if isinstance(c, Claim) and c.text.startswith(opening))


def test_rounds_saved_are_the_rivals_less_those_of_cgpfl() -> None:
    measured = {
        row: {ROUNDS_TO_LEVEL: {0: 30.0}, rounds_of("cgpfl-4"): {0: 20.0}, rounds_of("cgpfl-10"): {0: 35.0}}
        for row in ("pfedme", "ditto", "perfedavg_hf")
    }
    for opening, saved in (("CGPFL converges faster", 10.0), ("CGPFL with K = 10 converges faster", -5.0)):
        margins = claim_of("cgpfl-contexts", opening).margins(Results({"mnist-mlr": measured}))
        assert margins == {"pfedme": {0: saved}, "ditto": {0: saved}, "perfedavg_hf": {0: saved}}


def test_false_accepts_are_compared_on_every_type_of_devices() -> None:
    """The rival's ratio less that of Self-FL: fewer is better."""
    measured: Measurements = {
        row: {f"server.fa.{kind}.normal": {0: ratio} for kind in "ABCDE"}
        for row, ratio in (("selffl", 0.9), ("fedavg-w", 1.5), ("fedavg-e", 0.8), ("ditto-w", 1.0), ("ditto-e", 1.0))
    }
    margins = claim_of("selffl-wakeword", "Self-FL's global model").margins(Results({"types": measured}))
    assert len(margins) == 5 * 5
    assert margins["FedAvg-w on type A"] == pytest.approx({0: 0.6})
    assert margins["FedAvg-e on type E"] == pytest.approx({0: -0.1})
    assert margins["Per-FedAvg on type C"] == {}  # not measured


def test_what_self_fls_algorithms_send() -> None:
    """By hand: Algorithm 1 as much as the control, Algorithm 2 1.6 times as much, 0.4 away from twice; of what goes up
    2.05 times as much, 0.05 away."""
    sent = {"selffl": (100.0, 50.0), "selffl_augmented": (160.0, 102.5), "selffl_control": (100.0, 50.0)}
    measured: Measurements = {row: {"bytes": {0: both}, "bytes_up": {0: up}} for row, (both, up) in sent.items()}
    openings = ("Algorithm 1 sends", "With Algorithm 2 clients send", "With Algorithm 2 twice")
    claims = [claim_of("selffl-algorithms", opening) for opening in openings]
    margins = [claim.margins(Results({"letters": measured})) for claim in claims]
    assert margins[0]["Letters"] == {0: pytest.approx(1.0)}
    for cases, beyond in zip(margins[1:], (0.05, -0.4), strict=True):
        assert cases["Letters, more than twice"] == {0: pytest.approx(beyond)}
        assert cases["Letters, less than twice"] == {0: pytest.approx(-beyond)}
    assert [(claim.limit, claim.at_most) for claim in claims] == [(1.01, True), (0.1, True), (0.1, True)]


def test_an_optional_part_is_left_out_where_its_data_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And is said to be missing; a part that is not optional ends the recipe."""
    monkeypatch.setenv("KINFED_DATA", str(tmp_path / "nothing"))
    small: dict[str, Any] = {"algorithms": "fedavg", "rounds": 1, "clients": 4, "seeds": [0, 1], "workers": 1}

    def recipe(*, optional: bool) -> Recipe:
        away = RunPart("away", {**small, "dataset": "letters"}, optional=optional)
        return Recipe("r", PAPERS["Self-FL"], "-", "-", "-", lambda scale: [away, RunPart("here", small)])

    done = reproduce(recipe(optional=True), "small", tmp_path / "r")
    assert list(done.parts) == ["here"]
    assert done.missing == {"away": "the part away has not been measured: it runs only where its data is available"}
    assert is_done(recipe(optional=True), "small", tmp_path / "r", None, {})
    assert done_share(recipe(optional=True), "small", tmp_path / "r", None, {}) == 1.0
    assert commands(done) == ["kinfed reproduce r --scale small"]
    assert "the part away is left out: data set files are missing" in caplog.text
    with pytest.raises(DataError, match="data set files are missing"):
        reproduce(recipe(optional=False), "small", tmp_path / "s")


def test_femnist_is_used_where_it_is_to_be_had() -> None:
    parts = {part.name: part for part in load_recipe("selffl-femnist").parts("paper")}
    optional = {name: part.settings["dataset"] for name, part in parts.items() if getattr(part, "optional", False)}
    assert optional == {"femnist": {"name": "femnist", "characters": "lower", "first": 10}, "writers": "femnist"}


def test_other_data_are_called_that_in_the_index(tmp_path: Path) -> None:
    """By the parts that a claim asks for, and are remembered by the published record."""
    plain = recipe_of(MEASURED)
    foreign, partly = (replace(plain, other_data=(part,)) for part in ("p", "q"))
    for name, recipe, word in (
        ("a", plain, "paper"), ("b", foreign, "paper, other data"), ("c", partly, "paper"),
    ):  # fmt: skip
        done = reproduce(recipe, "paper", tmp_path / "toy")
        index = publish([done], tmp_path / name, {"toy": recipe}).read_text("utf-8")
        assert f"| 3 | 95 % | {word} |" in index
        (record,) = read_records(tmp_path / name, ["toy"])
        assert any(verdict.other_data for verdict in record.verdicts) == (word != "paper")


@pytest.mark.parametrize("name", RECIPES)
def test_parts_on_other_data_are_parts(name: str) -> None:
    """Where claims look for their figures; and a recipe that replaces the paper's data even at its scale says where."""
    recipe = load_recipe(name)
    assert set(recipe.other_data) <= {home(part) for scale in SCALES for part in recipe.parts(scale)}
    assert recipe.other_data or "paper" not in recipe.stand_ins


def test_other_data_of_an_older_record_are_those_of_all_its_claims(tmp_path: Path) -> None:
    done = reproduce(recipe_of(MEASURED), "paper", tmp_path / "toy")
    publish([done], tmp_path / "site", {"toy": recipe_of(MEASURED)})
    path = tmp_path / "site" / "verdicts" / "toy-paper.json"
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | {"format": 4, "other_data": True}), "utf-8")
    (record,) = read_records(tmp_path / "site", ["toy"])
    assert all(verdict.other_data for verdict in record.verdicts)


def test_the_command_of_a_page_names_seeds_that_are_not_the_recipes_own() -> None:
    """Of a study as of a run."""

    def command(own: tuple[int, ...]) -> str:
        study = Study("p", lambda seeds, settings: MEASURED, {}, own)
        recipe = replace(recipe_of(MEASURED), parts=lambda scale: [study])
        (text,) = commands(
            Reproduction(recipe, "small", {"p": PartRecord(MEASURED, settings_hash(study), "", 0, None)})
        )
        return text

    assert command((0, 1, 2)) == "kinfed reproduce toy --scale small"
    assert command((0, 1)) == "kinfed reproduce toy --scale small --seeds 0,1,2"


def test_algorithm_1_as_it_is_printed_has_no_smoothing() -> None:
    """Sums and (19) in the long version, means and (8) in the NeurIPS version."""
    parts = {part.name: part for part in load_recipe("selffl-femnist").parts("paper")}
    printed = parts["steps-20-printed"]
    assert isinstance(printed, RunPart)
    config = part_config(printed, None, {})
    methods = [config.algorithms[label] for label in ("selffl-printed", "selffl-printed-neurips")]
    assert [method["smoothing"] for method in methods] == [1.0, 1.0]
    assert [method.get("reduction", "mean") for method in methods] == ["sum", "mean"]
    assert [method.get("contraction", "batch") for method in methods] == ["batch", "gd"]


def test_forty_steps_are_those_of_the_baselines() -> None:
    """Self-FL's own number of steps stays as it is."""
    parts = {part.name: part for part in load_recipe("selffl-femnist").parts("paper")}
    longer = parts["steps-40"]
    assert isinstance(longer, RunPart)
    assert longer.settings["steps"] == 20
    steps = {label: options.get("steps") for label, options in longer.settings["algorithms"].items()}
    assert {label for label, number in steps.items() if number == 40} == {
        "fedavg",
        "selffl_control",
        "ditto",
        "pfedme",
        "perfedavg",
    }


def test_the_best_number_of_contexts_is_best_over_all_seeds() -> None:
    """Not the luckiest of every seed: K = 2 has 0.8 on average and K = 1 0.75, though 0.9 once. Heur is 2 points above
    it and 2 points below: the distance is stated, without a limit of ours."""
    accuracy = {"cgpfl-1": {0: 0.9, 1: 0.6}, "cgpfl-2": {0: 0.8, 1: 0.8}, "cgpfl_heur": {0: 0.82, 1: 0.78}}
    measured = {row: {"personal.accuracy": by_seed} for row, by_seed in accuracy.items()}
    claim = claim_of("cgpfl-heur", "CGPFL-Heur as good as the K that is best in hindsight")
    assert claim.margins(Results({"mnist-mlr": measured}))["the best K"] == pytest.approx({0: 0.02, 1: -0.02})
    assert claim.limit == 0


def test_the_list_of_recipes_says_what_they_say_of_themselves() -> None:
    assert {name: summary(load_recipe(name)) for name in RECIPES} == RECIPES
