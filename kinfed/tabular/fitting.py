"""The shortest way from a table with a column of sites to a good, explained model per site.

    result = kinfed.fit("visits.csv", client_column="hospital", label_column="outcome", out="fitted")
    result.model("north").predict(rows)         raw rows in, names of classes (or numbers) out
    result.model().predict(rows)                the server's model, for a site that was not there

    1  a share of every site's rows is set aside as test rows (or those that a column, or the data set, names)
    2  every method of the portfolio is tried with the same number of settings in folds of the other rows (search.py)
    3  every site takes what its validation rows, and those of all others, speak for (decision.py)
    4  what was taken is fitted on all training rows and measured on the test rows: alone, together, the gain

Files: fit.json (the result), fit.html (the page), models/sites/SITE.safetensors and models/server.safetensors
(`ModelPipeline.read`), runs/ (ordinary run folders of what was fitted: `kinfed report`, `export`, `gain`, `adopt`),
search/ (finished folds, for --resume), plan.json (what of them counts) and audit.json (doubts about the data).
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import torch
from torch import Tensor

from kinfed.algorithms import make_algorithm, sample_update
from kinfed.core import make_options, storage
from kinfed.data import Federation, Resplit, as_table, audited, example_weights, findings, make_federation
from kinfed.data.sources import SOURCES, Source, TableOptions, load_source, read_table, source_from_table
from kinfed.errors import ConfigError, DataError
from kinfed.newcomers import RunInMemory
from kinfed.records import JobFolder
from kinfed.runs import Interrupted, RunOutcome, baseline_name, run
from kinfed.serving import ModelPipeline
from kinfed.tabular.decision import FitDecision, Standing, decide, judged_test, only_choice
from kinfed.tabular.fit_result import (
    MODELS_FOLDER,
    RECORD,
    RUNS,
    ColumnWorth,
    ContenderRecord,
    FitResult,
    FittedModels,
    Newcomer,
    ReferenceRecord,
)
from kinfed.tabular.fit_settings import FitSettings
from kinfed.tabular.handover import (
    CERTIFIED,
    SAFE,
    Handover,
    OutputsOfAll,
    plain_handover,
    residual_variance,
    safe_handover,
    single_handover,
)  # fmt: skip
from kinfed.tabular.portfolio import ALONE, BASELINE, LOCAL, ONE_MODEL, Contender, is_tried, methods_of, run_name
from kinfed.tabular.references import ReferenceData
from kinfed.tabular.search import (
    FitObserver,
    FoldStore,
    Search,
    TimeBudget,
    Tries,
    Unobserved,
    method_config,
    outputs_on_test,
)  # fmt: skip
from kinfed.tabular.site_figures import (
    HANDED,
    ExpectedGains,
    SiteFigures,
    judged_baseline,
    mean_ahead,
    reference_records,
    site_records,
)

PLAN = "plan.json"
AUDIT = "audit.json"
SITE = "site"  # the column that names the file of a row, where a table is several files


class AskedSites(Protocol):
    """Sites that are asked where they are, such as kinfed.deploy.Sites."""

    def fit(self, settings: FitSettings, out: Path | str, **more: Any) -> FitResult:
        """The result of a search at them."""


def fit(
    table: Any = None, *, sites: AskedSites | None = None, out: Path | str | None = None, resume: bool = False,
    minutes: float | None = None,
    settings: FitSettings | None = None, data: Path | None = None, page: bool = True,
    observer: FitObserver | None = None, should_stop: Callable[[], bool] = lambda: False, accept: str = "",
    **options: Any,
) -> FitResult:  # fmt: skip
    """Fit a model for every site of a table, and choose for each whether it learns alone or with others.

    - `table`: a CSV or Parquet file, several of them (one per site), a frame, or the name of a data set with sites.
    - `options`: fields of FitSettings (algorithms, models, trials, folds, rounds, metric, ...) and, for tables, of
      kinfed.data.sources.TableOptions (client_column, label_column; also split_column, ignore, columns, task).
    - `sites` in place of a table: running nodes, each with rows of its own that stay there (kinfed.deploy.Sites).
    - `minutes` bounds the time; with `out` everything is written there and can be resumed (`resume`).
    - The data are audited first; `accept` names findings that are not to be refused (kinfed.data.audit).

    Example:

        >>> sick, age = [i % 3 == 0 for i in range(120)], [i * 7 % 90 for i in range(120)]
        >>> rows = pa.table({"site": list("aabbcc") * 20, "age": age, "sick": sick})
        >>> columns = {"client_column": "site", "label_column": "sick"}
        >>> result = kinfed.fit(rows, **columns, algorithms="ditto", trials=1, rounds=2, folds=2)
        >>> [site.site for site in result.sites]
        ['a', 'b', 'c']
    """
    own = {name: options.pop(name) for name in list(options) if name in FitSettings.__dataclass_fields__}
    if settings is not None and own:
        raise ConfigError("give either FitSettings or settings by name, not both")
    settings = FitSettings(**own) if settings is None else settings
    if sites is not None:
        if table is not None or out is None or minutes is not None or data is not None:
            raise ConfigError(
                "sites have their own rows and time: fit(sites=..., out=...) takes no table, data, minutes"
            )
        return sites.fit(settings, out, **options)
    if minutes is not None and not minutes > 0:
        raise ConfigError(f"minutes must be above 0; got {minutes}")
    source = replace(load_sites(table, options, data, settings.seed), is_val=None)
    job = SiteFit(source, settings, observer, should_stop, accept=accept)
    findings.refuse(job.data.findings, accept)
    settings = job.settings
    if settings.folds > (most := int(job.data.train.count.max())):
        raise ConfigError(
            f"folds = {settings.folds}: the training rows of each site are shared out among the folds, and the largest "
            f"site has {most} training rows; take fewer folds"
        )
    budget = TimeBudget(None if minutes is None else 60 * minutes)
    if out is None:
        return job.execute(None, budget, page)
    described = {"table": source.name, "options": source.options, **settings.dump()}
    contents = {"data": job.data.digest()}
    identity = hashlib.sha256(storage.to_json([described, contents]).encode()).hexdigest()[:16]
    with JobFolder.open(out, described, identity, contents=contents, resume=resume) as folder:
        storage.write_json(folder.path / AUDIT, findings.to_record(job.data.findings, accept))
        result = job.execute(folder.path, budget, page)
        folder.seal_files(RECORD, PLAN, AUDIT, f"{MODELS_FOLDER}/**/*.safetensors")
        return result


class SiteFit:
    """The fit of one table. `test_fraction` 0 leaves no test rows: models are chosen and fitted, and no gain is
    measured."""

    def __init__(
        self, source: Source, settings: FitSettings, observer: FitObserver | None = None,
        should_stop: Callable[[], bool] = lambda: False, test_fraction: float | None = None,
        accept: str = findings.EVERYTHING,
    ) -> None:  # fmt: skip
        self.source, self.should_stop = source, should_stop
        self.observer: FitObserver = Unobserved() if observer is None else observer
        share = settings.test_fraction if test_fraction is None else test_fraction
        # Test rows by label: a site with eight rows of a class has two of them among its test rows, and never none.
        options = {"test_fraction": share}
        data = make_federation(
            source, "column", None, options, settings.seed, resplit=Resplit(), audit=accept != findings.EVERYTHING
        )
        self.data: Federation = audited(data, accept)
        rows, problem = self.data.train.count, self.data.problem
        self.settings = settings = settings.with_folds(int(rows.median()), int(rows.max()))
        self.metric, self.choice_metric = settings.metric_for(problem), settings.choice_metric_for(problem)
        example_weights.class_weight_table(settings.class_weights, self.data.class_counts(), problem)  # refuses wrong
        self.methods = methods_of(settings.algorithms, self.data.num_clients, problem.kind)

    def execute(self, folder: Path | None, budget: TimeBudget, page: bool) -> FitResult:
        if folder is not None and (folder / RECORD).exists():
            return FitResult.read(folder)
        for note in self.data.notes:
            self.observer.note(note)
        store = FoldStore(None if folder is None else folder / "search")
        budget.used = store.seconds
        fits = sum(is_tried(number, one) for one in self.methods for number in range(self.settings.trials))
        self.observer.begin(fits * self.settings.folds + len(self.methods))
        search = self._make_search(store, budget)
        tries = self._search(search, folder)
        decision = decide(search, tries, self.choice_metric, self.metric)
        fitted = self._fit_all(decision, folder, budget)
        outputs = {one.name: outputs_on_test(fitted[one.name], one.name, one) for one in decision.fitted}
        figures = self._figures(outputs)
        handed = self._hand_over(decision, outputs, figures)
        expectations = ExpectedGains.of_test_rows(self.choice_metric, self.data, decision, outputs)
        with_handed = self._figures(outputs | {HANDED: handed.outputs})
        result = self._result(tries, decision, fitted, with_handed, handed, expectations)
        if self.choice_metric.name != self.metric.name:
            by_choice = mean_ahead(self.choice_metric, self.data, handed.outputs, outputs[ALONE])
            result = replace(result, overall_by_choice=by_choice)
        result = replace(result, references=self._references(handed, budget))
        models = self._models(decision, fitted, handed)
        if folder is None:
            return replace(result, models=models.sites, server=models.server)
        models.save(folder)
        result = replace(result, folder=folder)
        if page:
            from kinfed.tabular.site_page import write_page

            write_page(result, folder)
        storage.write_json(folder / RECORD, result.to_json())
        return result

    def choose_models(self) -> FittedModels:
        """Models of all sites, chosen and fitted in memory; nothing is measured on test rows."""
        budget = TimeBudget(None)
        search = self._make_search(FoldStore(None), budget)
        alone = self.methods == (LOCAL,) and self.settings.trials == 1
        decision = only_choice(search) if alone else decide(search, search.run(), self.choice_metric)
        return self._models(decision, self._fit_all(decision, None, budget), self._by_folds(decision))

    def _make_search(self, store: FoldStore, budget: TimeBudget) -> Search:
        return Search(
            self.source, self.data, self.settings, self.methods, self.metric.name, store, budget, self.observer,
            self.should_stop,
        )  # fmt: skip

    def _search(self, search: Search, folder: Path | None) -> Tries:
        """The tries; a search that ended before is not gone on with."""
        plan = None if folder is None else folder / PLAN
        if plan is not None and plan.exists():
            record = storage.read_json(plan, "the plan of a fit")
            search.settings = replace(self.settings, trials=record["trials"])
            search.methods, search.budget = tuple(record["methods"]), TimeBudget(None)
            return replace(search.run(), left_out=record["left_out"])
        tries = search.run(Standing(search, self.choice_metric).tell)
        for method, reason in tries.left_out.items():
            self.observer.note(f"{method} is left out: {reason}")
        if plan is not None:
            record = {"trials": tries.trials, "methods": list(tries.methods), "left_out": tries.left_out}
            storage.write_json(plan, record)
        return tries

    def _fit_all(self, decision: FitDecision, folder: Path | None, budget: TimeBudget) -> dict[str, RunOutcome]:
        """All fitted contenders on all training rows, by contender. Those of one kind of network share a run; but not
        those that keep some of these rows for validation with those that train on all."""
        results: dict[str, RunOutcome] = {}
        names = dict.fromkeys(run_name(one, decision.tries[one.name]) for one in decision.fitted)
        for name in sorted(names):
            contenders = [one for one in decision.fitted if run_name(one, decision.tries[one.name]) == name]
            network, dataset = decision.tries[contenders[0].name].model, {"name": self.source.name}
            self.observer.step(f"{', '.join(one.title for one in contenders)} on all training rows")
            algorithms = {one.name: {"method": one.method, **decision.tries[one.name].options} for one in contenders}
            config = method_config(self.settings, self.metric.name, network, algorithms, dataset=dataset)
            out = None if folder is None else folder / RUNS / name
            try:
                result = run(
                    config, out=out, resume=out is not None and (out / "config.json").exists(), federation=self.data,
                    should_stop=lambda: self.should_stop() or budget.is_over(),
                )  # fmt: skip
            except Interrupted:
                if self.should_stop():
                    raise
                raise Interrupted(
                    "time was up while the chosen methods were fitted on all training rows; what is done is saved, and "
                    "--resume with more minutes goes on from there"
                ) from None
            results |= {one.name: result for one in contenders}
        return results

    def _figures(self, outputs: Mapping[str, Tensor]) -> SiteFigures:
        judged = {name: judged_test(one, self.data) for name, one in outputs.items()}
        return SiteFigures(self.metric, {**judged, BASELINE: judged_baseline(self.data)})

    def _hand_over(self, decision: FitDecision, outputs: dict[str, Tensor], figures: SiteFigures) -> Handover:
        """What every site is handed, by the setting `deploy`."""
        data, names, settings = self.data, list(outputs), self.settings
        rows, owner = data.train.rows[decision.places], data.train.owner[decision.places]
        one_number = data.problem.is_single_number
        variance = residual_variance(decision.outputs[ALONE], data, rows, owner) if one_number else None
        test = OutputsOfAll.of_rows(outputs, names, data, data.test.rows, data.test.owner, variance)
        if not one_number and not data.problem.classifies:
            self.observer.note(
                "every site is handed the one model that was chosen by its validation rows: mixtures, certificates and "
                "prediction sets are for classes and single numbers"
            )
            return single_handover(names, decision.chosen, test)
        if settings.deploy == SAFE:
            validated = OutputsOfAll.of_rows(decision.outputs, names, data, rows, owner, variance)
            return safe_handover(names, decision.chosen, validated, test, data, settings.seed, settings.alone_prior)
        taken = decision.chosen
        if settings.deploy == CERTIFIED:
            taken = [name if figures.gain(name, k).is_shown else ALONE for k, name in enumerate(taken)]
        return plain_handover(names, taken, test)

    def _by_folds(self, decision: FitDecision) -> Handover | None:
        """What the folds chose, with prediction sets by the rows that they validated: of models of fewer rows, so that
        coverage is not exact even with own rows alone. None without folds, or where sets are not known."""
        data, places, names = self.data, decision.places, list(decision.outputs)
        one_number = data.problem.is_single_number
        if not len(places) or not (one_number or data.problem.classifies):
            return None
        rows, owner = data.train.rows[places], data.train.owner[places]
        variance = residual_variance(decision.outputs[ALONE], data, rows, owner) if one_number else None
        validated = OutputsOfAll.of_rows(decision.outputs, names, data, rows, owner, variance)
        return plain_handover(names, decision.chosen, validated)

    def _result(
        self, tries: Tries, decision: FitDecision, fitted: dict[str, RunOutcome], figures: SiteFigures,
        handed: Handover, expectations: ExpectedGains,
    ) -> FitResult:  # fmt: skip
        data = self.data
        by_sites, by_rows = figures.overall()
        return FitResult(
            problem=data.problem, metric=self.metric.name, table=self.source.name, settings=self.settings.dump(),
            trials=tries.trials, left_out=tries.left_out,
            contenders=tuple(self._contender(one, decision, fitted) for one in decision.contenders),
            sites=site_records(data, decision, figures, handed, expectations), drift=expectations.drift,
            overall=by_sites, overall_by_rows=by_rows,
            choice_metric=self.choice_metric.name, deploy=self.settings.deploy,
            notes=tuple(data.notes),
            statistics_bytes=fitted[ALONE].federations[self.settings.seed].statistics_bytes[1] // data.num_clients,
            target=_target_name(self.source.options),
            class_rows=tuple(data.class_counts().sum(0).tolist()) if data.problem.has_classes else (),
            baseline=baseline_name(data.problem), weights=self._weights(), newcomer=decision.newcomer.name,
            own_columns=ColumnWorth.of_sites(data.names, data.own_columns) if data.own_columns else (),
        )  # fmt: skip

    def _weights(self) -> str:
        """Which rows count more than others, for readers."""
        rule, column = self.settings.class_weights, self.source.options.get("weight_column")
        rows = f"rows count by the column {column}, in training and in all figures" if column else ""
        classes = "" if rule == example_weights.NONE else f"classes count in training by the rule {rule}"
        return " and ".join(part for part in (rows, classes) if part)

    def _contender(self, one: Contender, decision: FitDecision, fitted: dict[str, RunOutcome]) -> ContenderRecord:
        chosen, advantage = decision.tries[one.name], decision.advantages.get(one.name)
        is_sent = one.name in fitted and one.name != ALONE
        return ContenderRecord(
            one.name, one.title, one.method, one.model, chosen.model, chosen.options, decision.validation[one.name],
            0.0 if advantage is None else advantage.mean, 0.0 if advantage is None else advantage.spread,
            run=run_name(one, chosen) if one.name in fitted else "",
            **(sent_message(fitted[one.name], one.name) if is_sent else {}),
        )  # fmt: skip

    def _references(self, handed: Handover, budget: TimeBudget) -> tuple[ReferenceRecord, ...]:
        """The usual alternatives; none for problems that these cannot predict, or once time is up."""
        problem = self.data.problem
        if not self.settings.references or not (problem.classifies or problem.is_single_number):
            return ()
        if budget.is_over():
            self.observer.note("time was up before references (ridge or logistic regression, trees) were fitted")
            return ()
        self.observer.step("references: the usual alternatives")
        reference = ReferenceData.of(self.data, self.settings.seed)
        return reference_records(self.metric, self.data, reference.every(), reference.titles(), handed.outputs)

    def _models(self, decision: FitDecision, fitted: dict[str, RunOutcome], handed: Handover | None) -> FittedModels:
        """Models of all sites; where nothing is `handed` over, what the folds chose."""
        kinds = {one.name: one.model for one in decision.contenders}
        chosen = dict(zip(self.data.names, decision.chosen, strict=True))

        def part(site: str, name: str) -> ModelPipeline:
            if kinds[name] != "server":
                return fitted[name].personal_model(site, name)
            model = fitted[name].server_model(name)
            assert model is not None  # of FedAvg
            return ModelPipeline(model.module, model.inputs, {"client": site, **model.about})

        models = {}
        for k, (site, name) in enumerate(chosen.items()):
            if handed is None:
                models[site] = part(site, name)
                continue
            shares = handed.shares_of(k)
            mixture = ModelPipeline.mixture([part(site, name) for name in shares], list(shares.values()))
            models[site] = mixture.with_sets(handed.sets[k].thresholds) if handed.sets[k].thresholds else mixture
        server = fitted[ONE_MODEL].server_model(ONE_MODEL) if ONE_MODEL in fitted else None
        if server is not None and handed is not None and handed.new_site_sets:
            server = server.with_sets(handed.new_site_sets)
        one = decision.newcomer
        run = RunInMemory.of_result(fitted[one.name], one.name) if fitted[one.name].folder is None else None
        return FittedModels(models, server, chosen, Newcomer(one, run))


def sent_message(result: RunOutcome, label: str) -> dict[str, Any]:
    """The message of a site in a run in which all sites take part in every round, as fields of ContenderRecord."""
    method, config = result.result(label), result.config
    options = dict(config.algorithms[label])
    algorithm = make_algorithm(options.pop("method"), config.training, options)
    data, task = result.federations[method.seed], result.task
    population = data.population(method.seed)
    cohort = data.cohort(torch.arange(1), method.seed, 1)
    up = sample_update(algorithm, task, algorithm.init_server(task, population), cohort, population)
    size = (method.bytes_up - data.statistics_bytes[1]) / (method.rounds * data.num_clients)
    hands_on = "hands models on" in algorithm.traits
    return {"bytes_up": round(size), "sends": tuple(up.named()), "hands_on": hands_on}


def load_sites(table: Any, options: Mapping[str, Any], data: Path | None, seed: int) -> Source:
    """`options` are those of a table, or of the data set. Several files are one site each, called as the file is."""
    columns = {name: value for name, value in options.items() if value is not None}
    if isinstance(table, str) and table in SOURCES:
        source = load_source(table, data, seed, columns)
        if source.owners is None:
            raise ConfigError(f"{table} names no sites; fit takes a table with a column of sites (--client-column)")
        return source
    named = (table,) if isinstance(table, str | Path) else table
    is_files = isinstance(named, Sequence) and len(named) > 0 and all(isinstance(one, str | Path) for one in named)
    files = [Path(one) for one in named] if is_files else None
    if files is not None and len(files) > 1:
        if "client_column" in columns:
            raise ConfigError("several files are one site each, called as the files are; leave --client-column out")
        options_of_files = make_options(TableOptions, {**columns, "client_column": SITE}, "fit")
        name = ", ".join(str(file) for file in files)
        return source_from_table(join_files(files, options_of_files.encoding), options_of_files, name, files[0].parent)
    chosen = make_options(TableOptions, columns, "fit")
    rows, name = (
        (as_table(table), "the table") if files is None else (read_table(files[0], chosen.encoding), str(files[0]))
    )
    if chosen.client_column is None:
        raise ConfigError(
            f"which column of {name} names the site of each row? Give it with --client-column, or give one file per "
            f"site; columns: {', '.join(rows.column_names)}"
        )
    return source_from_table(rows, chosen, name, None if files is None else files[0].parent)


def join_files(files: Sequence[Path], encoding: str = "utf-8") -> pa.Table:
    """The rows of all files, with the column `site`. A column that a file lacks is missing in its rows; where files do
    not agree whether a column holds numbers, it holds text."""
    names = [file.name.partition(".")[0] for file in files]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise DataError(f"two files are called {twice[0]}; every site needs a name of its own: rename one")
    parts = []
    for name, file in zip(names, files, strict=True):
        part = read_table(file, encoding)
        if SITE in part.column_names:
            raise DataError(f"{file} has a column {SITE!r} already; join the files, and give --client-column {SITE}")
        parts.append(part.append_column(SITE, pa.array([name] * part.num_rows)))
    try:
        return pa.concat_tables(parts, promote_options="permissive")
    except pa.ArrowTypeError:
        return pa.concat_tables([_as_text(part, _disputed(parts)) for part in parts], promote_options="permissive")


def _disputed(parts: Sequence[pa.Table]) -> set[str]:
    """Columns of which the parts have types that no common one holds."""
    disputed = set()
    for name in {name for part in parts for name in part.column_names}:
        schemas = [pa.schema([part.schema.field(name)]) for part in parts if name in part.column_names]
        try:
            pa.unify_schemas(schemas, promote_options="permissive")
        except pa.ArrowTypeError:
            disputed.add(name)
    return disputed


def _as_text(part: pa.Table, names: set[str]) -> pa.Table:
    for name in names & set(part.column_names):
        place = part.column_names.index(name)
        part = part.set_column(place, name, part[name].cast(pa.string()))
    return part


def _target_name(options: Mapping[str, Any]) -> str:
    """The column that is predicted; of survival that of time."""
    return str(options.get("label_column") or options.get("time_column") or "")
