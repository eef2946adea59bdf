"""The sentences of the report: what was run, and what came out. Plain text, escaped by the page."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from kinfed.analysis import (
    Comparison,
    Difference,
    Method,
    average,
    clear_winner,
    client_gains,
    difference,
    display_name,
    gains,
    leader,
    metric_style,
    options_of,
    summarize_gains,
)
from kinfed.config import PresetUse, published_notes
from kinfed.data import Description
from kinfed.records import Kind, RunRecord
from kinfed.report.drawing.looks import format_number, plural, shown
from kinfed.report.panels.shares_panel import in_short

FinalValues = dict[int, dict[int, float]]  # of a metric, by method and seed

FEW_NAMES = 4  # clients that a sentence names
MOSTLY_ONE_CLASS = 0.8  # of test examples in their client's most frequent class


def brief(value: Any) -> str:
    """A configuration value in a few words: {"name": "classes", "classes": 2} becomes classes (classes 2)."""
    if isinstance(value, Mapping):
        name = str(value.get("name", ""))
        rest = {key: entry for key, entry in value.items() if key != "name" and entry not in (None, {}, [])}
        options = ", ".join(f"{key} {brief(entry)}" for key, entry in rest.items())
        return f"{name} ({options})" if name and options else name or options
    if isinstance(value, list):
        return ", ".join(brief(entry) for entry in value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


def facts(run: RunRecord) -> dict[str, str]:
    """The main settings of a run, by heading; whatever else was configured is in the fold below them."""
    config = run.config
    work = {key: config.get(key) for key in _WORK if _WITHOUT_EFFECT.get(key) != config.get(key)}
    entries = {
        "Data": brief(config.get("dataset")), "Split among clients": brief(_partition(run)),
        "Clients": brief(_clients(run)), "Model": brief(config.get("models") or config.get("model")),
        "Rounds": brief(config.get("rounds")),
        "Participation": _participation(config.get("participation")), "Local work": brief(work),
        "Seeds": brief(config.get("seeds")), "Folds": brief(config.get("folds")),
    }  # fmt: skip
    methods, algorithms = [], config.get("algorithms")
    for name in algorithms if isinstance(algorithms, dict) else ():
        options = {key: value for key, value in options_of(run, name).items() if (key, value) != ("method", name)}
        methods.append(display_name(name) + (f" ({brief(options)})" if brief(options) else ""))
    entries["Methods"] = ", ".join(methods)
    if isinstance(use := config.get("preset"), Mapping):
        entries["Preset"] = "; ".join(PresetUse(**use).notes())
    if config.get("as_published"):
        entries["As published"] = "; ".join(published_notes({name: options_of(run, name) for name in run.algorithms}))
    return {label: text for label, text in entries.items() if text and text != "None"}


def _partition(run: RunRecord) -> Any:
    """The partition as configured, or as the data set is shared out where nothing was said."""
    for federation in run.federations.values():
        if not run.config.get("partition") and federation.description.get("partition"):
            return {"name": federation.description["partition"], **federation.description.get("options", {})}
    return run.config.get("partition")


def _clients(run: RunRecord) -> int | None:
    """The number of clients as configured, or as found where the data set brings its own."""
    counts = [len(federation.names) for federation in run.federations.values()]
    configured = run.config.get("clients")
    return configured if isinstance(configured, int) else next(iter(counts), None)


_WORK = (
    "optimizer", "lr", "batch", "steps", "epochs", "momentum", "nesterov", "weight_decay", "clip", "optimizer_state",
    "lr_decay",
)  # fmt: skip
_WITHOUT_EFFECT = {
    "optimizer": "sgd", "momentum": 0, "nesterov": False, "weight_decay": 0, "optimizer_state": "reset", "lr_decay": 1,
}  # fmt: skip


def _participation(value: Any) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return "all clients in every round" if value == 1 else f"{100 * value:g} % of the clients in a round"
    return brief(value)


def headline(runs: Iterable[RunRecord]) -> str:
    """Title of the page: the data, and how many methods and clients met on it."""
    runs = list(runs)
    datasets = list(dict.fromkeys(brief(run.config.get("dataset") or run.label) for run in runs))
    methods = len({name for run in runs for name in run.algorithms})
    clients = {_clients(run) for run in runs}
    text = f"{' and '.join(datasets)}: {plural(methods, 'method')}"
    only = next(iter(clients))
    return text + (f", {plural(only, 'client')}" if len(clients) == 1 and isinstance(only, int) else "")


def findings(comparison: Comparison) -> list[str]:
    """The outcome in two or three sentences that claim no more than the seeds support."""
    sentences = [ranking] if (ranking := _ranking(comparison)) else []
    method = best_federated(comparison)
    if method is not None and (values := gains(comparison, method)):
        by_client = client_gains(values)
        s = summarize_gains(by_client)
        seeds = len({g.seed for g in values})
        over = f" (a client's gain is its mean over {seeds} seeds)" if seeds > 1 else ""
        lost = [g.client for g in reversed(by_client) if g.gain < 0]
        named = f": {_join_names(lost)}" if 0 < s.hurt == len(lost) <= FEW_NAMES else ""
        sentences.append(
            f"Compared with training alone, {method.label} helps {s.helped} of {s.n} clients, leaves {s.unchanged} as "
            f"they were and hurts {s.hurt}{named}{over}."
        )
    return sentences + [text for method in comparison.methods if (text := in_short(method)) is not None]


def outsiders_sentence(comparison: Comparison) -> str:
    """The number of clients that took part in no round; "" if all did, or where a run does not say."""
    counts = [pair for method in comparison.methods for pair in method.participation.values()]
    missing = [clients - took_part for took_part, clients in counts]
    if not any(missing):
        return ""
    low, high, clients = min(missing), max(missing), max(clients for _, clients in counts)
    number = f"{high}" if low == high else f"{low} to {high}"
    return f"{number} of {plural(clients, 'client')} took part in no round"


def one_class_sentence(comparison: Comparison) -> str:
    """A warning that accuracy tells little, where clients reach most of it without a model; else ""."""
    known = {seed: b.personal["accuracy"] for seed, b in comparison.baselines.items() if "accuracy" in b.personal}
    reached = average(known)
    if comparison.metric != "accuracy" or reached is None or not reached.mean >= MOSTLY_ONE_CLASS:
        return ""
    return (
        f"Always predicting a client's own most frequent class is right in {format_number(100 * reached.mean, 1)} % of "
        "test examples, so compare accuracies with that; AUROC and balanced accuracy, below, say more about the rarer "
        "classes."
    )


def best_federated(comparison: Comparison) -> Method | None:
    """The method in which clients do learn from each other that ranks first."""
    federated = [method for method in comparison.methods if method.family != "local"]
    return None if (kind := headline_kind(comparison)) is None else _leader(comparison, kind, federated)[0]


def _leader(comparison: Comparison, kind: Kind, methods: Sequence[Method]) -> tuple[Method | None, FinalValues]:
    """The first of the methods by the headline metric, and the metric of each by seed."""
    values = {method.index: method.final(kind, comparison.metric) for method in methods}
    first = leader(values, comparison.style.lower_is_better)
    return next((method for method in methods if method.index == first), None), values


def headline_kind(comparison: Comparison) -> Kind | None:
    return comparison.kinds[0] if comparison.kinds else None


def _ranking(comparison: Comparison) -> str:
    kind = headline_kind(comparison)
    if kind is None or len(comparison.methods) < 2:
        return ""
    first, values = _leader(comparison, kind, comparison.methods)
    if first is None:
        return ""
    lower, models = comparison.style.lower_is_better, "personal models" if kind == "personal" else "the server model"
    is_clear, level = clear_winner(values, lower) == first.index, _level(values[first.index], comparison.metric)
    start = f"{first.label} has the {'lowest' if lower else 'highest'} {comparison.style.noun} of {models}, {level}"
    if not comparison.same_final_round:
        return start + ", but the methods have reached different rounds, so this is no verdict."
    if not comparison.same_seeds and not is_clear:
        return start + ", but the methods do not rest on the same seeds, so this is no verdict."
    if comparison.seeds < 2:
        return start + ". One seed gives no spread to judge the difference by: run at least three before naming a best."
    if is_clear:
        return start + f", and leads every other method clearly over {comparison.seeds} seeds."
    rivals = pair[1] if (pair := leads(comparison, kind)) else []
    close = [method.label for method, lead in rivals if lead is None or not lead.clear]
    return start + f", but its lead over {_join_names(close)} may be due to the seeds: no clear best."


def _level(values: Mapping[int, float], metric: str) -> str:
    level = average(values)
    if level is None:
        return "–"
    style = metric_style(metric)
    spread = "" if level.sd is None else f" ± {style.scale * level.sd:.{style.digits}f}"
    return shown(level.mean, style) + spread + style.unit


def _join_names(names: list[str]) -> str:
    if len(names) > 4:
        return f"{', '.join(names[:3])} and {len(names) - 3} others"
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def leads(comparison: Comparison, kind: Kind) -> tuple[Method, list[tuple[Method, Difference | None]]] | None:
    """The best method by the headline metric and how far it is ahead of each of the others."""
    first, values = _leader(comparison, kind, comparison.methods)
    others = [method for method in comparison.methods if method is not first and values[method.index]]
    if first is None or not others:
        return None
    own, lower = values[first.index], comparison.style.lower_is_better
    return first, [(one, difference(own, values[one.index], lower)) for one in others]


def data_sentence(federation: Description) -> str:
    sizes = sorted(federation.sizes())
    text = (
        f"{plural(len(sizes), 'client')} hold {plural(sum(sizes), 'training example')}: {sizes[0]} to {sizes[-1]} each "
        f"(median {median(sizes):g})"
    )
    if not federation.problem.has_classes:
        return f"{text}; {federation.problem.in_words()}."
    held = [sum(count > 0 for count in counts) for counts in federation.train]
    classes = f"{min(held)} to {max(held)}" if min(held) != max(held) else f"{held[0]}"
    if federation.listed is not None:
        text = f"In a sample of {len(sizes):,} of {federation.num_clients:,} clients: {text}"
    return f"{text}, of {classes} out of {len(federation.class_labels)} classes."


def data_notes(federations: Mapping[int, Description]) -> list[str]:
    """Notes of sharing out the data, once where they hold for all seeds."""
    by_note: dict[str, list[int]] = {}
    for seed, federation in sorted(federations.items()):
        for note in federation.notes:
            by_note.setdefault(note, []).append(seed)
    return [
        note if len(seeds) == len(federations) else f"Seed {', '.join(map(str, seeds))}: {note}"
        for note, seeds in by_note.items()
    ]


def other_data(comparisons: list[Comparison]) -> str:
    names = " | ".join(", ".join(run.label for run in comparison.runs) for comparison in comparisons)
    warning = "These runs do not share their data, so their figures must not be compared"
    return f"{warning}: {names}. Each has its own section below."
