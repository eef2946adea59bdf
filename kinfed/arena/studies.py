"""Studies: cells of federations, models and values of a swept setting, all methods and seeds in each, as one table.

    result = kinfed.study("study.toml", out="studies/skew")
    print(result.table())

Every cell is a run folder, which `report`, `compare`, `gain` and the board read like any other. Repeating the command
runs what is missing: a study that was stopped goes on, a method or a seed that is added is run on the clients, batches
and starts of the others, a value or federation that is added is a new cell. A cell refuses a changed setting."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kinfed.arena.plan import Cell, StudyPlan
from kinfed.config import RunConfig
from kinfed.core import storage
from kinfed.errors import ConfigError, DataError
from kinfed.records import RunRecord, load_run
from kinfed.runs import NullObserver, Observer, experiment

if TYPE_CHECKING:
    import plotly.graph_objects as go
    import pyarrow as pa

    from kinfed.arena.study_table import StudyTable

_FORMAT, _VERSION = "kinfed-study", 2
_RECORD = "study.json"
# Names of federation, model and value; labels of methods; seeds; rounds.
_CellRecord = tuple[tuple[str, str, str], tuple[str, ...], tuple[int, ...], int]
CELLS, TUNING = "cells", "tuning"


@dataclass(frozen=True)
class StudyResult:
    """A study in its folder, finished or not."""

    folder: Path
    plan: StudyPlan
    crossed: tuple[Cell, ...]

    @cached_property
    def cells(self) -> list[tuple[Cell, RunRecord | None]]:
        """Every cell and its run; none if it has not begun."""
        return [(cell, self._run(cell)) for cell in self.crossed]

    def _run(self, cell: Cell) -> RunRecord | None:
        folder = self.folder / CELLS / cell.folder
        return load_run(folder, cell.folder) if (folder / "config.json").is_file() else None

    def table(self, metric: str | None = None, *, costs: bool = False) -> StudyTable:
        """The methods by cells: mean and deviation over seeds of the clients' personal models, by default of the
        headline metric, with ranks, and with `costs` what was sent and how long it took."""
        from kinfed.arena.study_table import study_table

        return study_table(self, metric, costs=costs)

    def plot(self, metric: str | None = None) -> go.Figure:
        """A plotly figure of the metric over the swept setting, one line per method, for every federation and model."""
        from kinfed.api import as_plotly
        from kinfed.arena.study_table import sweep_figure

        return as_plotly(sweep_figure(self, metric))

    def client_rounds(self) -> pa.Table:
        """Every client's metrics in every evaluated round of all cells, for figures of one's own: a row for each cell,
        method, seed, round and client. The study must have been run with client_rounds = true."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        parts = []
        for cell in self.crossed:
            for file in sorted((self.folder / CELLS / cell.folder).glob("client-rounds/*.parquet")):
                names = {"federation": cell.federation, "model": cell.model, "value": cell.value}
                columns = {
                    name: pa.repeat(pa.scalar(value), pq.read_metadata(file).num_rows) for name, value in names.items()
                }
                own = pq.read_table(file)
                parts.append(pa.table({**columns, **{name: own[name] for name in own.column_names}}))
        if not parts:
            raise ConfigError(f"{self.folder} has no rounds of clients; run the study with client_rounds = true")
        return pa.concat_tables(parts, promote_options="permissive")

    def __str__(self) -> str:
        return self.table().text()

    def _repr_html_(self) -> str:
        return self.table().html()


def study(
    content: Mapping[str, Any] | Path | str, out: Path | str | None = None, *,
    should_stop: Callable[[], bool] = lambda: False, begin: Callable[[str], None] = lambda sentence: None,
    watch: Callable[[RunConfig], AbstractContextManager[Observer]] = lambda config: nullcontext(NullObserver()),
) -> StudyResult:  # fmt: skip
    """Run a study (kinfed.arena.plan), or what of it is missing, and return its results.

    `content` is the file, or its content as a dictionary; `out` the folder, by default studies/<name of the file>.
    `begin` is told what is begun, and `watch` makes an observer for every cell's run.

        >>> plan = {"algorithms": "local,fedavg", "rounds": 1, "seeds": [0], "clients": 3}
        >>> plan["sweep"] = {"setting": "batch", "values": [5, 10]}
        >>> result = kinfed.study(plan, out="studies/small")
        >>> print(result.table().csv().splitlines()[0])
        Method,batch 5,batch 10,rank"""
    plan = StudyPlan.read(content)
    if out is None and isinstance(content, Mapping):
        raise ConfigError("a study from a dictionary needs the folder that it is kept in: out=...")
    folder = Path("studies") / Path(str(content)).stem if out is None else Path(out)
    cells = plan.cells()
    _write_plan(folder, plan, cells)
    for number, cell in enumerate(cells, start=1):
        begin(f"cell {number} of {len(cells)}: {cell.folder}")
        config = _tuned(plan, cell, folder, should_stop) if plan.trials else cell.config
        path = folder / CELLS / cell.folder
        exists = (path / "config.json").is_file()
        with watch(config) as observer:
            experiment.run(config, out=path, extend=exists, observer=observer, should_stop=should_stop)
    return StudyResult(folder, plan, tuple(cells))


def open_study(folder: Path | str) -> StudyResult:
    """The study in a folder, as far as it has come. The folder may come from anyone: no plugin that it names is run."""
    record = storage.read_json(Path(folder) / _RECORD, "the record of a study")
    if record.get("format") != _FORMAT or record.get("version") != _VERSION:
        raise DataError(
            f"{Path(folder) / _RECORD} is no study of this version of kinfed (format {record.get('format')!r}, version "
            f"{record.get('version')!r})"
        )
    where = f"{Path(folder) / _RECORD} is no record of a study"
    cells = storage.as_record(list[_CellRecord], record.get("cells"), f"{where}: cells")
    plan = storage.as_record(StudyPlan, record.get("plan"), f"{where}: plan")
    return StudyResult(Path(folder), plan, tuple(Cell(*names, *others) for names, *others in cells))


def _write_plan(folder: Path, plan: StudyPlan, cells: Sequence[Cell]) -> None:
    if folder.exists() and any(folder.iterdir()) and not (folder / _RECORD).is_file():
        raise DataError(f"{folder} holds files but no study; choose a new or empty folder with --out")
    storage.make_folder(folder)
    record = [[[one.federation, one.model, one.value], one.labels, one.seeds, one.rounds] for one in cells]
    storage.write_json(
        folder / _RECORD, {"format": _FORMAT, "version": _VERSION, "plan": asdict(plan), "cells": record}
    )


def _tuned(plan: StudyPlan, cell: Cell, folder: Path, should_stop: Callable[[], bool]) -> RunConfig:
    """The cell's configuration with the settings that tuning chose for every method, each with as many trials. Methods
    are tuned one by one: one that is added later is tuned like the others, and these are not tuned again."""
    from kinfed.tuning import tune  # with optuna

    algorithms = {}
    for label in cell.config.algorithms:
        path = folder / TUNING / cell.folder / label
        config = plan.tuning_config(cell, label)
        result = tune(config, plan.trials, path, resume=path.exists(), should_stop=should_stop)
        algorithms[label] = result.config.algorithms[label]
    return replace(cell.config, algorithms=algorithms, preset=None)
