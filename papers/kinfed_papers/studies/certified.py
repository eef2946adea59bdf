"""What `kinfed fit` prints of gains, sets and expectations, held against a truth: simulated, and rows kept apart.

`bounds`, `expectations` and `watches` draw worlds whose truth is known. `on_table` divides every site's rows of a real
table in two halves, fits on one half (which has its own test rows) and judges everything that was handed over or
printed by the other half, which nothing has seen. With `permuted` targets nothing ranks rows, so that AUROC has nothing
to gain, and little should be shown; learning alone follows noise there, so that one model truly has smaller losses.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from scipy.special import expit
from scipy.stats import t as student

import kinfed
from kinfed.data import Problem
from kinfed.data.sources import SITE_TABLES, data_folder
from kinfed.engine import METRICS, Judged, bootstrap_draws, deviation_of_draws
from kinfed.errors import DataError
from kinfed.serving import ModelPipeline, model_of_run
from kinfed.tabular import FitResult
from kinfed.theory import certificates, joint_gains
from kinfed_papers.recipe import Measurements

Floats = np.ndarray[Any, np.dtype[np.float64]]
ALONE, ONE_MODEL = "alone", "one_model"
LEVEL = 0.9  # of prediction sets
HURT = 0.005  # nats, or standard deviations of the target, by which a site must do worse on fresh rows to count as hurt
LEAST = 1e-6  # probability of a truth
MOST = 400.0  # variances of the target that an error is counted as: of what has diverged


class Collector:
    """Measurements as they come: row, metric, seed, value."""

    def __init__(self) -> None:
        self.measured: Measurements = {}

    def put(self, row: str, seed: int, **figures: float | np.floating[Any]) -> None:
        for metric, value in figures.items():
            if np.isfinite(value):
                self.measured.setdefault(row, {}).setdefault(metric, {})[seed] = float(value)


# ---- statements about one site ----

CELLS = (
    (15, 0.15, 0.10),
    (30, 0.05, 0.03),
    (30, 0.3, 0.0),
    (60, 0.1, 0.05),
    (200, 0.1, 0.02),
)  # rows, discordant, gain


def half_row_bound(d: Floats) -> tuple[float, float]:
    """The interval of earlier versions: deviation at least that of half a row at 85 % accuracy."""
    error = max(d.std(ddof=1) / len(d) ** 0.5, 0.85 / (2 * len(d)))
    reach = student.ppf(0.975, len(d) - 1) * error
    return d.mean() - reach, d.mean() + reach


RANKED = ((20, 5), (60, 10), (200, 30))  # rows, those of the rarer class


def ranking_misses(draw: np.random.Generator, rows: int, rarer: int, sites: int = 200) -> tuple[float, float]:
    """Shares of sites whose interval, and lower bound, of a gain in AUROC exclude 0, where two models rank alike."""
    target = np.tile(np.arange(rows) < rarer, sites).astype(np.int64)
    level = target + 0.7 * draw.normal(size=len(target))

    def judged() -> Judged:
        score = level + 0.7 * draw.normal(size=len(target))
        output = np.stack([1 - expit(score), expit(score)], 1)
        return Judged(output, target, np.repeat(np.arange(sites), rows), sites, Problem.of_classes(2))

    auroc, ids, models = METRICS.named("auroc"), torch.arange(sites), (judged(), judged())
    values = [np.divide(*auroc.sums(model)) for model in models]
    gain = values[0] - values[1]
    error = deviation_of_draws(torch.sub(*(bootstrap_draws(auroc, model, ids, replicates=200) for model in models)))
    ratio = gain / error.numpy()
    two_sided, one_sided = (student.ppf(level, rarer - 1) for level in (0.975, 0.95))
    return float((np.abs(ratio) > two_sided).mean()), float((ratio > one_sided).mean())


def bounds(seeds: Sequence[int], draws: int) -> Measurements:
    """Largest share of misses over cells: of 0/1 losses before and now, of log losses that are skewed, of rankings, and
    of the mean over sites."""
    collector = Collector()
    for seed in seeds:
        draw = np.random.default_rng(seed)
        before, now, shown, skewed = [], [], [], []
        for rows, discordant, gain in CELLS:
            up = (discordant + gain) / 2
            chances = [up, discordant - up, 1 - discordant]
            d = draw.choice([1.0, -1.0, 0.0], p=chances, size=(draws, rows))
            ends = [half_row_bound(one) for one in d]
            printed = [certificates.gain_bound(one, "zero_one") for one in d]
            before.append(np.mean([not low <= gain <= high for low, high in ends]))
            now.append(np.mean([not one.low <= gain <= one.high for one in printed if one is not None]))
            shown.append(np.mean([one.at_least > gain for one in printed if one is not None]))
            losses = 1 - draw.lognormal(0, 0.75, size=(draws, rows)) / np.exp(0.75**2 / 2)  # mean 0, skewed to the left
            bounded = [certificates.gain_bound(one, "any") for one in losses]
            skewed.append(np.mean([one.at_least > 0 for one in bounded if one is not None]))
        collector.put("accuracy, half a row at least (before)", seed, miss=max(before))
        collector.put("accuracy, two pseudo-rows", seed, miss=max(now), one_sided=max(shown))
        collector.put("log loss, Student's t, skewed", seed, one_sided=max(skewed))
        ranked = [ranking_misses(draw, rows, rarer) for rows, rarer in RANKED]
        collector.put("AUROC, bootstrap, t of the rarer class", seed, miss=max(r[0] for r in ranked),
                      one_sided=max(r[1] for r in ranked))  # fmt: skip
        missed, above = [], []
        for sites in (4, 20, 60):  # gains with a mean of 0, seen with the noise of 20 to 2,000 rows
            noise = 0.5 / np.sqrt(np.exp(draw.uniform(np.log(20), np.log(2000), (draws, sites))))
            gains = draw.normal(0, 0.03, (draws, sites)) + noise * draw.normal(size=(draws, sites))
            known = [bound for one in gains if (bound := certificates.mean_over_sites(one)) is not None]
            missed.append(np.mean([not one.low <= 0 <= one.high for one in known]))
            above.append(np.mean([one.is_shown for one in known]))
        collector.put("mean gain over sites, Student's t", seed, miss=max(missed), one_sided=max(above))
    return collector.measured


# ---- what is expected ----

WORLDS: Mapping[str, tuple[float, float, float]] = {  # mean gain, spread between sites, drift of validation
    "no gain": (0.0, 0.0, 0.0), "helps": (0.03, 0.02, 0.0), "harms": (-0.03, 0.02, 0.0), "mixed": (0.0, 0.03, 0.0),
    "drift of 2 points": (0.0, 0.03, 0.02),
}  # fmt: skip
MODELS = 5


@dataclass(frozen=True)
class World:
    """Sites of 20 to 2,000 rows, and gains of models in points of accuracy."""

    truth: Floats  # [K, M]
    seen: Floats  # [K, M] on validation rows
    covariance: Floats  # [K, M, M]
    test: Floats  # [K, M] on a third as many test rows

    @classmethod
    def draw(cls, name: str, sites: int, draw: np.random.Generator) -> World:
        mean, spread, drift = WORLDS[name]
        rows = np.exp(draw.uniform(np.log(20), np.log(2000), sites))
        alike = 0.5 + 0.5 * np.eye(MODELS)
        truth = mean + spread * draw.multivariate_normal(np.zeros(MODELS), alike, sites)
        covariance = 0.09 * (0.6 + 0.4 * np.eye(MODELS)) / rows[:, None, None]
        noise = np.stack([draw.multivariate_normal(np.zeros(MODELS), one, 2) for one in covariance])
        return cls(truth, truth + drift + noise[:, 0], covariance, truth + 3**0.5 * noise[:, 1])


def one_by_one(seen: Floats, covariance: Floats) -> Floats:
    """Partial pooling of every model by itself, as before."""
    parts = [joint_gains.joint_gains(seen[:, [m]], covariance[:, [m]][:, :, [m]]).expected for m in range(MODELS)]
    return np.concatenate(parts, 1)


def expectations(seeds: Sequence[int], sites: int) -> Measurements:
    """Gain of what is chosen, share of sites hurt, and expected less true gain, in points."""
    collector = Collector()
    for world_name in WORLDS:
        for seed in seeds:
            world = World.draw(world_name, sites, np.random.default_rng(seed))
            joint = joint_gains.joint_gains(world.seen, world.covariance)
            variances = np.diagonal(joint.covariance, axis1=1, axis2=2)
            for title, expected in (
                ("one by one (before)", one_by_one(world.seen, world.covariance)), ("together", joint.expected)
            ):  # fmt: skip
                place, rows = expected.argmax(1), np.arange(sites)
                moves = expected[rows, place] > 0
                gain, promised = np.where(moves, world.truth[rows, place], 0), np.where(moves, expected[rows, place], 0)
                figures = {"gain": gain.mean(), "hurt": (gain < 0).mean(), "excess": (promised - gain).mean()}
                collector.put(f"{world_name}: {title}", seed, **figures)
            test = np.where(moves, world.test[rows, place], np.nan)
            noise, variance = 3 * world.covariance[rows, place, place], variances[rows, place]
            drift = joint_gains.drift_of(test, noise, promised, variance)
            mean, _ = joint_gains.with_test_rows(test, noise, promised, variance, drift)
            collector.put(f"{world_name}: with test rows", seed, excess=np.where(moves, mean - gain, 0).mean())
    return collector.measured


# ---- the watch ----


def watches(seeds: Sequence[int], draws: int) -> Measurements:
    """Share of false alarms in 500 rows if one looks after each, and of alarms where 10 points are lost."""
    collector, rows, looks = Collector(), 500, np.arange(10, 501)
    for seed in seeds:
        draw = np.random.default_rng(seed)
        for metric, lost in (("false_alarms", 0.0), ("found", 0.1)):
            harm = draw.choice([1.0, -1.0, 0.0], p=[0.1 + lost, 0.1, 0.8 - lost], size=(draws, rows))
            evidence = [certificates.e_process(one).max() > 20 for one in harm]
            mean, square = (np.cumsum(values, 1)[:, looks - 1] / looks for values in (harm, harm**2))
            t = mean / np.sqrt(np.maximum(square - mean**2, 1e-12) / (looks - 1))
            collector.put("e-process", seed, **{metric: float(np.mean(evidence))})
            collector.put("a t test at every look", seed, **{metric: float((t > 1.645).any(1).mean())})
    return collector.measured


# ---- real tables ----

FIT: dict[str, Any] = {"algorithms": "ditto,kin", "models": "mlr", "trials": 1, "rounds": 20, "folds": 5}


def rows_of(name: str, most: int, seed: int) -> pa.Table:
    """Rows of a table, `most` of them at most, drawn anew for every seed."""
    files = sorted((data_folder(None) / name).glob("train-*.parquet"))
    if not files:
        raise DataError(f"the table {name} is not in the data folder; see docs/data.md")
    table = pa.concat_tables([pq.read_table(file) for file in files])
    order = np.random.default_rng(seed).permutation(table.num_rows)[:most]
    left_out = {*SITE_TABLES[name].leave_out} - {SITE_TABLES[name].target}
    return table.take(np.sort(order)).drop_columns([c for c in table.column_names if c in left_out])


def halves(table: pa.Table, seed: int) -> tuple[pa.Table, pa.Table]:
    """Rows to fit on and fresh ones, of every site with 16 rows or more."""
    draw = np.random.default_rng([seed, 1])
    client = np.array([str(one) for one in table["client"].to_pylist()])
    parts: list[list[Any]] = [[], []]
    for site in np.unique(client):
        rows = draw.permutation(np.flatnonzero(client == site))
        if len(rows) >= 16:
            parts[0].append(rows[: len(rows) // 2])
            parts[1].append(rows[len(rows) // 2 :])
    first, fresh = (table.take(np.sort(np.concatenate(rows))) for rows in parts)
    return first, fresh


def permuted(table: pa.Table, target: str, seed: int) -> pa.Table:
    """The table with its target shuffled over all rows."""
    order = np.random.default_rng([seed, 2]).permutation(table.num_rows)
    return table.set_column(table.column_names.index(target), target, table[target].take(order))


def losses(model: ModelPipeline, rows: pa.Table, target: str) -> Floats:
    """[n] log loss, or squared error in variances of the target."""
    predictions, cells = model.predictions(rows), rows[target].to_pylist()
    outputs = predictions.outputs.double().numpy()
    if predictions.problem.is_regression:
        scale = float(predictions.problem.scale)  # type: ignore[arg-type]  # a single number has one
        return np.minimum((outputs.reshape(-1) - np.array(cells, dtype=np.float64)) ** 2 / scale**2, MOST)
    place = {label: index for index, label in enumerate(predictions.classes)}
    index = np.array([place.get(str(cell), -1) for cell in cells])
    p = np.where(index >= 0, outputs[np.arange(len(index)), index], 0.0)
    return np.asarray(-np.log(np.maximum(p, LEAST)))


def covered(model: ModelPipeline, rows: pa.Table, target: str) -> float:
    """Share of rows inside their sets."""
    predictions, cells = model.predictions(rows, level=LEVEL), rows[target].to_pylist()
    if predictions.problem.is_regression:
        ends = np.asarray(predictions.sets, dtype=np.float64)
        truth = np.array(cells, dtype=np.float64)
        return float(((ends[:, 0] <= truth) & (truth <= ends[:, 1])).mean())
    return float(np.mean([str(cell) in inside for cell, inside in zip(cells, predictions.sets, strict=True)]))


def on_table(
    name: str, most: int, null: bool = False
) -> Callable[[Sequence[int] | None, Mapping[str, Any]], Measurements]:
    """The function that measures a table for seeds."""

    def measure(seeds: Sequence[int] | None, settings: Mapping[str, Any]) -> Measurements:
        collector, target = Collector(), SITE_TABLES[name].target
        for seed in seeds or ():
            table = rows_of(name, most, seed)
            first, fresh = halves(permuted(table, target, seed) if null else table, seed)
            with tempfile.TemporaryDirectory() as folder:
                result = kinfed.fit(
                    first, client_column="client", label_column=target, columns=SITE_TABLES[name].columns,
                    task=SITE_TABLES[name].task, seed=seed, out=Path(folder) / "fit", page=False, accept="all",
                    metric="auroc" if null and name not in NUMBERS else _metric(name), **FIT,
                )  # fmt: skip
                _judge(collector, result, fresh, target, seed)
        return collector.measured

    return measure


def _metric(name: str) -> str:
    """The proper score, so that what is shown and what is judged are one figure."""
    return "rmse" if name in NUMBERS else "log_loss"


NUMBERS = ("london_schools", "chem97", "exam65_london", "parkinsons_telemonitoring")


def _judge(collector: Collector, result: FitResult, fresh: pa.Table, target: str, seed: int) -> None:
    """Figures of all that was handed over or printed, by fresh rows."""
    client = np.array([str(one) for one in fresh["client"].to_pylist()])
    gains: dict[str, list[float]] = {"chosen": [], "safe": [], "certified": []}
    coverage, shown, wrongly, promised, expected = [], [], [], [], []
    for site in result.sites:
        rows = fresh.take(np.flatnonzero(client == site.site))
        alone, handed = losses(_fitted(result, ALONE, site.site), rows, target), result.model(site.site)
        safe = float((alone - losses(handed, rows, target)).mean())
        chosen = 0.0
        if site.chosen != ALONE:
            chosen = float((alone - losses(_fitted(result, site.chosen, site.site), rows, target)).mean())
            shown.append(site.gain_chosen.is_shown)
            wrongly.append(site.gain_chosen.is_shown and chosen <= 0)
            if result.metric == "log_loss" and site.expected_gain.value is not None:
                promised.append(site.expected - chosen)
                expected.append(site.expected_gain.value - chosen)
        certified = chosen if site.gain_chosen.is_shown else 0.0
        for way, gain in (("chosen", chosen), ("safe", safe), ("certified", certified)):
            gains[way].append(gain)
        if "sets" in handed.about:
            coverage.append(covered(handed, rows, target))
    for way, values in gains.items():
        own = np.array(values)
        collector.put(way, seed, gain=own.mean(), hurt=(own < -HURT).mean(), worst=own.min())
    sites = len(result.sites)
    collector.put("safe", seed, coverage=float(np.mean(coverage)), tenth=float(np.quantile(coverage, 0.1)))
    collector.put("chosen", seed, shown=sum(shown) / sites, wrongly=sum(wrongly) / sites)
    collector.put("safe", seed, jointly_shown=float(result.overall.is_shown))
    if promised:
        collector.put("chosen", seed, promised=float(np.mean(promised)), expected=float(np.mean(expected)))


def _fitted(result: FitResult, name: str, site: str) -> ModelPipeline:
    assert result.folder is not None
    run = result.folder / "runs" / result.contender(name).run
    return model_of_run(run, None if name == ONE_MODEL else site, name)
