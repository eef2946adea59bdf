"""All methods by name. Adding one: its file, and one line here; the contract tests then cover it."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from kinfed.core.registry import Registry
from kinfed.errors import ConfigError, unknown_name

if TYPE_CHECKING:
    from kinfed.algorithms.base import Algorithm
    from kinfed.data.batches import LocalTraining

ALGORITHMS: Registry[type[Algorithm[Any, Any, Any, Any]]] = Registry("algorithm")
_SELFFL_NONE = {"use_init": False, "use_steps": False, "use_agg": False}

_ENTRIES: dict[str, tuple[Any, ...]] = {
    "local": ("local:Local", "every client alone"),
    "fedavg": ("fedavg:FedAvg", "one model, averaged by examples; personal = fine-tuned"),
    "fedavg_smooth": ("fedavg:FedAvg", "FedAvg with Self-FL's smoothing average only", {"smoothing": "participation"}),
    "fedprox": ("fedprox:FedProx", "FedAvg held near the received model"),
    "fedavg_data": ("fedavg_data:FedAvgData", "FedAvg after clients have shared some of their examples"),
    "fedavgm": ("fedavgm:FedAvgM", "FedAvg with server momentum"),
    "fedadam": ("fedopt:FedOpt", "FedAvg with Adam at the server"),
    "fedyogi": ("fedopt:FedOpt", "FedAvg with Yogi at the server", {"optimizer": "yogi"}),
    "fedadagrad": ("fedopt:FedOpt", "FedAvg with Adagrad at the server", {"optimizer": "adagrad", "beta1": 0.0}),
    "ditto": ("ditto:Ditto", "personal models held near a FedAvg model"),
    "pfedme": ("pfedme:PFedMe", "personal models as Moreau envelopes around a global one"),
    "perfedavg": (
        "perfedavg:PerFedAvg",
        "a global model one own gradient step away from good personal ones (first order)",
    ),
    "perfedavg_hf": ("perfedavg:PerFedAvg", "Per-FedAvg, Hessian-free", {"variant": "hf"}),
    "apfl": ("apfl:APFL", "own and global model mixed in a learned proportion"),
    "l2sgd": ("l2gd:L2GD", "local models pulled towards their average (L2GD with stochastic gradients)"),
    "lgfedavg": ("lgfedavg:LGFedAvg", "own lower layers, shared upper layers"),
    "fedper": ("fedper:FedPer", "shared base, own head, trained together"),
    "fedrep": ("fedrep:FedRep", "shared representation, own head, trained in turns"),
    "ifca": ("ifca:IFCA", "K models; each client trains the one that fits it best"),
    "cfl": ("cfl:CFL", "one model, split in two where clients pull apart, again and again"),
    "flhc": ("flhc:FLHC", "FedAvg, then FedAvg inside clusters of similar updates"),
    "fedem": ("fedem:FedEM", "K shared models; each client predicts with its own mixture of them"),
    "mocha": ("mocha:Mocha", "linear models and the relations of clients, in the dual (the convex original)"),
    "mocha_deep": ("mocha_deep:MochaDeep", "own models held near the mean of all (what papers call MOCHA on networks)"),
    "pfedhn": ("pfedhn:PFedHN", "a hypernetwork on the server makes every client's model"),
    "cgpfl": ("cgpfl.cgpfl:CGPFL", "K context models on the server, found by clustering"),
    "cgpfl_heur": ("cgpfl.heuristic:CGPFLHeur", "CGPFL that chooses K after the first round"),
    "fedfomo": ("fedfomo.fedfomo:FedFomo", "each client mixes the models that do best on its validation examples"),
    "fedfomo_ma": ("fedfomo.model_averages:FedFomoMA", "FedFomo judging averages with and without each model"),
    "selffl": ("selffl.selffl:SelfFL", "start, steps and weights of every client by its own uncertainty"),
    "selffl_init": (
        "selffl.selffl:SelfFL",
        "Self-FL's starting point only, and smoothing",
        _SELFFL_NONE | {"use_init": True},
    ),
    "selffl_steps": (
        "selffl.selffl:SelfFL",
        "Self-FL's local steps only, and smoothing",
        _SELFFL_NONE | {"use_steps": True},
    ),
    "selffl_agg": ("selffl.selffl:SelfFL", "Self-FL's weights only, and smoothing", _SELFFL_NONE | {"use_agg": True}),
    "selffl_control": ("selffl.selffl:SelfFL", "Self-FL without its three parts: smoothing alone", _SELFFL_NONE),
    "selffl_exact": ("selffl.selffl:SelfFL", "Self-FL with the posterior its model implies", {"posterior": "exact"}),
    "selffl_augmented": (
        "selffl.augmented:SelfFLAugmented",
        "Self-FL judged by models trained to convergence (Algorithm 2)",
    ),
    "selffl_cluster": ("selffl.cluster:SelfFLCluster", "Self-FL over groups of clients that the server remembers"),
}
for _name, (_target, _summary, *_preset) in _ENTRIES.items():
    ALGORITHMS.register(_name, f"kinfed.algorithms.{_target}", summary=_summary, preset=_preset[0] if _preset else None)


def make_algorithm(
    name: str, training: LocalTraining, options: Mapping[str, Any] | None = None
) -> Algorithm[Any, Any, Any, Any]:
    """The method `name` with its options, or those of every method: fields of LocalTraining change its local
    training, `finetune` adds local steps to its personal models."""
    from kinfed.algorithms.finetune import finetuned
    from kinfed.data.batches import LocalTraining

    entry = ALGORITHMS[name]
    given = {**entry.preset, **(options or {})}
    tuned = finetuned(entry.target)
    fields = {f.name for f in dataclasses.fields(tuned)} - {"training"}
    training_fields = {f.name for f in dataclasses.fields(LocalTraining)}
    for option in given:
        if option not in fields | training_fields:
            raise unknown_name(f"option of {name}", option, fields | training_fields)
    own_training = {k: v for k, v in given.items() if k in training_fields and k not in fields}
    if "epochs" in own_training and "steps" not in own_training:
        own_training["steps"] = None
    if own_training.get("steps") is not None and "epochs" not in own_training:
        own_training["epochs"] = None
    training = dataclasses.replace(training, **_validated(LocalTraining, own_training, name))
    own = {k: v for k, v in given.items() if k in fields}
    method = entry.target if own.keys() <= {f.name for f in dataclasses.fields(entry.target)} else tuned
    return method(training=training, **_validated(method, own, name))


def _validated(cls: type[Any], values: Mapping[str, Any], name: str) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    out = {}
    for option, value in values.items():
        try:
            out[option] = TypeAdapter(hints[option]).validate_python(value)
        except ValidationError as error:
            wanted = getattr(hints[option], "__name__", str(hints[option]))
            raise ConfigError(f"{name}.{option} must be {wanted}; got {value!r}") from error
    return out
