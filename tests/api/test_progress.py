"""What a run shows while it runs."""

from __future__ import annotations

import io
import sys
import types
from typing import Any

import pytest
from rich.console import Console

import kinfed
from kinfed.api import progress
from kinfed.api.progress import LiveDisplay, NotebookLine, notebook_cell
from kinfed.data.federations.federation import Federation
from kinfed.records.run_record import FinalRecord
from kinfed.runs.observer import NullObserver, Observers, RunInfo

SETTINGS: dict[str, Any] = {
    "algorithms": "fedavg,ditto", "model": "mlr", "rounds": 2, "steps": 1, "seeds": (3,), "warm_start": 1, "workers": 1,
}  # fmt: skip


class Ear(NullObserver):
    def __init__(self) -> None:
        self.heard: list[Any] = []

    def begun(self, run: RunInfo) -> None:
        self.heard.append(("begun", run.settings["rounds"], run.folder))

    def started(self, label: str, seed: int, first: int, rounds: int) -> None:
        self.heard.append(("started", label))

    def round(self, label: str, seed: int, report: Any, personal: Any, server: Any) -> None:
        self.heard.append((label, report.round, personal is not None, server is not None))

    def finished(self, result: FinalRecord) -> None:
        self.heard.append(("finished", result.label))

    def ended(self) -> None:
        self.heard.append("ended")


def test_an_observer_hears_a_run_in_order(federation: Federation) -> None:
    ear = Ear()
    kinfed.run(federation=federation, observer=ear, **SETTINGS)
    assert ear.heard == [
        ("begun", 2, None),
        ("started", "warm start"), ("warm start", 1, False, False),
        ("started", "fedavg"), ("fedavg", 2, False, False), ("fedavg", 3, True, True), ("finished", "fedavg"),
        ("started", "ditto"), ("ditto", 2, False, False), ("ditto", 3, True, True), ("finished", "ditto"),
        "ended",
    ]  # fmt: skip


def test_an_observer_hears_the_end_of_a_run_that_fails(federation: Federation) -> None:
    class Fails(Ear):
        def round(self, *_: Any) -> None:
            raise RuntimeError("full disk")

    first, second = Fails(), Ear()
    with pytest.raises(RuntimeError, match="full disk"):
        kinfed.run(federation=federation, observer=Observers((first, second)), **SETTINGS)
    assert first.heard[-1] == second.heard[-1] == "ended"


def test_all_observers_are_told_of_the_end() -> None:
    class Fails(Ear):
        def ended(self) -> None:
            raise RuntimeError("cannot close")

    ear = Ear()
    with pytest.raises(RuntimeError, match="cannot close"):
        Observers((Fails(), ear)).ended()
    assert ear.heard == ["ended"]


def test_nothing_is_shown_where_nobody_looks_on(
    federation: Federation, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kinfed.run(federation=federation, **SETTINGS)
    assert capsys.readouterr() == ("", "")
    kinfed.run(federation=federation, progress=True, **SETTINGS)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "ditto seed 3" in shown.err


def test_a_terminal_gets_a_bar(federation: Federation) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    with LiveDisplay(console, 5) as display:
        kinfed.run(federation=federation, progress=False, observer=display, **SETTINGS)
    assert "5/5" in console.file.getvalue()  # type: ignore[attr-defined]


def test_a_notebook_gets_one_line_that_changes(federation: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr(progress, "NOTEBOOK_EVERY", 0.0)
    line = NotebookLine(shown.append, 5)
    line.note("<b>bold</b> names are text")
    kinfed.run(federation=federation, progress=False, observer=line, **SETTINGS)
    assert any("ditto, seed 3, accuracy" in text for text in shown)
    assert "5/5 5 rounds in" in shown[-1].replace("\n", " ")
    assert "&lt;b&gt;bold" in shown[-1]
    assert "<script" not in "".join(shown)


def test_a_notebook_is_told_by_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """IPython is not installed with kinfed: what a notebook has is set up here by its names."""
    assert notebook_cell() is None
    updates: list[str] = []

    class Handle:
        def update(self, html: str) -> None:
            updates.append(html)

    shell = types.SimpleNamespace()
    ipython, displays = types.ModuleType("IPython"), types.ModuleType("IPython.display")
    ipython.get_ipython = lambda: shell  # type: ignore[attr-defined]
    displays.HTML = str  # type: ignore[attr-defined]
    displays.display = lambda html, display_id: Handle()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", displays)
    assert notebook_cell() is None  # IPython in a terminal has no kernel
    shell.kernel = object()
    show = notebook_cell()
    assert show is not None
    show("<p>5/5</p>")
    assert updates == ["<p>5/5</p>"]
