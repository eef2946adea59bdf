"""Shapley values against their definition by orders of arrival."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest

from kinfed.theory.shapley import shapley_weights, without


@pytest.mark.parametrize("players", [1, 2, 4])
def test_a_value_is_the_mean_over_orders_of_what_a_player_adds_on_arrival(players: int) -> None:
    worth = np.random.default_rng(players).normal(size=2**players)
    wanted, orders = np.zeros(players), list(permutations(range(players)))
    for order in orders:
        present = 0
        for player in order:
            wanted[player] += (worth[present | 1 << player] - worth[present]) / len(orders)
            present |= 1 << player
    np.testing.assert_allclose(shapley_weights(players) @ worth, wanted, atol=1e-12)


def test_coalitions_of_the_others_lose_one_bit() -> None:
    coalitions = np.array([0b0010, 0b0110, 0b1011])
    assert without(coalitions, 1).tolist() == [0b000, 0b010, 0b101]
    assert without(np.array([0b1000, 0b1111]), 3).tolist() == [0, 0b111]
