"""The registry of algorithms. Adding one is its file, its test and its line in METHODS:

    name | module:Class | title | summary          (an indented line goes on with the one before)

PRESETS has the options that make a variant, PUBLISHED those that the paper has where the defaults are others (the
setting `as_published`), UNPUBLISHED in words what no option makes as the paper has it, SPACES what `kinfed tune` varies
where that is not what the options declare, DATA the functions that change the data before training, FAMILIES who is on
which page of docs/methods."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from math import inf
from typing import TYPE_CHECKING, Any

from kinfed.core import Range, Registry, convert_options, declared, imported
from kinfed.errors import unknown_name

if TYPE_CHECKING:
    from kinfed.algorithms.base import Algorithm, AnyAlgorithm
    from kinfed.data import Federation, LocalTraining, Population
    from kinfed.engine import Extension

ALGORITHMS: Registry[type[Algorithm[Any, Any, Any, Any]]] = Registry("algorithm")
EXTENSIONS: Registry[type[Extension]] = Registry("extension")  # of personal models
LEARNING_RATE = Range(1e-3, 1.0)  # what tuning searches for lr
ADAPTIVE_RATE = Range(1e-4, 0.1)  # with adam and adamw, whose steps are about lr in every parameter

METHODS = """
local | local:Local | Local | every client alone
fedavg | fedavg:FedAvg | FedAvg | one model, averaged by number of examples; fine-tuned for personal use
fedavg_smooth | fedavg:FedAvg | FedAvg, smoothed | FedAvg with Self-FL's smoothing average only
fedavg_intercept | recalibrated:Recalibrated | FedAvg + intercept |
    one model whose output each client shifts to its own level
fedavg_recalibrated | recalibrated:Recalibrated | FedAvg, recalibrated |
    one model whose output each client shifts and scales to its examples
fedprox | fedprox:FedProx | FedProx | FedAvg with local training held near the received model
scaffold | scaffold:Scaffold | SCAFFOLD | FedAvg with control variates against client drift
feddyn | feddyn:FedDyn | FedDyn | local losses corrected until their minima agree
fednova | fednova:FedNova | FedNova | FedAvg of updates normalized by the number of local steps
heterofl | heterofl:HeteroFL | HeteroFL | one network; weaker clients train narrower slices of it
fedpa | fedpa:FedPA | FedPA | FedAvg of posterior samples, weighted by their certainty
qffl | qffl:QFFL | q-FFL | clients with larger losses count more, for fairer accuracy
fedavg_data | fedavg_data:FedAvgData | FedAvg + data | FedAvg after clients share some of their examples
fedavgm | fedopt:FedOpt | FedAvgM | FedAvg with server momentum
fedadam | fedopt:FedOpt | FedAdam | FedAvg with Adam at the server
fedyogi | fedopt:FedOpt | FedYogi | FedAvg with Yogi at the server
fedadagrad | fedopt:FedOpt | FedAdagrad | FedAvg with Adagrad at the server
ditto | ditto:Ditto | Ditto | personal models held near a FedAvg model
pfedme | pfedme:PFedMe | pFedMe | personal models as Moreau envelopes around a global one
perfedavg | perfedavg:PerFedAvg | Per-FedAvg |
    a global model that one local gradient step turns into a good personal one (first order)
perfedavg_hf | perfedavg:PerFedAvg | Per-FedAvg HF | Per-FedAvg, Hessian-free
apfl | apfl:APFL | APFL | personal and global model mixed in a learned proportion
mapper | mapper:MAPPER | MAPPER | personal and global model mixed in the best of a few proportions
fedala | fedala:FedALA | FedALA | FedAvg from an element-wise mix of the local and the received model
l2sgd | l2gd:L2GD | L2SGD | local models pulled towards their average (L2GD with stochastic gradients)
lgfedavg | lgfedavg:LGFedAvg | LG-FedAvg | personal lower layers, shared upper layers
fedper | fedper:FedPer | FedPer | shared body and personal head, trained together
fedbabu | fedbabu:FedBABU | FedBABU | shared body trained under a fixed random head; fine-tuned at the end
fedrep | fedrep:FedRep | FedRep | shared body and personal head, trained in turns
fedbn | fedbn:FedBN | FedBN | personal normalization layers, everything else shared
fedsa_lora | personal_adapters:PersonalAdapters | FedSA-LoRA | LoRA adapters: A shared, B personal
ffa_lora | ffa_lora:FFALoRA | FFA-LoRA | LoRA adapters: A fixed, B shared
fedex_lora | fedex_lora:FedExLoRA | FedEx-LoRA | LoRA adapters averaged exactly: a residual has what their means miss
flora | flora:FLoRA | FLoRA | LoRA adapters of ranks by client, stacked: their products are added up exactly
hetlora | hetlora:HetLoRA | HetLoRA | LoRA adapters of ranks by client, averaged by their norms
feddpa | personal_adapters:PersonalAdapters | FedDPA | two LoRA adapters per layer, one shared and one personal
fedlc | fedlc:FedLC | FedLC | FedAvg with logits calibrated by each client's class counts
fedntd | fedntd:FedNTD | FedNTD | FedAvg that preserves the received model's predictions on other classes
moon | moon:MOON | MOON | FedAvg with a contrastive pull of features towards the received model
fedphp | fedphp:FedPHP | FedPHP | FedAvg guided by each client's moving average of models, which is deployed
fedproto | fedproto:FedProto | FedProto | personal models; only the mean features of each class are shared
fedtgp | fedtgp:FedTGP | FedTGP | FedProto with prototypes that the server trains to stay apart
fedgh | fedgh:FedGH | FedGH | personal models; the server trains one head on the mean features of their classes
fd | fd:FD | FD | personal models; only the mean prediction for each class is shared
fml | fml:FML | FML | a personal and a common model teach each other; the common one is averaged
fedkd | fedkd:FedKD | FedKD | a personal mentor and a common mentee teach each other, as far as both know the batch
fedgen | fedgen:FedGen | FedGen | the server learns to generate features, on which clients train their heads too
fedpac | fedpac:FedPAC | FedPAC | aligned features, and heads combined from similar clients
fedas | fedas:FedAS | FedAS | FedPer with received bodies aligned to local features, and Fisher-weighted averages
pfedfda | pfedfda:PFedFDA | pFedFDA | a Gaussian classifier between the global and the client's feature distribution
fenda | fenda:FENDA | FENDA | own and common features side by side under a personal head
perfcl | perfcl:PerFCL | PerFCL | FENDA with contrasts that keep own and common features apart
fedcp | fedcp:FedCP | FedCP | a gate splits each feature between a personal and a shared head
gpfl | gpfl:GPFL | GPFL |
    features split in two: class embeddings guide the shared part, personal heads use the other
knnper | knnper:KNNPer | kNN-Per | FedAvg combined with the client's nearest training examples
fedbe | fedbe:FedBE | FedBE | the server distils an ensemble of all models on public examples
fedmd | fedmd:FedMD | FedMD | personal models that learn from everyone's mean prediction on public examples
ktpfl | ktpfl:KTpFL | KT-pFL | FedMD with a learned mixture of predictions for each client
fedrod | fedrod:FedRoD | Fed-RoD | a generic model trained with balanced classes, and a personal head
feddbe | feddbe:FedDBE | FedDBE | FedAvg with each client's mean removed from its features
ifca | ifca:IFCA | IFCA | K models; each client trains the one that fits it best
hypcluster | ifca:IFCA | HypCluster | IFCA with averages by number of examples
cfl | cfl:CFL | CFL | one model, split whenever its clients pull apart
flhc | flhc:FLHC | FL+HC | FedAvg, then FedAvg inside clusters of similar updates
floco | floco:Floco | Floco | heads as the corners of a simplex; each client has a region of it
fedem | fedem:FedEM | FedEM | K shared models; each client predicts with its own mixture of them
mocha | mocha:Mocha | MOCHA | linear models and their relations, in the dual (the convex original)
mocha_deep | mocha_deep:MochaDeep | MOCHA, deep variant |
    personal models held near their mean (what papers call MOCHA on networks)
mrmtl | mrmtl:MRMTL | MR-MTL | personal models held near their mean, with one training per round, which suits privacy
pfedhn | pfedhn:PFedHN | pFedHN | a hypernetwork at the server generates every client's model
pefll | pefll:PeFLL | PeFLL | a network describes a client by its examples, another makes its model of that
cgpfl | cgpfl.cgpfl:CGPFL | CGPFL | K context models at the server, found by clustering
cgpfl_heur | cgpfl.heuristic:CGPFLHeur | CGPFL-Heur | CGPFL that chooses K after the first round
fedfomo | fedfomo.fedfomo:FedFomo | FedFomo | each client mixes the models that do best on its validation examples
fedfomo_ma | fedfomo.model_averages:FedFomoMA | FedFomo-MA | FedFomo judging averages with and without each model
fedamp | fedamp:FedAMP | FedAMP | personal models held near a mix of similar models
heurfedamp | fedamp:FedAMP | HeurFedAMP | FedAMP with weights by the cosine similarity of models
pfedgraph | pfedgraph:PFedGraph | pFedGraph | own mixes of all models, by likeness and numbers of examples
fedcac | fedcac:FedCAC | FedCAC | critical parameters from similar clients, all others from everyone
pfedsim | pfedsim:PFedSim | pFedSim | FedAvg first; then personal heads, and bodies mixed by the similarity of heads
lotteryfl | lotteryfl:LotteryFL | LotteryFL | sparse personal networks, pruned once they are good enough
apple | apple:APPLE | APPLE | models as sums of all clients' core models, in learned proportions
selffl | selffl.selffl:SelfFL | Self-FL | starting point, local steps and weight of each client set by its uncertainty
selffl_init | selffl.selffl:SelfFL | Self-FL, start only | Self-FL's starting point only, and smoothing
selffl_steps | selffl.selffl:SelfFL | Self-FL, steps only | Self-FL's local steps only, and smoothing
selffl_agg | selffl.selffl:SelfFL | Self-FL, weights only | Self-FL's weights only, and smoothing
selffl_control | selffl.selffl:SelfFL | Self-FL's control | Self-FL without its three parts: smoothing alone
selffl_exact | selffl.selffl:SelfFL | Self-FL, exact posterior | Self-FL with the posterior its model implies
selffl_augmented | selffl.augmented:SelfFLAugmented | Self-FL, augmented |
    Self-FL judged by models trained to convergence (Algorithm 2)
selffl_cluster | selffl.cluster:SelfFLCluster | Self-FL, clusters |
    Self-FL within groups of clients that the server keeps track of
lmm | lmm:LMM | Linear mixed model |
    exact coefficients of all sites and of each, from one message of sums; with standard errors and intervals
glmm | glmm:GLMM | Generalized linear mixed model |
    exact log odds or log rates of all sites and of each, in a few rounds of totals; with standard errors
cox | cox:Cox | Cox regression, stratified by site |
    exact log hazard ratios of all sites in a few rounds of totals, with standard errors; every site's own baseline
trees | trees.trees:BoostedTrees | Personal boosted trees |
    shared trees from sums of histograms, an intercept and a personal part for each client
trees_fast | trees.trees:BoostedTrees | Personal boosted trees, fast | the same in fewer rounds: larger steps
random_trees | trees.random_trees:RandomTrees | Random trees |
    structure from a seed and leaf values from sums: many trees a round, also under user-level noise
bagged_trees | trees.bagged_trees:BaggedTrees | Bagged trees |
    every client grows a tree on its own rows in every round, and the server adds their average
kin | kin.kin:Kin | Kin |
    learns alone, with everyone and with similar clients, in proportions set by validation examples
"""
_SELFFL_NONE = {"use_init": False, "use_steps": False, "use_agg": False}
PRESETS: dict[str, dict[str, Any]] = {
    "fedavg_smooth": {"smoothing": "participation"},
    "fedavg_recalibrated": {"slope": True},
    "fedavgm": {"server_optimizer": "momentum", "server_lr": 1.0},
    "fedyogi": {"server_optimizer": "yogi"},
    "fedadagrad": {"server_optimizer": "adagrad", "beta1": 0.0},
    "perfedavg_hf": {"variant": "hf"},
    "feddpa": {"own": "*.personal_*", "turns": True},
    "knnper": {"knn": 10},
    "heurfedamp": {"attention": "cosine"},
    "hypcluster": {"weights": "examples"},
    "trees_fast": {"rate": 0.3, "bins": 32, "trees": 40, "folds": 1, "patience": 8, "pooled": False},
    "selffl_init": _SELFFL_NONE | {"use_init": True},
    "selffl_steps": _SELFFL_NONE | {"use_steps": True},
    "selffl_agg": _SELFFL_NONE | {"use_agg": True},
    "selffl_control": _SELFFL_NONE,
    "selffl_exact": {"posterior": "exact"},
}
_SELFFL_PAPER = {"r_max": inf, "reduction": "sum"}
PUBLISHED: dict[str, dict[str, Any]] = {
    "apfl": {"alpha_every_step": True},
    "apple": {"core_step": "paper"},
    "fedamp": {"relative": False, "self_weight": 0.0},
    "fedbn": {"weights": "equal"},
    "l2sgd": {"geometric": True},
    "pefll": {"server_lr": 2e-4, "server_eps": 1e-8},
    "pfedfda": {"ridge": 1e-4},
    "qffl": {"curvature": "step"},
    "selffl": _SELFFL_PAPER,
    "selffl_init": _SELFFL_PAPER,
    "selffl_steps": _SELFFL_PAPER,
    "selffl_agg": _SELFFL_PAPER,
    "selffl_augmented": {"r_max": inf},
}
UNPUBLISHED = {
    "apple": "relations begin at 1/N instead of shares of examples, and the penalty has the factor 1/2",
    "cgpfl": "models of contexts move by `pull`, because the printed step has a factor that is never given",
    "feddpa": "own adapters count fully for every input; the paper weighs them by its nearness to training inputs",
    "fedlc": "the softmax has all classes; the printed loss leaves the true one out and has no lower bound",
    "fedmd": "every round uses all public examples; the paper draws some of them",
    "fedproto": "the squared distance of features takes the place of the distance, and prototypes are plain means",
    "heterofl": "hidden outputs are not scaled, all classes are in the loss, and statistics are averaged in training",
    "mocha": "the loss of a client is a mean over its examples; the paper writes a sum",
    "pefll": "labels enter above the features of examples, not beside the pixels, and the head has a common start",
    "pfedgraph": "the client's term is the cosine with the mix itself, not with that of normalized models",
    "qffl": "clients are drawn uniformly; the paper draws them by their shares of examples",
    "selffl_augmented": "the gradient of a batch is its mean; the paper writes a sum with the same rate",
}
_ENVELOPE = {  # lr * lam must not exceed 1, and moves a model little where it is far below
    "lr": Range(0.01, 0.5),
    "lam": Range(0.2, 2.0),
    "inner_steps": Range(1, 5, log=False, whole=True),
}
SPACES = {
    "fedavgm": {"lr": LEARNING_RATE, "beta1": Range(0.0, 0.99, log=False), "server_lr": Range(0.1, 2.0)},
    "pfedme": _ENVELOPE,
    "mocha": {"lam": Range(1e-5, 1.0)},  # its coordinate steps have no learning rate
    "cox": {},
    "glmm": {},
    "lmm": {},  # nothing to tune: its variances are estimated
    "trees": {},  # what matters is chosen by the rows that its folds leave out
    "trees_fast": {},
    "bagged_trees": {},
    "cgpfl": _ENVELOPE | {"contexts": Range(2, 6, log=False, whole=True)},
    "cgpfl_heur": _ENVELOPE,
    "selffl_init": {"lr": LEARNING_RATE},
    "selffl_agg": {"lr": LEARNING_RATE},
    "selffl_control": {"lr": LEARNING_RATE},
}
DATA = {"fedavg_data": "kinfed.algorithms.fedavg_data:share_examples"}
FAMILIES = {  # by the titles of the pages
    "One model for all, and none": "local fedavg fedavg_smooth fedavg_intercept fedavg_recalibrated fedprox scaffold "
    "feddyn fednova fedpa heterofl qffl fedavg_data fedavgm fedadam fedyogi fedadagrad",
    "Personal models near a shared one": "ditto pfedme perfedavg perfedavg_hf apfl mapper fedala l2sgd mocha "
    "mocha_deep mrmtl",
    "Own layers": "fedper fedbabu fedrep lgfedavg fedbn",
    "Adapters": "fedsa_lora ffa_lora fedex_lora flora hetlora feddpa",
    "Losses at features and logits": "fedlc fedntd moon fedphp fedproto fedpac fedas pfedfda fedcp gpfl knnper fedrod "
    "feddbe fenda perfcl",
    "Models of different kinds": "fedtgp fedgh fd fml fedkd fedgen",
    "Over public examples": "fedbe fedmd ktpfl",
    "Clusters and mixtures": "ifca hypcluster cfl flhc cgpfl cgpfl_heur fedem floco",
    "Who helps whom": "fedfomo fedfomo_ma fedamp heurfedamp pfedgraph fedcac pfedsim lotteryfl apple",
    "By uncertainty": "selffl selffl_init selffl_steps selffl_agg selffl_control selffl_exact selffl_augmented "
    "selffl_cluster",
    "By sums": "lmm glmm cox",
    "Trees": "trees trees_fast random_trees bagged_trees",
    "Kin": "kin",
    "One network that makes all models": "pfedhn pefll",
}
_FAMILY = {_name: _family for _family, _names in FAMILIES.items() for _name in _names.split()}

for _row in re.sub(r"\n +", " ", METHODS).strip().split("\n"):
    _name, _location, _title, _summary = _row.split(" | ")
    _facts: dict[str, Any] = {"title": _title, "summary": _summary} | ({"data": DATA[_name]} if _name in DATA else {})
    _facts |= {"published": PUBLISHED.get(_name, {}), "unpublished": UNPUBLISHED.get(_name, "")}
    _facts |= {"family": _FAMILY.get(_name, "")}
    _location = f"kinfed.algorithms.{_location}"
    ALGORITHMS.register(_name, _location, preset=PRESETS.get(_name), space=SPACES.get(_name), **_facts)

EXTENSIONS.register("gate", "kinfed.algorithms.fedcp:FeatureGate", summary="FedCP's")
EXTENSIONS.register("valve", "kinfed.algorithms.gpfl:FeatureValve", summary="GPFL's")
EXTENSIONS.register("posterior", "kinfed.algorithms.common.by_sums:Posterior", summary="of methods that learn by sums")
EXTENSIONS.register("curved", "kinfed.algorithms.common.by_sums:CurvedPosterior", summary="of such methods with curves")
EXTENSIONS.register("neighbours", "kinfed.algorithms.common.neighbours:Neighbours", summary="kNN-Per's")


def make_algorithm(name: str, training: LocalTraining, options: Mapping[str, Any] | None = None) -> AnyAlgorithm:
    """The algorithm that is registered as `name`, with its `options`. Fields of LocalTraining among them change its
    local training.

    Example:

        >>> kinfed.make_algorithm("ditto", kinfed.LocalTraining(steps=5), {"lam": 0.1, "lr": 0.01}).training
        LocalTraining(lr=0.01, batch=20, steps=5)
    """
    from kinfed.data import LocalTraining

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
    """Ranges that `kinfed tune` varies with this local optimizer: the learning rate, and what the options declare."""
    entry = ALGORITHMS[name]
    rate = LEARNING_RATE if optimizer == "sgd" else ADAPTIVE_RATE
    return entry.space if entry.tuning is not None else {"lr": rate} | entry.space


def _transform(algorithm: AnyAlgorithm) -> Any:
    """The function that changes clients' data before training, as the registry names it; None if none does."""
    name = ALGORITHMS.name_of(type(algorithm))
    return None if name is None else imported(ALGORITHMS[name].facts.get("data"))


def changes_data(algorithm: AnyAlgorithm) -> bool:
    """True where clients' data are changed before training (examples are shared)."""
    return _transform(algorithm) is not None


def prepare_data(
    algorithm: AnyAlgorithm, federation: Federation, population: Population
) -> tuple[Federation, Population]:
    """The federation and population with which the algorithm begins, for its pool and its loop."""
    transform = _transform(algorithm)
    if transform is None:
        return federation, population
    return transform(algorithm, federation, population)  # type: ignore[no-any-return]  # imported by its name
