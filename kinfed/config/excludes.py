"""Settings that exclude each other: one table, which simulations, deployments, tuning and the command line read.

A row names settings that are not taken together, and says why and what to do; it holds everywhere, or in one place.
"dp_" stands for every setting whose name begins so, "state = disk" for one value.
"""

from collections.abc import Mapping
from typing import Any, Literal

from kinfed.config.setting_groups import DEFAULTS
from kinfed.errors import ConfigError
from kinfed.updates import NO_ROBUST_RULE, NO_SINGLE_UPDATES

Where = Literal["", "deployment", "tuning", "tuning while training"]

_CALLED_CLIENTS = (
    "privacy is accounted, and sums and robust averages are taken, over the clients that a round has called, which "
    "asynchronous modes do not have; leave out one of the two"
)
_FOLDS = (
    "models of all folds are trained on the same rows, and epsilon would count one training; leave out folds under "
    "differential privacy"
)
_TIME = (
    "simulated time and asynchronous rounds are for simulations; a deployment's rounds wait for their clients until "
    "the deadline. Leave it out"
)
_TRIALS = (
    "choosing among trials reveals something about clients' data, and no account is kept of that; tune without the dp_ "
    "and user_ settings, on data for which this is acceptable, then run with them"
)
_LOSSES = (
    "every client's validation loss leaves it in every round, without noise and outside secure sums; tune without the "
    "dp_, user_ and secure_ settings"
)
_ONE_MODEL = "a common start and noise are of one model, and clients have several; leave out one of the two"
_STOPPING = "tuning chooses by the validation rows that early_stopping would choose by, too; leave it out"
_ONE_SPLIT = "tuning while training has synchronous rounds and one split; leave out mode and folds"

EXCLUDES: Mapping[Where, Mapping[tuple[str, ...], str]] = {
    "": {
        ("folds", "foreign_targets"): "folds test every client's own rows, and foreign_targets shuffles them; leave "
        "out one",
        ("state = disk", "pool = ray"): "Ray moves states to disk by itself when memory is short; state = disk is for "
        "the local pool",
        ("dp_", "pretrain"): "pre-training sees the data of all clients in one place, which no privacy among them "
        "covers; leave pretrain out",
        ("user_", "pretrain"): "pre-training sees the data of all clients in one place, without noise; leave out "
        "pretrain or the user_ settings",
        ("secure_sum", "pretrain"): "pre-training sees the data of all clients in one place, and secure_sum hides even "
        "their updates; leave out one of the two",
        ("dp_epsilon", "warm_start"): "a warm start is common to all methods, and its noise would have to be known "
        "before theirs is found for dp_epsilon; give dp_noise, or leave warm_start out",
        ("folds", "dp_"): _FOLDS,
        ("folds", "user_"): _FOLDS,
        ("class_weights = by_client", "dp_"): "the weight of an example would depend on the client's other examples, "
        "which clipping single gradients does not bound; give weights, such as class_weights = sick=5,well=1",
        ("user_", "robust"): NO_ROBUST_RULE,
        ("secure_sum", "robust"): NO_SINGLE_UPDATES.format("robust"),
        ("secure_sum", "largest_norm"): NO_SINGLE_UPDATES.format("largest_norm"),
        ("secure_sum", "compress"): "a secure sum adds masks to exact numbers, and codes of compressed updates cannot "
        "be added up; leave out compress or secure_sum",
        ("folds", "early_stopping"): "models of folds are not kept, and stop at rounds of their own; leave out one",
        ("stopped_models", "dp_"): "which round a client stops at is chosen by rows that epsilon does not cover; leave "
        "out stopped_models",
        ("stopped_models", "user_"): "which round the server stops at is chosen by rows that epsilon does not cover; "
        "leave out stopped_models",
        ("models", "pretrain"): _ONE_MODEL,
        ("models", "warm_start"): _ONE_MODEL,
        ("models", "dp_"): _ONE_MODEL,
        ("models", "user_"): _ONE_MODEL,
        ("models", "frozen"): "patterns name the parameters of one model, and clients have several; leave out frozen",
        ("models", "preset"): "a preset is for the family of one model; leave out preset",
        ("models", "mode"): "asynchronous updates are changes of one model; leave out one of the two",
        ("models", "pool = ray"): "clients with several architectures live in the local pool; leave out one of the two",
        ("mode", "dp_"): _CALLED_CLIENTS,
        ("mode", "user_"): _CALLED_CLIENTS,
        ("mode", "secure_sum"): _CALLED_CLIENTS,
        ("mode", "robust"): _CALLED_CLIENTS,
    },
    "deployment": {
        ("mode",): _TIME,
        ("clock",): _TIME,
        ("compress",): "nodes send their updates as they are, because the server checks that each has the form the "
        "method expects, which compressed updates do not; leave it out (it is for simulations)",
        ("class_weights = balanced",): "the weights need the number of rows of every class at all clients, which nodes "
        "do not reveal; give them, such as class_weights = sick=5,well=1, or take by_client",
        ("dp_strict", "scaling = standard"): 'epsilon does not cover the sums that scaling = "standard" takes from '
        'every node; use scaling = "none" or a number',
        ("user_", "scaling = standard"): "user-level epsilon does not cover the column statistics that scaling = "
        '"standard" learns from exact sums of every client; use scaling = "none" or a number',
        ("user_", "quorum"): "under user-level privacy a round must use every answer, or its model would reveal "
        "whether one more client answered; leave out quorum or the user_ settings",
        ("user_quantile", "secure_sum"): "the server of a deployment with secure_sum does not see how many updates are "
        "within the clipping norm, which user_quantile counts; give user_clip alone, or leave out secure_sum",
    },
    "tuning": {
        ("early_stopping",): _STOPPING,
        ("folds",): "folds measure on test rows, and tuning chooses by validation rows; leave out folds",
        ("dp_",): _TRIALS,
        ("user_",): _TRIALS,
    },
    "tuning while training": {
        ("early_stopping",): _STOPPING,
        ("dp_",): _LOSSES,
        ("user_",): _LOSSES,
        ("secure_sum",): _LOSSES,
        ("mode",): _ONE_SPLIT,
        ("folds",): _ONE_SPLIT,
    },
}


def refuse_exclusions(values: Mapping[str, Any], where: Where = "") -> None:
    """Refuse settings, by name, that are not taken together in this place."""
    for settings, why in {**EXCLUDES[""], **EXCLUDES[where]}.items():
        if all(_asked_for(term, values) for term in settings):
            raise ConfigError(f"{', '.join(settings)}: {why}")


def _asked_for(term: str, values: Mapping[str, Any]) -> bool:
    name, equals, wanted = term.partition(" = ")
    if equals:
        return bool(values.get(name) == wanted)
    names = [other for other in values if other.startswith(name)] if name.endswith("_") else [name]
    return any(_word(values.get(one)) not in (None, "", _word(DEFAULTS.get(one, 0))) for one in names)


def _word(value: Any) -> Any:
    return getattr(value, "name", value)
