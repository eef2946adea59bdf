"""Personal boosted trees: shared trees grown from sums of histograms, an intercept per client, and a personal part.

Histogram boosting (Friedman 2001; Chen and Guestrin 2016 for gains and leaf values with curvature) whose every sum over
rows is a sum over clients; mixed effects inside boosting after Hajjem, Bellavance and Larocque 2014 and Sigrist 2022.

    F_k(x) = c + Σ_m w_m[leaf_m(x)] + b_k + personal part of client k

Shared trees. All clients know the bins (two rounds of counts) and send, for every level of a tree, histograms

    G = Σ g,  H = Σ h   by node, feature and bin,       g, h at F + b_k                                        (1)

of which the server needs the sum alone: a split gains Σ_c [G_L²/(H_L+λ) + G_R²/(H_R+λ) − G²/(H+λ)], a leaf says
w = −η G/(H+λ). One tree serves all classes at once (leaves are vectors). The trees are those of pooled rows in the same
bins: `depth` rounds a tree.

Intercepts. After every tree each client takes one Newton step of its own

    b_k ← b_k + (S_k − τ b_k)/(H_k + τ),      S_k = −Σ g,  H_k = Σ h                                           (2)
    τ ← φ / mean_k(b_k² + φ/(H_k + τ)),       φ the mean squared residual, 1 for classes                       (3)

so that trees spend no split on who a row comes from. The prior acts on the whole of b_k, not on what a tree adds: added
up with a step η, any effect would be fitted completely after enough trees.

Folds. With `folds` = V, V further ensembles grow in the same rounds, each without one part of all rows; their losses
there, summed over clients, say how many trees are used (growth ends `patience` trees after the best). With folds = 1
one part in five is held out; with 0 nothing is chosen: all trees, and the intercept as personal part.

Candidates. Beside the shared trees stand trees without intercepts (`pooled`, in the same rounds), linear mixed models
by a dozen rounds of their own before the first tree (tree_linear), and what a client makes of the trees itself (changed
leaf values, own trees, trees alone: tree_candidates). The model is their convex combination by what they say of rows
that they did not see: weights common to all clients from sums, then of each (tree_weights). A choice of one candidate
by a client's own losses is not safe; a combination was the only thing that was never far off.

Rounds are the method's own (`rounds_in`): it runs to its end whatever others are given, and asks no client afterwards.
Stopped before, the trees so far and the intercepts are used.

Only totals over clients are used, so that secure sums apply. A message has room for half of the lowest level: the
heavier child of a node is the difference of its parent and its sibling, which takes the same clients in both rounds.
Where they differ (sums of g and h tell), all nodes are asked for, and trees end where these have no more room, one
level above. A client that was away takes up the trees that it missed. Once all is chosen, no client is asked any more.

Limits: one client is plain boosting; τ → ∞ is boosting of pooled rows without site.
Not under differential privacy: a row is in a histogram of every feature at every level, and noise for that leaves
nothing at the sizes of tables with sites (a prototype, five trees on 6,667 rows: AUROC 0.60, not 0.88, at ε = 2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kinfed.algorithms.trees.tree_candidates import (
    CANDIDATES,
    NAMES,
    SHARED,
    CandidateChoice,
    PersonalParts,
)
from kinfed.algorithms.trees.tree_candidates import (
    LINEAR as FIRST_LINEAR,
)
from kinfed.algorithms.trees.tree_client import (
    LeftOut,
    OwnRows,
    cell_counts,
    histograms,
    linear_step,
    weights_of_clients,
)
from kinfed.algorithms.trees.tree_linear import FIXED, MOST_COLUMNS, MOST_SLOPES, design, effects_of, newton, num_sums
from kinfed.algorithms.trees.tree_linear import STEPS as LINEAR_STEPS
from kinfed.algorithms.trees.tree_messages import (
    COUNT,
    COUNT_AGAIN,
    DONE,
    FIRST_TAU,
    GROW,
    JUDGE,
    LEFT_LOSS,
    LEFT_WEIGHT,
    LINEAR,
    LOSS,
    POOLED,
    SUMS,
    UNIT,
    WEIGH,
    WEIGHT,
    Client,
    Down,
    GrownTrees,
    LinearState,
    Server,
    Up,
    YoungTree,
)
from kinfed.algorithms.trees.tree_rows import check_trees, model_rows, personal_rows
from kinfed.algorithms.trees.tree_weights import common_weights, without_traces
from kinfed.author import AveragingAlgorithm, Cohort, Population, RoundInfo, ServerModels, Task, option
from kinfed.engine.trees import TreeGrowth, TreeLoss, bin_edges, dependence, divided_cells, first_cells, importance

Array = np.ndarray[Any, Any]

NO_INTERCEPT = 1e30  # τ of trees without
WEIGHINGS = 4  # rounds for the weights of candidates
LOSSES = max(CANDIDATES, 1 + len(NAMES) + len(NAMES) ** 2)  # numbers in a message
LEAST_CELLS = 512
HASTE, STILL = 3.0, 0.06  # larger steps where the last `patience` trees gave so much of all that was gained
LARGEST_RATE = 0.3
FIRST_LEVELS = 3  # of trees, before any are deeper
MOST_CURVES = 12  # features whose dependence is told
SAME = 1e-6  # two means of the same clients differ by less
SEEN_BY_ALL = slice(0, 1)  # the ensemble of all rows, of its kind


@dataclass(frozen=True)
class BoostedTrees(AveragingAlgorithm[Server, Client, Down, Up]):
    trees: int = option(200, "most trees", ge=1, le=10_000)
    depth: int = option(4, "most levels of a tree, and rounds that it takes", ge=2, le=8)
    rate: float = option(0.1, "η: share of a leaf's best value that is taken", gt=0, le=1)
    bins: int = option(64, "bins of a feature, with that of missing values", ge=4, le=256)
    lam: float = option(1.0, "λ: penalty of leaf values", gt=0)
    min_rows: float = option(20, "rows of all clients on either side of a split", gt=0)
    folds: int = option(
        3, "V: parts of all rows that V more ensembles leave out, to choose by; 1: a fifth", ge=0, le=10
    )
    patience: int = option(20, "trees without a lower loss on left-out rows, after which growth ends", ge=1)
    personal: bool = option(True, "whether all candidates are tried beside the shared trees with an intercept")
    pooled: bool = option(True, "whether trees without intercepts grow beside, as a candidate and for new clients")

    fields = ("sums", "moments", "losses")
    adds_up = True
    noise_drowns = "sends histograms of every feature at every level, in which noise for a whole client leaves nothing"
    # Which rows are left out is drawn by client.
    traits = frozenset({"no momentum", "no weight decay", "draws by client"})
    leaks = "sums of gradients by bins of every feature, in which noise would drown all at the sizes of tables,"

    def check(self, task: Task, population: Population) -> None:
        check_trees(self, task)

    @property
    def kinds(self) -> int:
        """Kinds of ensembles: with intercepts, and without."""
        return 2 if self._chooses and self.pooled else 1

    @property
    def ensembles(self) -> int:
        return self.kinds * (1 + self.folds)

    @property
    def slots(self) -> int:
        """Nodes of an ensemble whose histograms a message holds."""
        return int(2 ** (self.depth - 2))

    def cells(self, scores: int) -> int:
        """Numbers of a feature in a message."""
        return max(self.ensembles * self.slots * self.bins * 2 * scores, LEAST_CELLS)

    # ---- the server ----

    def init_server(self, task: Task, population: Population) -> Server:
        loss, E = TreeLoss.of_task(task), self.ensembles
        base, ones = torch.zeros(E, loss.scores), torch.ones(E, loss.scores, dtype=torch.float64)
        trees, young = GrownTrees.nothing(E, self.depth, loss.scores), YoungTree.fresh(E, self.depth)
        steady, outputs = torch.tensor(population.participation >= 1), torch.tensor(loss.outputs)
        tau, losses = FIRST_TAU * ones, torch.zeros(0, self.kinds, dtype=torch.float64)
        tau[1 + self.folds :] = NO_INTERCEPT
        linear = LinearState.nothing(0, 0, loss.scores)
        inner, leaves = torch.zeros(0, 2**self.depth - 1), torch.zeros(0, 2**self.depth)
        effects = {"gains": inner.to(torch.float64), "covers": leaves.to(torch.float64)}
        return Server(
            base, tau, ones[:, 0].clone(), trees, young, steady, outputs, losses=losses, linear=linear, **effects
        )

    def rounds_in(self, rounds: int) -> int:
        """Its own number: two of counts, those of the linear model, `depth` a tree, few that choose, and a tenth more,
        as no client may answer in some."""
        return math.ceil(1.1 * (2 + LINEAR_STEPS + self.depth * self.trees + 2 + WEIGHINGS))

    def is_done(self, server: Server) -> bool:
        return int(server.phase) == DONE

    def plan(self, server: Server, active: Tensor, round: RoundInfo) -> tuple[Server, Tensor]:
        """No client is called once all is chosen."""
        return server, active[:0] if self.is_done(server) else active

    def download(self, server: Server, ids: Tensor) -> Down:
        return Down.of_server(server).map(lambda tensor: tensor.expand(len(ids), *tensor.shape))

    def step(self, server: Server, mean: Up, round: RoundInfo) -> Server:
        phase, task = int(server.phase), round.server_task
        assert task is not None  # the loop's
        loss = TreeLoss.of_task(task)
        sums, moments, losses = (UNIT * one.to(torch.float64).numpy() for one in (mean.sums, mean.moments, mean.losses))
        if phase == COUNT:
            return self._counted(server, loss, sums, moments)
        if phase == COUNT_AGAIN:
            edges = bin_edges(server.ends.numpy(), sums.reshape(len(server.ends), -1), self.bins)
            return self._with_linear(replace(server, phase=torch.tensor(GROW), edges=torch.from_numpy(edges)))
        if phase == LINEAR:
            models, number = newton(loss, server.linear.models, sums, round.weight), int(server.round) + 1
            after = torch.tensor(LINEAR if number < LINEAR_STEPS else GROW)
            linear, place = LinearState.of_models(models), torch.tensor(number % LINEAR_STEPS)
            return replace(server, phase=after, linear=linear, round=place)
        if phase == JUDGE:
            choice, shares = CandidateChoice.best(losses), self._first_shares(server)
            marks = torch.tensor([choice.strength, choice.own, choice.early, choice.alone])
            return replace(server, phase=torch.tensor(WEIGH), choice=marks, shares=shares)
        if phase == WEIGH:
            return self._weighed(server, losses)
        if int(server.young.level) == 0:
            server = self._judged(server, loss, moments)
            if self._has_ended(server):
                return replace(server, phase=torch.tensor(JUDGE if self._chooses else DONE))
        clients = round.weight  # of the mean
        return self._grown(server, sums, moments, loss.least_share * self.min_rows / clients, self.lam / clients)

    def _counted(self, server: Server, loss: TreeLoss, sums: Array, moments: Array) -> Server:
        """Cells are divided if rows are many; the base is that of a model without features."""
        C = loss.scores
        ends = divided_cells(first_cells(self.cells(C)), sums.reshape(-1, self.cells(C)))
        share = moments[:, SUMS : SUMS + C] / np.maximum(moments[:, WEIGHT, None], 1e-30)
        base = torch.from_numpy(loss.start(share))
        return replace(server, phase=torch.tensor(COUNT_AGAIN), ends=torch.from_numpy(ends), base=base)

    def _with_linear(self, server: Server) -> Server:
        """The server before the linear models' first round, where a message has room for them."""
        columns, C = len(server.edges) + 1, server.base.shape[1]
        room = len(server.edges) * self.cells(C)
        each = 1 + self.folds
        models = each * (1 + (len(server.edges) <= MOST_SLOPES))
        if not self._chooses or columns > MOST_COLUMNS or models * num_sums(columns, C) > room:
            return server
        linear = LinearState.nothing(models, columns, C)
        linear.beta[:, 0] = server.base[:each].to(torch.float64).repeat(models // each, 1)
        linear.tau[:each, 1:] = FIXED
        return replace(server, phase=torch.tensor(LINEAR), linear=linear)

    def _first_shares(self, server: Server) -> Tensor:
        """The same weight for every candidate that there is."""
        there = torch.ones(len(NAMES), dtype=torch.float64)
        there[NAMES.index("pooled")] = self.kinds - 1
        there[FIRST_LINEAR + len(server.linear.beta) // (1 + self.folds) :] = 0.0
        return there / there.sum()

    def _weighed(self, server: Server, losses: Array) -> Server:
        """The weights to ask about next, where a quadratic form of the loss is least; the best so far are kept."""
        count, number = len(NAMES), int(server.round) + 1
        gradient, curvature = losses[1 : 1 + count], losses[1 + count : 1 + count + count**2].reshape(count, count)
        if losses[0] < float(server.least):
            best = torch.from_numpy(without_traces(server.shares.numpy()))
            server = replace(server, best=best, least=torch.tensor(losses[0], dtype=torch.float64))
        there = self._first_shares(server).numpy() > 0
        shares = common_weights(gradient, curvature, server.shares.numpy(), there)
        phase = torch.tensor(WEIGH if number < WEIGHINGS else DONE)
        return replace(server, phase=phase, shares=torch.from_numpy(shares), round=torch.tensor(number % WEIGHINGS))

    def _judged(self, server: Server, loss: TreeLoss, moments: Array) -> Server:
        """The loss on left-out rows with all trees so far, and new strengths of the intercepts (3)."""
        tau, phi = _strengths(loss, moments)
        tau[1 + self.folds :] = NO_INTERCEPT
        by_kind = moments.reshape(self.kinds, 1 + self.folds, -1)[:, 1:]
        left = by_kind[..., LEFT_LOSS].sum(1) / np.maximum(by_kind[..., LEFT_WEIGHT].sum(1), 1e-30)
        losses = torch.cat([server.losses[: server.trees.count], torch.from_numpy(left)[None]])
        return replace(server, tau=torch.from_numpy(tau), phi=torch.from_numpy(phi), losses=losses)

    @property
    def _chooses(self) -> bool:
        return self.folds > 0 and self.personal

    def _has_ended(self, server: Server) -> bool:
        count = server.trees.count
        best = max(server.used(kind) for kind in range(self.kinds))
        return count >= self.trees or (self.folds > 0 and count - best >= self.patience)

    def _still_falls(self, server: Server) -> bool:
        """Whether the loss fell fast still after a quarter of the trees, as where columns act together. The `trees`
        that there are end such growth long before its loss is least: all others are deeper and take larger steps."""
        quarter = self.trees // 4
        if self.folds == 0 or quarter <= self.patience or len(server.losses) <= quarter:
            return False  # among few trees the last `patience` ones always gave much
        start, before, then = server.losses[[0, quarter - self.patience, quarter]]
        return bool((before - then > STILL * (start - then).clamp_min(0.0)).any())

    def _rate(self, server: Server) -> float:
        """The step of the next tree."""
        return max(self.rate, min(HASTE * self.rate, LARGEST_RATE)) if self._still_falls(server) else self.rate

    def _levels(self, server: Server) -> int:
        """Levels of the next tree. Most tables with sites lose less with one fewer than `depth`; where the loss still
        falls all are grown, and all are where nothing is chosen."""
        return self.depth if self.folds == 0 or self._still_falls(server) else min(self.depth, FIRST_LEVELS)

    def _grown(self, server: Server, sums: Array, moments: Array, least: float, lam: float) -> Server:
        """The tree in growth after one more level. Sums are means over clients, and so are `least` and λ."""
        young, C = server.young, server.base.shape[1]
        feature, split, missing = (one.numpy().copy() for one in (young.feature, young.split, young.missing))
        growth = TreeGrowth(
            self.depth, lam, np.full(self.ensembles, least), feature, split, missing, int(young.level),
            server.parent.numpy(), server.weight.numpy(),
        )  # fmt: skip
        gradients, wanted = moments[:, SUMS + 2 * C :], young.wanted.numpy()
        steady = _is_same(server.gradients.numpy(), gradients) if growth.level else bool(server.steady)
        if steady or not (wanted < 0).any():
            shape = (self.ensembles, self.slots, len(server.edges), self.bins, 2 * C)
            growth.grow(sums[: math.prod(shape)].reshape(shape), wanted)
            server = replace(server, young_gain=torch.cat([server.young_gain, torch.from_numpy(growth.gain[0])]))
        asked = None if growth.level >= self._levels(server) else growth.wanted(self.slots, steady)
        server = replace(server, gradients=torch.from_numpy(gradients.copy()), steady=torch.tensor(steady))
        if asked is None:
            growth.stop()
            server = _with_effects(server, growth)
            trees, young = server.trees.joined(growth, self._rate(server)), YoungTree.fresh(self.ensembles, self.depth)
            nothing = torch.zeros(0, dtype=torch.float64)
            return replace(server, trees=trees, young=young, parent=nothing, weight=nothing.clone())
        parent, weight = torch.from_numpy(growth.parent), torch.from_numpy(growth.weight)
        return replace(server, young=YoungTree.of_growth(growth, asked), parent=parent, weight=weight)

    # ---- the clients ----

    def init_client(self, task: Task, data: Cohort) -> Client:
        n, C = len(data), TreeLoss.of_task(task).scores
        zero, longest = torch.zeros(1, 1, 1, 1), data.train.longest
        score = zero.expand(n, longest, self.ensembles, C)
        left = zero.expand(n, longest if self._chooses else 0, len(NAMES), C)
        judged = torch.zeros(n, dtype=torch.bool)
        return Client(score, torch.zeros(n, self.ensembles, C), torch.full((n,), -1), left, judged)

    def client_update(self, task: Task, client: Client, down: Down, data: Cohort) -> tuple[Client, Up]:
        loss, order = TreeLoss.of_task(task), down.one()
        phase, n, cells = int(order.phase), len(data), self.cells(loss.scores)
        rows = OwnRows.of_split(data.train, self.folds, self.kinds)
        losses = np.zeros((n, LOSSES))
        if phase in (COUNT, COUNT_AGAIN):
            ends = first_cells(cells) if phase == COUNT else order.ends.numpy()
            sums, moments, finite = cell_counts(loss, rows, data.train, ends)
        else:
            own, finite = rows.binned(data.train, order.edges.numpy())
            sums = np.zeros((n, own.codes.shape[1] * cells), np.float32)
            moments = np.zeros((n, self.ensembles, SUMS + 4 * loss.scores))
            if phase == GROW:
                client, moments = histograms(loss, client, order, own, rows, self.slots, self.bins, sums)
            elif phase == LINEAR:
                parts = linear_step(loss, order, own, rows, data.train, 1 + self.folds)
                np.divide(parts, UNIT, out=sums[:, : parts.shape[1]], casting="same_kind")
            else:
                asked = LeftOut(loss, order, own, rows, data.train, self.folds, self.bins)
                if phase == JUDGE:
                    losses[:, :CANDIDATES] = asked.judgement.losses()
                else:
                    client, losses = asked.weigh(client)
        sums[~finite] = np.nan  # a client with values that are no numbers has no update
        parts_of_unit = (torch.from_numpy((one / UNIT).astype(np.float32)) for one in (moments, losses))
        return client, Up(torch.from_numpy(sums), *parts_of_unit)

    # ---- models ----

    def personalize(self, task: Task, client: Client, down: Down, data: Cohort) -> Tensor:
        loss, order = TreeLoss.of_task(task), down.one()
        model, edges = order.model(loss, self.bins).ensembles(SEEN_BY_ALL), order.edges.numpy()
        if not edges.size:
            return model_rows(model.trees, edges, np.repeat(model.base, len(data), 0), loss.outputs)
        rows = OwnRows.of_split(data.train, 0)
        parts = PersonalParts(model, rows.binned(data.train, edges)[0], rows.weight)
        if int(order.phase) != DONE or not self._chooses:
            return personal_rows(parts, edges, _only(SHARED, len(data)), order.chosen())
        shares = weights_of_clients(loss, client, order, data.train, self.folds)
        pooled = order.model(loss, self.bins, POOLED).ensembles(SEEN_BY_ALL) if self.kinds > POOLED else None
        x, linear = design(data.train, rows.rows), []
        for models in order.linear.kinds(1 + self.folds):
            one = models.ensembles(SEEN_BY_ALL)
            linear.append(one.beta + effects_of(loss, parts.data, x, rows.weight, one)[:, 0])
        return personal_rows(parts, edges, shares, order.chosen(), pooled, linear)

    def server_models(self, server: Server) -> ServerModels:
        """Trees without intercepts, for a client of which no labelled row is known: what clients share may lack what
        their intercepts hold."""
        kind, each = self.kinds - 1, 1 + self.folds
        which = slice(kind * each, kind * each + 1)
        trees = Down.of_server(server).grown().cut(0, server.used(kind)).ensembles(which)
        edges, base = server.edges.numpy(), server.base.numpy()[which]
        return ServerModels(model_rows(trees, edges, base, int(server.outputs)))

    def figures(self, server: Server) -> dict[str, Any]:
        left = float(server.losses[:, 0].min()) if len(server.losses) and self.folds else math.nan
        shares = zip(NAMES, server.best.tolist(), strict=True)
        return {
            "trees": server.used(0), "grown": server.trees.count, "left_out_loss": left,
            "intercept_variance": float((server.phi[0] / server.tau[0]).mean()),
        } | {f"share_{name}": share for name, share in shares} | self._effects(server)  # fmt: skip

    def _effects(self, server: Server) -> dict[str, Tensor]:
        """What features do in the shared trees, once these are grown; dependence where a row has one score."""
        used, edges = server.used(0), server.edges.numpy()
        if not self.is_done(server) or not used:
            return {}
        trees = Down.of_server(server).grown().ensembles(SEEN_BY_ALL).cut(0, used)
        shares = importance(trees.feature[0, 0], server.gains.numpy()[:used], len(edges))
        figures = {"importance": torch.from_numpy(shares)}
        if server.base.shape[1] > 1:
            return figures
        most = np.argsort(-shares, kind="stable")[:MOST_CURVES]
        most = most[shares[most] > 0]
        curves = [dependence(trees, server.covers.numpy()[:used], int(j), self.bins)[:, 0] for j in most]
        return figures | {
            "dependence_of": torch.from_numpy(most), "dependence_at": torch.from_numpy(edges[most].astype(np.float64)),
            "dependence": torch.from_numpy(np.stack(curves)),
        }  # fmt: skip


def _with_effects(server: Server, growth: TreeGrowth) -> Server:
    """Gains and covers of a complete tree of the first ensemble."""
    gain, half = torch.zeros(1, growth.feature.shape[1], dtype=torch.float64), growth.weight.shape[-1] // 2
    gain[0, : len(server.young_gain)] = server.young_gain
    cover = torch.from_numpy(np.maximum(growth.weight[:1, :, half:].sum(-1), 0.0))
    gains, covers = torch.cat([server.gains, gain]), torch.cat([server.covers, cover])
    return replace(server, gains=gains, covers=covers, young_gain=server.young_gain[:0])


def _strengths(loss: TreeLoss, moments: Array) -> tuple[Array, Array]:
    """τ [E, C] and φ [E] by (3)."""
    C = loss.scores
    size, phi = moments[:, SUMS + C : SUMS + 2 * C], np.ones(len(moments))
    if loss.has_variance:
        phi = np.maximum(2 * moments[:, LOSS] / np.maximum(moments[:, WEIGHT], 1e-30), 1e-12)
    return np.clip(phi[:, None] / np.maximum(size, 1e-12), 1e-3, 1e9), phi


def _only(candidate: int, clients: int) -> Array:
    return np.tile(np.arange(len(NAMES)) == candidate, (clients, 1)).astype(np.float64)


def _is_same(before: Array, now: Array) -> bool:
    """Whether two mean sums of g and h [E, 2C] are over the same clients."""
    half = now.shape[1] // 2
    scale = SAME * np.maximum(now[:, half:], 1e-30)
    return before.shape == now.shape and bool((np.abs(before - now) <= np.concatenate([scale, scale], 1)).all())
