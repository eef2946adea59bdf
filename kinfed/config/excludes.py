"""Settings that exclude each other: one table, which simulations, deployments, tuning and the command line read.

A row names settings that are not taken together, the sentence that says why and what to do, and the place where this
holds, if not everywhere. "dp_" stands for every setting whose name begins so, "state = disk" for one value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from kinfed.config.setting_groups import DEFAULTS
from kinfed.errors import ConfigError
from kinfed.updates import NO_ROBUST_RULE, NO_SINGLE_UPDATES

Where = Literal["", "deployment", "tuning", "tuning while training"]

_NO_CALLED_CLIENTS = (
    "privacy is accounted, and sums and robust averages are taken, over the clients that a round has called, which "
    "asynchronous modes do not have; leave out mode or {}"
)
_SAME_ROWS = (
    "models of all folds are trained on the same rows, and epsilon would count one training; leave out folds under "
    "differential privacy"
)
_TRIALS_REVEAL = (
    "choosing among trials reveals something about clients' data, and no account is kept of that; tune without the dp_ "
    "and user_ settings, on data for which this is acceptable, then run with them"
)
_LOSSES_LEAVE = (
    "every client's validation loss leaves it in every round, without noise and outside secure sums; tune without the "
    "dp_, user_ and secure_ settings"
)
_SIMULATED_TIME = (
    "simulated time and asynchronous rounds are for simulations; a deployment's rounds wait for their clients until "
    "the deadline. Leave it out"
)
_ONE_SPLIT = "tuning while training has synchronous rounds and one split; leave out mode and folds"


class Exclusion(NamedTuple):
    settings: tuple[str, ...]
    why: str
    where: Where = ""


EXCLUDES = (
    Exclusion(
        ("folds", "foreign_targets"),
        "folds test every client's own rows, and foreign_targets shuffles them; leave out one",
    ),
    Exclusion(
        ("pool = ray", "state = disk"),
        "state = disk is for the local pool; Ray moves states to disk by itself when memory is short",
    ),
    Exclusion(
        ("dp_", "pretrain"),
        "pre-training sees the data of all clients in one place, which no privacy among them covers; leave pretrain "
        "out",
    ),
    Exclusion(
        ("user_", "pretrain"),
        "pre-training sees the data of all clients in one place, without noise; leave out pretrain or the user_ "
        "settings",
    ),
    Exclusion(
        ("secure_sum", "pretrain"),
        "pre-training sees the data of all clients in one place, and secure_sum hides even their updates; leave out "
        "one of the two",
    ),
    Exclusion(
        ("dp_epsilon", "warm_start"),
        "a warm start is common to all methods, and its noise would have to be known before theirs is found for "
        "dp_epsilon; give dp_noise, or leave warm_start out",
    ),
    Exclusion(("folds", "dp_"), _SAME_ROWS),
    Exclusion(("folds", "user_"), _SAME_ROWS),
    Exclusion(
        ("class_weights = by_client", "dp_"),
        "class_weights = by_client: the weight of an example would depend on the client's other examples, which "
        "clipping single gradients does not bound; give weights, such as class_weights = sick=5,well=1",
    ),
    Exclusion(("user_", "robust"), NO_ROBUST_RULE),
    Exclusion(("secure_sum", "robust"), NO_SINGLE_UPDATES.format("robust")),
    Exclusion(("secure_sum", "largest_norm"), NO_SINGLE_UPDATES.format("largest_norm")),
    Exclusion(
        ("secure_sum", "compress"),
        "a secure sum adds masks to exact numbers, and codes of compressed updates cannot be added up; leave out "
        "compress or secure_sum",
    ),
    *(
        Exclusion(("mode", other), _NO_CALLED_CLIENTS.format(other))
        for other in ("dp_", "user_", "secure_sum", "robust")
    ),
    # Deployments
    Exclusion(("mode",), _SIMULATED_TIME, "deployment"),
    Exclusion(("clock",), _SIMULATED_TIME, "deployment"),
    Exclusion(
        ("compress",),
        "nodes send their updates as they are, because the server checks that each has the form the method expects, "
        "which compressed updates do not; leave it out (it is for simulations)",
        "deployment",
    ),
    Exclusion(
        ("class_weights = balanced",),
        "class_weights = balanced needs the number of rows of every class at all clients, which nodes do not reveal; "
        "give the weights, such as class_weights = sick=5,well=1, or by_client",
        "deployment",
    ),
    Exclusion(
        ("dp_strict", "scaling = standard"),
        'epsilon does not cover the sums that scaling = "standard" takes from every node; use scaling = "none" or a '
        "number",
        "deployment",
    ),
    Exclusion(
        ("user_", "scaling = standard"),
        'user-level epsilon does not cover the column statistics that scaling = "standard" learns from exact sums of '
        'every client; use scaling = "none" or a number',
        "deployment",
    ),
    Exclusion(
        ("user_", "quorum"),
        "under user-level privacy a round must use every answer, or its model would reveal whether one more client "
        "answered; leave out quorum or the user_ settings",
        "deployment",
    ),
    Exclusion(
        ("user_quantile", "secure_sum"),
        "user_quantile counts the updates within the clipping norm, which the server of a deployment with secure_sum "
        "does not see; give user_clip alone, or leave out secure_sum",
        "deployment",
    ),
    # Tuning
    Exclusion(
        ("folds",), "folds measure on test rows, and tuning chooses by validation rows; leave out folds", "tuning"
    ),
    Exclusion(("dp_",), _TRIALS_REVEAL, "tuning"),
    Exclusion(("user_",), _TRIALS_REVEAL, "tuning"),
    Exclusion(("dp_",), _LOSSES_LEAVE, "tuning while training"),
    Exclusion(("user_",), _LOSSES_LEAVE, "tuning while training"),
    Exclusion(("secure_sum",), _LOSSES_LEAVE, "tuning while training"),
    Exclusion(("mode",), _ONE_SPLIT, "tuning while training"),
    Exclusion(("folds",), _ONE_SPLIT, "tuning while training"),
)


def refuse_exclusions(values: Mapping[str, Any], where: Where = "") -> None:
    """Refuse settings, by name, that are not taken together in this place."""
    for row in EXCLUDES:
        if row.where in ("", where) and all(_asked_for(term, values) for term in row.settings):
            raise ConfigError(f"{', '.join(row.settings)}: {row.why}")


def _asked_for(term: str, values: Mapping[str, Any]) -> bool:
    name, equals, wanted = term.partition(" = ")
    if equals:
        return bool(values.get(name) == wanted)
    names = [other for other in values if other.startswith(name)] if name.endswith("_") else [name]
    return any(_word(values.get(one)) not in (None, "", _word(DEFAULTS.get(one, 0))) for one in names)


def _word(value: Any) -> Any:
    return getattr(value, "name", value)
