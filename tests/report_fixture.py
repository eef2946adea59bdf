"""Writes run folders that look like real ones, for the tests of the report and for looking at it.

python tests/report_fixture.py DIR        writes some runs below DIR and a report into each
"""

from __future__ import annotations

import csv
import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kinfed.data.examples.problem import Problem
from kinfed.data.federations.description import Description

# What a method adds to local training (in accuracy), how fast, and how many models it moves per client and round.
CHARACTER = {
    "local": (0.0, 6.0, 0),
    "fedavg": (-0.02, 14.0, 2),
    "fedprox": (-0.015, 15.0, 2),
    "ditto": (0.055, 11.0, 2),
    "selffl": (0.05, 12.0, 2),
    "fedfomo": (0.06, 9.0, 6),
    "cgpfl": (0.045, 16.0, 2),
    "pfedme": (0.02, 18.0, 2),
    "perfedavg": (0.01, 16.0, 2),
    "ifca": (0.048, 13.0, 5),
    "apfl": (0.03, 12.0, 2),
}
PARAMETERS = 9610


def write_run(
    folder: Path,
    *,
    algorithms: Sequence[str] | Mapping[str, dict[str, Any]] = (
        "local",
        "fedavg",
        "ditto",
        "selffl",
        "fedfomo",
        "cgpfl",
    ),
    clients: int = 20,
    classes: int = 10,
    rounds: int = 60,
    seeds: Sequence[int] = (0, 1, 2),
    eval_every: int = 5,
    participation: float = 0.5,
    dataset: str = "digits",
    names: Sequence[str] | None = None,
    groups: int | None = 5,
    variant: int = 0,
    settings: Mapping[str, Any] | None = None,
) -> Path:
    """A finished run. `variant` changes the noise of the results, not the data."""
    folder.mkdir(parents=True, exist_ok=True)
    options = dict(algorithms) if isinstance(algorithms, Mapping) else {name: {"method": name} for name in algorithms}
    config = {
        "dataset": {"name": dataset},
        "partition": {"name": "classes", "classes": 2},
        "clients": clients,
        "model": "mlp",
        "algorithms": options,
        "rounds": rounds,
        "participation": participation,
        "seeds": list(seeds),
        "lr": 0.05,
        "batch": 20,
        "steps": 20,
        "epochs": None,
        "momentum": 0.0,
        "eval_every": eval_every,
        **(settings or {}),
    }
    envelope = {
        "kinfed": "0.1.0",
        "versions": {"python": "3.11.2", "torch": "2.13.0"},
        "config": config,
        "fingerprint": hashlib.sha256(json.dumps(config).encode()).hexdigest()[:16],
    }
    _write_json(folder / "config.json", envelope)
    lines: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for seed in seeds:
        federation = _federation(np.random.default_rng(seed), clients, classes, names, groups)
        _write_json(folder / f"federation-{seed}.json", federation)
        for position, (label, chosen) in enumerate(options.items()):
            rng = np.random.default_rng([seed, position, variant])
            method = chosen.get("method", label)
            trial = _trial(rng, label, method, seed, federation, rounds, eval_every, participation)
            lines += trial[0]
            rows += trial[1]
            results.append(trial[2])
    (folder / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    with (folder / "clients.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    _write_json(folder / "summary.json", {"results": results})
    return folder


def stop_early(folder: Path, keep: int) -> Path:
    """Turns a finished run into one killed while it wrote the line after the first `keep` rounds."""
    (folder / "summary.json").unlink()
    lines = (folder / "rounds.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    cut = lines[keep][: len(lines[keep]) // 2]
    (folder / "rounds.jsonl").write_text("".join(lines[:keep]) + cut, encoding="utf-8")
    last = json.loads(lines[keep - 1])
    rows = (folder / "clients.csv").read_text(encoding="utf-8").splitlines(keepends=True)
    cut_at = next(i for i, row in enumerate(rows) if row.startswith(f"{last['algorithm']},{last['seed']},"))
    (folder / "clients.csv").write_text("".join(rows[:cut_at]), encoding="utf-8")
    return folder


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")


def described(
    names: Sequence[str],
    class_names: Sequence[str],
    counts: Sequence[Sequence[int]],
    groups: Sequence[int] | None = None,
    group_names: Sequence[str] | None = None,
    description: Mapping[str, Any] | None = None,
) -> Description:
    """Clients with these counts of training and test examples by class, and none for validation."""
    rows = [list(row) for row in counts]
    return Description(
        list(names), Problem.of_classes(len(class_names), class_names), rows,
        [[0] * len(class_names) for _ in rows], rows,
        None if groups is None else list(groups), None if group_names is None else list(group_names),
        [0.0] * len(rows), [0.0] * len(rows), dict(description or {}), [], {},
    )  # fmt: skip


def _federation(
    rng: np.random.Generator, clients: int, classes: int, names: Sequence[str] | None, groups: int | None
) -> dict[str, Any]:
    """Clients of a group share their main classes; sizes follow a power law."""
    count = min(groups or clients, clients)
    group = [m % count for m in range(clients)]
    main = [rng.choice(classes, size=min(2, classes), replace=False) for _ in range(count)]
    sizes = np.maximum(12, (60 * rng.pareto(2.2, size=clients) + 25).astype(int))
    train = []
    for m in range(clients):
        mix = np.full(classes, 0.1 / classes)
        mix[main[group[m]]] += 0.9 * rng.dirichlet([4.0] * len(main[group[m]]))
        train.append(rng.multinomial(sizes[m], mix / mix.sum()).tolist())
    share = [[max(1, round(0.25 * n)) if n else 0 for n in counts] for counts in train]
    return {
        "names": list(names) if names else [f"client-{m:02d}" for m in range(clients)],
        "num_classes": classes,
        "class_names": [str(c) for c in range(classes)],
        "train": train,
        "val": [[0] * classes for _ in train],
        "test": share,
        "groups": group if groups else None,
        "group_names": [f"digits {a} and {b}" for a, b in main] if groups and classes > 1 else None,
        "description": {"clients": clients, "partition": "classes", "options": {"classes": 2, "max_size": None}},
        "notes": ["Clients of a group share their main classes."],
        "emd": [0.0] * clients,
        "emd_code": [0.0] * clients,
        "inputs": {"shape": [8, 8], "tokens": False, "mean": None, "std": None},
    }


def _trial(
    rng: np.random.Generator,
    label: str,
    method: str,
    seed: int,
    federation: dict[str, Any],
    rounds: int,
    eval_every: int,
    participation: float,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, Any]]:
    bonus, pace, models = CHARACTER.get(method, (0.03, 12.0, 2))
    n_train = np.array([sum(counts) for counts in federation["train"]])
    n_test = np.array([sum(counts) for counts in federation["test"]])
    talent = np.random.default_rng([seed, 99]).normal(0, 0.05, size=len(n_train))  # what local training makes of it
    ceiling = 0.80 + 0.05 * np.log(n_train / 40) + talent
    if method != "local":
        ceiling = ceiling + bonus + 0.06 * np.log(80 / n_train) + rng.normal(0, 0.035, size=len(n_train))
    ceiling = ceiling + rng.normal(0, 0.003)
    active = max(1, int(participation * len(n_train)))
    each_way = 4 * PARAMETERS * models * active / 2
    lines = []
    personal: dict[str, Any] = {}
    shared: dict[str, Any] | None = None
    final: tuple[np.ndarray, np.ndarray | None] = (ceiling, None)
    for number in range(1, rounds + 1):
        evaluated = number % eval_every == 0 or number == rounds
        if evaluated:
            growth = 1 - np.exp(-number / pace)
            own = _measured(rng, 0.1 + (ceiling - 0.1) * growth, n_test)
            personal = _metrics(own, n_test, n_train)
            glob = None if method == "local" else _measured(rng, 0.1 + (ceiling - 0.2 - 0.1) * growth, n_test)
            shared = None if glob is None else _metrics(glob, n_test, n_train)
            final = own, glob
        lines.append(
            {
                "algorithm": label,
                "seed": seed,
                "round": number,
                "seconds": round(float(rng.uniform(0.02, 0.05)), 4),
                "active": active,
                "dropped": int(rng.random() < 0.05),
                "bytes_down": int(each_way * (1.6 if method == "fedfomo" else 1)),
                "bytes_up": int(each_way * (0.4 if method == "fedfomo" else 1)),
                "personal": personal if evaluated else None,
                "server": shared if evaluated else None,
                "method": _own_figures(rng, method, number, len(n_train), evaluated),
            }
        )
    rows = [
        {
            "algorithm": label,
            "seed": seed,
            "client": federation["names"][m],
            "n_train": int(n_train[m]),
            "n_test": int(n_test[m]),
            "personal_accuracy": final[0][m],
            "personal_loss": 1.2 * (1 - final[0][m]) + 0.05,
            "server_accuracy": "" if final[1] is None else final[1][m],
            "server_loss": "" if final[1] is None else 1.2 * (1 - final[1][m]) + 0.05,
        }
        for m in range(len(n_train))
    ]
    result = {
        "algorithm": label,
        "seed": seed,
        "rounds": rounds,
        "personal": personal,
        "server": shared,
        "bytes_down": sum(line["bytes_down"] for line in lines),
        "bytes_up": sum(line["bytes_up"] for line in lines),
        "seconds": sum(line["seconds"] for line in lines),
    }
    return lines, rows, result


def _measured(rng: np.random.Generator, chance: np.ndarray, n_test: np.ndarray) -> np.ndarray:
    """Accuracies on that many test examples."""
    return rng.binomial(n_test, np.clip(chance, 0.0, 1.0)) / n_test


def _metrics(accuracy: np.ndarray, n_test: np.ndarray, n_train: np.ndarray) -> dict[str, float]:
    tenth = -(-len(accuracy) // 10)
    largest = np.argsort(-n_train, kind="stable")[:tenth]
    return {
        "accuracy": float(np.average(accuracy, weights=n_test)),
        "accuracy_mean": float(accuracy.mean()),
        "accuracy_std": float(accuracy.std()),
        "worst10": float(np.sort(accuracy)[:tenth].mean()),
        "top10": float(np.average(accuracy[largest], weights=n_test[largest])),
        "loss": float(1.2 * (1 - np.average(accuracy, weights=n_test)) + 0.05),
    }


def _own_figures(rng: np.random.Generator, method: str, number: int, clients: int, evaluated: bool) -> dict[str, Any]:
    if method == "selffl":
        figures: dict[str, Any] = {
            "sigma0_sq": float(0.4 * np.exp(-number / 20) + rng.normal(0, 0.004)),
            "sigma_sq_mean": float(2.0 / number + rng.uniform(0, 0.02)),
            "smoothing": 0.5,
        }
        if evaluated:
            figures["clients"] = {"steps": rng.integers(1, 40, size=clients).tolist()}
        return figures
    if method == "cgpfl":
        figures = {"clusters": 4, "moved": int(rng.integers(0, max(2, clients // number + 1)))}
        return figures | ({"assignment": rng.integers(0, 4, size=clients).tolist()} if evaluated else {})
    if method == "fedfomo" and evaluated:
        return {"epsilon": max(0.0, 0.3 - 0.05 * number), "affinity": rng.random((clients, clients)).tolist()}
    return {}


def main(target: Path) -> None:
    from kinfed.report import build

    build([write_run(target / "demo")])
    many = ("local", "fedavg", "fedprox", "ditto", "selffl", "fedfomo", "cgpfl", "pfedme", "perfedavg", "ifca", "apfl")
    build([write_run(target / "many", algorithms=many, clients=300, groups=None, rounds=200, seeds=(0, 1))])
    build([write_run(target / "one-seed", seeds=(0,), algorithms=("fedavg", "ditto"), groups=None)])
    build([stop_early(write_run(target / "stopped"), 500)])
    other = write_run(target / "other", dataset="mnist", clients=100, algorithms=("local", "fedavg"))
    again = write_run(target / "again", variant=1, algorithms=("fedavg", "ditto"), settings={"lr": 0.01})
    build([target / "demo", again], target / "two.html")
    build([target / "demo", other], target / "mixed.html")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
