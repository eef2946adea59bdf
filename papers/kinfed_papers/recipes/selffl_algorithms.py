"""Margins of selffl-algorithms: how far Self-FL's two algorithms are apart, and what they send."""

from __future__ import annotations

from kinfed_papers.recipe import BySeed, Results, difference, either_way

HEADINGS = {"mnist": "MNIST", "letters": "Letters"}


def within_a_point(results: Results, part: str, metric: str) -> dict[str, BySeed]:
    """Margin by which either is ahead. The paper says "smaller than 1 %" of training accuracy on FEMNIST alone."""
    one, two = (results.get(part, row, metric) for row in ("selffl", "selffl_augmented"))
    return either_way(difference(one, two), "Algorithm 1 ahead", "Algorithm 2 ahead")


def traffic(results: Results, row: str, metric: str = "bytes") -> dict[str, BySeed]:
    """Bytes of a round in units of FedAvg's, which are the control's: it sends what FedAvg sends."""
    cases = {}
    for part, heading in HEADINGS.items():
        own, fedavg = (results.get(part, label, metric) for label in (row, "selffl_control"))
        cases[heading] = {seed: own[seed] / fedavg[seed] for seed in own.keys() & fedavg.keys()}
    return cases


def distance_from_twice(results: Results, metric: str) -> dict[str, BySeed]:
    """How far Algorithm 2's traffic is from twice FedAvg's."""
    cases: dict[str, BySeed] = {}
    for heading, ratios in traffic(results, "selffl_augmented", metric).items():
        beyond = {seed: ratio - 2 for seed, ratio in ratios.items()}
        cases |= either_way(beyond, f"{heading}, more than twice", f"{heading}, less than twice")
    return cases
