"""Boosted trees beside what people would take instead, on tables with sites; and their time beside scikit-learn's.

    python benchmarks/boosted_trees.py tables exam65_london,heart_disease --seeds 0,1,2 --data DIR
    python benchmarks/boosted_trees.py speed --rows 1000000

`tables` prints the mean over sites on test rows: trees, and scikit-learn's HistGradientBoosting on pooled rows with the
site as a category, which needs pooled rows. `speed` grows ten trees of depth 6 on one thread and prints the ratio of
processor times; both see the same bins of 20 features.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
import torch
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.metrics import roc_auc_score

import kinfed
from kinfed.data import Federation, Problem
from kinfed.engine import make_objective, task_for
from kinfed.engine.trees import ClientRows, LocalTrees, TreeLoss
from kinfed.runs.experiment import chosen_config
from kinfed.runs.run_inputs import build_federation

METHODS = ("local", "fedavg", "ditto", "trees_fast", "trees")


def site_means(data: Federation, outputs: np.ndarray[Any, Any]) -> float:
    """RMSE, AUROC or accuracy of outputs [N, C] on the test rows, averaged over sites that have one."""
    labels, figures = data.labels.numpy(), []
    for k in range(data.num_clients):
        rows = data.test[k].numpy()
        y, z = labels[rows], outputs[rows]
        if data.problem.is_regression:
            figures += [float(np.sqrt(((z[:, 0] - y) ** 2).mean()))] if len(rows) else []
        elif data.num_classes == 2:
            figures += [float(roc_auc_score(y, z[:, 1]))] if len(set(y.tolist())) == 2 else []
        else:
            figures += [float((z.argmax(1) == y).mean())] if len(rows) else []
    return float(np.mean(figures))


def by_kinfed(data: Federation, method: str, seed: int, rounds: int) -> tuple[float, int]:
    """The figure of a method's personal models, and its rounds."""
    outputs = np.zeros((len(data.labels), data.problem.outputs))
    with kinfed.simulate(data, "mlr", method, seed=seed, workers=1) as loop:
        loop.task.problem = data.problem
        number = 0
        for report in loop.rounds(rounds):
            if not report.active:
                break
            number += 1
        models = loop.evaluate(keep_models=True).models
        assert models is not None
        task = task_for(loop.task, models)
        for k in range(data.num_clients):
            if len(data.test[k]):
                z = task.logits(models[k : k + 1], data.features.gather(data.test[k])[None])[0]
                outputs[data.test[k].numpy()] = data.problem.restored(z) if data.problem.is_regression else z
    if data.num_classes == 2:
        outputs[:, 1] -= outputs[:, 0]
    return site_means(data, outputs), number


def pooled(data: Federation) -> float:
    """scikit-learn on all training rows, with the site as a category where it takes so many."""
    every = np.arange(len(data.labels))
    x = data.features.gather(torch.from_numpy(every)).flatten(1).numpy()
    owner = np.zeros(len(every))
    for split in (data.train, data.val, data.test):
        owner[split.rows.numpy()] = split.owner.numpy()
    train, y = data.train.rows.numpy(), data.labels.numpy()
    kinds = [*(False for _ in range(x.shape[1])), True] if data.num_clients <= 255 else None
    x = np.column_stack([x, owner]) if kinds else x
    kind = HistGradientBoostingRegressor if data.problem.is_regression else HistGradientBoostingClassifier
    model = kind(categorical_features=kinds, early_stopping=True, random_state=0).fit(x[train], y[train])
    outputs = model.predict(x)[:, None] if data.problem.is_regression else model.predict_proba(x)
    return site_means(data, outputs)


def tables(names: list[str], seeds: list[int], folder: str | None, methods: list[str]) -> None:
    print("| table | seed |", " | ".join(methods), "| pooled trees with site |")
    for name in names:
        for seed in seeds:
            settings = {"dataset": name, "algorithms": "fedavg"} | ({} if folder is None else {"data": folder})
            data = build_federation(chosen_config(None, None, settings)[0], seed)
            cells = []
            for method in methods:
                figure, rounds = by_kinfed(data, method, seed, 2000 if method.startswith("trees") else 100)
                cells.append(f"{figure:.4f} ({rounds})")
            print(f"| {name} | {seed} |", " | ".join(cells), f"| {pooled(data):.4f} |", flush=True)


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
    parser.add_argument("what", choices=("tables", "speed"))
    parser.add_argument("names", nargs="?", default="exam65_london,heart_disease")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--data")
    parser.add_argument("--rows", type=int, default=1_000_000)
    options = parser.parse_args()
    if options.what == "speed":
        speed(options.rows)
    else:
        seeds = [int(seed) for seed in options.seeds.split(",")]
        tables(options.names.split(","), seeds, options.data, options.methods.split(","))


if __name__ == "__main__":
    main()
