"""The examples of the gallery and the notebooks run, and their pictures and outputs are there.

At a smaller size than `make gallery` draws them. What takes longer, needs data or starts processes waits for
KINFED_TEST_GALLERY=1."""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.documents

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples" / "gallery"
PICTURES = ROOT / "docs" / "gallery"
NOTEBOOKS = ROOT / "examples" / "notebooks"

matplotlib = pytest.importorskip("matplotlib", reason="the extra docs is not installed")
DRAWING = runpy.run_path(str(EXAMPLES / "draw_all.py"))
SMALL: dict[str, dict[str, Any]] = {
    "compare_methods": {"rounds": 5, "seeds": (0,)},
    "own_table": {"rounds": 2, "seeds": (0,)},
    "own_method": {"rounds": 2, "seeds": (0,)},
    "phones_and_servers": {"rounds": 2, "seeds": (0,)},
    "who_are_my_kin": {"rounds": 5},
    "new_client": {"rounds": 2, "sizes": (5, 40)},
    "classes_of_pixels": {"rounds": 1, "per_client": 4},
}
LONG: dict[str, dict[str, Any]] = {
    "own_model": {"rounds": 2, "seeds": (0,)},
    "privacy_and_accuracy": {"rounds": 2, "seeds": (0,), "noises": (1, 4)},
    "adapters_for_text": {"rounds": 1, "epochs": 1, "per_domain": 60},
    "several_labels": {"rounds": 1, "specialties": 4, "most": 60},
    "next_letter": {"rounds": 1, "epochs": 1, "roles": 4},
    "three_nodes": {"rounds": 2},
    "reproduce_a_table": {"scale": "smoke"},
}
DATA = {
    "adapters_for_text": "fdu_mtl_reviews", "several_labels": "diabetes_130", "next_letter": "shakespeare_roles",
}  # fmt: skip
opt_in = pytest.mark.skipif(not os.environ.get("KINFED_TEST_GALLERY"), reason="set KINFED_TEST_GALLERY=1")


def draw(name: str, sizes: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    with matplotlib.rc_context({"backend": "svg"}):
        runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"](picture="picture.svg", **sizes)
    assert (folder / "picture.svg").stat().st_size > 1000
    matplotlib.pyplot.close("all")


@pytest.mark.parametrize("name", SMALL)
def test_an_example_draws_its_picture(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw(name, SMALL[name], tmp_path, monkeypatch)


@opt_in
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", LONG)
def test_a_longer_example_draws_its_picture(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name in DATA:
        from realdata import real_data

        monkeypatch.setenv("KINFED_DATA", str(real_data(DATA[name])))
    draw(name, LONG[name], tmp_path, monkeypatch)


def test_the_page_shows_every_example_with_its_picture() -> None:
    order = DRAWING["ORDER"]
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*order, "draw_all"} == {*SMALL, *LONG, "draw_all"}
    seconds = json.loads((PICTURES / "seconds.json").read_text("utf-8"))
    assert (PICTURES / "index.md").read_text("utf-8") == DRAWING["page"](seconds), "run: make gallery"
    for name in order:
        assert len(DRAWING["title_and_text"](name)[1]) > 100, f"{name} does not say what it shows"
        picture = (PICTURES / f"{name}.svg").read_text("utf-8")
        assert picture.rstrip().endswith("</svg>")
        assert len(picture) < 200_000


def executed(file: Path, folder: Path) -> Any:
    """A notebook after all of its cells have run in a new kernel."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    notebook = nbformat.read(file, 4)
    client = nbclient.NotebookClient(
        notebook, timeout=100, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    )
    client.execute()
    return notebook


def kinds_of_outputs(notebook: Any) -> list[list[str]]:
    return [
        [kind for output in cell["outputs"] for kind in sorted(output.get("data", {"stream": ""}))]
        for cell in notebook["cells"]
        if cell["cell_type"] == "code"
    ]


@pytest.mark.filterwarnings("default")  # of Jupyter's own packages
@pytest.mark.parametrize("name", [pytest.param("first_steps", marks=opt_in), "table_to_models"])
def test_a_notebook_runs_and_shows_what_it_did(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]))
    monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    file = NOTEBOOKS / f"{name}.ipynb"
    stored = json.loads(file.read_text("utf-8"))
    assert kinds_of_outputs(executed(file, tmp_path)) == kinds_of_outputs(stored), "run it again and save it"
    numbers = [cell["execution_count"] for cell in stored["cells"] if cell["cell_type"] == "code"]
    assert numbers == [*range(1, len(numbers) + 1)], "cells were run in another order"
