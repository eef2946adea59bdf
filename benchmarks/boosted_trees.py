"""Boosted trees' time beside scikit-learn's HistGradientBoosting.

    python benchmarks/boosted_trees.py --rows 1000000

grows ten trees of depth 6 on one thread and prints the ratio of processor times; both see the same bins of 20 features.
How good they are beside these: `kinfed reproduce tables`.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
from sklearn.ensemble import HistGradientBoostingRegressor

from kinfed.data import Problem
from kinfed.engine import make_objective
from kinfed.engine.trees import ClientRows, LocalTrees, TreeLoss


def speed(rows: int, trees: int = 10, depth: int = 6, features: int = 20) -> None:
    draw = np.random.default_rng(0)
    x = draw.integers(0, 62, (rows, features)).astype(np.uint8)
    y = (np.sin(x[:, 0] / 10) + x[:, 1] / 30 + draw.normal(size=rows)).astype(np.float32)
    codes, loss = x + np.uint8(1), TreeLoss(make_objective(Problem.of_numbers()), 1)
    data = ClientRows(codes, np.arange(rows), np.array([0, rows]), y)
    grower, start = LocalTrees(trees, depth, 0.1, 1.0, 64), np.zeros((rows, 1, 1), np.float32)
    LocalTrees(1, depth, 0.1, 1.0, 64).grow(loss, data, start, np.ones((rows, 1), np.float32))  # compiles
    began = time.process_time()
    grower.grow(loss, data, start, np.ones((rows, 1), np.float32))
    ours = time.process_time() - began
    theirs = HistGradientBoostingRegressor(
        max_iter=trees, max_depth=depth, max_leaf_nodes=None, early_stopping=False, max_bins=64, l2_regularization=1.0
    )
    began = time.process_time()
    theirs.fit(x.astype(np.float32), y)
    other = time.process_time() - began
    print(f"{rows:,} rows, {trees} trees of depth {depth}: {ours:.2f} s, scikit-learn {other:.2f} s with its binning")
    print(f"ratio {ours / other:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    speed(parser.parse_args().rows)


if __name__ == "__main__":
    main()
