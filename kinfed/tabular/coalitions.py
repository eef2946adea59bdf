"""Contributions: what every site adds to the model of every other, by Shapley values of the sites' gains.

    result = kinfed.contributions("visits.csv", client_column="hospital", label_column="outcome", algorithm="ditto")
    result.gives("north"), result.gains("south"), result.pair("north", "south")

The method is trained by every coalition of two or more sites. For a site j and a coalition T of the others, u_j(T) is
the metric on j's own test rows of the model that j has if T and j train together, less that of learning alone; the
others are the players of this game, and

    φ_ij = the Shapley value of i in u_j      what i gives to j; Σ_i φ_ij = the whole gain of j in the federation
    Σ_j φ_ij                                  what i gives to all others; what a site gains is on its own page

so that a pair is known and not only a total, which of personal models is what sites ask. Coalitions are exact, not
sampled: 2^K of K sites, at most ten. Sites outside of a coalition do not come; the clients' numbers, batches and
draws stay, and what columns become was learnt from all. Runs of all coalitions train as one (kinfed.pools.joined_pool).

Errors are those of j's test rows (the bootstrap, the same draws for all coalitions); training anew, with another seed,
moves the values, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kinfed.algorithms import make_algorithm, prepare_data
from kinfed.core import storage, threads
from kinfed.data import Federation, findings
from kinfed.engine import Metric, bootstrap_draws
from kinfed.errors import ConfigError
from kinfed.pools import JoinedPool, in_step
from kinfed.report import TextTable
from kinfed.runs import Experiment
from kinfed.server import Loop, Schedule
from kinfed.tabular.decision import judged_rows, values
from kinfed.tabular.fit_settings import FitSettings
from kinfed.tabular.fitting import SiteFit, load_sites
from kinfed.tabular.portfolio import LOCAL, contenders_of
from kinfed.tabular.search import method_config, outputs_of_rows
from kinfed.theory import shapley

RECORD, PAGE = "contributions.json", "contributions.html"
REPLICATES = 200  # of the bootstrap
NINETY_FIVE = 1.96
Outputs = Mapping[int, torch.Tensor]  # [T, C] of a site's test rows, by coalition


@dataclass(frozen=True)
class Contribution:
    """A number with its standard error."""

    value: float
    error: float

    @property
    def low(self) -> float:
        return self.value - NINETY_FIVE * self.error

    @property
    def high(self) -> float:
        return self.value + NINETY_FIVE * self.error

    @property
    def is_clear(self) -> bool:
        return self.low > 0 or self.high < 0


@dataclass(frozen=True)
class Received:
    """What one site has from the others."""

    site: str
    parts: Mapping[str, Contribution]  # by the others
    gain: Contribution  # their sum
    test_rows: int


@dataclass(frozen=True)
class Contributions:
    """What sites give each other."""

    algorithm: str
    metric: str
    sites: tuple[Received, ...]
    settings: Mapping[str, Any]

    @property
    def names(self) -> list[str]:
        return [one.site for one in self.sites]

    def pair(self, giver: str, receiver: str) -> Contribution:
        """What one site adds to the metric at another."""
        return next(one for one in self.sites if one.site == receiver).parts[giver]

    def gains(self, site: str) -> Contribution:
        """What a site gains over learning alone."""
        return next(one for one in self.sites if one.site == site).gain

    def gives(self, site: str) -> Contribution:
        """What a site adds at the others, on average; their test rows are others, so that errors are independent."""
        parts = [one.parts[site] for one in self.sites if one.site != site]
        error = float(np.sqrt(np.sum([one.error**2 for one in parts]))) / len(parts)
        return Contribution(float(np.mean([one.value for one in parts])), error)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def read(cls, folder: Path | str) -> Contributions:
        path = Path(folder) / RECORD
        read: Contributions = storage.as_record(cls, storage.read_json(path, "contributions"), str(path))
        return read

    def save(self, folder: Path | str) -> None:
        """Write contributions.json and the page contributions.html."""
        from kinfed.tabular.contribution_page import write_page

        storage.make_folder(Path(folder))
        write_page(self, Path(folder))
        storage.write_json(Path(folder) / RECORD, self.to_json())


def contributions(
    table: Any, *, algorithm: str = "ditto", method_options: Mapping[str, Any] | None = None, models: str = "mlr",
    out: Path | str | None = None, data: Path | None = None, accept: str = "", **options: Any,
) -> Contributions:  # fmt: skip
    """Say what every site of a table gives to every other, and what it gains.

    - `table`, `data`, `accept`: as kinfed.fit takes them; `out`: a folder for contributions.json and its page.
    - `algorithm`: the method, with its options by name in `method_options`; `models`: the kind of model.
    - `options`: rounds, steps, metric, test_fraction and seed of a fit, and the columns of the table.

    Example:

        >>> age, site = [i * 7 % 90 for i in range(120)], list("aabbcc") * 20
        >>> rows = pa.table({"site": site, "age": age, "sick": [one > 40 for one in age]})
        >>> columns = {"client_column": "site", "label_column": "sick"}
        >>> result = kinfed.contributions(rows, **columns, algorithm="fedavg", rounds=2)
        >>> sorted(result.sites[0].parts)
        ['b', 'c']
    """
    own = {name: options.pop(name) for name in list(options) if name in FitSettings.__dataclass_fields__}
    settings = FitSettings(**{"algorithms": algorithm, "models": models, "folds": 2, "trials": 1, **own})
    fit = SiteFit(load_sites(table, options, data, settings.seed), settings, accept=accept)
    findings.refuse(fit.data.findings, accept)
    result = contributions_of(fit.data, fit.settings, algorithm, method_options or {})
    if out is not None:
        result.save(out)
    return result


def summary(result: Contributions) -> tuple[TextTable, list[str]]:
    """The table of pairs and a sentence for every site, as on the page."""
    from kinfed.tabular.contribution_page import pair_table, sentences

    return pair_table(result), sentences(result)


def coalitions_of(sites: int) -> list[int]:
    """All coalitions of two or more; refuses too many sites, and too few."""
    if not 2 <= sites <= shapley.MOST_PLAYERS:
        raise ConfigError(
            f"contributions compare all coalitions of 2 to {shapley.MOST_PLAYERS} sites; there are {sites}. Take "
            "fewer, or join small ones"
        )
    return [number for number in range(1, 2**sites) if number.bit_count() > 1]


def members_of(coalition: int) -> torch.Tensor:
    """[n] the sites of a coalition, ascending."""
    return torch.tensor([k for k in range(coalition.bit_length()) if coalition >> k & 1])


def contributions_of(
    data: Federation, settings: FitSettings, algorithm: str, options: Mapping[str, Any]
) -> Contributions:  # fmt: skip
    sites, outputs = data.num_clients, dict[int, dict[int, torch.Tensor]]()
    coalitions = coalitions_of(sites)
    metric = settings.metric_for(data.problem)
    for method, of_options, of_method in ((LOCAL, {}, [2**sites - 1]), (algorithm, options, coalitions)):
        for number, by_site in _trained(data, settings, metric.name, method, of_options, of_method).items():
            for k, one in by_site.items():
                outputs.setdefault(k, {})[1 << k if method == LOCAL else number] = one
    received = [received_of(metric, outputs[k], data, k) for k in range(sites)]
    chosen = {name: getattr(settings, name) for name in ("models", "rounds", "steps", "test_fraction", "seed")}
    return Contributions(algorithm, metric.name, tuple(received), {**chosen, "options": dict(options)})


def _trained(
    data: Federation, settings: FitSettings, metric: str, method: str, options: Mapping[str, Any],
    coalitions: Sequence[int],
) -> dict[int, dict[int, torch.Tensor]]:  # fmt: skip
    """Outputs on the test rows of every site in every coalition, whose runs advance in step."""
    config = method_config(settings, metric, settings.model_names[0], {method: {"method": method, **options}})
    experiment = Experiment(config, data)
    experiment.check()
    algorithm = make_algorithm(method, config.training, dict(options))
    task, prepared = experiment.inputs.training_parts(settings.seed, algorithm)
    prepared, population = prepare_data(algorithm, prepared, prepared.population(settings.seed))
    task.problem = prepared.problem
    together, who = object(), {number: members_of(number) for number in coalitions}
    loops = {
        number: Loop(
            algorithm, task, JoinedPool(together, algorithm, task, prepared, settings.seed, workers=config.workers),
            population, Schedule(1.0, members=members, evaluates=members),
        )
        for number, members in who.items()
    }  # fmt: skip
    (contender, *_) = contenders_of(method)
    with threads.one_thread():
        for _ in range(algorithm.rounds_in(settings.rounds)):
            running = [loop for loop in loops.values() if not (loop.completed and algorithm.is_done(loop.server))]
            in_step([loop.steps() for loop in running])
        outputs = {}
        for number, loop in loops.items():
            theta = loop.evaluate(keep_models=True).models
            if contender.model == "server":
                models = algorithm.server_models(loop.server)
                assert models is not None  # of FedAvg
                theta = models.rows(who[number])
            assert theta is not None  # they were kept
            test = prepared.cohort(who[number], settings.seed, 0).test
            rows = outputs_of_rows(loop.task, theta, test, prepared.problem)
            parts = torch.split(rows, test.count.tolist())
            outputs[number] = dict(zip(who[number].tolist(), parts, strict=True))
            loop.close()
    return outputs


def received_of(metric: Metric, outputs: Outputs, data: Federation, site: int) -> Received:
    """What a site has from the others: Shapley values of the metric on its own test rows, by `outputs` of its model in
    every coalition that it is in."""
    names, rows = data.names, data.test.rows[data.test.owner == site]
    others = [k for k in range(len(data.names)) if k != site]
    coalitions = np.array(sorted(outputs), dtype=np.int64)
    of_others, ids = shapley.without(coalitions, site), torch.tensor([site])
    worth = np.full((2 ** len(others), REPLICATES + 1), np.nan)  # of every coalition of the others: as seen, and drawn
    for number, place in zip(coalitions.tolist(), of_others.tolist(), strict=True):
        judged = replace(judged_rows(outputs[number], rows, torch.zeros_like(rows), data), clients=1)
        worth[place, 0] = float(values(metric, judged)[0])
        worth[place, 1:] = bootstrap_draws(metric, judged, ids, replicates=REPLICATES)[:, 0].numpy()
    sign = 1.0 if metric.higher_is_better else -1.0
    shares = sign * shapley.shapley_weights(len(others)) @ worth
    parts = {names[k]: _part(shares[place]) for place, k in enumerate(others)}
    return Received(names[site], parts, _part(shares.sum(0)), len(rows))


def _part(draws: NDArray[np.float64]) -> Contribution:
    """A value and its error, from what was seen and draws of it; NaN where most draws are undefined."""
    known = draws[1:][np.isfinite(draws[1:])]
    few = len(known) <= len(draws) // 2
    return Contribution(float(draws[0]), float("nan") if few else float(known.std(ddof=1)))
