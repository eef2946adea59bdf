"""The result of a fit, for every site alone, with the others and as chosen, and the models that it hands over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_type_hints

import numpy as np

from kinfed.core import make_options, storage
from kinfed.data import Federation, Problem, encodings
from kinfed.engine import METRICS, Metric
from kinfed.errors import ConfigError, StorageError, unknown_name
from kinfed.newcomers import RunInMemory, adopt, as_pipeline, learn_alone
from kinfed.runs import MAJORITY
from kinfed.serving import ModelPipeline
from kinfed.tabular.fit_settings import FitSettings
from kinfed.tabular.portfolio import ALONE, LOCAL, Contender

RECORD, MODELS_FOLDER, SERVER_FILE, PAGE = "fit.json", "models", "server.safetensors", "fit.html"
SITES_FOLDER, RUNS = "sites", "runs"
FORMAT = 5
_NOT_RECORDED = ("folder", "models", "server")
_OVERALL = ("overall", "overall_by_rows", "overall_by_choice")


@dataclass(frozen=True)
class Estimate:
    """A figure of a site on its test rows, with its 95 % interval; None if it is undefined there."""

    value: float | None
    low: float | None = None
    high: float | None = None
    at_least: float | None = None  # of a gain: it is above this one, at 95 %

    @property
    def is_shown(self) -> bool:
        """Tell whether test rows show a gain."""
        return self.at_least is not None and self.at_least > 0

    @property
    def is_clear(self) -> bool:
        """Tell of a gain whether its interval excludes zero."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


@dataclass(frozen=True)
class Calibration:
    """What a deployed model says of test rows, beside what was true of them: the probability of the second of two
    classes and its share, that of the likeliest of several and how often it was right, or a number and the true one."""

    gap: Estimate  # mean truth less mean prediction
    predicted: float  # on average
    bins: tuple[tuple[float, float, float, int], ...]  # equal parts: mean prediction, mean truth, its error, rows


@dataclass(frozen=True)
class ContenderRecord:
    name: str
    title: str
    method: str
    model: str  # personal or server
    network: str  # kind of model that was chosen for it
    options: dict[str, Any]  # of the method; what is not here is the default
    validation: float  # of the metric, over the validated rows of all sites
    mean: float  # μ: mean advantage over learning alone
    spread: float  # τ: how much sites differ in it
    bytes_up: int = 0  # that a site sends in a round; 0 where it was not fitted
    sends: tuple[str, ...] = ()  # what these are: fields of its message
    hands_on: bool = False  # the server passes it on to other sites
    run: str = ""  # the folder in runs/ that it was fitted in; "" if it was not


@dataclass(frozen=True)
class SiteRecord:
    site: str
    train_rows: int
    validated_rows: int
    test_rows: int
    rare_rows: int | None  # of the test rows, those of the rarer of two classes; None unless there are two
    chosen: str  # a contender, by the folds
    together: str | None  # the best contender that learns with others
    expected: float  # α̂ of what was chosen, over learning alone, by validation rows
    expected_together: float
    baseline: Estimate  # the most frequent class, or the mean, of its own training rows
    alone: Estimate
    one_model: Estimate
    with_others: Estimate  # of `together`
    deployed: Estimate  # of what it is handed
    gain: Estimate  # of what it is handed over alone, positive is better
    gain_together: Estimate  # of `together` over alone
    rare_class: str = ""  # which of two classes is the rarer among the test rows
    gain_chosen: Estimate = Estimate(None)  # of `chosen` over alone
    expected_gain: Estimate = Estimate(None)  # of `chosen` in the score that chose, test rows and drift included
    shares: dict[str, float] = field(default_factory=dict)  # of contenders, in what it is handed
    most_it_costs: float | None = None  # in expected log loss against alone; None if nothing is promised
    set_rows: int = 0  # test rows that calibrate its prediction sets
    covered: float | None = None  # share of these inside sets of 90 %, each by a threshold that it had no part in
    set_size: float | None = None  # mean number of classes in these, or the width of intervals
    calibration: Calibration | None = None  # of what it is handed; None with too few test rows


@dataclass(frozen=True)
class ReferenceRecord:
    """What a data scientist would take instead (kinfed.tabular.references), on the same test rows."""

    name: str
    title: str
    pooled: bool  # it needs the rows of all sites in one place
    value: float | None  # of the metric, the mean over sites
    by_rows: float | None  # the same of all rows, as the metric is defined for these
    ahead: Estimate  # by how much what sites are handed is better, the mean over sites; positive is better
    sites: tuple[float | None, ...]  # of every site


@dataclass(frozen=True)
class ColumnWorth:
    """What a column that not every site has (kinfed.data.preprocessing.own_columns) buys at a site, beyond the columns
    of all: by how much it lowers the loss of a row, with its standard error; None if too few rows tell."""

    column: str
    site: str
    held: bool  # the site has it
    gain: float | None
    error: float | None

    @classmethod
    def of_sites(cls, names: Sequence[str], own: Sequence[Sequence[encodings.OwnColumn]]) -> tuple[ColumnWorth, ...]:
        pairs = zip(names, own, strict=True)
        return tuple(
            cls(one.name, site, one.held, one.gain, one.gain_error) for site, columns in pairs for one in columns
        )


@dataclass(frozen=True, repr=False)
class FitResult:
    """The outcome of `kinfed.fit`: what every site has chosen, what it gains, and its model.

    `sites` has a SiteRecord each, `contenders` what was tried, `overall` the mean gain over sites with its interval;
    `model(site)` takes raw rows, and `predict(rows, site)` says what it makes of them."""

    problem: Problem
    metric: str
    table: str
    settings: dict[str, Any]
    trials: int  # of every method, finished
    left_out: dict[str, str]
    contenders: tuple[ContenderRecord, ...]
    sites: tuple[SiteRecord, ...]
    overall: Estimate  # mean gain over sites of what they are handed, every site alike
    notes: tuple[str, ...]  # on the table
    statistics_bytes: int  # that a site sends once, on average: what columns hold
    target: str = ""  # the column that is predicted, where it has a name
    class_rows: tuple[int, ...] = ()  # training rows of every class, at all sites together
    baseline: str = MAJORITY  # what `SiteRecord.baseline` predicts
    newcomer: str = ALONE  # the contender that suits a site that was not there
    weights: str = ""  # which rows or classes count more than others, in words
    overall_by_rows: Estimate = Estimate(None)  # the same, every test row alike
    overall_by_choice: Estimate = Estimate(None)  # `overall` in the score that chose, where that is another
    choice_metric: str = ""  # the proper score that contenders were chosen by
    drift: float = 0.0  # by which test rows of all sites lower what validation rows had promised, in that score
    apart: Literal["", "site", "consortium"] = ""  # of one site, or of all, where their rows were never in one place
    deploy: str = "chosen"  # what sites are handed: safe, chosen or certified
    own_columns: tuple[ColumnWorth, ...] = ()  # every column that some sites lack, at every site
    references: tuple[ReferenceRecord, ...] = ()  # none if they were not asked for, or cannot predict the target
    folder: Path | None = None
    models: dict[str, ModelPipeline] = field(default_factory=dict, repr=False)  # by site, if not kept in a folder
    server: ModelPipeline | None = field(default=None, repr=False)

    def __repr__(self) -> str:
        chosen = Counter(one.chosen for one in self.sites)
        choices = ", ".join(f"{name} for {count}" for name, count in chosen.most_common())
        return f"<FitResult {self.table}: {len(self.sites)} sites, {self.metric}; {choices}>"

    def __str__(self) -> str:
        from kinfed.tabular.site_page import short_table

        return f"{self!r}\n{short_table(self, len(self.sites)).text()}"

    @property
    def known_metric(self) -> Metric:
        return METRICS.named(self.metric)

    @cached_property
    def _by_name(self) -> dict[str, SiteRecord]:
        return {one.site: one for one in self.sites}

    def site(self, name: str) -> SiteRecord:
        if name not in self._by_name:
            error = unknown_name("site", name, self._by_name)
            raise ConfigError(f"{error}. A new site uses the server's model: leave the name out")
        return self._by_name[name]

    def contender(self, name: str) -> ContenderRecord:
        return next(one for one in self.contenders if one.name == name)

    def model(self, site: str | None = None) -> ModelPipeline:
        """The model of a site: raw rows in, classes or numbers out. Without a name, or for a site that was not there,
        ask for the server's: `model()`."""
        if site is None:
            if self.server is not None:
                return self.server
            if self.folder is None or not server_path(self.folder).exists():
                raise ConfigError("there is one site, and so no model of all sites; name the site")
            return ModelPipeline.read(server_path(self.folder))
        self.site(site)
        return self.models[site] if self.folder is None else ModelPipeline.read(site_path(self.folder, site))

    def predict(self, rows: Any, site: str | None = None) -> list[str] | np.ndarray[Any, Any]:
        return self.model(site).predict(rows)

    def predict_proba(self, rows: Any, site: str | None = None) -> np.ndarray[Any, Any]:
        return self.model(site).predict_proba(rows)

    # ---- files ----

    def to_json(self) -> dict[str, Any]:
        record = {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in _NOT_RECORDED}
        record["problem"] = self.problem.to_json()
        record["contenders"], record["sites"] = ([asdict(one) for one in record[n]] for n in ("contenders", "sites"))
        for name in ("references", "own_columns"):
            record[name] = [asdict(one) for one in record[name]]
        for name in _OVERALL:
            record[name] = asdict(record[name])
        return {"format": FORMAT, **record}

    @classmethod
    def read(cls, folder: Path | str) -> FitResult:
        """Read what `kinfed fit` wrote."""
        record = storage.read_json(Path(folder) / RECORD, "the result of kinfed fit")
        return cls.from_json(record, Path(folder))

    @classmethod
    def from_json(cls, record: dict[str, Any], folder: Path | None = None) -> FitResult:
        """The result from what `to_json` gave; its models are in the folder."""
        if record.get("format") != FORMAT:
            raise ConfigError(
                f"{'this' if folder is None else folder / RECORD} is of another version of kinfed; fit again"
            )
        where = "the record" if folder is None else str(folder / RECORD)
        kinds = get_type_hints(cls)
        typed = {
            name: storage.as_record(kinds[name], value, f"{where}: {name}")
            for name, value in record.items()
            if name in kinds.keys() - {*_NOT_RECORDED, "problem"}
        }
        try:
            result = cls(**typed, problem=Problem.from_json(record["problem"]), folder=folder)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise StorageError(f"{where} is no result of kinfed fit: {error}; restore the file, or fit again") from None
        make_options(FitSettings, result.settings, f"{where}: settings")
        names, sites = {one.name for one in result.contenders}, len(result.sites)
        for one in result.sites:
            if unknown := {one.chosen, one.together or one.chosen, *one.shares} - names:
                raise StorageError(f"{where}: {one.site} has a model of {min(unknown)}, no contender; fit again")
        if any(len(one.sites) != sites for one in result.references):
            raise StorageError(f"{where}: references have a figure of each of the {sites} sites, and one has others")
        return result


def is_fit(folder: Path) -> bool:
    """Tell whether a folder holds a finished fit."""
    return (folder / RECORD).exists()


def site_path(folder: Path, site: str) -> Path:
    return folder / MODELS_FOLDER / SITES_FOLDER / f"{storage.file_name(site, any_letters=True)}.safetensors"


def server_path(folder: Path) -> Path:
    return folder / MODELS_FOLDER / SERVER_FILE


@dataclass(frozen=True)
class Newcomer:
    """The way of a new site to a model."""

    contender: Contender
    run: RunInMemory | None = None  # where it joins, in memory

    def model(self, name: str, rows: Federation, server: ModelPipeline | None) -> ModelPipeline:
        """Its model, from labelled rows of its own (kinfed.newcomers.adoption)."""
        label = self.contender.name
        if self.contender.model == "server" and server is not None:
            return ModelPipeline(server.module, server.inputs, {**server.about, "client": name})
        assert self.run is not None
        alone = self.contender.method == LOCAL
        theta = learn_alone(self.run, rows, label) if alone else adopt(self.run, rows, label).model
        return as_pipeline(self.run, theta, label, name)


@dataclass(frozen=True)
class FittedModels:
    """Models with all that belongs to them."""

    sites: dict[str, ModelPipeline]
    server: ModelPipeline | None  # the one model of all; None with a single site
    chosen: dict[str, str]  # the contender of every site
    newcomer: Newcomer

    def save(self, folder: Path) -> None:
        storage.make_folder(folder / MODELS_FOLDER / SITES_FOLDER)
        for site, model in self.sites.items():
            model.save(site_path(folder, site))
        if self.server is not None:
            self.server.save(server_path(folder))
