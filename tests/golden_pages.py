"""What people read, one whole page per format, as text: wording is mended here and nowhere else.

    python tests/golden_pages.py        writes tests/pages/*.txt anew; look at the difference before you commit it

Other tests hold the facts that a page must state (names, numbers, which side wins), not its sentences.
"""

from __future__ import annotations

import io
import re
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
from rich.console import Console

HERE = Path(__file__).parent / "pages"
sys.path.insert(0, str(Path(__file__).parents[1]))

from kinfed.analysis.gain import gain_from_arrays, render, summary  # noqa: E402
from kinfed.arena.arena_pages import arena_board  # noqa: E402
from kinfed.arena.entries import ArenaEntry, CellScores, FederationScores, TriedSetting  # noqa: E402
from kinfed.arena.plan import StudyPlan  # noqa: E402
from kinfed.arena.studies import StudyResult  # noqa: E402
from kinfed.arena.suites import suite  # noqa: E402
from kinfed.core.storage import write_json  # noqa: E402
from kinfed.data.examples.problem import Problem  # noqa: E402
from kinfed.deploy.server.question_pages import description_page, matrix_page  # noqa: E402
from kinfed.dossier.document import page as dossier_page  # noqa: E402
from kinfed.dossier.facts import collect_facts  # noqa: E402
from kinfed.records.run_files import JobFiles, file_digest, sealed  # noqa: E402
from kinfed.report import build, coefficient_table, measured_gain  # noqa: E402
from kinfed.serving.coefficients import Coefficient, Coefficients, SiteEffect  # noqa: E402
from kinfed.tabular import contribution_page  # noqa: E402
from kinfed.tabular.coalitions import Contribution, Contributions, Received  # noqa: E402
from kinfed.tabular.fit_result import ContenderRecord, Estimate, FitResult, SiteRecord  # noqa: E402
from kinfed.tabular.site_page import page  # noqa: E402
from kinfed.tabular.watch import Watch  # noqa: E402
from tests.data.test_audit import PLANTED, findings_of, honest  # noqa: E402
from tests.report_fixture import stop_early, write_run  # noqa: E402


class _Text(HTMLParser):
    """The words of a page, a line per block; figures, scripts and styles are left out."""

    LEFT_OUT = ("script", "style", "svg", "title")
    BLOCKS = (
        "p",
        "h1",
        "h2",
        "h3",
        "h4",
        "li",
        "tr",
        "figcaption",
        "summary",
        "caption",
        "div",
        "section",
        "pre",
        "dt",
    )

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.lines = 0, [""]

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.inside += tag in self.LEFT_OUT
        if tag in self.BLOCKS:
            self.lines.append("")
        if tag in ("td", "th", "dd"):
            self.lines[-1] += " | "

    def handle_endtag(self, tag: str) -> None:
        self.inside -= tag in self.LEFT_OUT
        if tag in self.BLOCKS:
            self.lines.append("")

    def handle_data(self, data: str) -> None:
        if not self.inside:
            self.lines[-1] += data


def text_of(html: str) -> str:
    parser = _Text()
    parser.feed(html)
    lines = [" ".join(line.split()) for line in parser.lines]
    return re.sub(r"kinfed \d+\.\d+\.\d+\S*", "kinfed VERSION", "\n".join(filter(None, lines))) + "\n"


def report(folder: Path) -> str:
    """Two runs that share their data, one of them killed while it ran."""
    small = {"algorithms": ("local", "fedavg", "ditto"), "clients": 12, "rounds": 10, "seeds": (0, 1)}
    whole = write_run(folder / "whole", **small)
    stopped = stop_early(write_run(folder / "stopped", **small, settings={"lr": 0.5}), 47)
    return text_of(build([whole, stopped], folder / "report.html").read_text("utf-8"))


def fit(folder: Path) -> str:
    """Four sites: one gains, one is better off alone, one has few rows of a class, one has a single class."""
    problem = Problem.of_classes(2, ["benign", "malignant"])
    contenders = tuple(
        ContenderRecord(name, title, method, deployed, "mlr", {}, 0.8, 0.0, 0.0)
        for name, title, method, deployed in (
            ("alone", "alone", "local", "personal"),
            ("one_model", "one model for all", "fedavg", "server"),
        )
    )
    gains = SiteRecord(
        "Süd", 60, 60, 20, 12, "one_model", "one_model", 0.03, 0.03, rare_class="malignant",
        baseline=Estimate(0.5), alone=Estimate(0.8, 0.7, 0.9), one_model=Estimate(0.9, 0.85, 0.95),
        with_others=Estimate(0.9, 0.85, 0.95), deployed=Estimate(0.9, 0.85, 0.95), gain=Estimate(0.1, 0.04, 0.16),
        gain_together=Estimate(0.1, 0.04, 0.16),
    )  # fmt: skip
    alone = replace(
        gains, site="Ost", chosen="alone", with_others=Estimate(0.7, 0.6, 0.8), deployed=gains.alone,
        gain=Estimate(0.0), gain_together=Estimate(-0.1, -0.16, -0.04),
    )  # fmt: skip
    few = replace(gains, site="West", rare_rows=2, gain=Estimate(0.05, -0.3, 0.2))
    nothing = {name: Estimate(None) for name in ("alone", "one_model", "with_others", "deployed", "gain")}
    one_class = replace(gains, site="Nord", test_rows=8, rare_rows=0, **nothing)
    settings = {"rounds": 3, "seed": 0, "folds": 2, "trials": 1}
    result = FitResult(problem, "auroc", "tumours.csv", settings, 1, {}, contenders, (gains, alone, few, one_class),
                       Estimate(0.03, -0.01, 0.07), ("rows without a label were left out: 3",), 100, "growth",
                       class_rows=(94, 6), choice_metric="log_loss",
                       overall_by_choice=Estimate(0.041, 0.012, 0.07, 0.016))  # fmt: skip
    return text_of(page(result, folder))


def watch(folder: Path) -> str:
    """One model without a sign of harm, and one with both alarms and a column that has moved."""
    quiet, loud = np.linspace(1.0, 2.0, 40), np.geomspace(1.0, 400.0, 40)
    well = Watch(40, -0.01, quiet, 0.925, quiet, {}, ())
    ill = Watch(40, 0.2, loud, 0.4, loud, {"age": 2.1, "dose": -0.6}, ("rare categories count as other: 'x'",))
    return "".join(f"{sentence}\n" for one in (well, ill) for sentence in one.sentences())


def gain(folder: Path) -> str:
    """Theory from estimates, and what a run has measured."""
    console = Console(file=io.StringIO(), width=120)
    theory = gain_from_arrays([0.0, 4.0, 8.0], [10.0, 20.0, 6.0], [10, 20, 2], s0=1.0)
    console.print(render(theory))
    console.print(summary(theory), soft_wrap=True)
    table, sentence = measured_gain(write_run(folder / "run", clients=6, rounds=10, algorithms=("local", "ditto")))
    console.print(table)
    console.print(sentence, soft_wrap=True)
    assert isinstance(console.file, io.StringIO)
    return "".join(f"{line.rstrip()}\n" for line in console.file.getvalue().splitlines())


def describe(folder: Path) -> str:
    """Three sites: one in another unit, one with few rows that are not told, one with noise on its gaps."""
    age = {"kind": "number", "missing": 0, "mean": 61.5, "deviation": 9.25}
    height = {"kind": "number", "missing": 3, "mean": 1.71, "deviation": 0.08}
    ward = {"kind": "category", "missing": None, "categories": {"A": 40, "B": 60}, "others": [2, 7]}
    sites = {
        "north": {"rows": 120, "columns": {"age": age, "height": height, "ward": ward}, "terms": "exact"},
        "south": {"rows": 80, "columns": {"age": age, "height": {**height, "mean": 171.0, "deviation": 8.0}},
                  "terms": "exact"},
        "west": {"rows": 40, "columns": {"age": {"kind": "", "missing": 21}}, "terms": "noise 5"},
    }  # fmt: skip
    return text_of(description_page(sites, {"east": "no answer within 600 s"}))


def evaluate(folder: Path) -> str:
    """Two models at two sites, one of which has a single class."""
    scores = {"own": {"auroc": 0.81, "accuracy": 0.9}, "server": {"auroc": 0.79, "accuracy": 0.95}}
    one_class = {name: {"auroc": None, "accuracy": value["accuracy"]} for name, value in scores.items()}
    sites = {
        "north": {"rows": 40, "scores": scores, "terms": "exact"},
        "south": {"rows": 12, "scores": one_class, "terms": "noise 5"},
    }
    return text_of(matrix_page({"metric": "auroc", "models": ["own", "server"], "sites": sites}, {}))


def contributions(folder: Path) -> str:
    """Three sites, one of which the others help beyond chance."""

    def part(value: float) -> Contribution:
        return Contribution(value, 0.01)

    sites = tuple(
        Received(name, {other: part(value) for other in ("north", "south", "west") if other != name}, part(2 * value),
                 rows)
        for name, value, rows in (("north", 0.05, 80), ("south", 0.0, 80), ("west", -0.03, 20))
    )  # fmt: skip
    return text_of(contribution_page.page(Contributions("fedavg", "accuracy", sites, {"seed": 0})))


def coefficients(folder: Path) -> str:
    """A linear mixed model with a column that is left out, and a logistic one by ratios."""
    nan = float("nan")
    rows = (
        Coefficient("intercept", 12.5, 0.5, 11.52, 13.48, 0.0),
        Coefficient("dose", -0.25, 0.1, -0.446, -0.054, 0.0124),
        Coefficient("dose_mg", nan, nan, nan, nan, nan),
    )
    sites = (SiteEffect("north", -0.8, 0.4, 2.4, 0.2), SiteEffect("south", 0.9, 0.5, 2.7, 1.3))
    between = {"intercept": 1.25, "dose": 0.05}
    linear = Coefficients("lmm", 0, "", rows, between, 2.5, sites, (240, 4), {"dose": 0.3}, "")
    odds = replace(linear, label="glmm", scale="log odds", between={}, sigma=None, sites=(), bends=None, count=(240, 9))
    return "\n".join("\n".join([*fit.sentences(), coefficient_table(fit).text(), ""]) for fit in (linear, odds))


def arena(folder: Path) -> str:
    """The board of the references, kin among them, with scores that were made up."""
    whole = suite()
    for number, method in enumerate(whole.references):
        scores = {}
        for place, one in enumerate(whole.federations("lite")):
            leads = {seed: 0.02 * number * ((place + seed) % 3 - 0.8) for seed in whole.budgets["lite"].seeds}
            cells = {
                seed: CellScores(one.rounds, 1000 + number, tuple(0.7 + lead + 0.01 * k for k in range(4)))
                for seed, lead in leads.items()
            }
            values = (0.7 + 0.01 * number, 0.7 + 0.02 * (number % 2) + 0.005 * number)
            tried = tuple(TriedSetting({"lam": 0.5} if k else {}, value, 1, 9) for k, value in enumerate(values))
            scores[one.name] = FederationScores(tried, cells, "", 10.0)
        machine = {"processor": "made up", "kinfed": "0"}
        entry = ArenaEntry(method, method.title(), whole.name, whole.digest("lite"), "lite", scores, machine)
        (folder / method).mkdir()
        entry.write(folder / method / "entry.json")
    return text_of(arena_board(folder).html)


def study(folder: Path) -> str:
    """Two federations at two rates, tuned; a method takes other work, and a cell was stopped before its last trials."""
    plan = StudyPlan.read(
        {
            "algorithms": {"local": {}, "fedavg": {}, "ditto": {"steps": 5}}, "rounds": 10, "seeds": [0, 1, 2],
            "tuning": {"trials": 4}, "clients": 8, "sweep": {"setting": "lr", "values": [0.1, 0.5]},
            "federations": [{"name": "even", "dataset": "digits"}, {"name": "skewed", "dataset": "digits"}],
        }
    )  # fmt: skip
    cells = plan.cells()
    for variant, cell in enumerate(cells):
        run = write_run(folder / "cells" / cell.folder, algorithms={"local": {}, "fedavg": {}, "ditto": {"steps": 5}},
                        clients=8, rounds=10, variant=variant)  # fmt: skip
    stop_early(run, 31)
    return text_of(StudyResult(folder, plan, tuple(cells)).table(costs=True).html())


def audit(folder: Path) -> str:
    """What the audit says of every planted trouble, in its order."""
    lines = []
    for plant in PLANTED:
        table = honest()
        for finding in findings_of(table, **plant(table)):
            lines.append(f"{finding.name}{' (refused)' if finding.refused else ''}: {finding.text}")
    return "\n".join(dict.fromkeys(lines)) + "\n"


def dossier(folder: Path) -> str:
    """A comparison of two methods on four sites."""
    whole = write_run(folder / "whole", algorithms=("local", "fedavg"), clients=4, rounds=4, seeds=(0, 1))
    manifest = JobFiles(whole).envelope | {"files": {"clients.csv": file_digest(whole / "clients.csv")}}
    write_json(whole / "config.json", sealed(manifest), sort_keys=False)
    return re.sub(r"\b[0-9a-f]{16,64}\b", "DIGEST", text_of(dossier_page(collect_facts(whole))))


PAGES: dict[str, Callable[[Path], str]] = {
    "report": report, "fit": fit, "watch": watch, "gain": gain, "describe": describe, "evaluate": evaluate,
    "contributions": contributions, "coefficients": coefficients, "arena": arena, "study": study, "audit": audit,
    "dossier": dossier,
}  # fmt: skip


def main() -> None:
    HERE.mkdir(exist_ok=True)
    for name, write in PAGES.items():
        with tempfile.TemporaryDirectory() as folder:
            (HERE / f"{name}.txt").write_text(write(Path(folder)), encoding="utf-8")


if __name__ == "__main__":
    main()
