"""A recipe as data: recipes/NAME.toml, from which `read_recipe` makes a Recipe.

    paper = "pFedMe"                           a name of PAPERS; reproduces, title and about are texts
    notes = ["@one_rate", "..."]               "@name": a text, or several, of shared.toml
    part = "mnist-mlr"                         of columns and claims that name none; `row` and `metric` likewise

    [methods]                                  rows of tables, and the names shown for them
    [headings]                                 parts, and the names shown for them
    [lists]                                    rows that claims, and columns that tables call by a name
    [options]                                  of methods, by label in a run
    [settings]                                 as `kinfed run` takes them, of all parts at all scales
    [scales.small]                             what a scale changes; [scales.small.options]: options that it adds

    [[parts]]                                  name; settings, smoke, small, paper: what the part changes; algorithms:
                                               labels, or a list of them (methods but aliases if absent); scales
                                               (all if absent); options: of methods in this part; metrics: what
                                               measures the run; merge_into, optional: see RunPart
    [[readings]]                               title, part, metric, rows, columns (lists of rivals by heading), parts,
                                               likeliest, fair: see Readings; choices: names of shared.toml
    [[tables]]                                 title, rows, published, caption; columns: tables, or parts as
                                               headings name them; metrics: {heading = metric}; what else is said
                                               holds for every column
    [[claims]]                                 text (the paper's) or question (ours); part, row and above, ... as
                                               Claim.above takes them; margins and arguments: a function that
                                               computes them; untestable: why

An entry with each = { part = ["a", "b"], row = ["x"] } stands for all combinations: {part} in its texts is replaced by
the value and {part_name} by the name shown for it, and the entry is about this part, row or rival. A [[claims]] entry
with `claims` repeats these as a group.

Functions are named by "module:name" below kinfed_papers: `metrics`, `margins`, `figures`, and `parts` where what is run
has to be computed.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

from kinfed.core import imported
from kinfed.errors import ConfigError, unknown_name
from kinfed_papers.recipe import (
    PAPERS,
    SCALES,
    Claim,
    OpenChoice,
    Question,
    Readings,
    Recipe,
    ResultColumn,
    ResultTable,
    RunPart,
    Scale,
    Untestable,
    parse_published,
)

SHARED = Path(__file__).parent / "recipes" / "shared.toml"
OF_A_TABLE = ("title", "rows", "published", "caption", "columns", "metrics")  # what else it says is of its columns
KEYS = (
    *("paper", "reproduces", "title", "about", "notes", "stand_ins", "aliases", "method_figures", "other_data"),
    *("part", "row", "metric", "methods", "headings", "lists", "options", "settings", "scales"),
    *("parts", "tables", "claims", "readings", "figures"),
)
PART_KEYS = (
    *("each", "name", "settings", *SCALES, "algorithms", "options", "scales", "metrics", "merge_into", "optional"),
)
Entry = dict[str, Any]


def read_recipe(path: Path) -> Recipe:
    """The recipe of a file, which has the file's name."""
    data = tomllib.loads(path.read_text("utf-8"))
    try:
        return _RecipeFile(path.stem, data).recipe()
    except (KeyError, TypeError, ConfigError) as error:
        raise ConfigError(f"{path}: {type(error).__name__}: {error}; see kinfed_papers.recipe_file") from error


@cache
def _shared_texts() -> Mapping[str, Any]:
    return tomllib.loads(SHARED.read_text("utf-8"))


def _texts(entries: Iterable[str]) -> list[str]:
    """Texts, with those of shared.toml in the place of their names."""
    texts: list[str] = []
    for entry in entries:
        text = _shared_texts()[entry[1:]] if entry.startswith("@") else entry
        texts += [text] if isinstance(text, str) else text
    return texts


def function(location: str) -> Any:
    """What "module:name" names, below kinfed_papers."""
    return imported(f"kinfed_papers.{location}")


class _RecipeFile:
    """What a file says, by its keys."""

    def __init__(self, name: str, data: Entry) -> None:
        _refuse_unknown(data, KEYS)
        for part in data["parts"] if isinstance(data["parts"], list) else ():
            _refuse_unknown(part, PART_KEYS)
        self.name, self.data = name, data
        self.methods: dict[str, str] = data.get("methods", {})
        self.headings: dict[str, str] = data.get("headings", {})
        self.labels = [row for row in self.methods if row not in data.get("aliases", {})]
        self.defaults = {key: data[key] for key in ("part", "row", "metric") if key in data}

    def recipe(self) -> Recipe:
        data = self.data
        figures = {"figures": function(data["figures"])} if "figures" in data else {}
        return Recipe(
            name=self.name,
            paper=PAPERS[data["paper"]],
            reproduces=data["reproduces"],
            title=data["title"],
            about=data["about"],
            parts=function(data["parts"]) if isinstance(data["parts"], str) else self.parts,
            tables=[self.table(entry) for entry in self.expanded(data.get("tables", []))],
            claims=list(self.claims(data.get("claims", []))),
            readings=[self.reading(entry) for entry in self.expanded(data.get("readings", []))],
            notes=_texts(data.get("notes", [])),
            stand_ins={scale: _texts([text])[0] for scale, text in data.get("stand_ins", {}).items()},
            method_figures=[(part, method) for part, method in data.get("method_figures", [])],
            other_data=tuple(data.get("other_data", ())),
            aliases={row: (method, kind) for row, (method, kind) in data.get("aliases", {}).items()},
            **figures,
        )

    def expanded(self, entries: Iterable[Entry]) -> Iterator[Entry]:
        """Entries, each with `each` once for every combination."""
        for entry in entries:
            loops: dict[str, list[str]] = entry.get("each", {})
            template = {key: value for key, value in entry.items() if key != "each"}
            for values in product(*loops.values()):
                words = dict(zip(loops, values, strict=True))
                names = {f"{key}_name": self.name_of(value) for key, value in words.items()}
                yield _filled(
                    _with_words(template, words), {f"{{{key}}}": value for key, value in (words | names).items()}
                )

    def list_of(self, rows: Sequence[str] | str) -> Sequence[str]:
        """Rows themselves, or those of the list that is named."""
        return self.data["lists"][rows] if isinstance(rows, str) else rows

    def name_of(self, key: str) -> str:
        return self.headings.get(key) or self.methods.get(key) or key

    def parts(self, scale: Scale) -> list[RunPart]:
        entries = self.expanded(self.data["parts"])
        return [self.part(entry, scale) for entry in entries if scale in entry.get("scales", SCALES)]

    def part(self, entry: Entry, scale: Scale) -> RunPart:
        at_scale = self.data.get("scales", {}).get(scale, {})
        layers = (self.data.get("settings", {}), at_scale, entry.get("settings", {}), entry.get(scale, {}))
        settings = {key: value for layer in layers for key, value in layer.items() if key != "options"}
        chosen = settings.get("algorithms", entry.get("algorithms", self.labels))
        if not isinstance(chosen, str) or chosen in self.data.get("lists", {}):  # otherwise as `kinfed run` takes it
            options = [layer.get("options", {}) for layer in (self.data, at_scale, entry, entry.get(scale, {}))]
            settings["algorithms"] = {
                label: {key: value for layer in options for key, value in layer.get(label, {}).items()}
                for label in self.list_of(chosen)
            }
        metrics = function(entry["metrics"]) if "metrics" in entry else None
        return RunPart(entry["name"], settings, metrics, entry.get("merge_into"), entry.get("optional", False))

    def table(self, entry: Entry) -> ResultTable:
        own = {key: entry[key] for key in OF_A_TABLE if key in entry}
        common = {key: value for key, value in (self.defaults | entry).items() if key not in (*own, "row")}
        columns: list[Entry] = [
            {"heading": heading, "metric": metric} for heading, metric in own.get("metrics", {}).items()
        ]
        for column in own.get("columns", []):
            columns += self.expanded([column]) if isinstance(column, dict) else self.named_columns(column)
        rows = own.get("rows", list(self.methods))
        return ResultTable(
            own["title"],
            rows if isinstance(rows, dict) else {row: self.methods[row] for row in rows},
            [self.column({**common, **column}) for column in columns],
            parse_published(own["published"]) if "published" in own else {},
            own.get("caption", ""),
        )

    def named_columns(self, name: str) -> list[Entry]:
        """Columns of a list, or the one of a part."""
        columns: list[Entry] = self.data.get("lists", {}).get(name, [{"part": name}])
        return columns

    def column(self, entry: Entry) -> ResultColumn:
        return ResultColumn(**{"heading": self.headings.get(entry["part"], ""), **entry})

    def reading(self, entry: Entry) -> Readings:
        choices = [OpenChoice(**choice) for name in entry.get("choices", []) for choice in _shared_texts()[name]]
        columns = {heading: self.list_of(rivals) for heading, rivals in entry["columns"].items()}
        likeliest = tuple(entry["likeliest"])
        return Readings(**(self.defaults_of(("part", "metric")) | entry | {
            "columns": columns, "choices": choices, "likeliest": likeliest,
        }))  # fmt: skip

    def defaults_of(self, keys: Iterable[str]) -> Entry:
        return {key: self.defaults[key] for key in keys if key in self.defaults}

    def claims(self, entries: Iterable[Entry]) -> Iterator[Claim | Untestable]:
        for entry in self.expanded(entries):
            if "claims" in entry:
                yield from self.claims(entry["claims"])
            else:
                yield self.claim(entry)

    def claim(self, entry: Entry) -> Claim | Untestable:
        if "untestable" in entry:
            return Untestable(entry["text"], entry["untestable"], entry.get("place", ""))
        kind: type[Claim] = Question if "question" in entry else Claim
        text = entry.pop("question", None) or entry.pop("text")
        if "margins" in entry:
            margins: Callable[..., Any] = partial(function(entry.pop("margins")), **entry.pop("arguments", {}))
            return kind(text, margins, **{key: value for key, value in entry.items() if key not in ("part", "row")})
        rivals = self.list_of(entry.pop("above"))
        return kind.above(text, rivals=rivals, **(self.defaults | entry))


def _refuse_unknown(entry: Entry, known: Sequence[str]) -> None:
    for key in entry:
        if key not in known:
            raise unknown_name("key of a recipe", key, known)


def _with_words(entry: Entry, words: Mapping[str, str]) -> Entry:
    """An entry of which `each` said part, row or rival: where nothing else is said, it is about these."""
    common: Entry = {key: words[key] for key in ("part", "row") if key in words}
    if "rival" in words and "claims" not in entry and "margins" not in entry:
        common["above"] = [words["rival"]]
    if "claims" in entry:
        return {"claims": [{**common, **claim} for claim in entry["claims"]]}
    return {**common, **entry}


def _filled(value: Any, words: Mapping[str, str]) -> Any:
    """The value with words replaced in all its texts; a copy."""
    if isinstance(value, str):
        for word, text in words.items():
            value = value.replace(word, text)
        return value
    if isinstance(value, list):
        return [_filled(each, words) for each in value]
    if isinstance(value, dict):
        return {key: _filled(each, words) for key, each in value.items()}
    return value
