"""How many local steps Self-FL lets its clients take (Figures 10 and 11)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from kinfed.report.comparison import Comparison
from kinfed.report.panels.selffl_panel import decisions
from kinfed.reproduce import Claim, Column, Found, Part, Recipe, Table, Untestable
from kinfed.reproduce.recipe import SELF_FL, BySeed, Drawn, Measured, Scale
from kinfed.reproduce.recipes.selffl_femnist import letters
from kinfed.reproduce.recipes.selffl_mnist import options


def steps(folder: Path) -> Measured:
    """Mean number of steps of the clients whose uncertainty is known, at two thirds of the run and at its end."""
    rounds = int(json.loads((folder / "config.json").read_text("utf-8"))["config"]["rounds"])
    middle: BySeed = {}
    end: BySeed = {}
    for line in (folder / "rounds.jsonl").read_text("utf-8").splitlines():
        entry = json.loads(line)
        clients = entry.get("method", {}).get("clients")
        if clients is not None:
            pairs = zip(clients["raw_steps"], clients["steps"], strict=True)
            known = [float(taken) for raw, taken in pairs if raw >= 0]  # negative: not computed yet
            if known and entry["round"] <= 2 * rounds // 3:
                middle[entry["seed"]] = sum(known) / len(known)
            if known:
                end[entry["seed"]] = sum(known) / len(known)
    return {"selffl": {"steps.middle": middle, "steps.end": end}}


def parts(scale: Scale) -> list[Part]:
    return [Part("letters", {**letters(scale), "eval_every": 5, "algorithms": options(["selffl"])}, steps)]


def fewer(found: Found) -> dict[str, BySeed]:
    middle, end = (found.of("letters", "selffl", f"steps.{when}") for when in ("middle", "end"))
    return {"": {seed: middle[seed] - end[seed] for seed in middle.keys() & end.keys()}}


def figures(found: Found, runs: Mapping[str, Comparison]) -> list[Drawn]:
    made = (decisions(method) for comparison in runs.values() for method in comparison.methods)
    return [drawn for panel in made if panel is not None for drawn in Drawn.panel(panel)]


RECIPE = Recipe(
    name="selffl-steps",
    paper=SELF_FL,
    shows="Figures 10 and 11",
    title="The number of local steps, client by client",
    about="Self-FL computes from its uncertainties how many local steps a client takes: the distribution over clients, "
    "and one client over the rounds.",
    parts=parts,
    tables=[
        Table("Steps", {"selffl": "Self-FL"}, [
            Column("Mean at two thirds", "letters", "steps.middle", 1.0),
            Column("Mean at the end", "letters", "steps.end", 1.0),
        ]),
    ],
    claims=[
        Claim("Clients take fewer steps towards the end of the run", fewer, "steps", 1.0),
        Untestable("The histogram at round 100", "the paper prints no numbers for it"),
    ],
    notes=["By its formula the number of steps grows with a client's uncertainty, up to the cap: the text of the "
           "NeurIPS version says the opposite of its own formula."],
    stand_ins={
        "smoke": "digits with 40 clients in place of letters.",
        "small": "16x8 lower-case letters (Taskar, Kassel) in place of FEMNIST.",
        "paper": "16x8 lower-case letters (Taskar, Kassel) in place of FEMNIST.",
    },
    figures=figures,
)  # fmt: skip
