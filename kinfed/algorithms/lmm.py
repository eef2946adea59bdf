"""LMM: a linear mixed model of all sites, exact, from one message of sums per site.

    y = Xβ + Xb_k + e,    b_k ~ N(0, σ²Ψ) on some columns of X,    e ~ N(0, σ²)

Laird and Ware, Biometrics 38 (1982); restricted maximum likelihood from sums as in kinfed.theory.sums.mixed, to the
digits of R's lme4. It is Self-FL's two-level model made exact: how much a site learns from others follows from the
variance between sites, which is estimated and not guessed.

A site sends S = [X y]'[X y] once: (p + 1)(p + 2)/2 numbers. The server estimates β, σ² and Ψ. The personal model is
the posterior mean β + b_k, which the site computes from its own rows; its variance stays with the model, so that
predictions have intervals. Columns that others determine are left out, as R does.

`effects`: an intercept per site, or also slopes (independent, or `correlated` for up to eight columns). `auto` takes
what has the smaller restricted AIC, the criterion plus two per variance: intercept, or independent slopes.

`totals = true`: no site's sums are stored, and none need be seen. In every round the sites send what they add to the
criterion and to its derivatives at the current Ψ; the server uses their total alone, and takes a step of Fisher scoring
on variances. What needs M_xx and β of the same round uses those of the round before: the lag vanishes in the limit,
which is the same fit. It takes about 8 to 19 rounds to three digits, and stops asking when a step would gain less than
1e-7 in the criterion. `auto` is an intercept then.

Sensitivity of the totals under user-level privacy. A site's whole answer of a round is one vector v_k, a function of
its own rows and of what the server has released before. The stage shortens it to v_k min(1, C/‖v_k‖), adds these up
over sites and adds noise of deviation zC (kinfed.updates.user_level). One site more or less changes Σ_k v_k min(1,
C/‖v_k‖) by a vector of norm at most C, whatever the rows: that is all that the Gaussian mechanism and its composition
over rounds assume. A shortened S_k is that of the same rows with a smaller weight, so that large sites count less and
nothing else is wrong. Noise may leave a total that is no matrix of moments: such a round is not used. Example-level
privacy is refused: one row changes products of its columns without bound.

Limits: Ψ = 0 is least squares on all rows; σ²Ψ → ∞ is every site alone.
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
    moments,
    not_finite_where,
    num_columns,
    numpy_of,
    packed,
    places_of,
    posterior_rows,
    tensor_of,
    unpacked_parts,
)
from kinfed.author import Cohort, ConfigError, Nothing, Population, RoundInfo, ServerModels, Task, Tree, option
from kinfed.errors import DataError
from kinfed.theory.sums import (
    MixedFit,
    Profile,
    Sums,
    fit_diagonal,
    fit_full,
    fit_held,
    independent_columns,
    row_variance,
    scoring_step,
    site_effects,
    site_terms,
    solve_fixed,
)

Effects = Literal["auto", "intercept", "slopes", "correlated"]
MOST_CORRELATED = 8  # columns with a full covariance
MOST_SLOPES = 40  # columns for which `auto` tries slopes: a site costs their third power
HUGE = 1e300  # of what nothing is known yet: states are finite
DONE = 1e-7  # gain in the criterion for which another round of totals is not asked
START = 0.1  # variances before the first step, in units of σ² and of the column
# What became of the fit.
NOTHING_YET, FITTED, FEW_ROWS, CONSTANT, ONE_SITE, UNFINISHED = range(6)


@dataclass
class Fit(Tree):
    """The model; with an axis of clients in front, the message."""

    beta: Tensor  # [p]
    inverse: Tensor  # [p, p] Cov β / σ²
    psi: Tensor  # [p, p] Ψ, of columns that do not bend
    sigma2: Tensor  # []
    form: Tensor  # [d, FORM] of curves, 0 before it is known; [0] without curves


@dataclass
class Server(Tree):
    fit: Fit
    sums: Tensor  # [K, T] of sites, in units; [K, 0] with totals
    heard: Tensor  # [K] bool: whose sums are in the fit
    basis: Tensor  # [p] bool: columns that no others determine
    criterion: Tensor  # []
    count: Tensor  # [2] rows and sites in the fit
    verdict: Tensor  # [] int64
    places: Tensor  # [1, p] int64 of coefficients in a row
    best: Tensor  # [p + 2] with totals: the best variances so far, their criterion, and what the next step promises
    products: Tensor  # [d, BENDS, BENDS] of what bends columns, mean over all rows


@dataclass(frozen=True)
class LMM(BySums[Server, Nothing, Fit]):
    effects: Effects = option("auto", "which coefficients differ between sites")
    totals: bool = option(False, "the server uses only totals over sites, in several rounds")
    curves: bool = option(False, "columns bend where the evidence of training rows says so, in two rounds")

    @property
    def single_updates(self) -> str:
        return "" if self.totals else "keeps the sums of every site (totals = true needs their total alone)"

    def check(self, task: Task, population: Population) -> None:
        super().check(task, population)
        if task.classifies or task.head.outputs != 1:
            raise ConfigError("LMM predicts a number, and the target here is a class; use glmm, or --task regression")
        if population.num_clients < 2:
            raise ConfigError("LMM compares sites, and there is one; give it two sites or more")
        if self.curves:
            check_curves(task, "LMM")
            if self.totals:
                raise ConfigError("curves need the sums of every site; set totals or curves to false")
        if self.effects == "correlated" and (self.totals or num_columns(task) > MOST_CORRELATED):
            raise ConfigError(
                f"effects = correlated is for up to {MOST_CORRELATED} columns (with the intercept), without totals; "
                f"got {num_columns(task)} columns; use slopes"
            )

    def init_server(self, task: Task, population: Population) -> Server:
        d, k = task.head.inputs, population.num_clients
        curved = d if self.curves else 0
        linear, p = d + 1, d + 1 + curved * BENDS
        zero = torch.zeros((), dtype=torch.float64)
        psi = np.zeros((linear, linear))
        if self.totals:
            psi = np.diag(np.where(np.isin(np.arange(p), self._columns(p)), START, 0.0))
        form, products = np.zeros((curved, FORM)), np.zeros((curved, BENDS, BENDS))
        fit = Fit(*(tensor_of(part) for part in (np.zeros(p), np.zeros((p, p)), psi, 0.0, form)))
        width = 0 if self.totals else (p + 1) * (p + 2) // 2
        best = torch.full((p + 2,), HUGE, dtype=torch.float64)
        return Server(
            fit, torch.zeros(k, width, dtype=torch.float64), torch.zeros(k, dtype=torch.bool),
            torch.ones(p, dtype=torch.bool), zero.clone(), torch.zeros(2, dtype=torch.float64),
            torch.tensor(NOTHING_YET), places_of(task), best, tensor_of(products),
        )  # fmt: skip

    def _columns(self, p: int) -> list[int]:
        """Columns with a random effect, with totals."""
        return list(range(p)) if self.effects == "slopes" else [0]

    def rounds_in(self, rounds: int) -> int:
        """Curves take a round of counts before that of sums."""
        return max(rounds, 2) if self.curves else rounds

    def plan(self, server: Server, active: Tensor, round: RoundInfo) -> tuple[Server, Tensor]:
        """No site is asked twice for the same sums, nor after the last step of totals."""
        return server, self._missing(server).cpu().nonzero().squeeze(1)

    def is_done(self, server: Server) -> bool:
        return not bool(self._missing(server).any())

    def _missing(self, server: Server) -> Tensor:
        """bool [K]: sites that are asked in the next round."""
        return torch.full_like(server.heard, float(server.best[-1]) >= DONE) if self.totals else ~server.heard

    def download(self, server: Server, ids: Tensor) -> Fit:
        return server.fit.map(lambda tensor: tensor.expand(len(ids), *tensor.shape))

    def client_update(self, task: Task, client: Nothing, down: Fit, data: Cohort) -> tuple[Nothing, SumsUp]:
        form = down.form[0]
        sums = moments(task, data.train, form)
        if self.curves:  # counts of rows first, then sums with what bends columns
            counts = counts_by_client(task, data.train)
            known = bool(form.any())
            return Nothing(), SumsUp(packed(counts * (not known), sums * known))
        if not self.totals:
            return Nothing(), SumsUp(packed(sums))
        z = self._columns(num_columns(task))
        beta, inverse, psi = (numpy_of(tensor[0]) for tensor in (down.beta, down.inverse, down.psi))
        finite = np.isfinite(sums.sum((1, 2)))  # what is not is rejected on its way, and must not stop the others
        terms = site_terms(np.where(finite[:, None, None], sums, 0.0), z, psi[np.ix_(z, z)], beta, inverse)
        answer = packed(
            terms.moments, terms.log_det, terms.scores, terms.traces, terms.leverage, terms.curvature, sums[:, 0, 0]
        )
        return Nothing(), SumsUp(not_finite_where(answer, ~finite))

    def aggregate(self, server: Server, ids: Tensor, up: SumsUp, round: RoundInfo) -> Server:
        if self.totals:
            return super().aggregate(server, ids, up, round)
        sums, heard = server.sums.clone(), server.heard.clone()
        answer = up.sums.to(sums)
        if self.curves:
            width = len(server.products) * CELLS
            counts, answer = answer[:, :width], answer[:, width:]
            if not server.fit.form.any():
                form, products = form_of(numpy_of(counts.sum(0)).reshape(-1, CELLS))
                return replace(server, fit=replace(server.fit, form=tensor_of(form)), products=tensor_of(products))
        sums[ids], heard[ids] = answer, True
        return self._solved(replace(server, sums=sums, heard=heard))

    def forget(self, server: Server, ids: Tensor) -> Server:
        """The server as if these sites had never answered: their sums are taken out, and the rest is fitted anew."""
        if self.totals:
            raise ConfigError("with totals = true the server holds no site's sums to take out; fit the others anew")
        sums, heard = server.sums.clone(), server.heard.clone()
        sums[ids], heard[ids] = 0.0, False
        return self._solved(replace(server, sums=sums, heard=heard))

    def _solved(self, server: Server) -> Server:
        p = len(server.fit.beta)
        (sums,) = unpacked_parts(server.sums[server.heard], (p + 1, p + 1))
        solved = fitted(sums, self.effects, len(server.fit.psi))
        parts = (solved.beta, solved.inverse, solved.psi, solved.sigma2, numpy_of(server.fit.form))
        fit = Fit(*(tensor_of(part) for part in parts))
        return replace(
            server, fit=fit, basis=torch.from_numpy(solved.basis), criterion=tensor_of(solved.criterion),
            count=tensor_of([sums[:, 0, 0].sum(), len(sums)]), verdict=torch.tensor(solved.verdict),
        )  # fmt: skip

    def step(self, server: Server, mean: SumsUp, round: RoundInfo) -> Server:
        """A step of scoring on variances, by totals."""
        p = len(server.fit.beta)
        z = self._columns(p)
        q = len(z)
        total = unpacked_parts(mean.sums[None] * round.weight, (p + 1, p + 1), (), (q,), (q,), (q,), (q, q), ())
        matrix, log_det, scores, traces, leverage, curvature, rows = (part[0] for part in total)
        first = int(server.verdict) == NOTHING_YET
        basis = independent_columns(matrix[:-1, :-1]) if first else np.flatnonzero(server.basis.cpu().numpy()).tolist()
        count, psi = tensor_of([rows, round.weight]), np.diag(numpy_of(server.fit.psi))[z]
        if not (bool((np.diag(matrix)[:-1] >= 0).all()) and matrix[0, 0] > 0 and matrix[-1, -1] >= 0):
            return server  # no matrix of moments: noise has spoilt it
        if rows <= len(basis):
            return replace(server, verdict=torch.tensor(FEW_ROWS), count=count)
        index = [*basis, p]
        try:
            at = solve_fixed(matrix[np.ix_(index, index)], float(log_det), float(rows) - len(basis))
        except (DataError, np.linalg.LinAlgError):  # a constant target; or a total that noise has spoilt
            return replace(server, verdict=torch.tensor(CONSTANT)) if first else server
        beta, inverse = spread_out(at.beta, at.inverse, basis, p)
        best, least = numpy_of(server.best[:p])[z], float(server.best[p])
        new, promise = psi, HUGE
        if not first:
            if at.criterion > least + 1e-9 * abs(least) and float(rows) == float(server.count[0]):
                new = (psi + best) / 2  # the last step went too far; not so where other sites answered
            else:
                best, least = psi, at.criterion
                gradient = traces - scores / at.sigma2 - leverage
                information = curvature - np.outer(traces, traces) / (float(rows) - len(basis))
                free = [j for j, column in enumerate(z) if column in basis]
                step = np.zeros(q)
                step[free], promise = scoring_step(psi[free], gradient[free], information[np.ix_(free, free)])
                new, promise = np.maximum(psi + step, 0.0), abs(promise)
        variances, remembered = np.zeros(p), np.full(p, HUGE)
        variances[z], remembered[z] = np.where(np.isin(z, basis), new, 0.0), best
        fit = Fit(
            tensor_of(beta), tensor_of(inverse), tensor_of(np.diag(variances)), tensor_of(at.sigma2), server.fit.form
        )
        mask = torch.from_numpy(np.isin(np.arange(p), basis))
        return replace(
            server, fit=fit, basis=mask, criterion=tensor_of(at.criterion), count=count,
            verdict=torch.tensor(FITTED), best=tensor_of([*remembered, least, promise]),
        )  # fmt: skip

    def personalize(self, task: Task, client: Nothing, down: Fit, data: Cohort) -> Tensor | dict[str, Tensor]:
        """β + b_k, with its variance."""
        return _posterior(
            moments(task, data.train, down.form[0]), down.map(lambda tensor: tensor[0]), places_of(task), task.device
        )

    def profile(self, server: Server) -> tuple[Profile, list[int]]:
        """The likelihood around the fit, for intervals, and the columns that it is of."""
        if self.totals or self.effects == "correlated" or int(server.verdict) != FITTED:
            raise ConfigError(
                "profile intervals are of a fit to the sums of two sites or more, with an intercept or independent "
                "slopes (totals = false, effects = auto, intercept or slopes); this run has Wald's"
            )
        p = len(server.fit.beta)
        basis = np.flatnonzero(server.basis.cpu().numpy()).tolist()
        if basis[-1] >= len(server.fit.psi):
            raise ConfigError("columns of this fit bend, and profile intervals are of lines; set curves to false")
        (sums,) = unpacked_parts(server.sums[server.heard], (p + 1, p + 1))
        has_slopes = self.effects == "slopes" or bool(numpy_of(server.fit.psi.diagonal())[1:].any())
        index = [*basis, p]
        return Profile.of(sums[:, index][:, :, index], tuple(range(len(basis) if has_slopes else 1))), basis

    def site_models(self, server: Server, ids: Tensor) -> Tensor:
        """[n, P + E + 1] the models that these sites compute from their own rows, from their sums that the server has
        kept."""
        p = len(server.fit.beta)
        (sums,) = unpacked_parts(server.sums[ids], (p + 1, p + 1))
        return _posterior(sums, server.fit, server.places, server.places.device)

    def server_models(self, server: Server) -> ServerModels | None:
        """The model of a site that nothing is known of: β, with the variance between sites."""
        fit = server.fit
        beta, variance, psi, sigma2 = (
            numpy_of(fit.beta),
            numpy_of(fit.inverse).copy(),
            numpy_of(fit.psi),
            float(fit.sigma2),
        )
        variance[: len(psi), : len(psi)] += psi
        freedom = max(float(server.count[1]) - 1, 0.0)
        row = posterior_rows(server.places, beta[None], sigma2 * variance[None], sigma2, freedom, fit.form)
        return ServerModels(row)

    def figures(self, server: Server) -> dict[str, Any]:
        fit, linear = server.fit, len(server.fit.psi)
        rows = torch.tril_indices(linear, linear)
        sigma2, verdict = float(fit.sigma2), int(server.verdict)
        verdict = UNFINISHED if self.totals and verdict == FITTED and not self.is_done(server) else verdict
        figures = {
            "criterion": float(server.criterion), "sigma": sigma2**0.5, "rows": float(server.count[0]),
            "sites": float(server.count[1]), "verdict": verdict, "coefficients": fit.beta[:linear],
            "covariance": (sigma2 * fit.inverse)[rows[0], rows[1]], "between": (sigma2 * fit.psi)[rows[0], rows[1]],
            "basis": server.basis[:linear].to(torch.int64),
        }  # fmt: skip
        if self.curves:
            figures["bends"] = tensor_of(deviations(numpy_of(fit.beta)[linear:], numpy_of(server.products)))
        return figures if self.totals else figures | self._site_figures(server)

    def _site_figures(self, server: Server) -> dict[str, Any]:
        """Numbers of sites for the page: the effect on a row with average columns, how well it is known, the deviation
        of its rows around its model, and by how much β would move without the site, as Cook's distance."""
        k, p = len(server.heard), len(server.fit.beta)
        columns = {name: np.full(k, np.nan) for name in ("site_effect", "site_sd", "site_noise", "site_influence")}
        heard, sigma2 = server.heard.cpu().numpy(), float(server.fit.sigma2)
        if int(server.verdict) == FITTED and sigma2 > 0:
            (sums,) = unpacked_parts(server.sums[server.heard], (p + 1, p + 1))
            beta, inverse, psi = (numpy_of(part) for part in (server.fit.beta, server.fit.inverse, server.fit.psi))
            z = np.flatnonzero(np.diag(psi)).tolist() or [0]
            inner, everything = psi[np.ix_(z, z)], np.concatenate([beta, [-1.0]])
            effect, conditional = site_effects(sums, z, beta, inner, sigma2)
            residual = np.tile(everything, (len(sums), 1))
            residual[:, z] += effect
            rss = np.einsum("ni,nij,nj->n", residual, sums, residual)
            terms = site_terms(sums, z, inner, beta, inverse)
            basis = np.flatnonzero(server.basis.cpu().numpy())
            xx, xr = terms.moments[:, basis][:, :, basis], -(terms.moments @ everything)[:, basis]
            small = inverse[np.ix_(basis, basis)]
            change = np.linalg.solve(np.linalg.inv(small) - xx, xr[:, :, None])[:, :, 0]
            distance = np.einsum("ni,ij,nj->n", change, np.linalg.inv(small), change) / (len(basis) * sigma2)
            values = (effect[:, 0], np.sqrt(conditional[:, 0, 0]), np.sqrt(rss / sums[:, 0, 0]), distance)
            for name, value in zip(columns, values, strict=True):
                columns[name][heard] = value
        return {name: tensor_of(value) for name, value in columns.items()}


def _posterior(sums: Array, fit: Fit, places: Tensor, device: torch.device) -> Tensor:
    """[n, P + E + 1] models of sites with these sums [n, p + 1, p + 1]."""
    beta, inverse, psi, sigma2, _ = (numpy_of(tensor) for tensor in fit.named().values())
    z, noise = np.flatnonzero(np.diag(psi)).tolist(), float(sigma2)
    coefficients = np.tile(beta, (len(sums), 1))
    variance = np.tile(noise * inverse, (len(sums), 1, 1))
    if z and noise > 0:
        inner = psi[np.ix_(z, z)]
        coefficients[:, z] += site_effects(sums, z, beta, inner, noise)[0]
        variance = row_variance(sums, z, inner, noise, noise * inverse)
    return posterior_rows(places.to(device), coefficients, variance, noise, form=fit.form)


@dataclass(frozen=True)
class Solved:
    beta: Array  # [p], 0 for columns that are left out
    inverse: Array  # [p, p]
    psi: Array  # [p, p]
    sigma2: float
    criterion: float
    basis: Any  # [p] bool
    verdict: int


def fitted(sums: Array, effects: Effects, linear: int | None = None) -> Solved:
    """The model of some sites, from their sums [n, p + 1, p + 1]. The mean of y if they hold too little. Columns behind
    the first `linear` ones bend these, if the restricted AIC of the whole is smaller with them."""
    p = sums.shape[1] - 1
    linear = p if linear is None else linear
    whole, index = sums, [*range(linear), p]
    sums = sums[:, index][:, :, index] if linear < p else sums
    total = sums.sum(0)
    basis = independent_columns(total[:-1, :-1])
    index = [*basis, linear]
    own = sums[:, index][:, :, index]
    if total[0, 0] <= len(basis):
        return _mean_only(total, FEW_ROWS, p)
    try:
        if len(sums) < 2:
            at, psi, verdict = Sums.of(own).solve(np.zeros((1, 1))), np.zeros((1, 1)), ONE_SITE
        else:
            fits = [fit_diagonal(Sums.of(own))] if effects in ("auto", "intercept") else []
            if effects == "slopes" or (effects == "auto" and 1 < len(basis) <= MOST_SLOPES):
                fits.append(fit_diagonal(Sums.of(own, range(len(basis)))))
            if effects == "correlated":
                fits.append(fit_full(Sums.of(own, range(len(basis)))))
            at = min(fits, key=lambda fit: fit.restricted_aic)
            psi, verdict = at.psi, FITTED
            if linear < p and len(own) > 1:
                basis, at = _bending(whole, basis, linear, at)
                psi = at.psi
    except DataError:
        return _mean_only(total, CONSTANT, p)
    beta, inverse = spread_out(at.beta, at.inverse, basis, p)
    variances, z = np.zeros((linear, linear)), basis[: len(psi)]
    variances[np.ix_(z, z)] = psi
    mask = np.isin(np.arange(p), basis)
    return Solved(beta, inverse, variances, at.sigma2, at.criterion, mask, verdict)


def _bending(sums: Array, basis: list[int], linear: int, plain: MixedFit) -> tuple[list[int], MixedFit]:
    """The columns in the model and its fit: `plain`, or one in which columns bend. Random effects are those of
    `plain`, independently."""
    p = sums.shape[1] - 1
    bends = [j for j in range(linear, p) if sums[:, j, j].sum() > 0]
    index = [*basis, *bends, p]
    if not bends:
        return basis, plain
    held = replace(Sums.of(sums[:, index][:, :, index], plain.z), held=len(bends))
    fit, _ = fit_held(held, np.maximum(np.diag(plain.psi), 1e-6))
    better = fit.restricted_aic + 2 < plain.restricted_aic  # a variance more
    return ([*basis, *bends], fit) if better else (basis, plain)


def _mean_only(total: Array, verdict: int, p: int) -> Solved:
    linear, n = len(total) - 1, float(total[0, 0])
    beta, inverse = np.zeros(p), np.zeros((p, p))
    beta[0], inverse[0, 0] = total[0, -1] / n, 1 / n
    variance = max(float(total[-1, -1] / n - beta[0] ** 2), 0.0)
    return Solved(beta, inverse, np.zeros((linear, linear)), variance, 0.0, np.arange(p) == 0, verdict)


def spread_out(beta: Array, inverse: Array, basis: list[int], p: int) -> tuple[Array, Array]:
    """(β [p], M⁻¹ [p, p]) with zeros for the columns that are left out."""
    whole, square = np.zeros(p), np.zeros((p, p))
    whole[basis] = beta
    square[np.ix_(basis, basis)] = inverse
    return whole, square
