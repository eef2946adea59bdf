"""Short texts with a class, of several owners, as a table."""

from __future__ import annotations

import csv
from pathlib import Path

OPINIONS = {"good": ["the film was very good", "a fine book", "it is not bad", "we was very fine"],
            "bad": ["the film was poor", "a bad bad book", "it is not good", "the plot is very poor"]}  # fmt: skip


def write_opinions(path: Path, owners: list[str]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["body", "opinion", "who", "fold"])
        for owner in owners:
            for opinion, texts in OPINIONS.items():
                for number, text in enumerate(texts):
                    writer.writerow([f"{text} {owner}", opinion, owner, "test" if number == 3 else "train"])
    return path
