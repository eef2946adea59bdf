"""Settings of a deployment: `[tool.flwr.app.config]` of the app's pyproject.toml.

Flower hands the same flat table to the server and to every node, and `flwr run --run-config` overrides what is in it.
It knows no null, so "" stands for "not set": the default applies. Keys may be written with dashes or underscores.

A `Deployment` has what only a deployment has; all other settings are those of a run (`RunConfig`), with their meanings.
`SECTIONS` is the table as `kinfed deploy init` writes it, and says which settings of a run a deployment takes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from kinfed.algorithms import ALGORITHMS, AnyAlgorithm, changes_data, make_algorithm
from kinfed.config import Named, RunConfig, make_config, refuse_exclusions
from kinfed.core import convert_fields, convert_options, declared, option, option_of, storage
from kinfed.data import Problem, example_weights
from kinfed.engine import METRICS, MODELS, make_objective
from kinfed.errors import ConfigError, DataError, unknown_name
from kinfed.tabular import FitSettings, Try, make_try
from kinfed.version import __version__

STANDARD, NONE = "standard", "none"
FIT = "fit"  # in place of a method: a search over many (kinfed.deploy.server.fit_server)
DESCRIBE, EVALUATE = "describe", "evaluate"  # likewise: what tables are like, and how models do at every site
QUESTIONS = (FIT, DESCRIBE, EVALUATE)
AUTOMATIC_VALIDATION = 0.2  # share of training examples, where a method needs validation and none is asked for

SECTIONS = {
    "who takes part, and for how long to wait": (
        "out", "clients", "joined", "left", "quorum", "deadline", "wait", "patience", "participation", "sampling",
    ),
    "what is learned (kinfed list algorithms, kinfed list ditto, kinfed list models)": (
        "method", "options", "model", "rounds", "seed", "lr", "batch", "steps", "epochs", "optimizer", "momentum",
        "nesterov", "betas", "eps", "weight_decay", "clip", "optimizer_state", "lr_decay", "lr_floor", "augment",
        "loss", "huber_delta", "class_weights", "metric", "eval_every",
    ),
    "the data, which stay on the nodes": (
        "classes", "target", "label_column", "time_column", "event_column", "features", "columns", "scaling",
        "test_fraction", "validation",
    ),
    'a search over methods (method = "fit", docs/deployment.md)': (
        "portfolio", "models", "trials", "search_folds", "deploy", "judged",
    ),
    "protection (docs/deployment.md, docs/privacy.md)": (
        "keys", "largest_count", "drift", "largest_value", "largest_norm", "robust", "dp_noise", "dp_epsilon",
        "dp_clip", "dp_delta", "dp_budget", "dp_strict", "user_noise", "user_epsilon", "user_clip", "user_delta",
        "user_quantile", "user_at_nodes", "user_conspirators", "secure_sum", "secure_range", "secure_least",
        "secure_threshold",
    ),
}  # fmt: skip
SEARCH = ("portfolio", "models", "trials", "search_folds", "deploy")
LOCAL = "local"  # stands for the method of a search until one of its runs is meant
NUMBER, COUNTS = "number", "counts"  # targets whose mean and deviation a search learns from sums
LEARNT_TARGETS = (NUMBER, COUNTS)
SETTINGS = [name for names in SECTIONS.values() for name in names]
# Defaults that are others than those of a simulation.
RUN_DEFAULTS: dict[str, Any] = {"rounds": 20, "participation": 1.0, "label_column": "label"}


def not_for_nodes(algorithm: AnyAlgorithm) -> str:
    """The reason why nodes cannot run the algorithm; "" if they can."""
    if changes_data(algorithm):
        return "clients would share examples, which no node does"
    return "nodes hold no public examples" if "needs public data" in algorithm.traits else ""


def _refuse_exclusions(values: Mapping[str, Any]) -> None:
    """Refuse settings that are not taken together; `models` of a search is no setting of a run."""
    refuse_exclusions({name: value for name, value in values.items() if name not in SEARCH}, "deployment")


def _number_as_text(value: Any) -> Any:
    """`clients = 3` is as good as `clients = "3"`."""
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


Names = Annotated[str, BeforeValidator(_number_as_text)]  # or how many of them


@dataclass(frozen=True)
class Deployment:
    """Settings that only a deployment has, and those of its run."""

    out: str = option("runs/deployment", "Folder on the server's machine; the same again resumes the run.")
    clients: Names = option("3", 'Number of clients, or their names: "hospital-a,hospital-b,hospital-c".')
    joined: str = option("", "Names of sites that have come into the run since it began, in their order.")
    left: str = option("", "Names of sites that have left the run; removed from this list, a site is back.")
    quorum: int = option(
        0, "Number of updates that a round needs to count (0: more than half of the clients called).", ge=0
    )
    deadline: float = option(600.0, "Seconds that a round waits for its clients.", gt=0)
    wait: float = option(600.0, "Seconds that the start waits for all clients to appear.", gt=0)
    patience: int = option(3, "Rounds in a row without quorum after which the run stops.", ge=1)
    method: str = option(
        "ditto",
        'Method (kinfed list algorithms), or "fit": try many and let every site choose; "describe": tables; '
        '"evaluate": models, at every site.',
    )
    portfolio: str = option_of(FitSettings, "algorithms", "auto", "Of fit: methods to try beside local and fedavg.")
    models: str = option_of(FitSettings, "models")
    trials: int = option_of(FitSettings, "trials")
    search_folds: int = option_of(FitSettings, "folds")
    deploy: Literal["chosen", "certified"] = option(
        "chosen", "For fit: a site takes what the folds chose, or only if its test rows show a gain."
    )
    judged: str = option("", "For evaluate: files of models on the server (kinfed export), or a folder of them.")
    options: str = option(
        "", 'Options of the method, the model and the rule: "lam=0.5 model.width=8 robust.share=0.2".'
    )
    seed: int = option(0, "Seed of all draws but the noise and samples of private training.")
    classes: Names = option("10", 'Number of classes (labels 0, 1, ...), or their names: "benign,malignant".')
    target: str = option(
        "",
        "If a number is predicted instead of classes: its mean and standard deviation as known to "
        'everybody, such as "29,10". Models learn (y - mean) / deviation; no node is asked for either. Of other '
        'targets their record, such as {"kind": "counts", "mean": 2.5} (docs/targets.md).',
    )
    features: str = option(
        "", 'Columns (default: all others, which must agree at all nodes unless scaling is "standard").'
    )
    scaling: Names = option(
        STANDARD, '"standard": columns learnt together, mean 0, variance 1 (sums leave a node); "none"; "255".'
    )
    test_fraction: float = option(0.25, "Of examples, where a node does not name its test ones.", ge=0, lt=1)
    keys: str = option(
        "", "Folder on the server with <client>.pub (kinfed deploy certs): a name is refused to other keys."
    )
    largest_count: int = option(10**6, "Examples that a client may say it has; more is refused.", ge=1)
    drift: float = option(0.1, "Share by which a client's numbers of examples may change after the start.", ge=0, le=1)
    largest_value: float = option(
        1e6, "Largest value of a feature before scaling; clients whose sums say more are left out of the scaling.",
        gt=0, infinite=True,
    )  # fmt: skip
    secure_threshold: float = option(
        0.5, "Secure aggregation: more than this share of clients reveal masks together.", ge=0.5, lt=1
    )
    run_settings: Mapping[str, Any] = field(default_factory=dict)  # of `RunConfig`, if given

    def __post_init__(self) -> None:
        convert_fields(self)

    @classmethod
    def parse(cls, table: Mapping[str, Any]) -> Deployment:
        values = {key.replace("-", "_"): value for key, value in table.items()}
        _refuse_exclusions(values)  # first: among them are settings that no deployment has
        values = {name: value for name, value in values.items() if value != ""}
        if unknown := sorted(values.keys() - set(SETTINGS)):
            raise ConfigError(
                f"{unknown_name('setting of the deployment', unknown[0], SETTINGS)}. Or a newer kinfed has made this "
                f'app: set {unknown[0]} to "" there, or install its version here too (this is {__version__})'
            )
        own = {name: value for name, value in values.items() if name in declared(cls)}
        deployment = cls(**own, run_settings={name: values[name] for name in values.keys() - own.keys()})
        deployment.check()
        return deployment

    def check(self) -> None:
        """Refuse what cannot work, as far as the settings alone tell."""
        self._check_search()
        for part in ("num_clients", "problem", "divisor", "run", "algorithm"):
            getattr(self, part)  # each checks its values when it is made
        own = {name: getattr(self, name) for name in declared(Deployment)}
        _refuse_exclusions(self.run.settings | own)
        if reason := not_for_nodes(self.algorithm):
            raise ConfigError(f"{self.method} cannot be deployed: {reason}; choose another method")
        self._check_model()
        self._check_class_weights()
        self._check_members()
        secure = self.run.secure
        if secure is not None:
            secure.averaged_fields(self.method, self.algorithm)
            if self.scaling == STANDARD and self.algorithm.sends:
                raise ConfigError(
                    'secure_sum hides single updates, and scaling = "standard" takes exact sums of features from every '
                    'node; use scaling = "none" or a number'
                )

    def _check_search(self) -> None:
        """Refuse what no search does, and settings of a search without one."""
        if self.method.strip() != FIT:
            if self.target.strip() in LEARNT_TARGETS:
                raise ConfigError(
                    f"target = {self.target}: only a search (fit) learns the mean of a target; give its record"
                )
            self._check_question()
            if changed := [name for name in SEARCH if getattr(self, name) != self.__dataclass_fields__[name].default]:
                raise ConfigError(f'{changed[0]} is of a search; set method = "fit", or leave it out')
            return
        if other := [name for name in self._protections if not name.startswith("dp_") and name != "secure_sum"]:
            raise ConfigError(
                f"{other[0]}: a search chooses by figures of every single site, which noise for whole clients would "
                "hide, and judges no updates; choose a method by fit under dp_noise or secure_sum, and deploy it"
            )
        if self.run.secure is not None:
            self._check_secure_search()
        if self.run.privacy is not None:
            self._check_private_search()
        if self.scaling != STANDARD:
            raise ConfigError('a search learns what columns become in every fold; leave scaling at "standard"')
        if self.options.strip():
            raise ConfigError("options are of one method; a search tries its own (trials)")
        if self.run_settings.get("participation", 1) != 1:
            raise ConfigError("every site takes part in every round of a search; leave out participation")

    def _check_private_search(self) -> None:
        """Refuse what noise on gradients and figures cannot protect."""
        if not self.problem.classifies or not self.problem.has_classes:
            raise ConfigError(
                "dp_noise: errors of numbers have no bound that noise could hide; a search for classes has"
            )
        if self.deploy != "chosen":
            raise ConfigError(
                'dp_noise: what a site takes is known to all, and test rows may not decide it; deploy = "chosen"'
            )
        if self.run_settings.get("class_weights", example_weights.NONE) != example_weights.NONE:
            raise ConfigError(
                "dp_noise: a search chooses by log loss, of classes without weights; leave out class_weights"
            )

    def _check_secure_search(self) -> None:
        """Refuse sums that would hide nothing, and what would hide less than it says."""
        if self.run.privacy is not None:
            raise ConfigError(
                "secure_sum in a search under dp_noise: what an owner has paid for is kept answer by answer, and masks "
                "are new in each; leave out one of the two"
            )
        assert self.run.secure is not None
        if self.num_clients < self.run.secure.least:
            raise ConfigError(
                f"secure_sum adds up {self.run.secure.least} updates at least (secure_least), and the search has "
                f"{self.num_clients} sites"
            )

    @property
    def _protections(self) -> list[str]:
        """Settings of the run that protect updates, where they are set."""
        protected = ("dp_noise", "dp_epsilon", "user_noise", "user_epsilon", "secure_sum", "robust")
        return [name for name in protected if self.run_settings.get(name) not in (None, "", "none", 0, False)]

    def _check_question(self) -> None:
        """Refuse settings that have no meaning where nothing is trained."""
        if self.judged and self.question != EVALUATE:
            raise ConfigError('judged names models; set method = "evaluate", or leave it out')
        if self.question == EVALUATE and not self.judged:
            raise ConfigError("evaluate needs models: judged = a folder of .safetensors files, or their names")
        if self.question and self._protections:
            raise ConfigError(
                f"{self._protections[0]}: nothing is trained by {self.question}; owners protect what it asks for by "
                "rules of their own (evaluation_noise, smallest_count)"
            )

    def _check_model(self) -> None:
        """Refuse options, a metric or a loss that the model and the problem do not know, before any site is asked."""
        entry, name = MODELS[self.run.model.name], self.run.model.name
        convert_options(entry.options, {**entry.preset, **self.run.model.options}, f"model {name}")
        METRICS.headline(self.problem, self.run.metric)
        make_objective(self.problem, self.run.loss, self.run.huber_delta)

    def _check_members(self) -> None:
        """Refuse newcomers where a run was planned for the sites that it began with."""
        if not self.joined_names and not self.left_names:
            return
        if self.question:
            raise ConfigError(f"joined and left are of a run in rounds; {self.question} asks those in clients")
        if twice := set(self.joined_names) & set(self.client_names or ()):
            raise ConfigError(f"{min(twice)} is in clients and in joined; name it once")
        if self.run.user_privacy is not None:
            raise ConfigError("user_ privacy hides who takes part: sites neither join nor leave; begin a new run")
        if self.joined_names and self.run.dp_epsilon is not None:
            raise ConfigError("dp_epsilon: the noise was planned for the sites of the beginning; begin a new run")
        if self.joined_names and self.algorithm.has_invariant:
            raise ConfigError(
                f"{self.method}: server and clients remember the same sum over as many clients as there are, so that "
                "no site can join; begin a new run with the new site"
            )

    def _check_class_weights(self) -> None:
        """Refuse weights that the method does not know, or that are not those of the classes."""
        rule = self.run.class_weights
        if rule == example_weights.NONE:
            return
        if "no example weights" in self.algorithm.traits:
            raise ConfigError(f"the local steps of {self.method} know no class_weights; leave them out")
        if not self.problem.has_classes:
            raise ConfigError(f"class_weights = {rule}: the target is a number, without classes; leave it out")
        if rule != example_weights.BY_CLIENT:
            example_weights.parse_class_weights(rule, self.class_names)

    @cached_property
    def search(self) -> FitSettings | None:
        """The settings of a search, where the deployment is one."""
        if self.method.strip() != FIT:
            return None
        own = {name: self.run_settings[name] for name in ("steps", "class_weights") if name in self.run_settings}
        return FitSettings(
            algorithms=self.portfolio, models=self.models, trials=self.trials, folds=self.search_folds,
            deploy=self.deploy, rounds=self.run.rounds, metric=self.run_settings.get("metric", "auto"), seed=self.seed,
            test_fraction=self.test_fraction, **own,
        )  # fmt: skip

    @property
    def question(self) -> str:
        """The question that is asked in place of a method; "": none."""
        return self.method.strip() if self.method.strip() in QUESTIONS else ""

    def make_try(self, number: int, method: str, sites: int) -> Try:
        """A try of a search as all sites run it: in secure sums a method learns from totals, where it can."""
        assert self.search is not None
        chosen = make_try(number, method, self.search.model_names, sites, self.search.seed)
        can = "totals" in {one.name for one in ALGORITHMS[method].describe_options()}
        return replace(chosen, options={**chosen.options, "totals": True}) if can and self.run.secure else chosen

    def of_try(self, chosen: Try, problem: Mapping[str, Any] | None) -> Deployment:
        """The deployment of one run of a search; `problem` is that of its training rows, where it has no classes."""
        assert self.search is not None
        options = " ".join(f"{name}={value!r}" for name, value in chosen.options.items())
        target = self.target if problem is None else json.dumps(problem, sort_keys=True)  # the same at all ends
        run = {
            **self.run_settings, "model": chosen.model, "steps": self.search.steps, "eval_every": 0,
            "metric": self.search.metric_for(self.problem).name,
        }  # fmt: skip
        defaults: dict[str, Any] = {name: self.__dataclass_fields__[name].default for name in SEARCH}
        return replace(
            self, method=chosen.method, options=options, target=target, run_settings=run, quorum=self.num_clients,
            **defaults,
        )  # fmt: skip

    def problem_of(self, record: Any) -> Problem:
        """The problem of some training rows, as a message says it; the deployment's own where it has classes."""
        return self.problem if record is None else replace(self, target=json.dumps(record)).problem

    @property
    def num_clients(self) -> int:
        names = self.client_names
        if names is not None:
            return len(names)
        count = int(self.clients)
        if count < 1:
            raise ConfigError(f"a deployment has at least one client; got clients = {count}")
        return count

    @property
    def client_names(self) -> list[str] | None:
        """Names of the clients in their order, if the operator listed them."""
        if self.clients.strip().lstrip("-").isdigit():
            return None
        return distinct("clients", self.clients)

    @property
    def joined_names(self) -> list[str]:
        return distinct("joined", self.joined) if self.joined.strip() else []

    @property
    def left_names(self) -> list[str]:
        return distinct("left", self.left) if self.left.strip() else []

    @property
    def class_names(self) -> list[str]:
        counted = self.classes.strip().isdigit()
        names = [*map(str, range(int(self.classes)))] if counted else distinct("classes", self.classes)
        if len(names) < 2:
            raise ConfigError(f"there are at least two classes to tell apart; got {len(names)}")
        return names

    @property
    def problem(self) -> Problem:
        if self.target.strip() in LEARNT_TARGETS:
            return Problem.of_numbers() if self.target.strip() == NUMBER else Problem.of_counts()
        if not self.target.strip():
            return Problem.of_classes(len(self.class_names), self.class_names)
        if self.target.strip().startswith("{"):
            return self._problem_of_record()
        try:
            mean, deviation = (float(part) for part in self.target.split(","))
            return Problem("regression", mean=mean, scale=deviation)
        except (ValueError, DataError):
            raise ConfigError(
                "target is the mean and the standard deviation of the number to predict, as everybody knows them, such "
                f'as "29,10"; got {self.target!r}'
            ) from None

    def _problem_of_record(self) -> Problem:
        try:
            problem = Problem.from_json(json.loads(self.target))
        except (ValueError, TypeError, DataError) as error:
            raise ConfigError(f"target is no record of a problem ({error}); got {self.target!r}") from None
        if problem.kind == "survival" and not problem.periods:
            raise ConfigError("target: survival needs periods and hazards as everybody knows them (docs/targets.md)")
        return problem

    @property
    def feature_columns(self) -> list[str] | None:
        return distinct("features", self.features) if self.features.strip() else None

    @property
    def own_outputs(self) -> tuple[str, ...]:
        """Outputs that columns of some sites have effects on; none under differential privacy, where these columns are
        common ones with gaps."""
        from kinfed.data import TablePreprocessing  # with pyarrow, which only tables need

        return () if self.run.privacy is not None else TablePreprocessing.outputs_with_effects(self.problem)

    @property
    def divisor(self) -> float | None:
        """Number that features are divided by, if `scaling` is one."""
        if self.scaling in (STANDARD, NONE):
            return None
        try:
            number = float(self.scaling)
        except ValueError:
            raise unknown_name("scaling", self.scaling, (STANDARD, NONE, "a number")) from None
        if not 0 < number < float("inf"):
            raise ConfigError(f"scaling divides by a positive number; got {self.scaling}")
        return number

    def needed_updates(self, called: int) -> int:
        """Number of updates without which a round with this number of `called` clients does not count."""
        rule = self.run.robust_rule
        needed = min(self.quorum, called) if self.quorum else called // 2 + 1
        return needed if rule is None else max(needed, rule.least)

    @cached_property
    def run(self) -> RunConfig:
        """The configuration of the run; settings of deployments that decide results are options of its data set."""
        what = ("target",) if self.target.strip() else ("classes",)
        data = {name: getattr(self, name) for name in (*what, "features", "scaling", "test_fraction", "clients")}
        method = LOCAL if self.question else self.method.strip()
        owned = ("model.", "robust.")
        sets = tuple(text if text.startswith(owned) else f"{method}.{text}" for text in self.options.split())
        fixed = {
            "dataset": {"name": "deployment", **data}, "algorithms": method, "seeds": (self.seed,),
            "checkpoint_every": 1, "save_models": False,
        }  # fmt: skip
        return make_config(None, {**RUN_DEFAULTS, **self.run_settings, **fixed}, sets)

    @cached_property
    def algorithm(self) -> AnyAlgorithm:
        method = LOCAL if self.question else self.method.strip()
        if list(self.run.algorithms) != [method]:
            raise ConfigError(f"a deployment runs one method, given by its name; got {self.method!r}")
        options = dict(self.run.algorithms[method])
        if (name := options.pop("method")) != method:
            # The owners of nodes say which methods they allow.
            raise ConfigError(f"method says {method}, and the options method={name}; give the name once")
        return make_algorithm(name, self.run.training, options)

    @property
    def validation_share(self) -> float:
        needed = self.run.validation != "auto" or "needs validation" in self.algorithm.traits
        return self.common_validation if needed and self.search is None else 0.0

    @property
    def common_validation(self) -> float:
        """Share of training examples that methods of a search keep for validation, where they need some."""
        return AUTOMATIC_VALIDATION if self.run.validation == "auto" else self.run.validation

    @property
    def folder(self) -> Path:
        return Path(self.out).expanduser()

    def fingerprint(self) -> str:
        """Digest of what decides results; more rounds only continue a run, unless noise was planned for them."""
        planned = self.run.dp_epsilon is not None or self.run.user_epsilon is not None
        rounds = self.run.rounds if planned else 1
        run = replace(self.run, rounds=rounds).fingerprint()
        asked = {DESCRIBE: {"ask": DESCRIBE}, EVALUATE: {"ask": EVALUATE, "judged": self.judged}}.get(self.question)
        asked = asked if self.search is None else self.search.dump()
        return run if asked is None else f"{run}-{storage.record_digest(asked)[:8]}"


def describe_setting(name: str) -> tuple[Any, str]:
    """The default of a setting, "" if there is none, and its one line of text."""
    kind = Deployment if name in declared(Deployment) else RunConfig
    default = RUN_DEFAULTS.get(name, kind.__dataclass_fields__[name].default)
    if isinstance(default, Named):
        default = default.name
    if isinstance(default, tuple):
        default = ",".join(map(str, default))
    return "" if default is None else default, declared(kind)[name].text


def distinct(what: str, text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names or len(set(names)) < len(names):
        raise ConfigError(f"{what} are different names separated by commas; got {text!r}")
    return names
