"""Options of reading a table: which column is what. Also settings of a run, a fit and a node: it needs no torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from kinfed.core import option
from kinfed.data.examples.problem import TaskName

if TYPE_CHECKING:
    from kinfed.data.preprocessing.cells import Kind
    from kinfed.data.sources.wordpiece import TextInput

OwnColumns = Literal["at_sites", "shared"]
AT_SITES, SHARED = "at_sites", "shared"
LENGTH = 64  # tokens of a text, where nothing else is asked for


@dataclass(frozen=True)
class TableOptions:
    """Columns of a table, and what becomes of them."""

    label_column: str | None = option(
        None, "Column with the class, or the number to predict; several with commas between (own tables)."
    )
    client_column: str | None = option(None, "Column that names the client (own tables).")
    group_column: str | None = option(None, "Column with the client's group (own tables).")
    split_column: str | None = option(None, "Column with train, val or test (own tables).")
    image_column: str | None = option(None, "Column of images instead of feature columns.")
    ignore: tuple[str, ...] | str = option((), "Columns that are not features, separated by commas.")
    columns: str = option("", "Types of columns, to override the rule: age=number,zip=category,note=skip (tables).")
    standardize: bool = option(True, "Scale numbers by mean and deviation of all training rows.")
    public_statistics: bool = option(False, "Statistics of columns are no secret: learn them under privacy too.")
    own_columns: OwnColumns = option(
        "at_sites",
        "Columns that a fifth of the clients lack: at_sites: each client that has one learns its effect by itself; "
        "shared: they go through the model, as columns with gaps (tables).",
    )
    text_column: str | None = option(None, "Column of texts instead of feature columns.")
    tokenizer: str | None = option(None, "Folder with tokenizer.json or vocab.txt, for text_column.")
    length: int = option(LENGTH, "Tokens of a text that are read, for text_column.", ge=3)
    task: TaskName = option(
        "auto", "What the label column holds: classes, numbers, counts, ... (own tables); auto decides and says so."
    )
    weight_column: str | None = option(None, "Column with the weight of a row in training (own tables).")
    time_column: str | None = option(None, "Column with the time of an event or of the end of follow-up (survival).")
    event_column: str | None = option(None, "Column that says whether the event happened: 1 or 0 (survival).")
    person_column: str | None = option(
        None,
        "Column with the person (patient, case) of a row; all rows of one at a client stay in one part (own tables).",
    )
    order_column: str | None = option(
        None, "Column with the date or number by which rows follow each other: tests and folds come last (own tables)."
    )
    encoding: str = option("utf-8", "Encoding of a CSV file, such as latin-1 or cp1252 (own tables).")

    def record(self) -> dict[str, Any]:
        """All options by name, for files; those that came later only where they were set, so that files of earlier
        versions stay equal."""
        later = {"person_column": None, "order_column": None, "encoding": "utf-8", "own_columns": AT_SITES}
        return {name: value for name, value in asdict(self).items() if name not in later or value != later[name]}

    @property
    def target_columns(self) -> tuple[str, ...]:
        """Columns that hold what is predicted: time and event, or the label; without a look at the table."""
        if self.time_column is not None or self.event_column is not None:
            return tuple(name for name in (self.time_column, self.event_column) if name is not None)
        return () if self.label_column is None else (self.label_column,)

    @property
    def ignored(self) -> tuple[str, ...]:
        if isinstance(self.ignore, str):
            return tuple(name.strip() for name in self.ignore.split(",") if name.strip())
        return self.ignore

    @property
    def kinds(self) -> dict[str, Kind]:
        """Kinds of columns that the user declares."""
        from kinfed.data.preprocessing.table_preprocessing import parse_kinds

        return parse_kinds(self.columns)

    @property
    def text(self) -> TextInput | None:
        from kinfed.data.sources.wordpiece import TextInput

        return TextInput.of_options(asdict(self))

    @property
    def has_columns(self) -> bool:
        """Whether features are columns, and not images or texts."""
        return self.image_column is None and self.text_column is None
