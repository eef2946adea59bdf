"""All methods by name. Adding one: its file, and one line here; the contract tests then cover it."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError

from kinfed.algorithms.apfl import APFL
from kinfed.algorithms.base import Algorithm
from kinfed.algorithms.cfl import CFL
from kinfed.algorithms.cgpfl.cgpfl import CGPFL
from kinfed.algorithms.cgpfl.heuristic import CGPFLHeur
from kinfed.algorithms.ditto import Ditto
from kinfed.algorithms.fedavg import FedAvg
from kinfed.algorithms.fedavg_data import FedAvgData
from kinfed.algorithms.fedavgm import FedAvgM
from kinfed.algorithms.fedem import FedEM
from kinfed.algorithms.fedfomo.fedfomo import FedFomo
from kinfed.algorithms.fedfomo.model_averages import FedFomoMA
from kinfed.algorithms.fedopt import FedOpt
from kinfed.algorithms.fedper import FedPer
from kinfed.algorithms.fedprox import FedProx
from kinfed.algorithms.fedrep import FedRep
from kinfed.algorithms.finetune import finetuned
from kinfed.algorithms.flhc import FLHC
from kinfed.algorithms.ifca import IFCA
from kinfed.algorithms.l2gd import L2GD
from kinfed.algorithms.lgfedavg import LGFedAvg
from kinfed.algorithms.local import Local
from kinfed.algorithms.mocha import Mocha
from kinfed.algorithms.mocha_deep import MochaDeep
from kinfed.algorithms.perfedavg import PerFedAvg
from kinfed.algorithms.pfedhn import PFedHN
from kinfed.algorithms.pfedme import PFedMe
from kinfed.algorithms.selffl.augmented import SelfFLAugmented
from kinfed.algorithms.selffl.cluster import SelfFLCluster
from kinfed.algorithms.selffl.selffl import SelfFL
from kinfed.data.batches import LocalTraining
from kinfed.errors import ConfigError, unknown_name


@dataclass(frozen=True)
class Entry:
    method: type[Algorithm[Any, Any, Any, Any]]
    summary: str
    preset: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # options that make the variant


_SELFFL_NONE = {"use_init": False, "use_steps": False, "use_agg": False}

ALGORITHMS: dict[str, Entry] = {
    "local": Entry(Local, "every client alone"),
    "fedavg": Entry(FedAvg, "one model, averaged by examples; personal = fine-tuned"),
    "fedavg_smooth": Entry(FedAvg, "FedAvg with Self-FL's smoothing average only", {"smoothing": "participation"}),
    "fedprox": Entry(FedProx, "FedAvg held near the received model"),
    "fedavg_data": Entry(FedAvgData, "FedAvg after clients have shared some of their examples"),
    "fedavgm": Entry(FedAvgM, "FedAvg with server momentum"),
    "fedadam": Entry(FedOpt, "FedAvg with Adam at the server"),
    "fedyogi": Entry(FedOpt, "FedAvg with Yogi at the server", {"optimizer": "yogi"}),
    "fedadagrad": Entry(FedOpt, "FedAvg with Adagrad at the server", {"optimizer": "adagrad", "beta1": 0.0}),
    "ditto": Entry(Ditto, "personal models held near a FedAvg model"),
    "pfedme": Entry(PFedMe, "personal models as Moreau envelopes around a global one"),
    "perfedavg": Entry(PerFedAvg, "a global model one own gradient step away from good personal ones (first order)"),
    "perfedavg_hf": Entry(PerFedAvg, "Per-FedAvg, Hessian-free", {"variant": "hf"}),
    "apfl": Entry(APFL, "own and global model mixed in a learned proportion"),
    "l2sgd": Entry(L2GD, "local models pulled towards their average (L2GD with stochastic gradients)"),
    "lgfedavg": Entry(LGFedAvg, "own lower layers, shared upper layers"),
    "fedper": Entry(FedPer, "shared base, own head, trained together"),
    "fedrep": Entry(FedRep, "shared representation, own head, trained in turns"),
    "ifca": Entry(IFCA, "K models; each client trains the one that fits it best"),
    "cfl": Entry(CFL, "one model, split in two where clients pull apart, again and again"),
    "flhc": Entry(FLHC, "FedAvg, then FedAvg inside clusters of similar updates"),
    "fedem": Entry(FedEM, "K shared models; each client predicts with its own mixture of them"),
    "mocha": Entry(Mocha, "linear models and the relations of clients, in the dual (the convex original)"),
    "mocha_deep": Entry(MochaDeep, "own models held near the mean of all (what papers call MOCHA on networks)"),
    "pfedhn": Entry(PFedHN, "a hypernetwork on the server makes every client's model"),
    "cgpfl": Entry(CGPFL, "K context models on the server, found by clustering"),
    "cgpfl_heur": Entry(CGPFLHeur, "CGPFL that chooses K after the first round"),
    "fedfomo": Entry(FedFomo, "each client mixes the models that do best on its validation examples"),
    "fedfomo_ma": Entry(FedFomoMA, "FedFomo judging averages with and without each model"),
    "selffl": Entry(SelfFL, "start, steps and weights of every client by its own uncertainty"),
    "selffl_init": Entry(SelfFL, "Self-FL's starting point only, and smoothing", _SELFFL_NONE | {"use_init": True}),
    "selffl_steps": Entry(SelfFL, "Self-FL's local steps only, and smoothing", _SELFFL_NONE | {"use_steps": True}),
    "selffl_agg": Entry(SelfFL, "Self-FL's weights only, and smoothing", _SELFFL_NONE | {"use_agg": True}),
    "selffl_control": Entry(SelfFL, "Self-FL without its three parts: smoothing alone", _SELFFL_NONE),
    "selffl_exact": Entry(SelfFL, "Self-FL with the posterior its model implies", {"posterior": "exact"}),
    "selffl_augmented": Entry(SelfFLAugmented, "Self-FL judged by models trained to convergence (Algorithm 2)"),
    "selffl_cluster": Entry(SelfFLCluster, "Self-FL over groups of clients that the server remembers"),
}


def make_algorithm(
    name: str, training: LocalTraining, options: Mapping[str, Any] | None = None
) -> Algorithm[Any, Any, Any, Any]:
    """The method `name` with its options, or those of every method: fields of LocalTraining change its local
    training, `finetune` adds local steps to its personal models."""
    if name not in ALGORITHMS:
        raise unknown_name("algorithm", name, ALGORITHMS)
    entry = ALGORITHMS[name]
    given = {**entry.preset, **(options or {})}
    tuned = finetuned(entry.method)
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
    method = entry.method if own.keys() <= {f.name for f in dataclasses.fields(entry.method)} else tuned
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
