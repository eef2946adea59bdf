"""Shapley values of a few players, exactly: from the value of every coalition.

    φ_i = Σ_T  |T|! (n − 1 − |T|)! / n!  ·  (v(T with i) − v(T)),   over all T without i

A coalition is a number whose bit i says whether player i is in it. Values are linear in v: of several games at once, or
of draws of one, each gets its own, and Σ_i φ_i = v(all) − v(∅) in every one of them.

Shapley (1953), A value for n-person games.
"""

from __future__ import annotations

from math import factorial

import numpy as np
from numpy.typing import NDArray

MOST_PLAYERS = 10  # 1,024 coalitions


def shapley_weights(players: int) -> NDArray[np.float64]:
    """[n, 2^n] such that values of players are weights @ values of coalitions."""
    coalitions = np.arange(2**players)
    inside = (coalitions >> np.arange(players)[:, None] & 1).astype(bool)  # [n, 2^n]
    size = inside.sum(0)
    of_size = [factorial(s) * factorial(players - 1 - s) / factorial(players) for s in range(players)]
    joins, lacks = np.array([0.0, *of_size]), np.array([*of_size, 0.0])  # of the coalition with and without the player
    weights: NDArray[np.float64] = np.where(inside, joins[size], -lacks[size])
    return weights


def without(coalitions: NDArray[np.int64], player: int) -> NDArray[np.int64]:
    """Coalitions of all players that have `player`, as coalitions of the others: its bit is taken out."""
    low = coalitions & ((1 << player) - 1)
    others: NDArray[np.int64] = low | (coalitions >> (player + 1) << player)
    return others
