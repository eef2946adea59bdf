"""The registry of algorithms: one line each. Adding one is its file, its test and its line here.

    _add(name, "module:Class", title, summary, preset={...})

A line may name options that make a variant (`preset`), what `kinfed tune` varies where that is not what the options
declare (`space`), and a function that changes the data before training (`data`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kinfed.core.options import Range, convert_options, declared
from kinfed.core.registry import Registry, imported
from kinfed.errors import unknown_name

if TYPE_CHECKING:
    from kinfed.algorithms.base import Algorithm, AnyAlgorithm
    from kinfed.data.batches import LocalTraining
    from kinfed.data.federation import Federation, Population

ALGORITHMS: Registry[type[Algorithm[Any, Any, Any, Any]]] = Registry("algorithm")
LEARNING_RATE = Range(1e-3, 1.0)  # what tuning searches for lr
ADAPTIVE_RATE = Range(1e-4, 0.1)  # with adam and adamw, whose steps are about lr in every parameter
_ENVELOPE = {"lr": Range(1e-3, 0.05), "lam": Range(1.0, 20.0)}  # needs lr * lam <= 1
_SELFFL_NONE = {"use_init": False, "use_steps": False, "use_agg": False}


def _add(name: str, location: str, title: str, summary: str, **about: Any) -> None:
    ALGORITHMS.register(name, f"kinfed.algorithms.{location}", title=title, summary=summary, **about)


_add("local", "local:Local", "Local", "every client alone")
_add("fedavg", "fedavg:FedAvg", "FedAvg", "one model, averaged by examples; personal = fine-tuned")
_add(
    "fedavg_smooth",
    "fedavg:FedAvg",
    "FedAvg, smoothed",
    "FedAvg with Self-FL's smoothing average only",
    preset={"smoothing": "participation"},
)
_add("fedprox", "fedprox:FedProx", "FedProx", "FedAvg held near the received model")
_add("scaffold", "scaffold:Scaffold", "SCAFFOLD", "FedAvg whose clients correct their drift by control variates")
_add("feddyn", "feddyn:FedDyn", "FedDyn", "local losses corrected until their minima agree")
_add("fednova", "fednova:FedNova", "FedNova", "FedAvg of updates divided by the work behind them")
_add("heterofl", "heterofl:HeteroFL", "HeteroFL", "one network, of which weaker clients train narrower parts")
_add("fedpa", "fedpa:FedPA", "FedPA", "FedAvg of posterior samples, weighed by what clients are sure of")
_add("qffl", "qffl:QFFL", "q-FFL", "clients with larger losses weigh more: accuracy spread more evenly")
_add(
    "fedavg_data",
    "fedavg_data:FedAvgData",
    "FedAvg + data",
    "FedAvg after clients have shared some of their examples",
    data="kinfed.algorithms.fedavg_data:share_examples",
)
_add(
    "fedavgm",
    "fedopt:FedOpt",
    "FedAvgM",
    "FedAvg with server momentum",
    preset={"server_optimizer": "momentum", "server_lr": 1.0},
    space={"lr": LEARNING_RATE, "beta1": Range(0.0, 0.99, log=False), "server_lr": Range(0.1, 2.0)},
)
_add("fedadam", "fedopt:FedOpt", "FedAdam", "FedAvg with Adam at the server")
_add("fedyogi", "fedopt:FedOpt", "FedYogi", "FedAvg with Yogi at the server", preset={"server_optimizer": "yogi"})
_add(
    "fedadagrad",
    "fedopt:FedOpt",
    "FedAdagrad",
    "FedAvg with Adagrad at the server",
    preset={"server_optimizer": "adagrad", "beta1": 0.0},
)
_add("ditto", "ditto:Ditto", "Ditto", "personal models held near a FedAvg model")
_add(
    "pfedme",
    "pfedme:PFedMe",
    "pFedMe",
    "personal models as Moreau envelopes around a global one",
    space={"lr": Range(1e-3, 0.05), "lam": Range(1.0, 20.0)},  # lr * lam must not exceed 1
)
_add(
    "perfedavg",
    "perfedavg:PerFedAvg",
    "Per-FedAvg",
    "a global model one own gradient step away from good personal ones (first order)",
)
_add("perfedavg_hf", "perfedavg:PerFedAvg", "Per-FedAvg HF", "Per-FedAvg, Hessian-free", preset={"variant": "hf"})
_add("apfl", "apfl:APFL", "APFL", "own and global model mixed in a learned proportion")
_add("fedala", "fedala:FedALA", "FedALA", "FedAvg from a start that mixes own and received model element by element")
_add("l2sgd", "l2gd:L2GD", "L2SGD", "local models pulled towards their average (L2GD with stochastic gradients)")
_add("lgfedavg", "lgfedavg:LGFedAvg", "LG-FedAvg", "own lower layers, shared upper layers")
_add("fedper", "fedper:FedPer", "FedPer", "shared base, own head, trained together")
_add("fedbabu", "fedbabu:FedBABU", "FedBABU", "shared base trained under a fixed random head; fine-tuned at the end")
_add("fedrep", "fedrep:FedRep", "FedRep", "shared representation, own head, trained in turns")
_add("fedbn", "fedbn:FedBN", "FedBN", "own normalization layers, everything else shared")
_add("fedsa_lora", "personal_adapters:PersonalAdapters", "FedSA-LoRA", "adapters: A shared, B of one's own")
_add("ffa_lora", "ffa_lora:FFALoRA", "FFA-LoRA", "adapters: A constant, B shared")
_add(
    "feddpa",
    "personal_adapters:PersonalAdapters",
    "FedDPA",
    "two adapters per layer: one shared, one of one's own",
    preset={"own": "*.personal_*"},
)
_add("fedlc", "fedlc:FedLC", "FedLC", "FedAvg with logits calibrated by each client's class counts")
_add("fedntd", "fedntd:FedNTD", "FedNTD", "FedAvg that keeps what the received model thinks of other classes")
_add("moon", "moon:MOON", "MOON", "FedAvg with features drawn to the received model's, away from the last own ones")
_add(
    "fedphp", "fedphp:FedPHP", "FedPHP", "FedAvg guided by each client's moving average of its models, which it deploys"
)
_add("fedproto", "fedproto:FedProto", "FedProto", "own models; mean features of every class are shared")
_add("fedpac", "fedpac:FedPAC", "FedPAC", "aligned features below, heads mixed from those of similar clients on top")
_add(
    "fedas", "fedas:FedAS", "FedAS", "FedPer that aligns received bodies with own features; averages by Fisher weights"
)
_add(
    "pfedfda",
    "pfedfda:PFedFDA",
    "pFedFDA",
    "a Gaussian classifier between the global and one's own feature distribution",
)
_add("fedcp", "fedcp:FedCP", "FedCP", "a gate shares out every feature between a personal and the common head")
_add(
    "gpfl",
    "gpfl:GPFL",
    "GPFL",
    "features through a valve: class embeddings guide the common ones, own heads read theirs",
)
_add(
    "knnper",
    "knnper:KNNPer",
    "kNN-Per",
    "FedAvg's model beside the nearest examples of the client's own",
    preset={"knn": 10},
)
_add("fedbe", "fedbe:FedBE", "FedBE", "the server learns what an ensemble around all models says of public examples")
_add("fedmd", "fedmd:FedMD", "FedMD", "own models that learn from the mean of what all say of public examples")
_add("ktpfl", "ktpfl:KTpFL", "KT-pFL", "FedMD with a learned mixture of the others' predictions for each client")
_add("fedrod", "fedrod:FedRoD", "Fed-RoD", "a generic model of balanced classes, and a personal head on top")
_add("feddbe", "feddbe:FedDBE", "FedDBE", "FedAvg with each client's own mean taken out of its features")
_add("ifca", "ifca:IFCA", "IFCA", "K models; each client trains the one that fits it best")
_add("cfl", "cfl:CFL", "CFL", "one model, split in two where clients pull apart, again and again")
_add("flhc", "flhc:FLHC", "FL+HC", "FedAvg, then FedAvg inside clusters of similar updates")
_add("fedem", "fedem:FedEM", "FedEM", "K shared models; each client predicts with its own mixture of them")
_add(
    "mocha",
    "mocha:Mocha",
    "MOCHA",
    "linear models and the relations of clients, in the dual (the convex original)",
    space={"lam": Range(1e-5, 1.0)},  # its coordinate steps have no learning rate
)
_add(
    "mocha_deep",
    "mocha_deep:MochaDeep",
    "MOCHA, deep variant",
    "own models held near the mean of all (what papers call MOCHA on networks)",
)
_add(
    "mrmtl",
    "mrmtl:MRMTL",
    "MR-MTL",
    "own models held near the mean of all clients' models: one training per round, which suits privacy",
)
_add("pfedhn", "pfedhn:PFedHN", "pFedHN", "a hypernetwork on the server makes every client's model")
_add(
    "cgpfl",
    "cgpfl.cgpfl:CGPFL",
    "CGPFL",
    "K context models on the server, found by clustering",
    space=_ENVELOPE | {"contexts": Range(2, 6, log=False, whole=True)},
)
_add(
    "cgpfl_heur",
    "cgpfl.heuristic:CGPFLHeur",
    "CGPFL-Heur",
    "CGPFL that chooses K after the first round",
    space=_ENVELOPE,
)
_add(
    "fedfomo",
    "fedfomo.fedfomo:FedFomo",
    "FedFomo",
    "each client mixes the models that do best on its validation examples",
)
_add(
    "fedfomo_ma",
    "fedfomo.model_averages:FedFomoMA",
    "FedFomo-MA",
    "FedFomo judging averages with and without each model",
)
_add("fedamp", "fedamp:FedAMP", "FedAMP", "own models held near a mix of those that are close to them")
_add(
    "heurfedamp",
    "fedamp:FedAMP",
    "HeurFedAMP",
    "FedAMP with weights by the cosines of models",
    preset={"attention": "cosine"},
)
_add("fedcac", "fedcac:FedCAC", "FedCAC", "parameters that matter to a client from its like, all others from everyone")
_add("pfedsim", "pfedsim:PFedSim", "pFedSim", "FedAvg first; then own heads, and bodies mixed by how alike heads are")
_add("lotteryfl", "lotteryfl:LotteryFL", "LotteryFL", "sparse networks of one's own, pruned once they do well enough")
_add("apple", "apple:APPLE", "APPLE", "models as sums of all clients' core models, in learnt proportions")
_add("selffl", "selffl.selffl:SelfFL", "Self-FL", "start, steps and weights of every client by its own uncertainty")
_add(
    "selffl_init",
    "selffl.selffl:SelfFL",
    "Self-FL, start only",
    "Self-FL's starting point only, and smoothing",
    preset=_SELFFL_NONE | {"use_init": True},
    space={"lr": LEARNING_RATE},
)
_add(
    "selffl_steps",
    "selffl.selffl:SelfFL",
    "Self-FL, steps only",
    "Self-FL's local steps only, and smoothing",
    preset=_SELFFL_NONE | {"use_steps": True},
)
_add(
    "selffl_agg",
    "selffl.selffl:SelfFL",
    "Self-FL, weights only",
    "Self-FL's weights only, and smoothing",
    preset=_SELFFL_NONE | {"use_agg": True},
    space={"lr": LEARNING_RATE},
)
_add(
    "selffl_control",
    "selffl.selffl:SelfFL",
    "Self-FL's control",
    "Self-FL without its three parts: smoothing alone",
    preset=_SELFFL_NONE,
    space={"lr": LEARNING_RATE},
)
_add(
    "selffl_exact",
    "selffl.selffl:SelfFL",
    "Self-FL, exact posterior",
    "Self-FL with the posterior its model implies",
    preset={"posterior": "exact"},
)
_add(
    "selffl_augmented",
    "selffl.augmented:SelfFLAugmented",
    "Self-FL, augmented",
    "Self-FL judged by models trained to convergence (Algorithm 2)",
)
_add(
    "selffl_cluster",
    "selffl.cluster:SelfFLCluster",
    "Self-FL, clusters",
    "Self-FL over groups of clients that the server remembers",
)
_add("kin", "kin.kin:Kin", "Kin", "alone, together and with one's kin in the shares that validation examples ask for")


def make_algorithm(name: str, training: LocalTraining, options: Mapping[str, Any] | None = None) -> AnyAlgorithm:
    """The algorithm `name` with its options. Fields of LocalTraining among them change its local training."""
    from kinfed.data.batches import LocalTraining

    entry = ALGORITHMS[name]
    values = {**entry.preset, **(options or {})}
    own, common = declared(entry.target), declared(LocalTraining)
    for option in values:
        if option not in own and option not in common:
            raise unknown_name(f"option of {name}", option, [*own, *common])
    changes = {option: value for option, value in values.items() if option not in own}
    if "epochs" in changes and "steps" not in changes:
        changes["steps"] = None
    if changes.get("steps") is not None and "epochs" not in changes:
        changes["epochs"] = None
    training = dataclasses.replace(training, **convert_options(LocalTraining, changes, name))
    chosen = {option: value for option, value in values.items() if option in own}
    return entry.target(training=training, **convert_options(entry.target, chosen, name))


def tuning_space(name: str, optimizer: str = "sgd") -> dict[str, Range]:
    """What `kinfed tune` varies with this local optimizer: the learning rate, and what the algorithm's options
    declare."""
    entry = ALGORITHMS[name]
    rate = LEARNING_RATE if optimizer == "sgd" else ADAPTIVE_RATE
    return entry.space if entry.tuning is not None else {"lr": rate} | entry.space


def _transform(algorithm: AnyAlgorithm) -> Any:
    """The function that changes clients' data before training, as the registry names it; None where none does."""
    name = ALGORITHMS.name_of(type(algorithm))
    return None if name is None else imported(ALGORITHMS[name].facts.get("data"))


def changes_data(algorithm: AnyAlgorithm) -> bool:
    """Whether clients' data are changed before training (examples are shared)."""
    return _transform(algorithm) is not None


def prepare_data(
    algorithm: AnyAlgorithm, federation: Federation, population: Population
) -> tuple[Federation, Population]:
    """What clients hold and the server knows when the algorithm begins. Whoever makes a pool and a loop from a
    federation gives them what this returns."""
    transform = _transform(algorithm)
    if transform is None:
        return federation, population
    return transform(algorithm, federation, population)  # type: ignore[no-any-return]  # imported by its name
