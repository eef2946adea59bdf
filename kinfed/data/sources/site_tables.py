"""Real tables with natural clients, by name: hospitals, patients, schools, stations, users.

Each is one Parquet file in the data folder, <name>/train-*.parquet, with the column `client`. What is learnt, what
would give it away, and which split is honest is written here once, in SITE_TABLES, so that a name is enough.

`breast_cancer` and `post_offices` come with scikit-learn, need no file, and their sites are made up, which every run on
them says.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kinfed.core import make_options, option, rng
from kinfed.data.examples.arrays import name_keys
from kinfed.data.examples.problem import TaskName
from kinfed.data.sources import hub
from kinfed.data.sources.hub import ParquetSet
from kinfed.data.sources.source import Source, subsample
from kinfed.data.sources.table import source_from_table
from kinfed.data.sources.table_options import OwnColumns, TableOptions
from kinfed.errors import DataError

CLIENT, SPLIT = "client", "split"
TEST_SHARE = 0.25
Mask = np.ndarray[Any, np.dtype[np.bool_]]
SplitRule = Literal["random", "time", "patient", "official"]


@dataclass(frozen=True)
class SiteTableOptions:
    columns: str = option("", "what columns are, where the rule is wrong: age=number,zip=category,note=skip")
    standardize: bool = option(True, "scale numbers by mean and deviation of all training rows")
    public_statistics: bool = option(False, "statistics of columns are no secret: learn them under privacy too")
    own_columns: OwnColumns = option("at_sites", "columns that not every site has: at_sites or shared, as for tables")
    task: TaskName = option("auto", "classification or regression, where it is not what is usual for the table")
    examples: int | None = option(None, "only this many rows, drawn at random; none: all")
    sites: int | None = option(None, "only this many sites, drawn at random; none: all", ge=1)
    split: Literal["own", "rows", "published"] = option(
        "own",
        "own: what is honest for the table (by time, patient, ...); rows: any rows of a site, drawn by the seed; "
        "published: the one split of a benchmark, where the table has it (adult, tcga_brca)",
    )


@dataclass(frozen=True)
class ParkinsonsOptions(SiteTableOptions):
    target: Literal["total_UPDRS", "motor_UPDRS"] = option("total_UPDRS", "the score to predict")


@dataclass(frozen=True)
class SiteTable:
    """A table by name: its target, what is no feature, and how it is split."""

    name: str
    target: str
    leave_out: tuple[str, ...] = ()  # columns that give the target away, or say nothing of it
    columns: str = ""  # kinds that the rule would get wrong
    split: SplitRule = "random"
    split_by: str = ""  # the column of time, patients or official splits
    notes: tuple[str, ...] = ()
    task: TaskName = "auto"  # where the rule of kinfed.data.examples.target would take another
    has_hours: bool = False  # year, month, day and hour are columns, which become one time
    event: str = ""  # the column that says whether the event happened, where the target is a time
    fold: str = ""  # the column of a benchmark's split, where that is not what is honest for the table

    def load(self, options: SiteTableOptions, data_dir: Path | None, seed: int) -> Source:
        table, settings = self.rows(options, data_dir, seed)
        source = source_from_table(table, settings, self.name)
        source.notes += self.notes
        if self.split != "random" and settings.split_column is None:
            source.notes.append(f"test rows are drawn from all rows of a site, not by {self.split} as is honest here")
        return subsample(source, options.examples, "rows")

    def rows(self, options: SiteTableOptions, data_dir: Path | None, seed: int) -> tuple[pa.Table, TableOptions]:
        """The table, and which of its columns is what."""
        target, table = getattr(options, "target", self.target), self._read(data_dir)
        for name in self._targets(target):
            table = table.filter(pc.is_valid(table[name]))  # rows whose target is known
        if options.sites is not None:
            table = _some_sites(table, options.sites)
        is_published = options.split == "published"
        if is_published and self._published not in table.column_names:
            known = ", ".join(name for name, one in SITE_TABLES.items() if one._published)
            raise DataError(f"{self.name} has no column with a published split; split=published is for {known}")
        has_split = is_published or (self.split != "random" and options.split == "own")
        leave_out = [name for name in self.leave_out if name in table.column_names and name != target]
        settings = TableOptions(
            None if self.event else target, CLIENT, time_column=target if self.event else None,
            event_column=self.event or None, split_column=SPLIT if has_split else None,
            ignore=tuple(leave_out),
            columns=",".join(part for part in (self._kinds(options.columns), options.columns) if part),
            standardize=options.standardize, public_statistics=options.public_statistics,
            own_columns=options.own_columns,
            task=self.task if options.task == "auto" else options.task,
        )  # fmt: skip
        if has_split:
            is_test = _says_test(table[self._published]) if is_published else self._is_test(table, seed)
            table = table.append_column(SPLIT, pa.array(np.where(is_test, "test", "train")))
        if self.split == "official":
            table = table.drop_columns([self.split_by])
        return table, settings

    @property
    def _published(self) -> str:
        """The column with the split of a benchmark; "" if there is none."""
        return self.fold or (self.split_by if self.split == "official" else "")

    def _targets(self, target: str) -> tuple[str, ...]:
        return (target, self.event) if self.event else (target,)

    def _kinds(self, declared: str) -> str:
        """Kinds of this table that the user has not declared otherwise."""
        names = {part.partition("=")[0].strip() for part in declared.split(",")}
        return ",".join(part for part in self.columns.split(",") if part.partition("=")[0] not in names)

    def _read(self, data_dir: Path | None) -> pa.Table:
        advice = f"one file with the columns {CLIENT}, {self.target}, ..."
        files = hub.obtain(ParquetSet(self.name, ("train",), advice=advice), data_dir)["train"]
        table = pa.concat_tables([hub.read_parquet(file) for file in files])
        needed = [
            CLIENT,
            *self._targets(self.target),
            *(_HOUR if self.has_hours else [self.split_by] if self.split_by else []),
        ]
        if lacking := [name for name in needed if name not in table.column_names]:
            raise DataError(f"{files[0]} has no column {' or '.join(lacking)}; is it the table {self.name}?")
        return _with_time(table) if self.has_hours else table

    def _is_test(self, table: pa.Table, seed: int) -> Mask:
        if self.split == "official":
            return _says_test(table[self.split_by])
        if self.split == "patient":
            patients, index = np.unique(table[self.split_by].to_numpy().astype(str), return_inverse=True)
            keys = name_keys(rng.root(seed, "test-split"), patients.tolist())
            chosen: Mask = (rng.uniform(keys, 1)[:, 0] < TEST_SHARE).numpy()[index]
            return chosen
        return _last_rows(table[CLIENT].to_numpy(zero_copy_only=False), table[self.split_by].to_numpy())


def _says_test(column: pa.ChunkedArray) -> Mask:
    return np.array([text == "test" for text in column.to_pylist()])


_HOUR = ("year", "month", "day", "hour")


def _with_time(table: pa.Table) -> pa.Table:
    """Year, month, day and hour as one time."""
    year, month, day, hour = (table[name].to_numpy().astype(np.int64) for name in _HOUR)
    months = ((year - 1970) * 12 + month - 1).astype("datetime64[M]")
    hours = months.astype("datetime64[D]") + (day - 1).astype("timedelta64[D]")
    time = hours.astype("datetime64[h]") + hour.astype("timedelta64[h]")
    return table.drop_columns(list(_HOUR)).append_column("time", pa.array(time.astype("datetime64[s]")))


def _some_sites(table: pa.Table, number: int) -> pa.Table:
    """Draw some sites, the same for every seed, and take their rows."""
    names = np.unique(table[CLIENT].to_numpy(zero_copy_only=False).astype(str))
    order = rng.permutation(rng.root(0, "some-sites"), len(names)).numpy()
    return table.filter(pc.is_in(pc.cast(table[CLIENT], pa.string()), pa.array(names[order[:number]].tolist())))


def _last_rows(clients: np.ndarray[Any, Any], time: np.ndarray[Any, Any]) -> Mask:
    """bool [n]: the last quarter of every client's rows in time; of a single row none."""
    is_test = np.zeros(len(clients), bool)
    _, owner = np.unique(clients.astype(str), return_inverse=True)
    order = np.lexsort((time, owner))
    for rows in np.split(order, np.flatnonzero(np.diff(owner[order])) + 1):
        is_test[rows[len(rows) - int(TEST_SHARE * len(rows)) :]] = True
    return is_test


SITE_TABLES = {
    table.name: table
    for table in (
        SiteTable("heart_disease", "target", ("num",)),
        SiteTable("parkinsons_telemonitoring", "total_UPDRS", ("total_UPDRS", "motor_UPDRS"), split="time",
                  split_by="test_time",
                  notes=("UPDRS was measured at three visits and interpolated in between: a patient's own level and "
                         "slope explain nearly all of it",)),
        SiteTable("london_schools", "exam_score"),
        SiteTable("wisdm_ar_v1", "activity", ("UNIQUE_ID",)),
        SiteTable("exam65_london", "normexam"),
        SiteTable("chem97", "score", ("gcsecnt",), "lea=category", task="regression"),
        SiteTable("insteval", "rating", (), "lecturer=text", task="regression"),
        SiteTable("contraception", "label"),
        SiteTable("beijing_air", "pm25", ("PM10", "SO2", "NO2", "CO", "O3"), split="time", split_by="time",
                  has_hours=True,
                  notes=("other pollutants are measured with PM2.5 and are left out; hours without PM2.5 too",)),
        SiteTable("diabetes_130", "readmitted_30d", ("encounter_id", "patient_nbr", "readmitted"), split="patient",
                  split_by="patient_nbr",
                  notes=("clients are medical specialties: the data do not say which hospital; patients who died "
                         "cannot return, and discharge_disposition_id tells",)),
        SiteTable("adult", "label", ("education", "education-num", "fnlwgt"), split="official",
                  split_by="official_split", notes=("clients are levels of education: there are no sites",)),
        SiteTable("tcga_brca", "time_days", ("tss_code", "flamby_fold"), event="event", fold="flamby_fold",
                  notes=("Canada has 3 events in all and Europe 9: their figures mean little",)),
        SiteTable("rotterdam_gbsg", "time_days", event="event",
                  notes=("gbsg says nothing of chemotherapy",)),
        SiteTable("mdsd_amazon4", "label", ("rating", "title", "asin"), "text=text"),
    )
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """load_<table>, the entry of a table in SOURCES."""
    table = SITE_TABLES.get(name.removeprefix("load_"))
    if table is None or not name.startswith("load_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return table.load


NAMES = ("Anton", "Berta", "Caesar", "Dora", "Emil", "Friedrich", "Gustav", "Heinrich")
DEALT: dict[str, tuple[float, ...]] = {  # shares of the rows by site
    "breast_cancer": (0.4, 0.25, 0.15, 0.12, 0.08),
    "post_offices": (0.19, 0.17, 0.15, 0.14, 0.12, 0.1, 0.08, 0.05),
}


def load_breast_cancer(options: SiteTableOptions, data_dir: Path | None, seed: int) -> Source:
    """Wisconsin Diagnostic Breast Cancer as scikit-learn ships it, at five made-up sites."""
    return _load_dealt("breast_cancer", options)


def load_post_offices(options: SiteTableOptions, data_dir: Path | None, seed: int) -> Source:
    """Handwritten digits as scikit-learn ships them, 64 numbers each, at eight made-up post offices. With 64 to 256
    training rows an office by itself learns some of ten digits, and all of them together far more."""
    return _load_dealt("post_offices", options)


def _load_dealt(name: str, options: SiteTableOptions) -> Source:
    table, settings = dealt_rows(name, options)
    source = source_from_table(table, settings, name)
    source.notes.append(f"the {len(DEALT[name])} sites are made up: rows of one table, dealt at random")
    return subsample(source, options.examples, "rows")


def dealt_rows(name: str, options: SiteTableOptions) -> tuple[pa.Table, TableOptions]:
    """A table of scikit-learn's, whose rows are dealt to made-up sites at random, the same for every seed: sites differ
    in size alone."""
    from sklearn.datasets import load_breast_cancer, load_digits

    if name == "breast_cancer":
        data, label, kind = load_breast_cancer(), "diagnosis", "site"
        target = np.array(data.target_names)[data.target]
    else:
        data, label, kind = load_digits(), "digit", "office"
        target = np.array([f"digit {digit}" for digit in data.target])
    columns = {str(column): data.data[:, place] for place, column in enumerate(data.feature_names)}
    order = rng.permutation(rng.root(0, f"{name.replace('_', '-')}-sites"), len(target)).numpy()
    ends = np.round(np.cumsum(DEALT[name]) * len(order)).astype(int)
    site = np.empty(len(order), object)
    for own, rows in zip(NAMES, np.split(order, ends[:-1]), strict=False):
        site[rows] = f"{kind} {own}"
    table = pa.table({CLIENT: pa.array(site.tolist()), **columns, label: target})
    table = table if options.sites is None else _some_sites(table, options.sites)
    left_out = ("examples", "sites", "split")
    settings = {option: value for option, value in asdict(options).items() if option not in left_out}
    return table, TableOptions(label, CLIENT, **settings)


def site_rows(
    name: str, options: Mapping[str, Any], data_dir: Path | None = None, seed: int = 0
) -> tuple[pa.Table, TableOptions]:
    """The table that a name stands for, and which of its columns is what."""
    kind = ParkinsonsOptions if name == "parkinsons_telemonitoring" else SiteTableOptions
    chosen = make_options(kind, dict(options), name)
    if name in SITE_TABLES:
        return SITE_TABLES[name].rows(chosen, data_dir, seed)
    return dealt_rows(name, chosen)
