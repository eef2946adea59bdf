"""Contenders of `kinfed fit`, and the settings that it tries.

A *contender* is what a site could deploy: a model of its own training alone, the one model of all, that model
fine-tuned, or the personal model of a method. One training of FedAvg serves two of them.

All methods get the same number of tries. Try i takes model i mod M of the M kinds of model; the first M tries are the
methods as they are by default, the others draw their options from the ranges that `kinfed tune` searches, and
weight decay with them. Draws are points of Halton's sequence, shifted by the seed: they fill the ranges evenly however
many there are, a try does not depend on how many follow, and in the same try all methods have the same learning rate
and weight decay. Methods with nothing to tune and no network (mixed models, trees) are tried once, as they are: trees
choose their number, depth and candidates by left-out rows themselves, in one growth instead of several.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kinfed.algorithms import ALGORITHMS, tuning_space
from kinfed.core import Range, rng
from kinfed.errors import ConfigError

ALONE, ONE_MODEL, FINE_TUNED = "alone", "one_model", "fine_tuned"
BASELINE = "baseline"  # no contender: what it takes no model to reach (kinfed.runs.baseline)
LOCAL, AVERAGE = "local", "fedavg"  # methods that every portfolio has: what a site has alone, and the server's model
INTERCEPT, RECALIBRATED = "fedavg_intercept", "fedavg_recalibrated"
PORTFOLIO = (LOCAL, AVERAGE, INTERCEPT, RECALIBRATED, "ditto", "selffl", "cgpfl", "fedfomo", "kin")
# By kind of problem; they take seconds, and are tried first.
BY_SUMS = {"regression": "lmm", "binary": "glmm", "counts": "glmm", "survival": "cox"}
TREES = "trees"
TREE_KINDS = ("binary", "multiclass", "regression", "counts", "survival")
WEIGHT_DECAY = Range(1e-4, 0.1)
PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23)  # bases of Halton's sequence, one per option
COUNTS_OF_CLIENTS = ("contexts",)  # options that cannot exceed the number of sites

ModelSource = Literal["personal", "server"]


@dataclass(frozen=True)
class Contender:
    name: str  # also the label of its algorithm in the runs that fit it
    method: str  # registered
    model: ModelSource = "personal"  # which of the method's models a site would deploy

    @property
    def title(self) -> str:
        fixed = {
            ALONE: "alone", ONE_MODEL: "one model for all", FINE_TUNED: "one model, fine-tuned",
            INTERCEPT: "one model, own intercept", RECALIBRATED: "one model, recalibrated",
        }  # fmt: skip
        return fixed.get(self.name, ALGORITHMS[self.method].title)


def contenders_of(method: str) -> tuple[Contender, ...]:
    if method == LOCAL:
        return (Contender(ALONE, LOCAL),)
    if method == AVERAGE:
        return Contender(ONE_MODEL, AVERAGE, "server"), Contender(FINE_TUNED, AVERAGE)
    return (Contender(method, method),)


def methods_of(algorithms: Sequence[str] | str, sites: int, kind: str = "") -> tuple[str, ...]:
    """The methods to try, alone first, for a kind of problem; with a single site there is no other to learn with."""
    if sites == 1:
        return (LOCAL,)
    by_sums = (BY_SUMS[kind],) if kind in BY_SUMS else ()
    trees = (TREES,) if kind in TREE_KINDS else ()
    chosen = (LOCAL, *by_sums, *PORTFOLIO[1:4], *trees, *PORTFOLIO[4:]) if algorithms == "auto" else algorithms
    names = [name.strip() for name in chosen.split(",")] if isinstance(chosen, str) else list(chosen)
    for name in names:
        ALGORITHMS[name]  # an unknown name is an error that names its like
    return tuple(dict.fromkeys((LOCAL, *(names if AVERAGE in names else (AVERAGE, *names)))))


@dataclass(frozen=True)
class Try:
    """One setting of one method."""

    number: int
    method: str
    model: str
    options: dict[str, Any]


def run_name(contender: Contender, chosen: Try) -> str:
    """The run that fits a contender by a chosen try: one for the same training rows and kind of model."""
    validates = "needs validation" in ALGORITHMS[contender.method].target.traits
    return f"{chosen.model}-validated" if validates else chosen.model


def is_tried(number: int, method: str) -> bool:
    """Whether a try of that number differs from the first one of the method."""
    return number == 0 or bool(tuning_space(method))


def make_try(number: int, method: str, models: Sequence[str], sites: int, seed: int) -> Try:
    if not models:
        raise ConfigError("fit needs at least one kind of model, such as mlr")
    options = {} if number < len(models) else _drawn(number - len(models), method, seed)
    defaults = {doc.name: doc.default for doc in ALGORITHMS[method].describe_options()}
    for name in COUNTS_OF_CLIENTS:
        if name in tuning_space(method) and defaults.get(name) is not None:
            options[name] = min(options.get(name, defaults[name]), sites)
    return Try(number, method, models[number % len(models)], options)


def _drawn(draw: int, method: str, seed: int) -> dict[str, Any]:
    space = tuning_space(method)
    if "no weight decay" not in ALGORITHMS[method].target.traits:
        space = space | {"weight_decay": WEIGHT_DECAY}
    # lr and weight_decay first, so that their places in the sequence are the same for all methods.
    names = sorted(space, key=lambda name: (name != "lr", name != "weight_decay", name))
    return {name: _at(space[name], _unit(draw, place, seed)) for place, name in enumerate(names)}


def _unit(draw: int, place: int, seed: int) -> float:
    """Point `draw` of coordinate `place`, in [0, 1): its digits in the coordinate's base, mirrored at the point."""
    value, weight, rest = 0.0, 1.0, draw + 1
    while rest:
        weight /= PRIMES[place]
        value += weight * (rest % PRIMES[place])
        rest //= PRIMES[place]
    shift = float(rng.uniform(rng.fold(rng.root(seed, "fit-tries"), place), 1))
    return (value + shift) % 1.0


def _at(range_: Range, unit: float) -> Any:
    low, high = range_.low, range_.high
    if range_.whole:
        return min(int(low + unit * (high - low + 1)), int(high))
    return float(f"{low * (high / low) ** unit if range_.log else low + unit * (high - low):.3g}")
