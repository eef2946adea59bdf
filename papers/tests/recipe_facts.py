"""All that a recipe says at a scale as plain values, so that two versions of it can be compared.

Margins of claims are functions: they are given figures made up from names and seeds, all of them and with some missing,
and what they make of these is among the facts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

SEEDS = (3, 4, 7)


def facts(recipe: Any, scale: str, settings_hash: Callable[[Any], str], results_type: type[Any]) -> dict[str, Any]:
    """Of a recipe at a scale. `settings_hash` and `results_type` are those of the recipe's own version of kinfed."""
    parts = recipe.parts(scale)
    rows = {row for table in recipe.tables for row in table.rows} | {"federation"}
    measured = {part.merge_into if getattr(part, "merge_into", None) else part.name for part in parts}
    labels = {
        label
        for part in parts
        if isinstance(algorithms := getattr(part, "settings", {}).get("algorithms"), Mapping)
        for label in algorithms
    }
    known = {part: {row: {} for row in rows | labels} for part in measured}
    return {
        **{key: getattr(recipe, key) for key in ("name", "reproduces", "title", "about", "only")},
        "paper": asdict(recipe.paper),
        "notes": list(recipe.notes),
        "stand_ins": dict(recipe.stand_ins),
        "aliases": {row: list(alias) for row, alias in recipe.aliases.items()},
        "method_figures": [list(pair) for pair in recipe.method_figures],
        "other_data": list(recipe.other_data),
        "figures": _name(recipe.figures),
        "parts": [_part(part, settings_hash) for part in parts],
        "tables": [_table(table) for table in recipe.tables],
        "claims": [_claim(claim, known, recipe.aliases, results_type) for claim in recipe.claims],
        **({"readings": [asdict(one) for one in recipe.readings]} if recipe.readings else {}),
    }


def digest(value: Any) -> str:
    """Of numbers to twelve digits: from Python 3.12 on, sums of floats have other last ones."""
    rounded = json.loads(json.dumps(value), parse_float=lambda text: float(f"{float(text):.12g}"))
    return hashlib.sha256(json.dumps(rounded, sort_keys=True, ensure_ascii=False).encode()).hexdigest()[:16]


def _name(function: Any) -> str | None:
    return None if function is None else function.__name__.lstrip("_")


def _part(part: Any, settings_hash: Callable[[Any], str]) -> dict[str, Any]:
    known = {"name": part.name, "hash": settings_hash(part)}
    if not hasattr(part, "settings"):
        return known | {"identity": dict(part.identity), "seeds": part.seeds}
    algorithms = part.settings.get("algorithms")
    return known | {
        "settings": {key: value for key, value in part.settings.items() if key != "algorithms"},
        "algorithms": _algorithms(algorithms) if isinstance(algorithms, Mapping) else algorithms,
        "extra_metrics": _name(part.extra_metrics),
        "merge_into": part.merge_into,
        "optional": part.optional,
    }


def _algorithms(algorithms: Mapping[str, Any]) -> list[Any]:
    return [[label, {"method": label, **options}] for label, options in algorithms.items()]


def _table(table: Any) -> dict[str, Any]:
    return {
        "title": table.title,
        "caption": table.caption,
        "rows": list(table.rows.items()),
        "columns": [asdict(column) for column in table.columns],
        "published": sorted([*key, float(n.value), n.spread, str(n)] for key, n in table.published.items()),
    }


def _claim(claim: Any, known: Mapping[str, Any], aliases: Any, results_type: type[Any]) -> dict[str, Any]:
    if not hasattr(claim, "margins"):
        return {"untestable": asdict(claim)}
    plain = {name: getattr(claim, name) for name in ("text", "unit", "factor", "place", "main", "limit", "at_most")}
    cases = [made_up(results_type, known, aliases, missing)() for missing in (None, 0, 1)]
    return plain | {"source": claim.source, "margins": [_margins(claim.margins, case) for case in cases]}


def _margins(margins: Callable[[Any], Any], results: Any) -> Any:
    try:
        return [[case, sorted(by_seed.items())] for case, by_seed in margins(results).items()]
    except (ValueError, TypeError, ZeroDivisionError, StopIteration) as error:  # what is missing cannot be averaged
        return type(error).__name__


def made_up(results_type: type[Any], known: Mapping[str, Any], aliases: Any, missing: int | None) -> Callable[[], Any]:
    """Results in which every figure is a hash of its names, those of every third row `missing`."""

    class MadeUp(results_type):  # type: ignore[misc]
        def get(self, part: str, row: str, metric: str) -> dict[int, float]:
            if missing is not None and _number(part, row) % 3 == missing:
                return {}
            return {seed: 1 + _number(part, row, metric, seed) % 1000 / 1000 for seed in SEEDS}

    return lambda: MadeUp(known, aliases)


def _number(*names: object) -> int:
    return int(hashlib.sha256(repr(names).encode()).hexdigest()[:8], 16)
