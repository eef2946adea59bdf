"""The results of a run: tables, curves, a report, models. `kinfed.run` returns them, and `kinfed.load` reads them from
disk.

    result = kinfed.run(algorithms="local,fedavg,ditto", rounds=10, seeds=(0,), out="runs/a")
    result = kinfed.load("runs/a")
    result.to_frame(), result.history(), result.clients()      frames of pandas or polars
    result.answers()                                           what Kin found for every client
    result.plot(), result.report()                             a plotly figure, an HTML page
    result.personal_model("3", "ditto").predict(rows)

All of it is made from `result.run`, the record that pages are made from (kinfed.records.run_record).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kinfed.analysis import Comparison, average, single_run
from kinfed.api.progress import progress_display
from kinfed.api.result_views import client_rows, coefficient_rows, history_rows, plot, summary_rows, to_native
from kinfed.config import RunConfig
from kinfed.core import convert
from kinfed.data import Description
from kinfed.errors import ConfigError
from kinfed.records import Baseline, FinalRecord, Kind, RunFiles, RunRecord, client_number, headline_text, load_run
from kinfed.report import TextTable, findings, headline, main_columns, render, results_table
from kinfed.runs import Observer, Observers, RunOutcome, experiment, pick_result

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from kinfed.data import Federation
    from kinfed.engine import Builder, ModuleTask
    from kinfed.report import ClientShares
    from kinfed.serving import ModelPipeline
    from kinfed.serving import coefficients as fits


class RunResult:
    """The results of a run: what `kinfed.run` and `kinfed.load` return.

    `algorithms` are the labels of its methods, `result(label)` the final figures of one, `to_frame`, `history` and
    `clients` are tables by method, by round and by client, `plot` is a figure, `report` a page, and `personal_model`
    the model of one client. `folder` is the run folder, or None for a run in memory."""

    def __init__(self, *, folder: Path | None = None, outcome: RunOutcome | None = None) -> None:
        if folder is None and outcome is None:
            raise ValueError("a result needs a folder, or a run in this process")
        self.folder = folder
        self._outcome = outcome

    @classmethod
    def read(cls, folder: Path | str) -> RunResult:
        """Read a run folder. An unfinished run has the results so far."""
        result = cls(folder=Path(folder))
        result.run  # noqa: B018  (a folder that is no run is refused here, not at the first use)
        return result

    @cached_property
    def run(self) -> RunRecord:
        """The whole record: every method and seed with its rounds and clients, in plain values."""
        if self.folder is not None:
            return load_run(self.folder.resolve(), self.folder.resolve().name)
        assert self._outcome is not None
        return self._outcome.record()

    @cached_property
    def config(self) -> RunConfig:
        if self._outcome is not None:
            return self._outcome.config
        assert self.folder is not None
        return RunFiles(self.folder).config

    @property
    def algorithms(self) -> tuple[str, ...]:
        """Labels of the methods."""
        return tuple(self.run.config["algorithms"])

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(self.run.config["seeds"])

    # ---- results ----

    @property
    def results(self) -> Sequence[FinalRecord]:
        """One result per finished method and seed. After kinfed.run they also hold models and raw sums."""
        return self.run.results if self._outcome is None else self._outcome.results

    def result(self, label: str | None = None, seed: int | None = None) -> Any:
        """The final result of one method and seed; by default the only method and the first seed. A `FinalRecord`, or
        for a run made in this process a `MethodResult`."""
        return pick_result(self.results, self.algorithms, self.seeds, label, seed)

    @property
    def baselines(self) -> tuple[Baseline, ...]:
        """Baselines, which clients reach without a model, by seed."""
        return tuple(self.run.baselines.values())

    def describe(self, seed: int | None = None) -> Description:
        """Describe who holds what under a seed, by default the first."""
        chosen = self.seeds[0] if seed is None else seed
        if chosen not in self.run.federations:
            raise ConfigError(f"the run has no seed {chosen}; it has {', '.join(map(str, self.run.federations))}")
        return self.run.federations[chosen]

    # ---- tables ----

    def to_frame(self, backend: str | None = None) -> Any:
        """A table with a row per method and seed: the final results. `backend` is pandas, polars or pyarrow, by default
        the first one installed."""
        return to_native(summary_rows(self.run), backend)

    def history(self, backend: str | None = None) -> Any:
        """A table with a row per method, seed and round: costs, and metrics if the round was evaluated."""
        return to_native(history_rows(self.run), backend)

    def clients(self, backend: str | None = None) -> Any:
        """A table with a row per method, seed and client, after the last round."""
        return to_native(client_rows(self.run), backend)

    def coefficients(
        self, label: str | None = None, seed: int | None = None, backend: str | None = None, *, profile: bool = False
    ) -> Any:
        """A table with a row per coefficient of a method that learns by sums (lmm, glmm, cox): estimate, standard
        error, 95 % interval and p-value, in the units of the table; and the odds, rate or hazard ratio. `profile` adds
        intervals by the profile likelihood (lmm), also of the deviations between and within sites."""
        from kinfed.serving import coefficients

        fit = coefficients.coefficients_of(self.run, label, seed)
        return to_native(coefficient_rows(self._profiled(fit.label, fit.seed) if profile else fit), backend)

    def _profiled(self, label: str, seed: int) -> fits.Coefficients:
        from kinfed.newcomers import RunInMemory, profiled

        if self.folder is not None:
            return profiled(self.folder, label, seed=seed)
        assert self._outcome is not None
        return profiled(RunInMemory.of_result(self._outcome, label, seed=seed), label)

    def importance(self, label: str | None = None, seed: int | None = None, backend: str | None = None) -> Any:
        """A table with a row per column of the data: its share of all gains in the shared trees of a method."""
        from kinfed.serving import importance

        fit = importance.importance_of(self.run, label, seed)
        return to_native([{"column": name, "share": share} for name, share in fit.shares], backend)

    def partial_dependence(self, label: str | None = None, seed: int | None = None, backend: str | None = None) -> Any:
        """A table with a row per step of the curves along the most important columns: what shared trees say on average
        up to `until`, in the target's unit or in log-odds."""
        from kinfed.serving import importance

        fit = importance.importance_of(self.run, label, seed)
        rows = [
            {"column": one.name, "until": end, "level": level}
            for one in fit.curves
            for end, level in zip((*one.x, float("inf")), one.y, strict=True)
        ]
        return to_native(rows, backend)

    def answers(self, label: str | None = None, seed: int | None = None) -> tuple[ClientShares, ...]:
        """Shares by Kin: how much every client learns alone, from all and from its group, and what it gains over
        training alone where the run has Local too. `str` of an answer is a sentence."""
        from kinfed.report import answers

        by_method = {method.algorithm: answers(method) for method in self.comparison.methods}
        labels = [name for name, by_seed in by_method.items() if by_seed] if label is None else [label]
        chosen = self.seeds[0] if seed is None else seed
        if len(labels) != 1 or chosen not in by_method.get(labels[0], {}):
            raise ConfigError(f"the run has no shares of clients by {label or 'one Kin'} with seed {chosen}")
        return tuple(by_method[labels[0]][chosen])

    # ---- pictures and pages ----

    @cached_property
    def comparison(self) -> Comparison:
        """The methods side by side, as pages compare them."""
        return single_run(self.run)

    def plot(self, what: str = "rounds", kind: Kind = "personal") -> Figure:
        """A plotly figure of the headline metric over "rounds", over "bytes" sent, or by "clients"; for the clients'
        "personal" models or the "server"'s."""
        return plot(self.comparison, what, kind)

    def report(self, out: Path | str | None = None) -> Path:
        """Write the HTML report, by default report.html in the run folder (here, for a run in memory)."""
        from kinfed.analysis import compare
        from kinfed.report import report_page, write_page

        place = Path() if self.folder is None else self.folder
        target = place / "report.html" if out is None else Path(out)
        return write_page(target, report_page([self.run], compare([self.run])))

    def __repr__(self) -> str:
        metric = self.comparison.metric
        means = {method.algorithm: average(method.final("personal", metric)) for method in self.comparison.methods}
        figures = [f"{k} {headline_text({metric: v.mean}, metric).split()[-1]}" for k, v in means.items() if v]
        seeds = f"{len(self.seeds)} seed{'' if len(self.seeds) == 1 else 's'}"
        state = "" if all(trial.finished for trial in self.run.trials) and self.run.trials else ", unfinished"
        figures_text = ", ".join(figures[:6]) + (f", and {len(figures) - 6} more" if len(figures) > 6 else "")
        return f"<RunResult {self._place}: {metric} {figures_text or 'of nothing yet'}; {seeds}{state}>"

    def _table(self) -> TextTable:
        comparison, metric = self.comparison, self.comparison.metric
        worst = "worst10" if metric == "accuracy" else f"{metric}_worst10"
        keys = (f"personal_{metric}", f"personal_{worst}", f"server_{metric}", "mb_per_round", "seconds")
        return results_table(comparison, [column for column in main_columns(comparison) if column.key in keys])

    def __str__(self) -> str:
        return f"{headline([self.run])}\n{self._table().text()}" if self.run.trials else repr(self)

    def _repr_html_(self) -> str:
        return render(
            "result.html", "kinfed.api", heading=headline([self.run]), place=self._place, table=self._table(),
            sentences=[*self.run.notes, *(findings(self.comparison)[:2] if self.run.trials else ())],
        )  # fmt: skip

    @property
    def _place(self) -> str:
        return "in memory" if self.folder is None else str(self.folder)

    # ---- models ----

    def personal_model(
        self, client: str | int, label: str | None = None, seed: int | None = None, build: Builder | None = None
    ) -> ModelPipeline:
        """A client's own model, ready to use: raw rows in, classes out; `.module` is the plain torch module. Give the
        client's name or number. Pass `build`, the function that builds the module, if the run was read from disk and
        its model is not built in."""
        if self._outcome is not None:
            return self._outcome.personal_model(client, label, seed)
        from kinfed.serving import model_of_run

        assert self.folder is not None
        names = self.describe(seed).names
        return model_of_run(self.folder, names[client_number(names, client)], label, seed, build)

    def server_model(
        self, label: str | None = None, seed: int | None = None, build: Builder | None = None
    ) -> ModelPipeline | None:
        """The server's model, if there is a single one for all clients."""
        if self._outcome is not None:
            return self._outcome.server_model(label, seed)
        from kinfed.serving import server_model_of_run

        assert self.folder is not None
        return server_model_of_run(self.folder, label, seed, build)

    # ---- what only a run in this process has ----

    @property
    def federations(self) -> Mapping[int, Federation]:
        """The data, by seed."""
        return self._in_process("data").federations

    @property
    def task(self) -> ModuleTask:
        """The model as an engine trains it; of several architectures the server's."""
        return self._in_process("task").server_task

    def _in_process(self, what: str) -> RunOutcome:
        if self._outcome is None:
            raise ConfigError(
                f"a run folder holds no {what}: ask the result of kinfed.run for it, in the process that ran it; "
                "`describe` says who holds what"
            )
        return self._outcome


def run(
    config: RunConfig | Path | str | None = None, *, out: Path | str | None = None, resume: bool = False,
    extend: bool = False, federation: Federation | None = None, model: str | Mapping[str, Any] | Builder | None = None,
    observer: Observer | None = None, progress: bool | None = None, should_stop: Callable[[], bool] = lambda: False,
    **settings: Any,
) -> RunResult:  # fmt: skip
    """Run methods on a federation, show the progress, and return the results.

    - `config`: a RunConfig, or the path of a TOML file; `settings` by name replace its values.
    - `federation`: data of your own, in place of a data set and its partition.
    - `model`: a name, a dictionary {"name": ..., ...} with options, or a function that builds an nn.Module, either
      without arguments or from the shape of an example and the number of classes.
    - `loss` (a setting): a name, or a function or nn.Module of outputs and targets with one value per example.
    - `out`: the run folder. Such a run can be resumed (`resume`) or extended (`extend`): pass the total number of
      `rounds`, and the `seeds` and `algorithms` to add; the results are the same as if everything had been run at once.
      Without `out`, everything stays in memory.
    - `progress`: True for a progress bar, False for silence. By default there is a bar on a terminal, a line in a
      notebook and nothing elsewhere.
    - `observer` is notified of every round (kinfed.runs.observer); `should_stop` is called after every round.

    Example:

        >>> result = kinfed.run(algorithms="local,ditto", clients=4, rounds=2, steps=2, seeds=[0])
        >>> result.algorithms
        ('local', 'ditto')
        >>> 0 <= result.result("ditto").personal["accuracy_mean"] <= 1
        True
    """
    extended = Path(out) if extend and out is not None else None
    chosen, build = experiment.chosen_config(config, model, settings, extended)
    with progress_display(chosen, progress) as display:
        watching = display if observer is None else Observers((display, observer))
        outcome = experiment.run(
            chosen, out=out, resume=resume, extend=extend, federation=federation, model=build, observer=watching,
            should_stop=should_stop,
        )  # fmt: skip
    return RunResult(folder=outcome.folder, outcome=outcome)


def load(
    folder: Path | str, *, plugins: Path | str | Sequence[Path | str] = (), trust_plugins: bool = False
) -> RunResult:
    """Read the results of a run from its folder; an unfinished run has the results so far.

    Reading runs no code of a folder. What needs the plugins of the run (`config`, models that a plugin registers) asks
    for them:

    - `plugins`: their files, named by you;
    - `trust_plugins`: run those that the folder has recorded, if they are unchanged.

    Example:

        >>> _ = kinfed.run(algorithms="local", clients=3, rounds=1, steps=1, seeds=[0], out="runs/first")
        >>> kinfed.load("runs/first").algorithms
        ('local',)
    """
    convert(RunConfig, "plugins", plugins)
    if trust_plugins:
        RunFiles(folder).load_plugins()
    return RunResult.read(folder)
