"""Self-FL's two algorithms side by side (Figure 6, Table 6)."""

from __future__ import annotations

from kinfed.reproduce import Claim, Column, Found, Part, Recipe, Table, Untestable
from kinfed.reproduce.recipe import SELF_FL, BySeed, Scale
from kinfed.reproduce.recipes.selffl_femnist import letters
from kinfed.reproduce.recipes.selffl_mnist import mnist, options

METHODS = {"selffl": "Algorithm 1", "selffl_augmented": "Algorithm 2", "selffl_control": "Control: smoothing only"}
HEADINGS = {"mnist": "MNIST", "letters": "Letters"}


def parts(scale: Scale) -> list[Part]:
    methods = options(METHODS)
    found = [Part("letters", {**letters(scale), "algorithms": methods})]
    if scale != "smoke":
        size = mnist(1000, 200) if scale == "paper" else mnist(200, 100)
        found.insert(0, Part("mnist", {**size, "algorithms": methods}))
    return found


def within(part: str, points: float) -> Claim:
    def margins(found: Found) -> dict[str, BySeed]:
        one, two = (found.of(part, row, "personal.accuracy") for row in ("selffl", "selffl_augmented"))
        return {"": {seed: points / 100 - abs(one[seed] - two[seed]) for seed in one.keys() & two.keys()}}

    return Claim(f"The two differ by less than {points:g} point, {HEADINGS[part]} (margin to that)", margins)


RECIPE = Recipe(
    name="selffl-algorithms",
    paper=SELF_FL,
    shows="Figure 6 and Table 6",
    title="Self-FL's Algorithm 1 and Algorithm 2",
    about="Algorithm 2 trains a second model to convergence at every client and sends both: cleaner uncertainties for "
    "twice the upload and many more steps. The paper finds hardly a difference.",
    parts=parts,
    tables=[
        Table("Personal test accuracy (%)", METHODS, [Column(h, part) for part, h in HEADINGS.items()]),
        Table("Megabytes a round", METHODS, [Column(h, part, "bytes", 1e-6, 2, True) for part, h in HEADINGS.items()]),
    ],
    claims=[
        within("letters", 1.0),
        within("mnist", 1.0),
        Untestable("Table 6 (relative false accepts of both algorithms)", "the audio data is private"),
        Untestable("Figure 6a (training accuracy on MNIST)", "no numbers are printed; test accuracy is shown here"),
    ],
    notes=["The second model is trained until the training loss changes by less than 1e-4 in an epoch, ten at most."],
    stand_ins={
        "smoke": "digits with 40 clients in place of letters; no MNIST.",
        "small": "16x8 letters in place of FEMNIST; MNIST with 200 clients and 100 rounds instead of 1,000 and 200.",
        "paper": "16x8 letters in place of FEMNIST.",
    },
)  # fmt: skip
