"""What the documents show, runs."""

from __future__ import annotations

import importlib
import re
import runpy
import shlex
from pathlib import Path

import click
import pyarrow as pa
import pyarrow.csv
import pytest
from typer.main import get_command

from kinfed.algorithms import ALGORITHMS
from kinfed.cli.app import app
from kinfed.cli.inspect_command import KINDS, names, options_of
from kinfed.data.partitions import PARTITIONS
from kinfed.engine import METRICS
from kinfed.engine.contract.loss_names import LOSSES
from kinfed.engine.zoo.models import MODELS
from tests.tabular.conftest import make_table

pytestmark = pytest.mark.documents

ROOT = Path(__file__).parent.parent


def blocks(document: str, language: str) -> list[str]:
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", (ROOT / document).read_text("utf-8"), re.S | re.M)
    return [text for kind, text in fenced if kind == language]


def test_the_python_of_the_readme_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "readme"}
    found = blocks("README.md", "python")
    assert len(found) >= 3
    try:
        for block in found:
            exec(compile(block, "README.md", "exec"), names)
    finally:
        ALGORITHMS.unregister("mine")


def test_the_readme_has_two_commands_that_make_everything() -> None:
    first = blocks("README.md", "")[0]
    assert [line.split("#")[0].strip() for line in first.splitlines()] == ["make demo", "make test"]


DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def test_links_in_documents_lead_somewhere() -> None:
    for document in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text("utf-8")):
            if target != "changelog.md":  # a page of the site alone
                assert (document.parent / target).exists(), f"{document.name} links to {target}"


def resolves(name: str) -> bool:
    """Whether a dotted name is a module or what one holds."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            thing: object = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        try:
            for part in parts[cut:]:
                thing = getattr(thing, part)
        except AttributeError:
            return False
        return True
    return False


FORMER_NAMES = {"CHANGELOG.md", "docs/upgrading.md"}  # they say what a name was before


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_names_of_the_package_in_documents_exist(document: Path) -> None:
    if document.relative_to(ROOT).as_posix() in FORMER_NAMES:
        return
    for name in re.findall(r"`(kinfed(?:\.\w+)+)[(`]", document.read_text("utf-8")):
        assert name == "kinfed.plugins" or resolves(name), f"{document.name}: {name}"  # the group of entry points


@pytest.mark.parametrize("family", ["selffl", "fedfomo", "cgpfl"])
def test_the_table_of_formulas_names_code_that_exists(family: str) -> None:
    """The first table of a founding paper's page ends with where each formula is computed."""
    text = (ROOT / "docs" / f"{family}.md").read_text("utf-8")
    rows = [line.split("|")[1:-1] for line in text[text.index("\n| ") :].split("\n\n")[0].strip().splitlines()[2:]]
    named = [name for row in rows for name in re.findall(r"`([\w.]+)`", row[-1])]
    assert len(named) >= 4
    folder = Path(importlib.import_module(f"kinfed.algorithms.{family}").__path__[0])
    modules = [f"kinfed.algorithms.{family}.{file.stem}" for file in folder.glob("*.py")]
    for name in named:
        homes = [f"kinfed.algorithms.{family}", *modules]
        assert any(resolves(f"{home}.{name}") for home in homes), f"docs/{family}.md: {name}"


def commands(document: Path) -> list[list[str]]:
    """Every command `kinfed ...` in blocks of a document, as words."""
    lines = []
    for block in [*blocks(str(document), "text"), *blocks(str(document), "")]:
        for line in block.replace("\\\n", " ").splitlines():
            for part in re.split(r"[&|]+", line.removeprefix("$ ")):
                if re.match(r"(\w+=\S+ )*kinfed ", part.strip()):
                    lines.append(shlex.split(part.split("kinfed ", 1)[1], comments=True))
    return lines


GROUP = get_command(app)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_commands_in_documents_can_be_typed(document: Path) -> None:
    """Commands, options and arguments are known and complete; what they say of data and methods is not looked at."""
    for words in commands(document):
        if "--help" in words:
            continue  # of commands whose arguments the help explains
        context = GROUP.make_context("kinfed", list(words), resilient_parsing=False)
        command: click.Command = GROUP
        while isinstance(command, click.Group):
            name, command, rest = command.resolve_command(context, [*context._protected_args, *context.args])
            assert command is not None, f"kinfed {shlex.join(words)}"
            context = command.make_context(name, rest, parent=context)


def test_commands_of_the_first_page_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    lines = [shlex.split(line, comments=True) for block in blocks("docs/start.md", "") for line in block.splitlines()]
    assert len(lines) >= 8
    for program, *words in lines:
        assert program == "kinfed"
        app(words, standalone_mode=False)


@pytest.mark.parametrize("page", ["start", "metrics", "targets", "guides/data-scientist", "guides/method-author"])
def test_the_python_of_the_guides_runs(page: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": page}
    try:
        for block in blocks(f"docs/{page}.md", "python"):
            exec(compile(block, page, "exec", dont_inherit=True), names)
    finally:
        ALGORITHMS.unregister("cautious")
        LOSSES.unregister("asymmetric")
        METRICS.unregister("specificity")


def test_the_example_method_runs_and_keeps_the_contract(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runpy.run_path(str(ROOT / "examples" / "halfway.py"), run_name="__main__")
    ALGORITHMS.unregister("halfway")  # the script's class, which is another than the module's
    assert "halfway-2" in capsys.readouterr().out
    monkeypatch.syspath_prepend(ROOT / "examples")
    for block in blocks("docs/adding-a-method.md", "python"):
        exec(compile(block, "adding-a-method.md", "exec"), {})
    ALGORITHMS.unregister("halfway")  # other tests count the methods of the package


def test_the_python_of_the_page_about_models_runs(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {"__name__": "models"}
    try:
        for block in blocks("docs/models.md", "python"):
            exec(compile(block, "models.md", "exec"), names)
    finally:
        MODELS.unregister("small_net")
    assert capsys.readouterr().out.strip() in (ROOT / "docs/models.md").read_text("utf-8")


def test_the_python_of_the_page_about_results_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "results"}
    for block in blocks("docs/results.md", "python"):
        exec(compile(block, "results.md", "exec"), names)
    assert Path("runs/first/report.html").exists()


def test_the_python_of_the_page_about_trackers_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    monkeypatch.chdir(tmp_path)
    for block in blocks("docs/tracking.md", "python"):
        exec(compile(block, "tracking.md", "exec"), {"__name__": "tracking"})
    for place in ("runs/a/tensorboard", "logs"):
        assert {path.name for path in Path(place).iterdir()} == {"local-0", "fedavg-0"}


def test_the_page_about_growing_runs_does_what_it_shows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for line in blocks("docs/growing-runs.md", "")[0].strip().splitlines():
        app(
            [*shlex.split(line, comments=True)[1:], *(["--no-report"] if " run " in line else [])],
            standalone_mode=False,
        )
    assert capsys.readouterr().out.endswith("same results\n")
    for line in blocks("docs/growing-runs.md", "")[1].strip().splitlines():
        words = shlex.split(line, comments=True)[1:]
        if words[0] != "board":  # serves until it is ended; tests/board
            app(words, standalone_mode=False)
            assert "ditto" in capsys.readouterr().out


def test_the_page_about_tables_does_what_it_shows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    table = pa.table(make_table()).rename_columns(["hospital", "age", "dose", "group", "outcome"])
    pa.csv.write_csv(table, "hospitals.csv")
    pa.csv.write_csv(table.slice(0, 3).drop_columns(["hospital", "outcome"]), "new.csv")
    quick = "--algorithms fedprox --models mlr --trials 1 --folds 2 --rounds 2"  # the same in less time
    for line in blocks("docs/tables.md", "")[0].strip().splitlines():
        words = shlex.split(line + (f" {quick}" if line.startswith("kinfed fit") else ""))
        app(words[1:], standalone_mode=False)
    assert Path("fitted/fit.html").exists()
    assert "north takes" in capsys.readouterr().out
    app(
        ["fit", "--out", "fitted", "--resume"], standalone_mode=False
    )  # finished: the same again, from the folder alone
    assert "north takes" in capsys.readouterr().out
    names: dict[str, object] = {"__name__": "tables"}
    for block in blocks("docs/tables.md", "python"):
        exec(compile(block.replace("rounds=10, trials=2", f"{SMALLER}"), "tables.md", "exec"), names)
    for line in blocks("docs/dossier.md", "")[0].strip().splitlines():
        app(shlex.split(line.replace("--by sex", "--by group"))[1:], standalone_mode=False)
    assert "verified" in capsys.readouterr().out
    for block in blocks("docs/dossier.md", "python"):
        exec(compile(block, "dossier.md", "exec"), names)


SMALLER = "rounds=2, trials=1, models='mlr', algorithms='fedprox'"


def test_every_model_is_documented() -> None:
    text = (ROOT / "docs/models.md").read_text("utf-8")
    assert [name for name in MODELS if f"`{name}`" not in text] == []


def test_every_partition_is_documented() -> None:
    text = (ROOT / "docs/data.md").read_text("utf-8")
    assert [name for name in PARTITIONS if f"`{name}`" not in text] == []


def test_every_option_of_every_method_is_explained() -> None:
    for name in ALGORITHMS:
        for option in options_of(name):
            assert option.text or option.name == "server_nesterov", f"{name}.{option.name} has no sentence under it"


def test_names_are_unique_over_all_kinds() -> None:
    every = [name for kind in KINDS for name in names(kind)]
    assert len(every) == len(set(every))
