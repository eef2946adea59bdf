"""Coefficients of a run's method that learns by sums: with names of columns, in their own units, with standard errors.

    table = coefficients_of(run, "lmm")
    table.rows[1].estimate, table.rows[1].low, table.rows[1].high
    table.sentences()

Methods fit standardized columns and targets; here everything is in the units of the table again. An intercept is then
that of a row with zeros in all columns, as R prints it. Intervals are Wald's, estimate ± 1.96 standard errors;
`with_profile` adds those of the profile likelihood, which deviations have alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy import stats

from kinfed.errors import ConfigError
from kinfed.records import RunRecord, TrialRecord, pick

if TYPE_CHECKING:
    from kinfed.data import Description, Problem
    from kinfed.serving.model_inputs import ModelInputs
    from kinfed.theory.sums import Profile

LEVEL = 0.95
FEW_SITES = 5
LOG_ODDS, LOG_RATE, LOG_HAZARD = "log odds", "log rate", "log hazard"
RATIOS = {LOG_ODDS: "odds ratio", LOG_RATE: "rate ratio", LOG_HAZARD: "hazard ratio"}  # exp of a coefficient
# By what a fit says of itself (kinfed.algorithms.lmm, and common.newton_totals for glmm and cox).
SPOILT = (
    "no round gave totals that a model can be fitted to, and nothing is estimated; where noise is added to them, it "
    "takes more sites, a smaller user_clip or fewer rounds"
)
ENDED = "rounds ended before the fit did, and these are no estimates yet; give more rounds"
NOISE = "noise was added to the totals (user-level privacy), and no standard error knows of it"
LINEAR = {
    0: SPOILT,
    2: "there are no more training rows than columns: the target's mean is predicted, and nothing else is estimated",
    3: "the target does not vary, or columns determine it: its mean is predicted, and nothing else is estimated",
    4: "one site has answered so far: how sites differ cannot be told",
    5: ENDED,
}
GENERALIZED = {
    0: SPOILT,
    2: "columns separate those with the event from those without: coefficients are held by a prior, they predict and "
    "are no estimates",
    3: "nearly every site has one class only: effects of sites are left out",
    4: ENDED,
}
MEAN_ONLY = (LINEAR[2], LINEAR[3])


@dataclass(frozen=True)
class Coefficient:
    name: str
    estimate: float  # NaN where the column is left out: others determine it
    se: float  # NaN, as what follows from it, also where the fit is no proper one
    low: float
    high: float
    p: float

    @property
    def is_left_out(self) -> bool:
        return math.isnan(self.estimate)


@dataclass(frozen=True)
class SiteEffect:
    name: str
    effect: float  # on a row with average columns
    reach: float  # half the width of its interval
    noise: float  # deviation of the site's rows around its model; NaN where it is not known
    influence: float  # Cook's distance; NaN where it is not known


Ends = tuple[float, float]


@dataclass(frozen=True)
class ProfileIntervals:
    """Intervals of 95 % by the profile likelihood."""

    rows: Mapping[str, Ends]  # by coefficient that is not left out
    between: Mapping[str, Ends]  # of deviations between sites, by column, those at zero too
    sigma: Ends


@dataclass(frozen=True)
class Coefficients:
    label: str
    seed: int
    scale: str  # what a coefficient is in: "" for the target's unit, or one of RATIOS
    rows: tuple[Coefficient, ...]
    between: Mapping[str, float]  # deviation between sites, by column, of a row with average columns
    sigma: float | None  # deviation within sites
    sites: tuple[SiteEffect, ...]  # ascending by effect
    count: tuple[int, int]  # rows and sites
    bends: Mapping[str, float] | None  # deviation of a column's curve around its line; None: the fit has no curves
    warning: str  # why there is no proper fit; ""
    profile: ProfileIntervals | None = None

    @property
    def ratio(self) -> str:
        """What exp of a coefficient is called; "" if coefficients are in the target's unit."""
        return RATIOS.get(self.scale, "")

    @property
    def intraclass_correlation(self) -> float | None:
        """Share of the variance of a row with average columns that lies between sites."""
        level = self.between.get("intercept", 0.0) ** 2
        noise = math.pi**2 / 3 if self.scale == LOG_ODDS else None if self.sigma is None else self.sigma**2
        return None if noise is None or not level + noise > 0 else level / (level + noise)

    def deviations(self) -> list[tuple[str, float, Ends]]:
        """Deviations between and within sites that have intervals: name, estimate, ends."""
        if self.profile is None or self.sigma is None:
            return []
        between = self.profile.between.items()
        return [
            *((f"between sites: {name}", self.between.get(name, 0.0), ends) for name, ends in between),
            ("within sites", self.sigma, self.profile.sigma),
        ]

    def sentences(self) -> list[str]:
        """What to know beside the table."""
        rows, sites = self.count
        unit = f" in {self.scale}" if self.scale else ""
        lines = [f"{self.label}, seed {self.seed}: {rows:,} rows of {sites} sites; coefficients{unit}."]
        if self.warning:
            lines.append(f"Beware: {self.warning}.")
        if self.warning == SPOILT:
            return lines
        level, slopes = self.between.get("intercept", 0.0), {k: v for k, v in self.between.items() if k != "intercept"}
        share = self.intraclass_correlation
        if self.scale == LOG_HAZARD:
            lines.append("Every site has a baseline hazard of its own; rows are compared within sites.")
        elif level > 0:
            part = "" if share is None else f", {100 * share:.1f} % of the variance that columns leave"
            lines.append(
                f"Sites differ by {level:.3g}{self._ends('intercept')}{unit} beyond chance (standard deviation of "
                f"their level{part})."
            )
        else:
            ends = self._ends("intercept")
            lines.append(f"Sites do not differ in level beyond chance{ends and f' (standard deviation{ends})'}.")
        if slopes:
            top = sorted(slopes.items(), key=lambda item: -item[1])[:3]
            named = ", ".join(f"{name} by {value:.3g}{self._ends(name)}" for name, value in top)
            many = "coefficients differ" if len(slopes) > 1 else "coefficient differs"
            lines.append(f"{len(slopes)} {many} between sites, per deviation of a column: {named}.")
        if self.bends is not None:
            top = sorted(self.bends.items(), key=lambda item: -item[1])[:3]
            named = ", ".join(f"{name} by {value:.3g}" for name, value in top)
            lines.append(
                f"Columns bend: their curves lie around the lines of these coefficients, {named} (standard deviation)."
                if top
                else "No column bends beyond chance: the evidence of training rows is for lines."
            )
        if self.sigma is not None:
            noise = "" if self.profile is None else _text(self.profile.sigma)
            lines.append(f"Rows of a site lie around its model with a standard deviation of {self.sigma:.3g}{noise}.")
        left = [row.name for row in self.rows if row.is_left_out]
        if left and self.warning not in MEAN_ONLY:
            lines.append(f"Left out, because other columns determine them: {', '.join(left)}.")
        if sites < FEW_SITES and self.scale != LOG_HAZARD:
            lines.append(f"{sites} sites are few to estimate a variance between sites from; read it with care.")
        known = [site for site in self.sites if not math.isnan(site.influence)]
        if known:
            most = max(known, key=lambda site: site.influence)
            verdict = "more than one site should" if most.influence > 1 else "no site decides the result"
            lines.append(f"{most.name} moves the coefficients most (Cook's distance {most.influence:.2g}): {verdict}.")
        return lines

    def _ends(self, name: str) -> str:
        """The interval of a deviation between sites; "" if it is not known."""
        return _text(self.profile.between[name]) if self.profile and name in self.profile.between else ""


def _text(ends: Ends) -> str:
    return f" [{ends[0]:.3g}, {ends[1]:.3g}]"


def coefficients_of(run: RunRecord, label: str | None = None, seed: int | None = None) -> Coefficients:
    """Coefficients of the method of that label, by default the only one that has any, and of the first seed."""
    which = choose_trial(run, _figures, label, seed, "coefficients", "lmm, glmm and cox have")
    return coefficient_rows(run.federations[which[1]], *which)


def choose_trial(
    run: RunRecord, figures_of: Callable[[TrialRecord], dict[str, Any]], label: str | None, seed: int | None,
    what: str, who: str,
) -> tuple[str, int, dict[str, Any]]:  # fmt: skip
    """Label, seed and figures of a trial that has figures: of that label, by default the only one, and by default of
    the first seed. Errors say `what` is missing, and `who` has it."""
    trials = {(trial.algorithm, trial.seed): figures for trial in run.trials if (figures := figures_of(trial))}
    labels = list(dict.fromkeys(name for name, _ in trials))
    if not labels:
        raise ConfigError(f"no method of this run has {what}; {who} (kinfed list algorithms)")
    name = pick("algorithm", label, labels)
    seeds = [number for one, number in trials if one == name]
    if seed is not None and seed not in seeds:
        raise ConfigError(f"{name} has no {what} with seed {seed}; it has {', '.join(map(str, seeds))}")
    number = seeds[0] if seed is None else seed
    return name, number, trials[name, number]


def has_coefficients(trial: TrialRecord) -> bool:
    return bool(_figures(trial))


def _figures(trial: TrialRecord) -> dict[str, Any]:
    """The last figures with coefficients, those of clients among them; {} if there are none."""
    for entry in reversed(trial.rounds):
        if "coefficients" in entry.method and "covariance" in entry.method:
            return {**entry.method.get("clients", {}), **entry.method}
    return {}


def coefficient_rows(description: Description, label: str, seed: int, figures: Mapping[str, Any]) -> Coefficients:
    """Coefficients in the units of the table, of the figures that a method says of its server."""
    from kinfed.serving.model_inputs import ModelInputs  # with torch, which other pages do not need

    inputs = ModelInputs.of_description(description, {})
    beta, covariance = _numbers(figures["coefficients"]), _square(figures["covariance"])
    linear, problem = "sigma" in figures, inputs.problem
    names, back, origin = _table_units(inputs, len(beta) - 1, linear)
    unit = _unit(problem) if linear else 1.0
    estimate = back @ beta
    estimate[0] += origin
    se = np.sqrt(np.maximum(np.einsum("ij,jk,ik->i", back, covariance, back), 0))
    reach = float(stats.norm.ppf((1 + LEVEL) / 2))
    rows, warning = [], _warning(figures, linear)
    scale = (
        "" if linear else LOG_HAZARD if problem.kind == "survival" else LOG_ODDS if problem.num_classes else LOG_RATE
    )
    for i, used in enumerate(_numbers(figures["basis"])):
        if i == 0 and scale == LOG_HAZARD:
            continue  # every site has a baseline of its own
        error = float(se[i]) if used and not warning else math.nan
        p = float(2 * stats.norm.sf(abs(estimate[i]) / error)) if error > 0 else math.nan
        value = float(estimate[i]) if used else math.nan
        rows.append(Coefficient(names[i], value, error, value - reach * error, value + reach * error, p))
    deviations = unit * np.sqrt(np.diag(_square(figures.get("between", np.zeros(len(figures["covariance"]))))))
    return Coefficients(
        label, seed, scale, tuple(rows),
        {name: float(value) for name, value in zip(names, deviations, strict=True) if value > 0},
        unit * float(figures["sigma"]) if linear else None, _sites(description.names, figures, unit, reach),
        (int(figures["rows"]), int(figures["sites"])), _bends(names[1:], figures, unit),
        warning,
    )  # fmt: skip


def _warning(figures: Mapping[str, Any], linear: bool) -> str:
    """Why there is no proper fit, or no error is known; "" if nothing is wrong."""
    verdict = int(figures["verdict"])
    noise = bool(figures.get("user_privacy", {}).get("noise")) and verdict != 0
    return NOISE if noise else (LINEAR if linear else GENERALIZED).get(verdict, "")


def with_profile(fit: Coefficients, description: Description, profile: Profile, basis: Sequence[int]) -> Coefficients:
    """The coefficients with intervals of a profile likelihood, whose columns are those of `basis`."""
    from kinfed.serving.model_inputs import ModelInputs

    inputs = ModelInputs.of_description(description, {})
    names, back, origin = _table_units(inputs, len(fit.rows) - 1, linear=True)
    unit, place = _unit(inputs.problem), {column: number for number, column in enumerate(basis)}
    rows = {}
    for i, name in enumerate(names):
        if i in place:
            low, high = profile.coefficient(back[i, basis])
            shift = origin if i == 0 else 0.0
            rows[name] = (low + shift, high + shift)
    between = {
        names[basis[z]]: (unit * low, unit * high)
        for z in range(len(profile.sums.z))
        for low, high in (profile.deviation(z),)
    }
    low, high = profile.noise()
    return replace(fit, profile=ProfileIntervals(rows, between, (unit * low, unit * high)))


def _table_units(inputs: ModelInputs, width: int, linear: bool) -> tuple[list[str], Any, float]:
    """(names, matrix [p, p], shift): coefficients in the table's units are the matrix times those that a method fitted;
    that of the intercept is shifted."""
    names, centre, spread = columns_of(inputs, width)
    back = np.diag(np.concatenate([[1.0], 1 / spread]))
    back[0, 1:] = -centre / spread
    if not linear:
        return names, back, 0.0
    return names, _unit(inputs.problem) * back, float(np.ravel(inputs.problem.mean)[0])


def _unit(problem: Problem) -> float:
    """What a standardized number is worth in the table."""
    return float(np.ravel(problem.scale)[0])


def _bends(names: Sequence[str], figures: Mapping[str, Any], unit: float) -> dict[str, float] | None:
    if "bends" not in figures:
        return None
    return {name: unit * float(value) for name, value in zip(names, figures["bends"], strict=True) if value > 0}


def columns_of(inputs: ModelInputs, width: int) -> tuple[list[str], Any, Any]:
    """Names, means and deviations of the columns that a method was given; the intercept's name first."""
    learnt = inputs.preprocessing
    mean, std = (inputs.mean, inputs.std) if learnt is None else (learnt.mean, learnt.std)
    features = [f"x{j + 1}" for j in range(width)] if learnt is None else learnt.features
    if len(features) != width or mean is None or std is None or mean.numel() not in (1, width):
        plain = features if len(features) == width else [f"feature {j + 1}" for j in range(width)]
        return ["intercept", *plain], np.zeros(width), np.ones(width)
    centre, spread = (np.broadcast_to(part.double().flatten().numpy(), width) for part in (mean, std))
    return ["intercept", *features], centre, spread


def _sites(names: Sequence[str], figures: Mapping[str, Any], unit: float, reach: float) -> tuple[SiteEffect, ...]:
    effect = _numbers(figures.get("site_effect", ()))
    if len(effect) != len(names):
        return ()
    unknown = [math.nan] * len(names)
    sd, noise, influence = (_numbers(figures.get(f"site_{name}", unknown)) for name in ("sd", "noise", "influence"))
    known = [k for k in range(len(names)) if not math.isnan(effect[k])]
    sites = (
        SiteEffect(
            names[k], unit * float(effect[k]), reach * unit * float(sd[k]), unit * float(noise[k]), float(influence[k])
        )
        for k in known
    )
    return tuple(sorted(sites, key=lambda site: site.effect))


def _numbers(values: Any) -> Any:
    return np.array([math.nan if value is None else value for value in values], dtype=np.float64)


def _square(lower: Any) -> Any:
    """[p, p] from its lower triangle."""
    values = _numbers(lower)
    p = round((math.sqrt(8 * len(values) + 1) - 1) / 2)
    square = np.zeros((p, p))
    rows, columns = np.tril_indices(p)
    square[rows, columns] = square[columns, rows] = values
    return square
