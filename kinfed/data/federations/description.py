"""A federation in plain values: the content of federation-<seed>.json. Reading and drawing it needs no torch.

`emd` is the distance sum_y |p_k(y) - p(y)| between a client's class distribution and that of all training data,
in [0, 2]. `emd_code` is what FedFomo's released function computes: classes that both distributions contain count
twice, so one class of ten is 2.70 instead of 1.80. Published tables use `emd_code` (P-11); compare like with like.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from kinfed.core import storage
from kinfed.data.examples.problem import IGNORED, HasProblem, Problem
from kinfed.errors import DataError, StorageError

if TYPE_CHECKING:
    from torch import Tensor

    from kinfed.data.federations.federation import Federation

MOST_CLIENTS = 40  # rows; more clients are sampled by size
MOST_CLASSES = 60  # columns; more classes are counted and not drawn
_CELL, _LABEL, _BAR, _TOP = 16, 150, 160, 22  # pixels: a square, the names beside it, the longest bar, the head
_COLOUR = "#2598e6"
_SPLITS = ("train", "val", "test")


@dataclass(frozen=True, repr=False)
class Description(HasProblem):
    """Plain values only: `to_json` is the content of federation-<seed>.json, `from_json` reads it back."""

    names: list[str]
    problem: Problem
    train: list[list[int]]  # [K][C] examples of every class at every client; [K][1] without classes
    val: list[list[int]]
    test: list[list[int]]
    groups: list[int] | None
    group_names: list[str] | None
    emd: list[float] | None  # [K]; None without classes
    emd_code: list[float] | None  # [K]
    description: dict[str, Any]  # data set, partition and their options
    notes: list[str]
    inputs: dict[str, Any]  # what models are fed: shape of an example, and what columns became, or (x - mean) / std
    # [K] of problems without classes: mean and deviation of the training target; of survival, the share of events and
    # the median time
    targets: list[tuple[float, float]] | None = None
    survival: dict[str, Any] | None = None  # curves of training rows, without small counts: survival_table
    listed: list[int] | None = None  # numbers of the clients that the lists above are of; None: all of them
    clients: int | None = None  # how many there are in all, where not all are listed

    def __repr__(self) -> str:
        return f"<Description {self.in_words()}>"

    def _repr_html_(self) -> str:
        """A picture for notebooks: one row per client, one square per class, drawn as SVG inside HTML. It needs no
        script and no style sheet; texts have the colour of what stands around them, in light and dark themes."""
        lines = [f"<p style='margin: .3em 0'><b>{escape(self.in_words())}</b></p>"]
        rows = _shown(self)
        if len(rows) < self.num_clients:
            part = f"{len(rows)} of {self.num_clients:,} clients, by size"
            lines.append(f"<p style='margin: .3em 0; opacity: .7'>{part}</p>")
        lines.append(_picture(self, rows))
        lines += [f"<p style='margin: .3em 0; opacity: .75'>note: {escape(note)}</p>" for note in self.notes]
        return "<div>" + "".join(lines) + "</div>"

    def in_words(self) -> str:
        dataset, partition = self.description.get("dataset", "data"), self.description.get("partition", "given")
        sizes = ((split, sum(self.sizes(split))) for split in _SPLITS)
        counts = " + ".join(f"{total:,} {split}" for split, total in sizes if total)
        clients = f"{self.num_clients:,} clients, {self.problem.in_words()}"
        return f"{dataset}, partition {partition}: {clients}, {counts} examples"

    @property
    def num_clients(self) -> int:
        """Number of all clients, listed or not."""
        return len(self.names) if self.clients is None else self.clients

    @property
    def class_labels(self) -> list[str]:
        """[C] names of the classes; their numbers where they have no names."""
        return self.problem.class_labels

    def sizes(self, split: str = "train") -> list[int]:
        """[K] examples of every client."""
        return [sum(counts) for counts in getattr(self, split)]

    @property
    def classes_held(self) -> list[int]:
        """[K] number of classes that occur in a client's training data."""
        return [sum(count > 0 for count in counts) for counts in self.train]

    @property
    def mean_emd(self) -> float | None:
        return None if self.emd is None else sum(self.emd) / len(self.emd)

    @property
    def mean_emd_code(self) -> float | None:
        return None if self.emd_code is None else sum(self.emd_code) / len(self.emd_code)

    def to_json(self) -> dict[str, Any]:
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}  # asdict would copy all
        means = {"mean_emd": self.mean_emd, "mean_emd_code": self.mean_emd_code}
        if self.survival is None:
            del fields["survival"]
        return fields | {"problem": self.problem.to_json()} | means

    @classmethod
    def from_json(cls, record: Mapping[str, Any], where: str) -> Description:
        """A description from what `to_json` gave; StorageError, with `where` as the name of the file, for all else."""
        fields = {field.name: record[field.name] for field in dataclasses.fields(cls) if field.name in record}
        try:
            if "problem" not in fields and "num_classes" in record:  # written before there were regressions
                fields["problem"] = Problem.of_classes(record["num_classes"], record.get("class_names"))
            description: Description = storage.as_record(cls, fields, f"{where} does not describe a federation")
        except (DataError, TypeError) as error:
            raise StorageError(f"{where} does not describe a federation: problem: {error}") from None
        clients = len(description.names)
        classes = description.num_classes if description.problem.has_classes else 1
        for split in _SPLITS:
            counts = getattr(description, split)
            widths = {len(row) for row in counts}
            if len(counts) != clients or widths - {classes}:
                wanted = f"{split} should hold {clients} clients with {classes} counts each"
                raise StorageError(f"{where}: {wanted}, got {len(counts)} clients with {sorted(widths)} counts")
        for name in ("listed", "groups", "emd", "emd_code"):
            values = getattr(description, name)
            if values is not None and len(values) != clients:
                raise StorageError(f"{where}: {len(values)} {name} given for {clients} clients")
        return description


def _shown(d: Description) -> list[int]:
    """Places of clients: all, or some from the largest to the smallest."""
    places, sizes = list(range(len(d.names))), d.sizes()
    if len(places) <= MOST_CLIENTS:
        return places
    ordered = sorted(places, key=lambda place: -sizes[place])
    return [ordered[round(i * (len(ordered) - 1) / (MOST_CLIENTS - 1))] for i in range(MOST_CLIENTS)]


def _picture(d: Description, rows: list[int]) -> str:
    classes = d.class_labels if d.problem.has_classes and d.num_classes <= MOST_CLASSES else []
    sizes, grid = d.sizes(), _CELL * len(classes)
    largest = max([sizes[k] for k in rows], default=1) or 1
    width, height = _LABEL + grid + _BAR + 120, _TOP + _CELL * len(rows) + 4
    marks = [_text(_LABEL + grid + 8, _TOP - 8, "training examples", muted=True)]
    marks += [
        _text(_LABEL + _CELL * c + _CELL / 2, _TOP - 8, _shortened(label, 2), muted=True, middle=True, title=label)
        for c, label in enumerate(classes)
    ]
    for row, k in enumerate(rows):
        y, total = _TOP + _CELL * row, max(sizes[k], 1)
        marks.append(_text(_LABEL - 8, y + _CELL - 5, _shortened(d.names[k], 20), end=True, title=d.names[k]))
        for c, label in enumerate(classes):
            if count := d.train[k][c]:
                text = f"{d.names[k]}: {count} of {total} are {label}"
                marks.append(_square(_LABEL + _CELL * c, y, _CELL - 2, 0.12 + 0.88 * count / total, text))
        marks.append(_square(_LABEL + grid + 8, y + 3, _BAR * sizes[k] / largest, 0.45, f"{sizes[k]:,}", _CELL - 8))
        figure = f"{sizes[k]:,}"
        if d.targets is not None:
            figure += ", " + target_words(d.problem, *d.targets[k])
        marks.append(_text(_LABEL + grid + 14 + _BAR * sizes[k] / largest, y + _CELL - 5, figure, muted=True))
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' role='img' aria-label='Training examples of every client by class' "
        f"width='{width}' height='{height}' viewBox='0 0 {width} {height}' fill='currentColor' "
        f"font-family='system-ui, sans-serif' font-size='11' style='max-width: 100%'>{''.join(marks)}</svg>"
    )


def target_words(problem: Problem, first: float, second: float) -> str:
    """A client's target in a few words, from its figures in `Description.targets`."""
    if problem.kind == "survival":
        return f"{first:.0%} events, median time {second:.3g}"
    return f"target {first:.3g} ± {second:.3g}"


def _text(
    x: float, y: float, text: str, *, muted: bool = False, middle: bool = False, end: bool = False, title: str = ""
) -> str:
    anchor = "middle" if middle else "end" if end else "start"
    tooltip = f"<title>{escape(title)}</title>" if title else ""
    opacity = " opacity='.65'" if muted else ""
    return f"<text x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}'{opacity}>{escape(text)}{tooltip}</text>"


def _square(x: float, y: float, width: float, opacity: float, title: str, height: float = _CELL - 2) -> str:
    place = f"x='{x:.1f}' y='{y:.1f}' width='{width:.1f}' height='{height}' rx='2'"
    return f"<rect {place} fill='{_COLOUR}' fill-opacity='{opacity:.2f}'><title>{escape(title)}</title></rect>"


def _shortened(text: str, limit: int) -> str:
    """The text in at most `limit` characters, with an ellipsis where some are missing."""
    return text if len(text) <= limit else text[: max(limit - 1, 1)] + "…"


def describe(federation: Federation, ids: Tensor | None = None) -> Description:
    """Describe all clients, or only those of `ids` [n], measured against all."""
    everyone, plain = slice(None) if ids is None else ids, not federation.problem.has_classes
    counts = {split: federation.class_counts(split)[everyone].tolist() for split in _SPLITS}
    trained = federation.class_counts()
    return Description(
        **counts, names=list(federation.names) if ids is None else [federation.names[k] for k in ids.tolist()],
        problem=federation.problem, description=federation.description, notes=list(federation.notes),
        groups=None if federation.groups is None else federation.groups[everyone].tolist(),
        group_names=federation.group_names, inputs=_inputs(federation),
        emd=None if plain else emd(trained)[everyone].tolist(),
        emd_code=None if plain else emd_code(trained)[everyone].tolist(),
        targets=_targets(federation, ids) if plain else None, survival=_survival(federation, ids),
        listed=None if ids is None else ids.tolist(), clients=None if ids is None else federation.num_clients,
    )  # fmt: skip


def _survival(federation: Federation, ids: Tensor | None) -> dict[str, Any] | None:
    if federation.problem.kind != "survival":
        return None
    from kinfed.data.examples.survival_curves import survival_table

    lists = (federation.train if ids is None else federation.train.take(ids)).lists()
    return survival_table([federation.labels[rows].numpy() for rows in lists], federation.problem.periods[-1])


def _targets(federation: Federation, ids: Tensor | None) -> list[tuple[float, float]]:
    lists = (federation.train if ids is None else federation.train.take(ids)).lists()
    if federation.problem.kind == "survival":  # the share of events, and the median time of follow-up
        times = [federation.labels[rows].T for rows in lists]
        return [(float(event.mean()), float(time.quantile(0.5))) for time, event in times]
    own = [federation.labels[rows].double() for rows in lists]
    known = [y[(y == y) & (y != IGNORED)] for y in own]
    return [(float(y.mean()), float(y.std(correction=0))) for y in known]


def _inputs(federation: Federation) -> dict[str, Any]:
    features, learnt = federation.features, federation.preprocessing
    scale = {"mean": features.mean, "std": features.std} if learnt is None else {"mean": None, "std": None}
    plain = {name: None if value is None else value.tolist() for name, value in scale.items()}
    columns: dict[str, Any] = {} if learnt is None else {"preprocessing": learnt.to_json()}
    if federation.own_columns:
        pairs = zip(federation.names, federation.own_columns, strict=True)
        columns["own_columns"] = {name: [asdict(one) for one in own] for name, own in pairs}
    if features.packing is not None:
        columns["packing"] = features.packing.to_json()
    return {"shape": list(features.shape), "tokens": features.is_tokens} | plain | columns


def emd(counts: Tensor) -> Tensor:
    """[K] distance of every client's class distribution from that of all clients together; counts [K, C]."""
    own, whole = _distributions(counts)
    return (own - whole).abs().sum(1)


def emd_code(counts: Tensor) -> Tensor:
    """[K] the same with classes in both supports counted twice, as FedFomo's released code does."""
    own, whole = _distributions(counts)
    times = (own > 0).double() + (whole > 0).double()
    return ((own - whole).abs() * times).sum(1)


def _distributions(counts: Tensor) -> tuple[Tensor, Tensor]:
    exact = counts.double()
    whole = exact.sum(0)
    return exact / exact.sum(1, keepdim=True).clamp_min(1), whole / whole.sum().clamp_min(1)
