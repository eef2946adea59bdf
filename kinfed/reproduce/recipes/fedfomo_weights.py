"""Whom FedFomo weighs up and whom down: the matrix of affinities over the rounds (Figures 2, 6 and 7)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kinfed.report.chart import axis
from kinfed.report.comparison import Comparison
from kinfed.reproduce import Claim, Column, Found, Part, Recipe, Table, Untestable
from kinfed.reproduce.recipe import FEDFOMO, BySeed, Drawn, Scale
from kinfed.reproduce.recipe_figures import against
from kinfed.reproduce.recipes.fedfomo_latent import setting
from kinfed.reproduce.studies.kinship import kinship, minus, top_places

METHODS = {"fedfomo-5": "FedFomo, n = 5"}
SETTINGS = {
    "own-5": "own targets, D = 5",
    "foreign-5": "foreign targets, D = 5",
    "own-2": "own targets, D = 2",
    "own-3": "own targets, D = 3",
    "many-5": "100 clients, D = 5",
}


def parts(scale: Scale) -> list[Part]:
    names = ("own-5", "foreign-5", "own-3") if scale == "smoke" else tuple(SETTINGS)
    made = []
    for name in names:
        kind, _, groups = name.partition("-")
        run = setting(scale, int(groups), clients=100 if kind == "many" else 15)
        run |= {"algorithms": {"fedfomo-5": {"method": "fedfomo", "models": 5}}, "foreign_targets": kind == "foreign"}
        made.append(Part(name, run | {"eval_every": 10 if kind == "many" else 1}, kinship))
    return made


def _above_chance(name: str, metric: str) -> Callable[[Found], Mapping[str, BySeed]]:
    return lambda found: {"": minus(found.of(name, "fedfomo-5", metric), found.of(name, "fedfomo-5", "kin.chance"))}


def figures(found: Found, runs: Mapping[str, Comparison]) -> list[Drawn]:
    series = {}
    for name, comparison in runs.items():
        by_round: dict[int, BySeed] = {}
        for method in comparison.methods:
            for trial in method.complete_trials:
                for number, share in top_places(method.run, trial).items():
                    by_round.setdefault(number, {})[trial.seed] = share
        series[SETTINGS[name]] = [(float(number), by_round[number]) for number in sorted(by_round)]
    chance = found.of("own-5", "fedfomo-5", "kin.chance")
    drawn = against(
        axis("Round"), series, "Top places held by clients of the target’s distribution",
        "Over the rounds: how many of the top places of clients’ lists are held by those who train on the target.",
        levels={"by chance, D = 5": sum(chance.values()) / len(chance)} if chance else {},
    )  # fmt: skip
    return [Drawn("Finding one’s own", drawn, "One line per setting, mean over seeds.")]


RECIPE = Recipe(
    name="fedfomo-weights",
    paper=FEDFOMO,
    shows="Figures 2, 6 and 7",
    title="Whom FedFomo weighs up",
    about="The server’s list of who helped whom, after every round, and how often its top places go to clients that "
    "train on what the client is judged on: in distribution, with foreign targets, with fewer distributions and with "
    "100 clients. The matrices themselves are below, under “Inside the methods”.",
    parts=parts,
    tables=[
        Table(f"{text[0].upper()}{text[1:]} (%)", METHODS, [
            Column("Top places to the target’s distribution", name, "kin.top"),
            Column("of what is mixed from others", name, "kin.mixed"),
            Column("by chance", name, "kin.chance"),
            Column("Accuracy", name, "personal.accuracy"),
        ])
        for name, text in SETTINGS.items()
    ],
    claims=[
        *(Claim(f"Clients of the same training and target distribution are weighed up: above chance, {text}",
                _above_chance(name, "kin.top"))
          for name, text in SETTINGS.items()),
        *(Claim(f"What is mixed from others comes from the target’s distribution: above chance, {SETTINGS[name]}",
                _above_chance(name, "kin.mixed"))
          for name in ("own-5", "foreign-5")),
        Claim("All clients of the target’s distribution are found: nine of ten top places, D = 5 (Fig. 4, 6 and 7)",
              lambda found: {SETTINGS[name]: {seed: share - 0.9 for seed, share in
                                              found.of(name, "fedfomo-5", "kin.top").items()}
                             for name in ("own-5", "foreign-5")}),
        Claim("Foreign targets are harder to find than one’s own",
              lambda found: {"": minus(found.of("own-5", "fedfomo-5", "kin.top"),
                                       found.of("foreign-5", "fedfomo-5", "kin.top"))}, asked_by="kinfed"),
        Untestable("The shades of the figures", "heat maps without numbers"),
    ],
    notes=[
        "Top places: of a client’s list, the first m, where m other clients train on its target (2 of 14 for 15 "
        "clients in 5 distributions). Chance is what a list in random order would give.",
        "A client’s own model is always a candidate and is left out of these counts.",
        "The list starts as the identity with ties broken at random; the released code starts with 0.1 on the "
        "diagonal. Weights are divided by the Euclidean distance; the released default is the sum of absolute values.",
        "With foreign targets some clients draw their own distribution; they are among the 15, in the paper too.",
    ],
    stand_ins={
        "smoke": "digits in place of CIFAR-10, pixels’ principal components in place of VGG-11, 6 rounds.",
        "small": "6,000 of CIFAR-10’s images, embeddings of a small network trained on them, conv 6/16 instead of "
        "32/64/64, 20 (100 clients: 5, in 60 rounds) steps of 20 examples instead of 5 epochs, no augmentation.",
    },
    inside=[(name, "fedfomo-5") for name in SETTINGS],
    figures=figures,
)  # fmt: skip
