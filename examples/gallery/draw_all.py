"""Run the examples of the gallery at full size, draw their pictures and write the gallery's page: make gallery.

python examples/gallery/draw_all.py [NAME ...]     only these; times of the others stay as they are on the page
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import runpy
import sys
import tempfile
from pathlib import Path

import matplotlib

HERE = Path(__file__).resolve().parent
PAGES = HERE.parents[1] / "docs" / "gallery"
TIMES = PAGES / "seconds.json"
ORDER = (
    "compare_methods", "own_table", "own_model", "own_method", "privacy_and_accuracy", "who_are_my_kin", "new_client",
    "phones_and_servers", "several_labels", "classes_of_pixels", "adapters_for_text", "next_letter", "three_nodes",
    "reproduce_a_table",
)  # fmt: skip
STYLE = {
    "svg.fonttype": "none", "figure.constrained_layout.use": True, "font.size": 11, "axes.grid": True,
    "grid.color": "#e3e5e8", "axes.axisbelow": True, "axes.spines.top": False, "axes.spines.right": False,
}  # fmt: skip
HEAD = """# Gallery

Short examples, each a file of its own with its picture. `make gallery` runs all of them and draws the pictures anew;
the tests run them at a smaller size. Made by `examples/gallery/draw_all.py`; do not edit.

Two notebooks go through more of it, with their outputs: [first steps](../../examples/notebooks/first_steps.ipynb) and
[from a table to a model per site](../../examples/notebooks/table_to_models.ipynb).

| | example | seconds of processor time |
|---|---|---:|
"""


def title_and_text(name: str) -> tuple[str, str]:
    """The first line of an example's docstring, and the rest."""
    text = ast.get_docstring(ast.parse((HERE / f"{name}.py").read_text("utf-8"))) or ""
    title, _, rest = text.partition("\n\n")
    return title.rstrip("."), " ".join(rest.split())


def draw(name: str, picture: Path) -> float:
    """Run an example in a folder of its own; seconds of processor time, those of its processes included."""
    matplotlib.use("svg")
    before = os.times()
    with (
        matplotlib.rc_context({**STYLE, "svg.hashsalt": name}),
        tempfile.TemporaryDirectory() as folder,
        contextlib.chdir(folder),
    ):
        runpy.run_path(str(HERE / f"{name}.py"))["main"](picture=str(picture))
    return sum(os.times()[:4]) - sum(before[:4])


def page(seconds: dict[str, float]) -> str:
    rows = []
    for name in ORDER:
        title, text = title_and_text(name)
        link = f"../../examples/gallery/{name}.py"
        time_text = f"{seconds[name]:.0f}" if name in seconds else ""
        rows.append(
            f"| [![{title}]({name}.svg){{ width=240 }}]({link}) | **[{title}]({link})**<br>{text} | {time_text} |\n"
        )
    return HEAD + "".join(rows)


def main(names: list[str]) -> None:
    seconds = json.loads(TIMES.read_text()) if TIMES.exists() else {}
    for name in names or ORDER:
        print(f"== {name}", flush=True)
        seconds[name] = round(draw(name, PAGES / f"{name}.svg"), 1)
        print(f"{seconds[name]:.1f} s")
    TIMES.write_text(json.dumps(seconds, indent=2) + "\n")
    (PAGES / "index.md").write_text(page(seconds), "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
