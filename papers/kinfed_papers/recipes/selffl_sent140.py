"""Margins of selffl-sent140: what has changed since the warm start."""

from __future__ import annotations

from kinfed_papers.recipe import ACCURACY, BySeed, Results, difference, either_way

NAMES = {
    "fedavg": "FedAvg, fine-tuned",
    "ditto": "Ditto",
    "pfedme": "pFedMe",
    "perfedavg": "Per-FedAvg",
    "selffl": "Self-FL",
}


def saturated(results: Results) -> dict[str, BySeed]:
    """Points by which a method's test accuracy has risen, or fallen, since the warm start."""
    start = results.get("scratch", "fedavg", ACCURACY)
    cases: dict[str, BySeed] = {}
    for row, name in NAMES.items():
        change = difference(results.get("warm", row, ACCURACY), start)
        cases |= either_way(change, f"{name} rises", f"{name} falls")
    return cases
