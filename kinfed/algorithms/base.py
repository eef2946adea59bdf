"""The contract of an algorithm: what is kept, what travels, and what happens at each end.

An algorithm is a frozen dataclass; its fields are its options. State and messages are trees of tensors declared at the
head of the algorithm's file. One round, for every algorithm and every pool:

    server, ids = plan(server, active, round)              who takes part, and what the round needs (sums, choices)
    down        = download(server, ids)                    rows for any subset of these clients
    client, up  = client_update(task, client, down, data)  at the clients; `client` stays there
    server      = aggregate(server, ids, up, round)        of the clients that replied, in ascending order of ids

A server that only averages updates is an AveragingAlgorithm, by what it does with their mean; mostly it adds it:

    server      = step(server, mean, round)

Evaluation uses `plan`, `download`, `personalize` on copies and changes nothing.
`download` must act row by row: download(server, ids)[r] equals download(server, ids[r]), so that a pool may ask
for it in chunks and never hold all clients' messages at once.
"""

import inspect
import warnings
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from typing import Any, ClassVar, Generic, Literal, TypeVar

import torch
from torch import Tensor

from kinfed.algorithms.common.averaging import COUNT, DELTA, mean_of
from kinfed.algorithms.common.heads import required_body, required_head
from kinfed.core import Nothing, Tree, changed_repr, check_options, option, rng, take_rows
from kinfed.data import Cohort, LocalTraining, Population
from kinfed.engine import Task
from kinfed.errors import ConfigError, ModelError

Server = TypeVar("Server", bound=Tree)
Client = TypeVar("Client", bound=Tree)
Down = TypeVar("Down", bound=Tree)
Up = TypeVar("Up", bound=Tree)

Trait = Literal[
    "needs validation", "needs classes", "needs public data", "keeps stragglers", "no momentum", "no weight decay",
    "no example weights", "draws by client", "state to deploy", "hands models on", "any architecture",
]  # fmt: skip

EXAMPLE_COUNT = "the number of training examples of each client"


@dataclass(frozen=True)
class RoundInfo:
    """Facts about a round for the server's side of an algorithm."""

    number: int  # of the algorithm's rounds, from 1 on; in an evaluation that of the round to come
    population: Population
    # The columns of a row that are trained (Task.trainable): only these have distances.
    trainable: slice = field(default_factory=lambda: slice(None))
    # For a server that trains or predicts on its own or public examples (population.pool): never with the noise of
    # private training, which is for clients' examples.
    server_task: Task | None = None
    # Sum of the weights that a `step`'s mean stands for: mean times weight is the total (`AveragingAlgorithm.adds_up`).
    weight: float = 1.0

    def key(self, purpose: str) -> Tensor:
        """The key of the draws for one purpose in this round (kinfed.core.rng)."""
        return rng.fold(self.population.key(purpose), self.number - 1)


@dataclass(frozen=True)
class ServerModels:
    """The models that the server holds, and which client has which."""

    models: Tensor  # [C, P]
    assignment: Tensor | None = None  # [K] int64 in [0, C); None: all clients have the first

    def rows(self, ids: Tensor) -> Tensor:
        """[n, P]: the model of each of these clients."""
        if self.assignment is None:
            return self.models[0].expand(len(ids), -1)
        return take_rows(self.models, self.assignment[ids])


@dataclass(frozen=True)
class PrivacyProfile:
    """Account of what an algorithm computes from a client's training examples; privacy plans with it and holds it
    against what is really done.

    Epsilon covers gradients. What leaves a client and was computed from its examples in any other way is `uncovered`,
    with the setting that avoids it ("" if there is none)."""

    per_round: Mapping[int, Tensor] | None  # on how many batches [n] a round takes k gradients at most; None: no bound
    per_personalization: Mapping[int, Tensor] = field(default_factory=dict)  # the same for `personalize`
    uncovered: Mapping[str, str] = field(default_factory=dict)
    impossible: str = ""  # what leaves a client that noise on gradients cannot hide: the algorithm is refused
    # By how much one example changes every sum in the messages at most, as a norm; inf: by any amount.
    sensitivity: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Algorithm(Generic[Server, Client, Down, Up]):
    """A method of federated learning: what is kept, what travels, and what is computed at each end.

    A subclass is a frozen dataclass whose fields are its options. Its four types are trees of tensors: Server and
    Client are kept, Down and Up travel. All but Server have one row for each of n clients; a model is a row [P].
    `kinfed.author` offers all that its file needs, and `kinfed.testing.check_algorithm` checks it.

    Example:

        >>> @dataclass(frozen=True)
        ... class Plain(AveragingAlgorithm[ModelState, Nothing, ModelState, DeltaUp]):
        ...     rate: float = option(1.0, "share of the mean change that the server takes", gt=0, le=1)
        ...
        ...     def init_server(self, task, population):
        ...         return ModelState(task.init(population.seed))
        ...
        ...     def client_update(self, task, client, down, data):
        ...         return client, DeltaUp(sgd(task, down.w, data.train.batches(self.training)) - down.w, None)
        ...
        ...     def step(self, server, mean, round):
        ...         return ModelState(server.w + self.rate * mean.delta)
        ...
        ...     def personalize(self, task, client, down, data):
        ...         return down.w
        >>> with kinfed.simulate(kinfed.testing.tiny_federation(), "mlr", Plain(rate=0.5)) as loop:
        ...     loop.round().active
        6
    """

    training: LocalTraining = field(default_factory=LocalTraining)
    _: KW_ONLY
    finetune: int = option(0, "k: local steps on the personal model before it is used; 0 is the algorithm itself", ge=0)
    finetune_lr: float | None = option(None, "learning rate of those steps; the local one by default", gt=0)
    knn: int = option(0, "k: nearest own training examples that predict beside the personal model; 0: none", ge=0)
    knn_share: float | None = option(None, "λ: their share; by default what validation examples choose", ge=0, le=1)
    knn_capacity: int = option(1000, "most examples that a client's memory of them holds", ge=1)

    traits: ClassVar[frozenset[Trait]] = frozenset()
    """Needs and limits: "needs validation" (every client needs validation examples), "needs public
    data" (the federation has examples that all know), "needs classes" (its loss, messages or models are about
    classes: not for a regression), "keeps stragglers" (partial work of slow clients is used instead of dropped),
    "no momentum", "no weight decay" and "no example weights" (its local steps are its own and have no place for them;
    without momentum there is no other optimizer and no clipping of gradients either), "draws by client" (draws of the
    server go by the clients' numbers, so that renumbering them changes results), "state to deploy" (a client's state is
    what it deploys, and its training does not read it: states of clients that are never evaluated need not be
    kept. Not inherited: a class derived from such an algorithm may read the state, and says so anew), "hands models on"
    (what a client sends reaches other clients as it is, or can be told from what they get), "any architecture" (nothing
    that the server keeps or clients send depends on the model that a client trains: clients may have several)."""

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        if "__repr__" not in cls.__dict__:
            cls.__repr__ = changed_repr  # type: ignore[method-assign]  # dataclasses would write one with all options
        if "averages" in cls.__dict__:
            warnings.warn(
                f"{cls.__name__}.averages is of an older version: a server that only averages derives from "
                "AveragingAlgorithm and writes `step`; any other says in `single_updates` why it does not",
                DeprecationWarning,
                stacklevel=2,
            )
            if isinstance(cls.__dict__["averages"], str):
                setattr(cls, "single_updates", cls.__dict__["averages"])  # noqa: B010  (a text, as subclasses have it)
        for name in inspect.get_annotations(cls):
            if callable(getattr(super(cls, cls), name, None)):
                raise TypeError(f"{cls.__name__}.{name}: an option must not hide the method {name} of all algorithms")

    def __post_init__(self) -> None:
        check_options(self)
        if self.finetune_lr is not None and not self.finetune:
            raise ConfigError("finetune_lr is the rate of fine-tuning steps, but finetune is 0; set finetune too")
        if self.knn_share is not None and not self.knn:
            raise ConfigError("knn_share is the share of nearest neighbours, but knn is 0; set knn too")

    # ---- written by all ----

    def init_server(self, task: Task, population: Population) -> Server:
        raise NotImplementedError

    def client_update(self, task: Task, client: Client, down: Down, data: Cohort) -> tuple[Client, Up]:
        raise NotImplementedError

    def aggregate(self, server: Server, ids: Tensor, up: Up, round: RoundInfo) -> Server:
        raise NotImplementedError

    def personalize(self, task: Task, client: Client, down: Down, data: Cohort) -> Tensor | dict[str, Tensor]:
        """[n, P]: the model each client would deploy now, or several by name, of which the first is deployed and the
        others are scored beside it. May use training and validation data, never test.

        Wider rows are mixtures of K models, [n, K (P + 1)], or models with a second network at their features,
        [n, P + E + 1] (kinfed.engine.personal.personal_models)."""
        raise NotImplementedError

    # ---- written by some ----

    def download(self, server: Server, ids: Tensor) -> Down:
        """What these clients are sent; unless it is written, all that the server keeps, the same for everyone."""
        return server.map(lambda tensor: tensor.expand(len(ids), *tensor.shape))  # type: ignore[return-value]

    def init_client(self, task: Task, data: Cohort) -> Client:
        return Nothing()  # type: ignore[return-value]  # an algorithm that says nothing here has Client = Nothing

    def plan(self, server: Server, active: Tensor, round: RoundInfo) -> tuple[Server, Tensor]:
        """Called once before the downloads of a round with the clients that the schedule drew (ascending ids): the
        server as the round needs it, which is what `aggregate` gets, and who takes part. May not change `server`."""
        return server, active

    def rounds_in(self, rounds: int) -> int:
        """Rounds that the algorithm takes at most in a run of `rounds`: as many, unless it knows its own end. For one
        that learns in a number of rounds of its own, whatever others are given."""
        return rounds

    def is_done(self, server: Server) -> bool:
        """Whether all is learnt and no client will be asked any more: the run of the algorithm ends then."""
        return False

    def server_models(self, server: Server) -> ServerModels | None:
        """The server's own models; None if it has none."""
        return None

    def place_newcomer(self, task: Task, server: Server, data: Cohort) -> Server:
        """The server as it serves clients who join after the run: what it keeps by client has rows for them at the end,
        as `init_server` makes them. For an algorithm that must find their place, from their training and validation
        data only, or that cannot serve them (ConfigError with the reason)."""
        return server

    def check(self, task: Task, population: Population) -> None:
        """Refuse settings that cannot work, before anything runs."""
        if self.acts_at:
            required = required_head if self.acts_at == "head" else required_body
            required(type(self).__name__, task)

    def figures(self, server: Server) -> dict[str, Any]:
        """The algorithm's own numbers for the journal: floats, or tensors (written at evaluated rounds only)."""
        return {}

    def client_figures(self, client: Client) -> dict[str, Tensor]:
        """Diagnostics of every client [n], collected with the evaluation."""
        return {}

    def sent_columns(self, task: Task) -> Tensor:
        """bool [P]: the columns of a row that models and changes of models in messages hold, from left to right; all of
        them where no part of a model stays with the clients."""
        return torch.ones(task.num_params, dtype=torch.bool)

    # ---- declared ----

    acts_at: ClassVar[Literal["", "head", "body"]] = ""
    """Part of a model that the algorithm cannot do without: the last linear layer, or also trained layers below it."""
    gradients: ClassVar[int] = 0
    """Gradients that a client takes of every batch, where it sends what they led to, with the option `weights` its
    number of examples, and nothing else; 0 where `privacy` says it in another way."""
    leaks: ClassVar[str] = ""
    """What leaves a client that noise on gradients cannot hide, which rules out differential privacy."""

    def privacy(self, count: Tensor) -> PrivacyProfile | None:
        """Account of what is computed from the examples of clients with `count` [n] of them. None: nothing is declared,
        and the algorithm is refused under differential privacy."""
        if self.leaks:
            return PrivacyProfile(None, impossible=self.leaks)
        steps = {self.gradients: self.training.num_steps(count)}
        return gradient_steps(steps, weights=getattr(self, "weights", "equal")) if self.gradients else None

    @property
    def single_updates(self) -> str:
        """Words to follow the algorithm's name: what the server does with single updates that a mean would not do for;
        "" if it only averages them (`AveragingAlgorithm`)."""
        return "looks at single updates"

    @property
    def sends(self) -> bool:
        """True where anything leaves the clients."""
        return True

    def heard(self, task: Task, before: Client, after: Client, down: Down, up: Up) -> Client:
        """The client's state `after` an update that reached the server as `up`, where that is not what was sent (codes
        are not exact). For algorithms whose server adds up what their clients remember too: both must remember the
        same. `before`: the state that training began with."""
        return after

    @property
    def has_invariant(self) -> bool:
        """True where server and clients remember the same."""
        return type(self).invariant is not Algorithm.invariant

    def clients_for_noise(self, task: Task, noise: float) -> float:
        """Clients of a round below which user-level noise of this deviation, in units of the clipping norm, spoils what
        is solved for with their total. 0: many rounds make up for noise, and nothing is told beforehand."""
        return 0.0

    def invariant(self, task: Task, server: Server, clients: Client) -> tuple[Tensor, Tensor] | None:
        """Two tensors, one that the server keeps and the same of the states of all clients [K, ...]: equal after every
        round, whatever happens to updates on the way."""
        return None


@dataclass(frozen=True)
class AveragingAlgorithm(Algorithm[Server, Client, Down, Up]):
    """An algorithm whose server knows its updates only by a weighted mean over the clients of a round: secure sums,
    robust averages and user-level noise may take the mean's place."""

    fields: ClassVar[tuple[str, ...]] = (DELTA,)
    """Fields of Up that are averaged; any other is a weight of that mean. () if nothing is sent."""
    noise_drowns: ClassVar[str] = ""
    """Words to follow the algorithm's name: why noise for a client's whole update would leave nothing of it, and
    user-level privacy is refused; "" if it applies."""
    adds_up: ClassVar[bool] = False
    """Whether the fields are sums over a client's rows, and `step` works with their total over clients, which is the
    mean times `RoundInfo.weight`. Every client weighs the same, and no robust rule takes the mean's place: a median of
    sums is no sum of any rows."""

    @property
    def single_updates(self) -> str:
        return ""

    @property
    def sends(self) -> bool:
        return bool(self.fields)

    def step(self, server: Server, mean: Up, round: RoundInfo) -> Server:
        """The server after a round. `mean` has the averaged fields without their axis of clients, and nothing else.
        Unless it is written, `delta` is added to the first tensor of the server, any other to that of its own name."""
        first = next(iter(server.named()), "")
        changes = {first if name == DELTA else name: getattr(mean, name) for name in self.fields}
        return replace(server, **{name: getattr(server, name) + change for name, change in changes.items()})

    def weight(self, up: Up) -> Tensor | None:
        """[n]: what clients weigh in the mean; None: all the same."""
        return getattr(up, COUNT, None)

    def averaged(self, up: Up) -> Up:
        """The mean of updates [n, ...], as `step` takes it."""
        return mean_of(up, self.fields, self.weight(up))

    def aggregate(self, server: Server, ids: Tensor, up: Up, round: RoundInfo) -> Server:
        weight = self.weight(up)
        total = float(len(ids) if weight is None else weight.sum())
        return self.step(server, self.averaged(up), replace(round, weight=total))


AnyAlgorithm = Algorithm[Any, Any, Any, Any]


def required_averaging(
    algorithm: AnyAlgorithm, label: str, consequence: str, setting: str
) -> AveragingAlgorithm[Any, Any, Any, Any]:
    """The algorithm as one that only averages. Refuses others, for what a setting could not do with them."""
    if algorithm.single_updates:
        raise ConfigError(f"{label} {algorithm.single_updates}, so {consequence}; leave out the method or {setting}")
    assert isinstance(algorithm, AveragingAlgorithm)
    return algorithm


def _target(task: Task) -> str:
    return "a number" if task.problem is None or task.problem.is_regression else task.problem.in_words()


def check_algorithm_settings(algorithm: AnyAlgorithm, task: Task, population: Population) -> None:
    """Refuse what cannot work: classes that are not there, local training with terms that the algorithm's own steps
    ignore, and `check`."""
    if "needs classes" in algorithm.traits and not task.classifies:
        raise ConfigError(
            f"{type(algorithm).__name__} works with classes (their probabilities, counts, prototypes or margins), and "
            f"the target here is {_target(task)}; leave it out, or choose --task classification where the values are "
            "classes"
        )
    if "needs public data" in algorithm.traits and population.pool is None:
        raise ConfigError(
            f"{type(algorithm).__name__} learns from predictions on public examples, and the federation has none; run "
            "it with --public 0.1, or give it federation.with_public(0.1, seed)"
        )
    if "no example weights" in algorithm.traits and population.weighs_examples:
        raise ConfigError(
            f"{type(algorithm).__name__}'s local steps are its own, without weights of classes or examples; leave out "
            "the method or the weights"
        )
    training = algorithm.training
    # What the steps lack, the trait that says so, what was asked for, and how a method goes without it.
    terms: tuple[tuple[str, Trait, Any, str], ...] = (
        ("momentum", "no momentum", training.momentum, "it to 0"),
        ("optimizers but SGD", "no momentum", training.optimizer.removeprefix("sgd"), "optimizer to sgd"),
        ("clipping of gradients", "no momentum", training.largest_gradient, "clip to inf"),
        ("weight_decay", "no weight decay", training.weight_decay, "it to 0"),
    )
    for lacking, trait, value, remedy in terms:
        if value and trait in algorithm.traits:
            raise ConfigError(
                f"{type(algorithm).__name__}'s local steps are its own, without {lacking}; got {value}; set {remedy} "
                "for this method"
            )
    if algorithm.knn and not task.classifies:
        raise ConfigError("knn: nearest neighbours vote for classes, and a regression has none; set knn to 0")
    if algorithm.knn:
        try:
            _ = task.feature_head
        except ModelError as error:
            raise ConfigError(
                f"knn: nearest neighbours are found by features, which this model lacks: {error}"
            ) from error
    algorithm.check(task, population)


def privacy_profile(algorithm: AnyAlgorithm, count: Tensor) -> PrivacyProfile | None:
    """Declared profile, with the steps of fine-tuning. A memory of examples is nothing that noise hides."""
    if algorithm.knn:
        return PrivacyProfile(None, impossible="the features of its examples, in its personal model,")
    profile = algorithm.privacy(count)
    if profile is None or not algorithm.finetune:
        return profile
    steps = profile.per_personalization.get(1, torch.zeros_like(count)) + algorithm.finetune
    return replace(profile, per_personalization={**profile.per_personalization, 1: steps})


def gradient_steps(
    per_round: Mapping[int, Tensor] | Tensor | None,
    *,
    per_personalization: Mapping[int, Tensor] | None = None,
    weights: str = "equal",
    uncovered: Mapping[str, str] | None = None,
) -> PrivacyProfile:
    """The profile of an algorithm whose clients send what gradient steps led to, and with weights = "examples" how
    many examples they have. `per_round` as a tensor [n]: numbers of steps of one gradient each."""
    if isinstance(per_round, Tensor):
        per_round = {1: per_round}
    counts = {EXAMPLE_COUNT: 'weights = "equal"'} if weights == "examples" else {}
    return PrivacyProfile(per_round, per_personalization or {}, counts | dict(uncovered or {}))


def check_stable(what: str, name: str, rate: float, strength: float) -> None:
    """Refuse a proximal term, the option `name`, whose steps of rate · strength overshoot: they diverge from 2 on."""
    if not rate * strength < 2:
        raise ConfigError(f"{what} is unstable for lr * {name} >= 2; got {rate} * {strength}; lower one of them")


def option_values(algorithm: AnyAlgorithm) -> dict[str, Any]:
    """The options as plain values, as the journal and reports show them."""
    return {f.name: getattr(algorithm, f.name) for f in fields(algorithm) if f.name != "training"}
