"""Reproduce a table.

A recipe runs what a table or figure of a paper shows, with a verdict for every claim (`kinfed list recipes`). Here
Figures 3 to 5 of Self-FL (Chen et al., NeurIPS 2022): how far personal models are from the truth, which a synthetic
task knows, by the share of clients that a round calls. The picture is of the scale `smoke`, a trial of the code in a
minute; docs/benchmark/selffl-synthetic-paper.md has the recipe's results at the scale `paper`.
"""

import csv
import subprocess
import sys
from pathlib import Path

import matplotlib.pyplot as plt

TABLE = "Case 1 (homogeneous): local error, truth theta_m"
METHODS = ("FedAvg-w", "Ditto, oracle lambda 1/s0", "Self-FL, known variances", "Self-FL, estimated")


def main(picture: str = "reproduce_a_table.svg", scale: str = "smoke") -> None:
    subprocess.run([sys.executable, "-m", "kinfed", "reproduce", "selffl-synthetic", "--scale", scale], check=True)
    with Path("reproduced", f"selffl-synthetic-{scale}", "results.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["table"] == TABLE]

    figure, axes = plt.subplots(figsize=(6, 4))
    for method in METHODS:
        points = [
            (float(row["column"].removeprefix("C = ")), float(row["mean"]), float(row["sd"] or 0))
            for row in rows
            if row["method"] == method
        ]
        shares, means, spreads = zip(*points, strict=True)
        axes.errorbar(shares, means, spreads, marker="o", capsize=3, label=method)
    axes.set(xlabel="share of clients that a round calls", ylabel="squared error of personal models", ylim=(0, None))
    axes.legend()
    figure.savefig(picture)


if __name__ == "__main__":
    main()
