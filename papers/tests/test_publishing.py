"""Published pages and records: joined part by part, judged by the recipe as it is now, never edited by hand."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kinfed.cli.app import app
from kinfed.errors import ConfigError, StorageError
from kinfed_papers import Claim, Question, Recipe, ResultColumn, ResultTable, RunPart, Study, difference
from kinfed_papers.benchmark_records import FORMAT, NEW_CLAIM, BenchmarkRecord, joined_parts, read_records
from kinfed_papers.judge import NO_COMMON_SEED, NOT_RUN, NOT_TAKEN
from kinfed_papers.markdown_page import seeds_text
from kinfed_papers.measure import Reproduction, read_reproduction, reproduce
from kinfed_papers.part_records import PartRecord, settings_hash
from kinfed_papers.publishing import find_reproductions, publish
from kinfed_papers.recipe import PAPERS, Measurements, OpenChoice, Readings, Results
from kinfed_papers.verdict import Verdict

A_ABOVE_B = Claim.above("a above b", "p", "a", ["b"], place="Table 1", main=True)
ELSEWHERE = Claim.above("a above b elsewhere", "q", "a", ["b"], place="Table 2")


def across(results: Results) -> dict[str, dict[int, float]]:
    metric = "personal.accuracy"
    return {"": difference(results.get("p", "a", metric), results.get("q", "b", metric))}


ACROSS = Claim("a of p above b of q", across, place="Table 3")


def study(name: str, rounds: int = 1) -> Study:
    """Method a 10, 20, 30, ... points above b; seeds 0 to 2 where none are asked for."""

    def measure(seeds: Any, settings: Any) -> Measurements:
        numbers = (0, 1, 2) if seeds is None else tuple(seeds)
        b = {seed: 0.2 for seed in numbers}
        a = {seed: 0.3 + 0.01 * place for place, seed in enumerate(numbers)}
        return {"a": {"personal.accuracy": a}, "b": {"personal.accuracy": b, "personal.-=1": b}}

    return Study(name, measure, {"rounds": rounds})


def toy(*parts: Study, claims: Any = (A_ABOVE_B, ELSEWHERE, ACROSS)) -> Recipe:
    rows = {"a": "Method A", "b": "Method B"}
    table = ResultTable("Accuracy", rows, [ResultColumn("On p", "p"), ResultColumn("On q", "q")])
    return Recipe("toy", PAPERS["Self-FL"], "Table 0", "A toy", "Nothing.", lambda scale: parts, [table], list(claims))


P, Q = study("p"), study("q")
TOY = toy(P, Q)


def measured(folder: Path, recipe: Recipe, only: str = "", seeds: Any = None) -> Reproduction:
    chosen = recipe.limited_to([only], "small") if only else recipe
    return replace(reproduce(chosen, "small", folder, seeds=seeds), recipe=recipe)


def by_claim(docs: Path) -> dict[str, Verdict]:
    record = BenchmarkRecord.read(docs / "verdicts" / "toy.json")
    return {verdict.claim: verdict for verdict in record.verdicts}


def test_parts_of_other_days_and_seeds_join_what_is_published(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    publish([measured(tmp_path / "one", TOY, "p")], docs, {"toy": TOY})
    before = by_claim(docs)
    assert before["a above b"].status == "holds"
    for text in ("a above b elsewhere", "a of p above b of q"):
        assert before[text].sentence == "the part q has not been measured yet"
    assert "**Not on this page:** the part q has not been measured yet." in (docs / "toy.md").read_text("utf-8")
    publish([measured(tmp_path / "two", TOY, "q", [7, 8, 9])], docs, {"toy": TOY})
    after = by_claim(docs)
    assert after["a above b"] == before["a above b"]
    assert after["a above b elsewhere"].status == "holds"
    assert (after["a of p above b of q"].status, after["a of p above b of q"].sentence) == (
        "not judged",
        NO_COMMON_SEED,
    )
    record = BenchmarkRecord.read(docs / "verdicts" / "toy.json")
    assert {name: part.seeds for name, part in record.parts.items()} == {"p": (0, 1, 2), "q": (7, 8, 9)}
    page = (docs / "toy.md").read_text("utf-8")
    assert "p: 3 seeds (0–2), 20" in page
    assert "q: 3 seeds (7–9), 20" in page
    assert "| Method A | 31.0 ± 1.0 | 31.0 ± 1.0 |" in page
    assert publish([], docs, {"toy": TOY}).read_text("utf-8").count("| [toy](toy.md) | Self-FL: Table 0 |") == 1
    assert (docs / "toy.md").read_text("utf-8") == page  # nothing new, nothing changed


def test_figures_survive_being_published(tmp_path: Path) -> None:
    done = measured(tmp_path / "one", TOY)
    publish([done], tmp_path / "docs", {"toy": TOY})
    record = BenchmarkRecord.read(tmp_path / "docs" / "verdicts" / "toy.json")
    assert record.parts == done.parts  # names that a spreadsheet would take for a formula, too


def test_published_figures_are_rounded_before_they_are_judged() -> None:
    figures = {0: 1 / 3, 1: 123456789.0, 2: 0.5, 3: float("inf")}
    part = PartRecord({"a": {"m": figures}}, "hash", "2026-01-01 with kinfed", 1.0, None).rounded()
    assert part.measured == {"a": {"m": {0: 0.3333333, 1: 123456800.0, 2: 0.5, 3: float("inf")}}}
    assert part.rounded() == part


def test_other_settings_are_told_and_never_judged(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    publish([measured(tmp_path / "one", TOY)], docs, {"toy": TOY})
    page = (docs / "toy.md").read_text("utf-8")
    changed = toy(P, study("q", rounds=2))
    index = publish([], docs, {"toy": changed}).read_text("utf-8")
    judged = by_claim(docs)
    assert judged["a above b"].status == "holds"
    assert "the part q was measured on 20" in judged["a above b elsewhere"].sentence
    assert "with other settings than the recipe has now" in judged["a of p above b of q"].sentence
    assert judged["a of p above b of q"].margin is None
    assert "## Not judged (2)" in index
    told = (docs / "toy.md").read_text("utf-8")
    assert "**Not on this page:** the part q was measured on" in told
    assert "On q" not in told
    assert "--only p" in told  # what measures again what is shown
    publish([measured(tmp_path / "new", changed, "q")], docs, {"toy": changed})
    assert by_claim(docs)["a above b elsewhere"].status == "holds"
    publish([measured(tmp_path / "one", TOY)], docs, {"toy": TOY})  # the recipe is as it was
    assert (docs / "toy.md").read_text("utf-8") == page


def test_claims_come_and_go_with_the_recipe(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    publish([measured(tmp_path / "one", TOY)], docs, {"toy": TOY})
    moved = replace(A_ABOVE_B, place="Table 9")
    asked = Question.above("b above a?", "p", "b", ["a"])
    publish([], docs, {"toy": toy(P, Q, claims=(asked, moved))})
    judged = by_claim(docs)
    assert list(judged) == ["b above a?", "a above b"]
    assert judged["b above a?"].status == "does not hold"  # its figures were kept
    assert judged["a above b"].place == "Table 9"
    publish([], docs, {"another": replace(TOY, name="another")})  # a recipe that is not known here stays as it is
    assert by_claim(docs) == judged


OLD_PAGE = """# A toy

Scale small, 3 seeds: measured 2025-01-01 with kinfed 0.1.0.

## Accuracy

| | On p |
|---|---:|
| Method A | 31.0 |

## Claims

| claim | verdict | figures |
|---|---|---|
| an older sentence | reproduced | yes |

1 more claim, by hand.

## What differs from the paper, and why

* Much.

To measure it again: `kinfed reproduce toy`
"""


def write_format_1(docs: Path, *claims: str) -> None:
    (docs / "verdicts").mkdir(parents=True)
    margin = {"mean": 10.0, "low": 5.0, "high": 15.0, "n": 3}
    entries = [
        {"claim": text, "status": "reproduced", "sentence": "yes, +10", "source": "paper", "place": "Table 7",
         "margin": margin, "unit": "points", "margins": 1, "outlook": ""}
        for text in claims
    ]  # fmt: skip
    record = {"recipe": "toy", "title": "A toy", "paper": "Self-FL", "reproduces": "Table 0", "scale": "small",
              "seeds": 4, "provenance": "2025-01-01 with kinfed 0.1.0", "verdicts": entries}  # fmt: skip
    (docs / "verdicts" / "toy.json").write_text(json.dumps(record), "utf-8")
    (docs / "toy.md").write_text(OLD_PAGE, "utf-8")


def test_records_without_figures_follow_the_recipe(tmp_path: Path) -> None:
    write_format_1(tmp_path, "a above b", "an older sentence")
    index = publish([], tmp_path, {"toy": TOY}).read_text("utf-8")
    assert "| [toy](toy.md) | Self-FL: Table 0 | 1 | 0 | 0 | 0 | 2 | 0 | 0 | 0 | 4 | – | small | 2025-01-01 |" in index
    judged = by_claim(tmp_path)
    assert list(judged) == ["a above b", "a above b elsewhere", "a of p above b of q"]
    assert (judged["a above b"].status, judged["a above b"].place) == ("holds", "Table 1")
    assert judged["a above b"].main  # as the recipe says; format 1 does not know
    assert judged["a above b elsewhere"].sentence == NEW_CLAIM
    page = (tmp_path / "toy.md").read_text("utf-8")
    head, tail = OLD_PAGE.split("## Claims")
    assert page.startswith(head)  # tables stay
    assert page.endswith("## What differs" + tail.split("## What differs")[1])
    assert "older sentence" not in page
    assert "by hand" not in page
    assert "| a above b (Table 1) | holds | +10 |" in page
    record = (tmp_path / "verdicts" / "toy.json").read_text("utf-8")
    publish([], tmp_path, {"toy": TOY})  # from the format of today, the same
    assert (tmp_path / "verdicts" / "toy.json").read_text("utf-8") == record
    assert (tmp_path / "toy.md").read_text("utf-8") == page


def test_verdicts_that_cannot_be_had_again_do_not_go_unsaid(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_format_1(tmp_path, "a above b", "an older sentence")
    publish([], tmp_path, {"toy": TOY})
    assert "toy: 1 verdict without figures went with claims that the recipe no longer makes: an older" in caplog.text


def test_measured_parts_replace_verdicts_without_figures(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    write_format_1(docs, "a above b", "a above b elsewhere")
    publish([measured(tmp_path / "one", TOY, "p")], docs, {"toy": TOY})
    judged = by_claim(docs)
    assert judged["a above b"].sentence.startswith("+11.0")
    assert (judged["a above b elsewhere"].sentence, judged["a above b elsewhere"].earlier) == ("+10", "2025-01-01")
    assert "+10; measured 2025-01-01, figures not saved" in (docs / "toy.md").read_text("utf-8")
    record = BenchmarkRecord.read(docs / "verdicts" / "toy.json")
    assert record.seed_counts == (3, 4)
    assert record.dates[0] == "2025-01-01"
    publish([measured(tmp_path / "two", TOY, "q")], docs, {"toy": TOY})
    record = BenchmarkRecord.read(docs / "verdicts" / "toy.json")
    assert (record.unkept, record.seed_counts) == (None, (3,))


def test_what_was_not_judged_rests_on_no_figures(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    write_format_1(docs, "a above b", "a above b elsewhere")
    path = docs / "verdicts" / "toy.json"
    record = json.loads(path.read_text("utf-8"))
    record["verdicts"][1] |= {"status": "not judged", "sentence": "not run then", "margin": None}
    path.write_text(json.dumps(record), "utf-8")
    publish([measured(tmp_path / "one", TOY, "p")], docs, {"toy": TOY})
    assert BenchmarkRecord.read(path).unkept is None
    assert by_claim(docs)["a above b elsewhere"].sentence == "the part q has not been measured yet"


def test_a_record_of_a_later_format_is_refused(tmp_path: Path) -> None:
    write_format_1(tmp_path, "a above b")
    path = tmp_path / "verdicts" / "toy.json"
    path.write_text(json.dumps({**json.loads(path.read_text("utf-8")), "format": FORMAT + 1}), "utf-8")
    with pytest.raises(StorageError, match=rf"format {FORMAT + 1}.*upgrade kinfed"):
        publish([], tmp_path, {"toy": TOY})


def test_older_contradictions_hold_for_all_their_comparisons_or_are_open(tmp_path: Path) -> None:
    """One of nine comparisons, -2 with three seeds: a plain interval of ±1.5 is ±4.66 at 95 % for all nine together
    (Student's quantiles with two degrees of freedom: 4.303 and 13.36); of a single comparison nothing changes."""
    write_format_1(tmp_path, "a above b")
    path = tmp_path / "verdicts" / "toy.json"
    values = json.loads(path.read_text("utf-8"))
    values["verdicts"][0] |= {"status": "contradicted", "margin": {"mean": -2.0, "low": -3.5, "high": -0.5, "n": 3}}
    for margins, status, high in ((1, "does not hold", -0.5), (9, "unknown", pytest.approx(2.66, abs=0.01))):
        values["verdicts"][0]["margins"] = margins
        path.write_text(json.dumps(values), "utf-8")
        (record,) = read_records(tmp_path, ["toy"])
        margin = record.verdicts[0].margin
        assert margin is not None
        assert (record.verdicts[0].status, margin.high) == (status, high)
        assert record.verdicts[0].confidence == pytest.approx(1 - 0.05 / margins)


def test_a_verdict_without_figures_shows_its_difference_beside_the_limit(tmp_path: Path) -> None:
    """Older records keep how far it is beyond a limit that the recipe knows."""
    write_format_1(tmp_path, "a above b")
    limited = Claim.above("a above b", "p", "a", ["b"], limit=-0.005)
    publish([], tmp_path, {"toy": toy(P, Q, claims=(limited,))})
    (record,) = read_records(tmp_path, ["toy"])
    assert record.verdicts[0].limit == pytest.approx(-0.5)
    assert "(limit −0." in (tmp_path / "README.md").read_text("utf-8")
    assert record.verdicts[0].sentence == "+9.5 [+4.5, +14.5] points (limit −0.5) (3 seeds, 95 % interval)"


def test_seeds_drawn_again_are_counted_and_fewer_of_them_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In the record, by every claim that asks for the part, and in the index."""
    docs = tmp_path / "docs"
    publish([measured(tmp_path / "one", TOY)], docs, {"toy": TOY})
    assert not caplog.messages
    for number, seeds in enumerate(([5, 6, 7, 8], [9, 10, 11])):
        publish([measured(tmp_path / str(number), TOY, "p", seeds=seeds)], docs, {"toy": TOY})
        publish([], docs, {"toy": TOY})  # and once more, with nothing new
        judged = by_claim(docs)
        assert judged["a above b"].draws == number + 2
        assert judged["a above b elsewhere"].draws == 1
        assert f"in draw {number + 2}" in (docs / "README.md").read_text("utf-8")
    assert caplog.messages == ["toy: p now has 3 seeds, and had 4"]


def test_lost_figures_are_told(tmp_path: Path) -> None:
    publish([measured(tmp_path / "one", TOY)], tmp_path / "docs", {"toy": TOY})
    (tmp_path / "docs" / "measured" / "toy.csv").unlink()
    with pytest.raises(StorageError, match=r"toy\.csv does not exist.*restore it"):
        publish([], tmp_path / "docs", {"toy": TOY})


def test_older_outlooks_end_where_present_ones_do(tmp_path: Path) -> None:
    for text, shown in (
        ("about 107 seeds would decide", "not even 100 seeds would decide"),
        ("not even 1,000 seeds would decide", "not even 100 seeds would decide"),
        ("about 12 seeds would decide", "about 12 seeds would decide"),
    ):
        write_format_1(tmp_path / text, "a above b")
        path = tmp_path / text / "verdicts" / "toy.json"
        values = json.loads(path.read_text("utf-8"))
        values["verdicts"][0] |= {"sentence": f"+1.0 points; {text} (3 seeds)", "outlook": text}
        path.write_text(json.dumps(values), "utf-8")
        (verdict, *_) = BenchmarkRecord.read(path).verdicts
        assert (verdict.sentence, verdict.outlook) == (f"+1.0 points; {shown} (3 seeds)", shown)


def test_which_record_of_a_part_is_kept() -> None:
    """That with the present settings; then that with several seeds; then the newer; then that to be published."""

    def record(date: str, settings: str, seconds: float = 0.0, seeds: int = 2) -> PartRecord:
        measured = {"a": {"personal.accuracy": dict.fromkeys(range(seeds), 0.5)}}
        return PartRecord(measured, settings, f"{date} with kinfed", seconds, None)

    now = settings_hash(P)

    def kept(published: PartRecord, new: PartRecord) -> PartRecord:
        return joined_parts(toy(P), "small", {"p": published, "gone": published}, {"p": new})["p"]

    old, later, foreign = record("2026-01-01", now), record("2026-02-01", now), record("2026-03-01", "other")
    assert kept(old, later) == later
    assert kept(later, old) == later
    assert kept(old, foreign) == old
    assert kept(foreign, old) == old
    single = record("2026-04-01", now, seeds=1)  # one seed is no evidence
    assert kept(old, single) == old
    assert kept(single, old) == old
    again = record("2026-01-01", now, 1.0)
    assert kept(old, again) == again
    assert joined_parts(toy(P), "small", {"gone": old}, {}) == {}
    other_seeds = record("2026-05-01", now, seeds=3)
    assert [kept(one, other_seeds).draw for one in (old, replace(old, draw=2), foreign, other_seeds)] == [2, 3, 1, 1]
    assert kept(replace(other_seeds, draw=2), other_seeds).draw == 2


def test_figures_that_are_not_those_of_the_record_are_refused(tmp_path: Path) -> None:
    """A part whose lines are gone would look like one that was never run."""
    publish([measured(tmp_path / "out", toy(P))], tmp_path / "site", {"toy": toy(P)})
    figures = tmp_path / "site" / "measured" / "toy.csv"
    figures.write_text("".join(figures.read_text("utf-8").splitlines(keepends=True)[:1]), "utf-8")
    with pytest.raises(StorageError, match="restore both files"):
        publish([], tmp_path / "site", {"toy": toy(P)})


def test_a_rival_in_a_part_that_is_missing_is_not_left_out(tmp_path: Path) -> None:
    """Methods that are run apart count as methods of another part: without them, a claim about all is not judged."""
    digits: dict[str, Any] = {"rounds": 1, "clients": 4, "seeds": [0, 1]}
    parts = [
        RunPart("p", {**digits, "algorithms": "fedavg,local"}),
        RunPart("more", {**digits, "algorithms": "ditto"}, merge_into="p"),
    ]
    claims = [
        Claim.above("FedAvg above all", "p", "fedavg", ["local", "ditto"]),
        Claim.above("FedAvg above Local", "p", "fedavg", ["local"]),
        Claim.above("FedAvg above a stranger", "nowhere", "fedavg", ["local"]),
        Claim.above("FedAvg above Local by a figure that nobody took", "p", "fedavg", ["local"], "kin.top"),
    ]
    recipe = Recipe("toy", PAPERS["Self-FL"], "-", "-", "-", lambda scale: parts, [], claims)
    publish([measured(tmp_path / "one", recipe, "p")], tmp_path / "docs", {"toy": recipe})
    judged = by_claim(tmp_path / "docs")
    assert judged["FedAvg above all"].sentence == "the part more has not been measured yet"
    assert judged["FedAvg above Local"].margin is not None
    assert judged["FedAvg above a stranger"].sentence == NOT_RUN
    assert judged["FedAvg above Local by a figure that nobody took"].sentence == NOT_TAKEN
    # A record beside a run that notes no hash, as older versions wrote it: the run's own settings tell.
    path = tmp_path / "one" / "parts" / "p.json"
    values = json.loads(path.read_text("utf-8"))
    del values["settings"]
    path.write_text(json.dumps(values), "utf-8")
    assert list(read_reproduction(recipe, "small", tmp_path / "one").missing) == ["more"]
    parts[0] = RunPart("p", {**digits, "algorithms": "fedavg,local", "rounds": 2})
    assert "other settings" in read_reproduction(recipe, "small", tmp_path / "one").missing["p"]


def test_the_hash_of_settings_is_of_what_the_recipe_declares() -> None:
    settings: dict[str, Any] = {"rounds": 3, "algorithms": "fedavg,ditto"}
    part = RunPart("p", settings)
    same = RunPart("p", {**settings, "seeds": [5, 6], "workers": 3, "algorithms": ["fedavg", "ditto"]})
    assert settings_hash(part) == settings_hash(same)
    assert settings_hash(part) != settings_hash(RunPart("p", {**settings, "rounds": 4}))
    assert settings_hash(part) != settings_hash(RunPart("p", {**settings, "lr": 0.1}))


def test_publishing_alone_runs_nothing(tmp_path: Path) -> None:
    docs, out = tmp_path / "docs", tmp_path / "out"
    write_format_1(docs, "a above b")
    mistyped = CliRunner().invoke(app, ["reproduce", "--publish", str(docs), "--out", str(out)])
    assert "does not exist: nothing to publish there" in str(mistyped.exception)
    out.mkdir()
    result = CliRunner().invoke(app, ["reproduce", "--publish", str(docs), "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert not any(out.iterdir())
    assert "[toy](toy.md)" in (docs / "README.md").read_text("utf-8")
    assert find_reproductions(out, [TOY], ["small"]) == []
    refused = CliRunner().invoke(app, ["reproduce", "--publish", str(docs), "--seeds", "1,2"])
    assert "runs nothing" in str(refused.exception)


def test_seeds_are_named() -> None:
    assert seeds_text((10, 11, 12)) == "3 seeds (10–12)"
    assert seeds_text((1, 3)) == "2 seeds (1, 3)"
    assert seeds_text((4,)) == "1 seed (4)"


def test_a_claim_has_a_grid_of_readings(tmp_path: Path) -> None:
    """Two readings of a method by two of its rivals: the marked cell, the best at the same rate, and a page of all."""
    grid = Readings(
        "a above b", "p", {"a": "as printed", "b": "as run"}, {"slow": ["b"], "fast": ["c"]}, ("b", "fast"),
        {"a": "slow", "b": "fast"}, choices=[OpenChoice("Rate", "slow; fast", "“fast”, Section 1", "fast")],
    )  # fmt: skip
    recipe = replace(TOY, readings=[grid])
    publish([measured(tmp_path / "one", recipe)], tmp_path / "docs", {"toy": recipe})
    page = (tmp_path / "docs" / "readings.md").read_text("utf-8")
    assert "As its authors most likely ran it (as run; rivals: fast), it was not judged (" in page  # there is no c
    assert "In its best reading (as printed; rivals: slow), it holds: +11.0 [" in page
    assert re.search(r"\| as run \| exact tie: 0\S* \[0\S*, 0\S*\] points \| ● not judged \|", page)
    assert "| Rate | slow; fast | “fast”, Section 1 | fast |" in page
    assert "● not judged" in (tmp_path / "docs" / "toy.md").read_text("utf-8")
    with pytest.raises(ConfigError, match="reading in 'a above b'"):
        replace(grid, likeliest=("x", "fast"))


@pytest.mark.parametrize("name", ["selffl", "fedfomo", "cgpfl"])
def test_headlines_are_figures_of_published_pages(name: str) -> None:
    """ "Does it work?" on the page of a method has intervals that pages of the benchmark show, to the digit."""
    docs = Path(__file__).parents[2] / "docs"
    section = (docs / f"{name}.md").read_text().partition("## Does it work?")[2].partition("\n## ")[0]
    figures = re.findall(r"[+−][\d.]+\s\[[^]]*\]", section)
    published = "\n".join(page.read_text() for page in (docs / "benchmark").glob("*.md"))
    assert figures
    assert [figure for figure in figures if figure.replace("\n", " ") not in published] == []
