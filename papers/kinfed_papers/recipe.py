"""What a recipe is made of: parts to run, tables with published numbers, claims to check.

    RECIPE = Recipe(
        name="selffl-mnist",
        paper=PAPERS["Self-FL"],
        reproduces="Figure 1a",
        title="Self-FL on MNIST",
        about="...",
        parts=lambda scale: [RunPart("mnist", {"dataset": "mnist", "algorithms": "fedavg,selffl", ...})],
        tables=[ResultTable("Personal models", METHODS, [ResultColumn("Accuracy", "mnist")])],
        claims=[Claim.above("Self-FL above FedAvg", "mnist", "selffl", ["fedavg"])],
    )

Parts that a scale does not have drop out of tables and claims, so one recipe serves all scales.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Self

from kinfed.analysis import Comparison
from kinfed.errors import ConfigError, unknown_name
from kinfed.records import RunRecord
from kinfed.report import Panel
from kinfed.report.drawing import Figure

Scale = Literal["smoke", "small", "paper"]
SCALES: tuple[Scale, ...] = ("smoke", "small", "paper")

Source = Literal["paper", "kinfed"]  # of a claim

DIVERGED = "diverged"  # 1 for a seed with which losses or updates ran out of all bounds; not there for others
ACCURACY = "personal.accuracy"  # the metric of tables and claims that name no other

BySeed = dict[int, float]
Measurements = dict[str, dict[str, BySeed]]  # of one part: row (a method's label), then metric, then seed


def difference(a: BySeed, b: BySeed) -> BySeed:
    """Paired differences: a - b for every seed that both have."""
    return {seed: a[seed] - b[seed] for seed in sorted(a.keys() & b.keys())}


def either_way(differences: BySeed, more: str, less: str) -> dict[str, BySeed]:
    """The two cases, by these names, of a claim that two things differ by at most so much: neither may exceed the other
    by more. (The size of a difference is not zero on average even where the difference is: seeds alone would contradict
    a claim about sizes.)"""
    return {more: differences, less: {seed: -value for seed, value in differences.items()}}


@dataclass(frozen=True)
class Paper:
    name: str
    citation: str


# Where a claim of Self-FL stands only in the NeurIPS version, its place says so.
_CITATIONS = {
    "Self-FL": "Chen et al., Self-Aware Personalized Federated Learning, NeurIPS 2022 (numbers as in arXiv 2204.08069)",
    "FedFomo": "Zhang et al., Personalized Federated Learning with First Order Model Optimization, 2021",
    "CGPFL": "Tang et al., Personalized Federated Learning with Contextualized Generalization, IJCAI 2022",
    "FedSA-LoRA": "Guo et al., Selective Aggregation for Low-Rank Adaptation in Federated Learning, ICLR 2025",
    "FedBN": "Li et al., FedBN: Federated Learning on Non-IID Features via Local Batch Normalization, ICLR 2021",
    "Ditto": "Li et al., Ditto: Fair and Robust Federated Learning Through Personalization, ICML 2021",
    "pFedMe": "Dinh et al., Personalized Federated Learning with Moreau Envelopes, NeurIPS 2020",
    "FedRep": "Collins et al., Exploiting Shared Representations for Personalized Federated Learning, ICML 2021",
    "FedBABU": "Oh et al., FedBABU: Toward Enhanced Representation for Federated Image Classification, 2022",
    "FedALA": "Zhang et al., FedALA: Adaptive Local Aggregation for Personalized Federated Learning, AAAI 2023",
    "IFCA": "Ghosh et al., An Efficient Framework for Clustered Federated Learning, NeurIPS 2020",
    "SCAFFOLD": "Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, ICML 2020",
    "FLamby": "Ogier du Terrail et al., FLamby: Datasets and Benchmarks for Cross-Silo Federated Learning in Realistic "
    "Healthcare Settings, NeurIPS 2022",
    "kinfed": "kinfed",
}
PAPERS = {name: Paper(name, citation) for name, citation in _CITATIONS.items()}


@dataclass(frozen=True)
class RunPart:
    """One run: settings as `kinfed run` takes them. `extra_metrics` adds measurements of the finished run. Methods
    that are run later, or apart, on the data of another part count as methods of that part: `merge_into` names it.
    A part that is `optional` is left out where its data cannot be had, and the page says so."""

    name: str
    settings: Mapping[str, Any]
    extra_metrics: Callable[[RunRecord], Measurements] | None = None
    merge_into: str | None = None
    optional: bool = False

    def __post_init__(self) -> None:
        _check_name(self.name)


@dataclass(frozen=True)
class Study:
    """Work that is not a run of rounds: a function that measures, given the seeds asked for (none: its own) and the
    settings of all runs (where data lies, how many workers). With `by_seed` it is asked for one seed after the other,
    and each is kept as soon as it is there, so that a part that was stopped goes on where it was. `merge_into` and
    `optional` are those of RunPart."""

    name: str
    measure: Callable[[Sequence[int] | None, Mapping[str, Any]], Measurements]
    identity: Mapping[str, Any] = field(default_factory=dict)  # what its result depends on but for seeds, plain values
    seeds: tuple[int, ...] | None = None  # its own; none if no chance is involved
    by_seed: bool = False
    merge_into: str | None = None
    optional: bool = False

    def __post_init__(self) -> None:
        _check_name(self.name)
        if self.by_seed and self.seeds is None:
            raise ConfigError(f"part {self.name}: work that is done by seed needs seeds")


def _check_name(name: str) -> None:
    if not name or not all(c.isalnum() or c in "-_" for c in name):
        raise ConfigError(f"a part's name is that of its folder: letters, digits, '-' and '_'; got {name!r}")


@dataclass(frozen=True)
class Results:
    """What the parts measured. Rows are methods by their label; an alias is another kind of model of a method."""

    parts: Mapping[str, Measurements]
    aliases: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    def get(self, part: str, row: str, metric: str) -> BySeed:
        """Values by seed; empty if this was not measured."""
        if row in self.aliases:
            row, kind = self.aliases[row]
            metric = f"{kind}.{metric.removeprefix('personal.')}" if metric.startswith("personal.") else metric
        return self.parts.get(part, {}).get(row, {}).get(metric, {})

    def diverged(self, part: str, row: str) -> list[int]:
        """Seeds with which a method has diverged: its figures mean nothing then, be they good or bad."""
        method, _ = self.aliases.get(row, (row, ""))
        return sorted(self.parts.get(part, {}).get(method, {}).get(DIVERGED, {}))

    def __contains__(self, part: object) -> bool:
        return part in self.parts


Margins = Callable[[Results], Mapping[str, BySeed]]
"""By rival (or case) and seed: what is held against the limit of a claim, in stored units. Without seeds: not run."""


@dataclass(frozen=True)
class ResultColumn:
    heading: str
    part: str
    metric: str = ACCURACY  # kind.metric as in summary.json; or bytes, seconds, or what a part adds
    factor: float = 100.0  # from the stored to the shown unit
    digits: int = 1
    lower_is_better: bool = False
    against: str = ""  # a row: shown is the paired difference to it, with Student's 95 % interval over seeds

    @classmethod
    def by_part(cls, headings: Mapping[str, str], metric: str = ACCURACY, **options: Any) -> list[ResultColumn]:
        """The same metric of several parts; `headings` by part."""
        return [cls(heading, part, metric, **options) for part, heading in headings.items()]

    @classmethod
    def by_metric(cls, part: str, metrics: Mapping[str, str], **options: Any) -> list[ResultColumn]:
        """Several metrics of one part, by their heading."""
        return [cls(heading, part, metric, **options) for heading, metric in metrics.items()]


@dataclass(frozen=True)
class PublishedNumber:
    """A number as the paper prints it."""

    value: float
    spread: float | None = None
    text: str = ""

    def __str__(self) -> str:
        return self.text or (f"{self.value:g}" if self.spread is None else f"{self.value:g} ± {self.spread:g}")


@dataclass(frozen=True)
class ResultTable:
    title: str
    rows: Mapping[str, str]  # row in the measurements -> name shown
    columns: Sequence[ResultColumn]
    published: Mapping[tuple[str, str], PublishedNumber] = field(default_factory=dict)  # by (row, heading)
    caption: str = ""


def parse_published(text: str) -> dict[tuple[str, str], PublishedNumber]:
    """Numbers from a table written as in the paper: headings after the first line's |, rows by their label.

    method  | MNIST MLR    | MNIST DNN
    fedavg  | 88.63        | 91.05
    fedfomo | 99.63 ± 0.07 | -
    """
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    headings = [cell.strip() for cell in lines[0].split("|")[1:]]
    numbers = {}
    for line in lines[1:]:
        row, *cells = (cell.strip() for cell in line.split("|"))
        if len(cells) != len(headings):
            raise ConfigError(f"published row {row!r} has {len(cells)} numbers for {len(headings)} columns")
        for heading, cell in zip(headings, cells, strict=True):
            if cell not in ("-", ""):
                value, _, spread = cell.partition("±")
                numbers[row, heading] = PublishedNumber(float(value), float(spread) if spread else None, cell)
    return numbers


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper as numbers. What is measured must lie above the limit; with `at_most`, below it. Where
    several things are measured (one for each rival or case), all must."""

    text: str
    margins: Margins
    unit: str = "points"
    factor: float = 100.0  # from the stored to the shown unit
    place: str = ""  # where the paper says it: section, figure or table
    main: bool = (
        False  # what the paper stands on (its abstract, its main comparison), or a control or reading beside it
    )

    limit: float = 0.0  # in stored units: -0.02 allows a method to be two points below
    at_most: bool = False  # the limit is an upper one

    source: ClassVar[Source] = "paper"

    @classmethod
    def above(
        cls,
        text: str,
        part: str,
        row: str,
        rivals: Iterable[str],
        metric: str = ACCURACY,
        *,
        limit: float = 0.0,
        instead: Mapping[str, str] = MappingProxyType({}),
        lower_is_better: bool = False,
        unit: str = "points",
        factor: float = 100.0,
        place: str = "",
        main: bool = False,
    ) -> Self:
        """`row` is better than every rival, by at least `limit` (in stored units). `instead` names rows that take a
        rival's place where they were run: the same method with settings that suit it better."""
        named = tuple(rivals)

        def margins(results: Results) -> Mapping[str, BySeed]:
            own = results.get(part, row, metric)
            sign = -1.0 if lower_is_better else 1.0
            run = results.parts.get(part, {})
            others = [instead[rival] if instead.get(rival) in run else rival for rival in named]
            measured = {other: results.get(part, other, metric) for other in others}
            return {
                other: {seed: sign * gap for seed, gap in difference(own, values).items()}
                for other, values in measured.items()
            }

        return cls(text, margins, unit, factor, place, main, limit)

    def as_question(self, *reading: str) -> Question:
        """The same sentence as a question of ours: in another reading, or stricter than the paper says it."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        return Question(**values | {"text": ", ".join((self.text, *reading)), "place": "", "main": False})


@dataclass(frozen=True)
class Question(Claim):
    """A question of ours that stands beside the paper's claims, judged as they are."""

    source: ClassVar[Source] = "kinfed"


@dataclass(frozen=True)
class Untestable:
    """A claim that nothing here can confirm or refute, and why."""

    text: str
    reason: str
    place: str = ""


@dataclass(frozen=True)
class OpenChoice:
    """Something that a paper leaves open, or says in two ways."""

    choice: str
    readings: str
    evidence: str  # what the paper says, quoted, and where
    likeliest: str  # the reading that its authors most likely ran


@dataclass(frozen=True)
class Readings:
    """A claim in every reading of the paper: a grid of comparisons in place of one."""

    title: str
    part: str
    rows: Mapping[str, str]  # row in the measurements -> how the method is read
    columns: Mapping[str, Sequence[str]]  # how its rivals are read -> their rows
    likeliest: tuple[str, str]  # row and column: what the authors most likely ran
    fair: Mapping[str, str]  # by row, the column whose rivals have as much work at the same effective rate
    parts: Mapping[str, str] = field(default_factory=dict)  # columns that were measured in a part of their own
    metric: str = ACCURACY
    choices: Sequence[OpenChoice] = ()

    def __post_init__(self) -> None:
        row, column = self.likeliest
        for name, known in ((row, self.rows), (column, self.columns), *((each, self.rows) for each in self.fair)):
            if name not in known:
                raise unknown_name(f"reading in {self.title!r}", name, known)
        for column in self.fair.values():
            if column not in self.columns:
                raise unknown_name(f"reading of rivals in {self.title!r}", column, self.columns)

    def claim(self, row: str, column: str) -> Question:
        """The comparison of one cell."""
        text = f"{self.title}: {self.rows[row]}; rivals: {column}"
        return Question.above(text, self.parts.get(column, self.part), row, self.columns[column], self.metric)


@dataclass(frozen=True)
class RecipeFigure:
    """A figure of the recipe's own."""

    title: str  # empty: it goes with the one before
    figure: Figure
    caption: str = ""

    @classmethod
    def from_panel(cls, panel: Panel, title: str = "") -> list[RecipeFigure]:
        """The figures of a method's panel under one heading, what is to be seen said below the last."""
        last = len(panel.figures) - 1
        return [
            cls("" if number else title or panel.title, figure, panel.sentence if number == last else "")
            for number, figure in enumerate(panel.figures)
        ]


@dataclass(frozen=True)
class Recipe:
    name: str
    paper: Paper
    reproduces: str  # which tables and figures of the paper
    title: str
    about: str
    parts: Callable[[Scale], Sequence[RunPart | Study]]
    tables: Sequence[ResultTable] = ()
    claims: Sequence[Claim | Untestable] = ()
    readings: Sequence[Readings] = ()
    notes: Sequence[str] = ()  # what cannot match the paper, and why
    stand_ins: Mapping[Scale, str] = field(default_factory=dict)  # what a scale replaces, said above its numbers
    aliases: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # row -> (method, kind): FedAvg's server model
    method_figures: Sequence[tuple[str, str]] = ()  # (part, method) whose own figures the page shows
    figures: Callable[[Results, Mapping[str, Comparison]], Sequence[RecipeFigure]] = lambda results, runs: ()
    arranged: Callable[[Sequence[ResultTable], Results], Sequence[ResultTable]] = lambda tables, results: (
        tables
    )  # order
    other_data: tuple[str, ...] = ()  # parts on another data set than the paper's, at every scale
    only: tuple[str, ...] = ()  # of a recipe limited to some of its parts: which

    def command(self, scale: Scale, *, seeds: Sequence[int] | None = None) -> str:
        """What measures it; `seeds` where they are not its own."""
        chosen = f" --only {','.join(self.only)}" if self.only else ""
        drawn = f" --seeds {','.join(map(str, seeds))}" if seeds is not None else ""
        return f"kinfed reproduce {self.name} --scale {scale}{chosen}{drawn}"

    def limited_to(self, names: Sequence[str], scale: Scale) -> Recipe:
        """The recipe with some of its parts."""
        all_names = {part.name for part in self.parts(scale)}
        for name in names:
            if name not in all_names:
                raise unknown_name(f"part of {self.name} at scale {scale}", name, all_names)
        parts = self.parts
        chosen = tuple(names)
        return replace(self, parts=lambda scale: [part for part in parts(scale) if part.name in chosen], only=chosen)
