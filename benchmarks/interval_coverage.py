"""How often 95 % intervals of the linear mixed model hold the truth, on real tables (docs/methods/sums.md).

    python benchmarks/interval_coverage.py exam65_london london_schools chem97 insteval      (tables in $KINFED_DATA)

Sites that took part: a quarter of their rows, by the model of the site. New sites: a fifth of the sites is left out of
the fit, and all their rows but k labelled ones are predicted, for k = 0 by the server's model and else by the posterior
of the k rows. From 8 sites: the same for k = 0 with a fit to eight sites, by t as predictions have it, by the normal
distribution, and without the variance between sites. Shares of rows over ten divisions; of chem97 and insteval the
first 300 sites.
"""

from __future__ import annotations

import sys

import numpy as np
import torch
from scipy import stats

import kinfed
from kinfed.algorithms.lmm import Solved, fitted
from kinfed.runs.run_inputs import build_federation
from kinfed.theory.sums import row_variance, site_effects

LEVEL, MOST_SITES, FEW, DIVISIONS = 0.95, 300, 8, 10
KNOWN = (0, 1, 5, 20)

Site = np.ndarray  # [n, p + 1] columns with ones first, and the target


def sites_of(name: str) -> list[Site]:
    config = kinfed.make_config(settings={"dataset": name, "seeds": (0,), "model": "mlr", "algorithms": "lmm"})
    data = build_federation(config, 0)
    train, test = data.train.lists(), data.test.lists()
    sites = []
    for k in range(min(len(data), MOST_SITES)):
        rows = torch.cat([torch.as_tensor(train[k]), torch.as_tensor(test[k])])
        x, y = data.features.gather(rows).double().numpy(), data.targets[rows].double().numpy()
        sites.append(np.column_stack([np.ones(len(y)), x, y]))
    return sites


def fit(sites: list[Site]) -> Solved:
    return fitted(np.stack([site.T @ site for site in sites]), "auto")


def inside(fit: Solved, known: Site, rows: Site, freedom: float, *, between: bool = True) -> np.ndarray:
    """[n] whether intervals hold the truth of a site's rows, from what is `known` of it."""
    z = np.flatnonzero(np.diag(fit.psi)).tolist()
    beta, variance = fit.beta, fit.sigma2 * fit.inverse
    if z and between:
        psi, sums = fit.psi[np.ix_(z, z)], (known.T @ known)[None]
        beta = beta.copy()
        beta[z] += site_effects(sums, z, beta, psi, fit.sigma2)[0][0]
        variance = row_variance(sums, z, psi, fit.sigma2, variance)[0]
    x, y = rows[:, :-1], rows[:, -1]
    spread = np.einsum("ij,jk,ik->i", x, variance, x)
    total = spread + fit.sigma2
    degrees = freedom * (total / np.maximum(spread, 1e-300)) ** 2 if freedom else np.inf
    reach = stats.t.ppf((1 + LEVEL) / 2, degrees) * np.sqrt(total)
    return np.abs(y - x @ beta) <= reach


def coverage(name: str) -> dict[str, float]:
    everything, counts = sites_of(name), {}

    def add(what: str, held: np.ndarray) -> None:
        one = counts.setdefault(what, [0, 0])
        one[0] += int(held.sum())
        one[1] += len(held)

    low = []
    for division in range(DIVISIONS):
        draw = np.random.default_rng(division)
        mixed = [site[draw.permutation(len(site))] for site in everything]
        train = [site[len(site) // 4 :] for site in mixed]
        model = fit(train)
        for own, site in zip(train, mixed, strict=True):
            held = inside(model, own, site[: len(site) // 4], 0)
            add("own", held)
            if len(held) >= 10:
                low.append(held.mean() < 0.85)
        order = draw.permutation(len(mixed))
        new, there = order[: len(order) // 5], order[len(order) // 5 :]
        model = fit([mixed[k] for k in there])
        for k in new:
            for known in KNOWN:
                if len(mixed[k]) > known:
                    freedom = len(there) - 1 if known == 0 else 0
                    add(f"k = {known}", inside(model, mixed[k][:known], mixed[k][known:], freedom))
            add("without between", inside(model, mixed[k][:0], mixed[k], 0, between=False))
        few = fit([mixed[k] for k in there[:FEW]])
        for k in new:
            add("8 sites, t", inside(few, mixed[k][:0], mixed[k], FEW - 1))
            add("8 sites, normal", inside(few, mixed[k][:0], mixed[k], 0))
            add("8 sites, without between", inside(few, mixed[k][:0], mixed[k], 0, between=False))
    shares = {what: held / count for what, (held, count) in counts.items()}
    return shares | {"sites below 85 %": float(np.mean(low)) if low else float("nan")}


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(name, ", ".join(f"{what} {100 * share:.1f}" for what, share in coverage(name).items()), flush=True)
