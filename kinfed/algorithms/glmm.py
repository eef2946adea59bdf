"""GLMM: a logistic or Poisson mixed model of all sites, from totals over sites.

    y ~ f(η),    η = Xβ + XΛu_k,    u_k ~ N(0, I),    Λ = diag(λ) on some columns of X

Breslow and Clayton, JASA 88 (1993), by maximum likelihood. Every site integrates over its own effects (adaptive
Gauss-Hermite quadrature for an intercept, Laplace's approximation for slopes) and answers (β, λ) with the value,
gradient and curvature of its log likelihood; the server takes a step of Newton's method on the totals
(kinfed.theory.sums.generalized). It ends at the digits of R's glmer after about ten rounds; when a step would gain
nothing, no site is asked any more. Penalized quasi-likelihood takes as many rounds and halves variances where sites are
small: it is not offered.

The server uses totals alone, so that secure sums apply. Under user-level privacy the proof of the linear model's totals
holds word for word (kinfed.algorithms.lmm): a site's answer is one vector, shortened to a norm before it is added.

Two classes that columns separate have no finite β. Where a coefficient of a standardized column exceeds 15, the fit
starts again with a normal prior of precision 0.5 on all but the intercept, and says so: such coefficients predict, and
are no estimates. Where nearly every site has one class only, effects of sites grow without bound: they are left out.

The personal model is the mode β + Λû_k, which the site computes from its own rows, with the variance of a normal
approximation. Limits: λ = 0 is one generalized linear model of all rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from kinfed.algorithms.common.bending import BENDS, CELLS, FORM, deviations, form_of
from kinfed.algorithms.common.by_sums import (
    Array,
    BySums,
    SumsUp,
    check_curves,
    counts_by_client,
    not_finite_where,
    num_columns,
    numpy_of,
    packed,
    places_of,
    posterior_rows,
    rows_by_client,
    tensor_of,
    unpacked_parts,
    width_of,
)
from kinfed.algorithms.common.newton_totals import NewtonFit
from kinfed.author import Cohort, ConfigError, Population, RoundInfo, ServerModels, Task, Tree, option
from kinfed.theory.sums import FAMILIES, Likelihood, SiteRows, log_likelihood, modes


@dataclass
class Down(Tree):
    point: Tensor  # [n, p + q] (β, λ)
    covariance: Tensor  # [n, p, p] of β
    form: Tensor  # [n, d, FORM] of curves, 0 before it is known; [n, 0, FORM] without curves


@dataclass
class Client(Tree):
    effect: Tensor  # [n] of the site on a row with average columns, as of its last answer
    deviation: Tensor  # [n] how well that is known


@dataclass
class Server(Tree):
    estimate: NewtonFit
    places: Tensor  # [C, p] int64 of coefficients in a row
    offset: Tensor  # [] log of the count that a model's output 0 stands for
    form: Tensor  # [d, FORM]
    products: Tensor  # [d, BENDS, BENDS] of what bends columns, mean over all rows


@dataclass(frozen=True)
class GLMM(BySums[Server, Client, Down]):
    effects: Literal["intercept", "slopes"] = option("intercept", "which coefficients differ between sites")
    nodes: int = option(
        15, "nodes of the quadrature over a site's intercept; 1 is Laplace's approximation", ge=1, le=99
    )
    ridge: float = option(0.0, "precision of a normal prior on the coefficients; 0 is maximum likelihood", ge=0)
    curves: bool = option(False, "columns bend where the evidence of training rows says so")

    def check(self, task: Task, population: Population) -> None:
        super().check(task, population)
        if self.curves:
            check_curves(task, "GLMM")
        if family_of(task) is None:
            raise ConfigError(
                "GLMM is for two classes or counts; use lmm for numbers, and --task counts where they are counts"
            )
        if population.num_clients < 2:
            raise ConfigError("GLMM compares sites, and there is one; give it two sites or more")

    def _columns(self, p: int) -> list[int]:
        return list(range(p)) if self.effects == "slopes" else [0]

    def init_server(self, task: Task, population: Population) -> Server:
        linear, curved = num_columns(task), task.head.inputs * self.curves
        bends = curved * BENDS
        estimate = NewtonFit.of(linear + bends, len(self._columns(linear)), self.ridge, bends)
        form, products = tensor_of(np.zeros((curved, FORM))), tensor_of(np.zeros((curved, BENDS, BENDS)))
        return Server(estimate, places_of(task), tensor_of(offset_of(task)), form, products)

    def init_client(self, task: Task, data: Cohort) -> Client:
        return Client(*(torch.zeros(len(data), dtype=torch.float64) for _ in range(2)))

    def is_done(self, server: Server) -> bool:
        return server.estimate.is_done

    def download(self, server: Server, ids: Tensor) -> Down:
        one = server.estimate
        return Down(*(part.expand(len(ids), *part.shape) for part in (one.point, one.covariance, server.form)))

    def client_update(self, task: Task, client: Client, down: Down, data: Cohort) -> tuple[Client, SumsUp]:
        rows, z, beta, lam = self._asked(task, down, data)
        finite = np.isfinite(rows.total(rows.x).sum(1) + rows.total(rows.y))
        rows = replace(rows, x=np.where(finite[rows.owner, None], rows.x, 0.0))
        one = log_likelihood(rows, z, beta, lam, FAMILIES[family_of(task) or ""], self.nodes)
        squares = rows.total(rows.x[:, z] ** 2)
        answer = packed(one.value, one.gradient, one.curvature, squares, rows.total(np.ones(len(rows.y))))
        if self.curves:  # counts of rows first, then what likelihoods say
            known = bool(down.form.any())
            counts = packed(counts_by_client(task, data.train))
            answer = torch.cat([counts * (not known), answer * known], 1)
        u, a = modes(rows, z, beta, lam, FAMILIES[family_of(task) or ""])
        deviation = lam[0] * np.sqrt(np.linalg.inv(a)[:, 0, 0])
        return Client(tensor_of(lam[0] * u[:, 0]), tensor_of(deviation)), SumsUp(not_finite_where(answer, ~finite))

    def _asked(self, task: Task, down: Down, data: Cohort) -> tuple[SiteRows, list[int], Array, Array]:
        form, point = down.form[0], numpy_of(down.point[0])
        p, z = width_of(task, form), self._columns(num_columns(task))
        return SiteRows.of(*rows_by_client(task, data.train, form)), z, point[:p], point[p:]

    def step(self, server: Server, mean: SumsUp, round: RoundInfo) -> Server:
        one = server.estimate
        p, q = len(one.covariance), len(one.rms)
        width = len(server.form) * CELLS
        everything = mean.sums[None] * round.weight
        counts, totals = everything[:, :width], everything[:, width:]
        if self.curves and not server.form.any():
            (cells,) = unpacked_parts(counts, (width,))
            form, products = form_of(cells.reshape(-1, CELLS))
            return replace(server, form=tensor_of(form), products=tensor_of(products))
        total = unpacked_parts(totals, (), (p + q,), (p + q, p + q), (q,), ())
        value, gradient, curvature, squares, rows = total
        likelihood = Likelihood(value, gradient, curvature)
        return replace(server, estimate=one.after(likelihood, squares[0], float(rows[0]), round.weight))

    def personalize(self, task: Task, client: Client, down: Down, data: Cohort) -> Tensor | dict[str, Tensor]:
        """β + Λû, with the variance T Cov(β) T' + ΛA⁻¹Λ, where T = I − ΛA⁻¹ΛZ'WX on the columns z."""
        rows, z, beta, lam = self._asked(task, down, data)
        family = FAMILIES[family_of(task) or ""]
        u, a = modes(rows, z, beta, lam, family)
        coefficients = np.tile(beta, (len(u), 1))
        coefficients[:, z] += lam * u
        posterior = lam[:, None] * np.linalg.inv(a) * lam
        eta = np.einsum("ip,ip->i", rows.x, coefficients[rows.owner])
        weighted = family.weight(family.mean(eta))[:, None] * rows.x
        gain = np.tile(np.eye(len(beta)), (len(u), 1, 1))
        gain[:, z] -= posterior @ rows.total(rows.x[:, z][:, :, None] * weighted[:, None, :])
        variance = gain @ numpy_of(down.covariance[0]) @ np.swapaxes(gain, 1, 2)
        variance[np.ix_(range(len(u)), z, z)] += posterior
        coefficients[:, 0] -= offset_of(task)
        return posterior_rows(places_of(task).to(task.device), coefficients, variance, 0.0, form=down.form[0])

    def server_models(self, server: Server) -> ServerModels | None:
        """The model of a site that nothing is known of, with the variance between sites."""
        (beta, lam), variance = server.estimate.fit, numpy_of(server.estimate.covariance).copy()
        z = self._columns(int(server.estimate.linear))
        variance[z, z] += lam**2
        beta[0] -= float(server.offset)
        freedom = max(float(server.estimate.count[1]) - 1, 0.0)
        return ServerModels(posterior_rows(server.places, beta[None], variance[None], 0.0, freedom, server.form))

    def figures(self, server: Server) -> dict[str, Any]:
        p = int(server.estimate.linear)
        between, rows, z = np.zeros((p, p)), torch.tril_indices(p, p), self._columns(p)
        between[z, z] = server.estimate.between
        figures = {**server.estimate.figures(), "between": tensor_of(between)[rows[0], rows[1]]}
        if self.curves:
            figures["bends"] = tensor_of(deviations(server.estimate.fit[0][p:], numpy_of(server.products)))
        return figures

    def client_figures(self, client: Client) -> dict[str, Tensor]:
        return {"site_effect": client.effect, "site_sd": client.deviation}


def family_of(task: Task) -> str | None:
    """The name in FAMILIES of what the task predicts; None if it has none there."""
    if task.classifies:
        return "binary" if task.head.outputs == 2 else None
    return "count" if task.objective.name in ("poisson", "negative_binomial") else None


def offset_of(task: Task) -> float:
    """Log of the count that an output of 0 stands for: models of counts give ratios to the mean of training rows."""
    problem = getattr(task.objective, "problem", None)
    return 0.0 if task.classifies or problem is None else float(np.log(problem.mean))
