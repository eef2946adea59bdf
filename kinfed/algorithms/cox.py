"""Cox: proportional hazards of all sites with a baseline hazard at every site, from totals over sites.

    h_k(t | x) = h_0k(t) exp(x'β)

Cox, JRSS B 34 (1972), stratified by site; tied events as Efron, JASA 72 (1977). Rows of two sites are never compared,
so that the log partial likelihood, its gradient and its information are sums over sites. The server asks all sites
about one β, adds up, and takes a step of Newton's method (kinfed.theory.sums.hazards); after 4 to 7 rounds it has the
digits of R's coxph with strata(site), and no site is asked any more. Coefficients are log hazard ratios with standard
errors.

The server uses totals alone, so that secure sums apply. Under user-level privacy the proof of the linear model's totals
holds word for word (kinfed.algorithms.lmm): a site's answer is one vector, shortened to a norm before it is added.

The baseline hazard stays at the site. Its personal model gives the chance to outlive each of the problem's periods,

    exp(−Σ_j H_kj exp(x'β)),    H_kj = (B_kj E_kj + c_j) / (E_kj + c_j / H_j)

with Breslow's hazard B of the site within a period, the site's exposure E there, and the hazard H of all sites, events
by exposure, which a site with few events leans on: `prior` is how many events H counts for over all periods (c_j are
its shares, in proportion to the hazards of all training rows; prior → 0 is Breslow's estimate, ∞ is one baseline for
all sites). A site that nothing is known of has H. So the order of risks is that of x'β, and what a site is told about
chances follows its own follow-up.

A target with one hazard ratio for all periods (`--loss partial_likelihood`) has one output, and of the baseline only
its level over all periods. Where a column separates those with the event from those without, β runs away: the fit
starts again with a normal prior, and says so. Columns that do not vary within any site are left out and named: every
site has a baseline of its own, and nothing tells the two apart."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kinfed.algorithms.common.by_sums import (
    Array,
    BySums,
    SumsUp,
    not_finite_where,
    num_columns,
    numpy_of,
    packed,
    places_of,
    rows_by_client,
    tensor_of,
    unpacked_parts,
)
from kinfed.algorithms.common.newton_totals import NewtonFit
from kinfed.author import Cohort, ConfigError, Nothing, Population, RoundInfo, ServerModels, Task, Tree, option
from kinfed.data import Problem
from kinfed.theory.sums import Likelihood, baseline_hazard, exposure, partial_likelihood

LEAST = 1e-12  # hazard of a period without survivors


@dataclass
class Down(Tree):
    beta: Tensor  # [n, p] that of the ones first, which is 0
    hazards: Tensor  # [n, T] of all sites, of a row with average columns, within each period


@dataclass
class Server(Tree):
    estimate: NewtonFit
    hazards: Tensor  # [T]
    scale: Tensor  # [T] the hazards that outputs of 0 stand for
    places: Tensor  # [C, p] int64 of coefficients in a row


@dataclass(frozen=True)
class Cox(BySums[Server, Nothing, Down]):
    ridge: float = option(0.0, "precision of a normal prior on the coefficients; 0 is maximum likelihood", ge=0)
    prior: float = option(1.0, "events that the baseline hazard of all sites counts for in that of a site", gt=0)

    def check(self, task: Task, population: Population) -> None:
        if getattr(getattr(task.objective, "problem", None), "kind", "") != "survival":
            raise ConfigError(
                "Cox is for survival: a time, and whether the event happened then (--time-column and --event-column); "
                "use lmm for numbers, glmm for two classes or counts"
            )
        super().check(task, population)

    def init_server(self, task: Task, population: Population) -> Server:
        hazards = tensor_of(problem_of(task).hazards)
        return Server(NewtonFit.of(num_columns(task), 0, self.ridge), hazards, hazards.clone(), places_of(task))

    def is_done(self, server: Server) -> bool:
        return server.estimate.is_done

    def download(self, server: Server, ids: Tensor) -> Down:
        return Down(server.estimate.point.expand(len(ids), -1), server.hazards.expand(len(ids), -1))

    def client_update(self, task: Task, client: Nothing, down: Down, data: Cohort) -> tuple[Nothing, SumsUp]:
        beta, ends = numpy_of(down.beta[0]), np.array(problem_of(task).periods)
        answers, spoilt = [], []
        for x, target in _sites(task, data):
            spoilt.append(not np.isfinite(x).all())  # rejected on its way, and must not stop the others
            rows = (np.where(np.isfinite(x), x, 0.0), target[:, 0], target[:, 1], beta)
            one = partial_likelihood(*rows)
            parts = (one.value, one.gradient, one.curvature, *(part[None] for part in exposure(*rows, ends)))
            answers.append(packed(*parts, np.array([[len(x)]])))
        return Nothing(), SumsUp(not_finite_where(torch.cat(answers), np.array(spoilt)))

    def step(self, server: Server, mean: SumsUp, round: RoundInfo) -> Server:
        p, periods = len(server.estimate.covariance), len(server.hazards)
        total = unpacked_parts(mean.sums[None] * round.weight, (), (p,), (p, p), (periods,), (periods,), ())
        value, gradient, curvature, events, exposed, rows = total
        estimate = server.estimate.after(
            Likelihood(value, gradient, curvature), np.zeros(0), float(rows[0]), round.weight
        )
        prior = self.prior * numpy_of(server.scale) / float(server.scale.sum())
        hazards = (np.maximum(events[0], 0) + prior) / (np.maximum(exposed[0], 0) + prior / numpy_of(server.scale))
        return replace(server, estimate=estimate, hazards=tensor_of(np.maximum(hazards, LEAST)))

    def personalize(self, task: Task, client: Nothing, down: Down, data: Cohort) -> Tensor | dict[str, Tensor]:
        """β with the site's own baseline."""
        problem, beta, common = problem_of(task), numpy_of(down.beta[0]), numpy_of(down.hazards[0])
        ends, scale = np.array(problem.periods), np.array(problem.hazards)
        weight = self.prior * scale / scale.sum()  # c_j
        levels = []
        for x, target in _sites(task, data):
            rows = (x, target[:, 0], target[:, 1], beta)
            own = np.diff(baseline_hazard(*rows, ends), prepend=0.0)  # B_kj
            exposed = exposure(*rows, ends)[1]
            levels.append((own * exposed + weight) / (exposed + weight / common))
        return _rows(places_of(task).to(task.device), beta, np.array(levels), scale)

    def server_models(self, server: Server) -> ServerModels | None:
        """The model of a site that nothing is known of: the hazard of all sites."""
        beta, _ = server.estimate.fit
        return ServerModels(_rows(server.places, beta, numpy_of(server.hazards)[None], numpy_of(server.scale)))

    def figures(self, server: Server) -> dict[str, Any]:
        return server.estimate.figures()


def problem_of(task: Task) -> Problem:
    problem: Problem = task.objective.problem  # type: ignore[attr-defined]  # as `Cox.check` asks
    return problem


def _sites(task: Task, data: Cohort) -> list[tuple[Array, Array]]:
    """X [N, p] with times and events [N, 2], client by client."""
    x, target, count = rows_by_client(task, data.train)
    ends = np.cumsum(count)[:-1]
    return list(zip(np.split(x, ends), np.split(target, ends), strict=True))


def _rows(places: Tensor, beta: Array, hazards: Array, scale: Array) -> Tensor:
    """[n, P] models whose outputs are log hazard ratios: x'β, and by how much the baseline hazards [n, T] of each
    period are above those that outputs of 0 stand for."""
    theta = torch.zeros(len(hazards), places.numel())
    single = len(places) == 1  # one ratio for all periods
    level = np.log(hazards.sum(1, keepdims=True) / scale.sum() if single else hazards / scale)
    theta[:, places[:, 0].cpu()] = tensor_of(level).float()
    theta[:, places[:, 1:].cpu()] = tensor_of(beta[1:]).float()
    return theta.to(places.device)
