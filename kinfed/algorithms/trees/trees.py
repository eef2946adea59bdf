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
there, summed over clients, say how many trees are used (growth ends `patience` trees after the best), how strong the
personal part is and which (kinfed.algorithms.trees.tree_candidates: leaf values, own trees, alone, and their weights).
With folds = 1 one part in five is held out; with 0 nothing is chosen: all trees, and the intercept as personal part.

Messages are means with equal weights, so that secure sums apply; n, by which a mean is a sum, is what the schedule
calls. The message has room for half of the lightest level, because the heavier child is the difference of parent and
sibling; that takes the same clients in both rounds. Where they differ (sums of g and h tell), all nodes are asked for,
and trees end where these have no more room, one level above. A client that was away takes up the trees it missed.

Limits: one client is plain boosting; τ → ∞ is boosting of pooled rows without site.
Not under differential privacy: a row is in a histogram of every feature at every level, and noise for that leaves
nothing at the sizes of tables with sites (measured: AUROC 0.60 instead of 0.89 at ε = 2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kinfed.algorithms.trees import tree_candidates as candidates
from kinfed.algorithms.trees.tree_candidates import Judgement, PersonalParts, SharedModel, newton_step
from kinfed.algorithms.trees.tree_rows import OwnRows, model_rows, personal_rows
from kinfed.author import (
    AveragingAlgorithm,
    Cohort,
    ConfigError,
    Population,
    RoundInfo,
    ServerModels,
    Task,
    Tree,
    option,
)
from kinfed.engine.trees import (
    ClientRows,
    TreeGrowth,
    TreeLoss,
    Trees,
    bin_edges,
    count_cells,
    divided_cells,
    first_cells,
    flat_rows,
)

Array = np.ndarray[Any, Any]

COUNT, COUNT_AGAIN, GROW, JUDGE, WEIGH, DONE = range(6)  # phases
UNIT = 1024.0  # of sums in messages: a million rows are within the usual range of secure sums
FIRST_TAU = 5.0
FIRST_STEPS = 3  # of an intercept before the first tree
JUDGED_AT = (10,)  # trees after which a personal part is chosen, before growth ends
LEAST_CELLS = 512
SAME = 1e-6  # two means of the same clients differ by less
# Columns of moments: weight and loss of the rows of an ensemble, loss and weight of the rows it does not see; then C
# sums of targets, C sizes of intercepts, and C sums of g and of h.
WEIGHT, LOSS, LEFT_LOSS, LEFT_WEIGHT, SUMS = range(5)


@dataclass
class Server(Tree):
    phase: Tensor  # [] int64
    ends: Tensor  # [p, cells - 1] float64, or [0]: of the cells to count
    edges: Tensor  # [p, B - 2] float32, or [0]: of the bins
    base: Tensor  # [E, C] float32
    tau: Tensor  # [E, C] float64
    phi: Tensor  # [E] float64
    feature: Tensor  # [E, T, I] int16 of all trees
    split: Tensor  # [E, T, I] uint8
    missing: Tensor  # [E, T, I] uint8
    value: Tensor  # [E, T, L, C] float32
    level: Tensor  # [] int64 of the tree in growth
    new_feature: Tensor  # [E, I] int16 of that tree
    new_split: Tensor  # [E, I] uint8
    new_missing: Tensor  # [E, I] uint8
    wanted: Tensor  # [E, nodes] int16 slots of the nodes of the level
    parent: Tensor  # [E, nodes / 2, p, B, 2C] float64 mean histograms of the level before
    weight: Tensor  # [E, nodes, 2C] float64 sums of the nodes of the level
    gradients: Tensor  # [E, 2C] float64 mean sums of g and h, of the round before
    steady: Tensor  # [] bool whether that was of the same clients as the round before
    losses: Tensor  # [trees + 1] float64 mean loss on left-out rows, by the number of trees
    choice: Tensor  # [3] int64 of the personal part (tree_candidates)
    shares: Tensor  # [4] float32 weights of the shared model, leaves, own trees and alone
    outputs: Tensor  # [] int64 of a model


@dataclass
class Client(Tree):
    score: Tensor  # [n, most rows of any client, E, C] what the trees say of every row
    b: Tensor  # [n, E, C] intercepts
    done: Tensor  # [n] int64 trees in the scores; -1: none, nor the base


@dataclass
class Down(Tree):
    phase: Tensor  # [n]; the others as in Server
    ends: Tensor
    edges: Tensor
    base: Tensor
    tau: Tensor
    phi: Tensor
    feature: Tensor
    split: Tensor
    missing: Tensor
    value: Tensor
    level: Tensor
    new_feature: Tensor
    new_split: Tensor
    new_missing: Tensor
    wanted: Tensor
    used: Tensor  # [n] int64 trees that models are made of
    choice: Tensor
    shares: Tensor


@dataclass
class Up(Tree):
    sums: Tensor  # [n, p cells] counts of cells [p, cells], or histograms [E, S, p, B, 2C]
    moments: Tensor  # [n, E, 4 + 4C]
    losses: Tensor  # [n, G] of candidates or of weights


@dataclass(frozen=True)
class BoostedTrees(AveragingAlgorithm[Server, Client, Down, Up]):
    trees: int = option(200, "most trees", ge=1, le=10_000)
    depth: int = option(4, "levels of a tree, and rounds that it takes", ge=2, le=8)
    rate: float = option(0.1, "η: share of a leaf's best value that is taken", gt=0, le=1)
    bins: int = option(64, "bins of a feature, with that of missing values", ge=4, le=256)
    lam: float = option(1.0, "λ: penalty of leaf values", ge=0)
    min_rows: float = option(20, "rows of all clients on either side of a split", gt=0)
    folds: int = option(3, "V: parts of the rows that further ensembles leave out, to choose by; 1: a fifth", ge=0, le=10)
    patience: int = option(20, "trees without a lower loss on left-out rows, after which growth ends", ge=1)
    personal: bool = option(True, "whether leaf values, own trees and trees alone are tried beside the intercept")

    fields = ("sums", "moments", "losses")
    traits = frozenset({"no momentum", "no weight decay", "draws by client"})  # which rows are left out, by client
    leaks = "sums of gradients by bins of every feature, in which noise would drown all at the sizes of tables,"

    def check(self, task: Task, population: Population) -> None:
        if self.finetune or self.knn:
            raise ConfigError("trees are not trained by steps and have no features; set finetune and knn to 0")
        if task.device.type != "cpu":
            raise ConfigError("trees are grown on the processor; run them with --device cpu")

    # ---- sizes ----

    @property
    def ensembles(self) -> int:
        return 1 + self.folds

    @property
    def slots(self) -> int:
        return int(2 ** (self.depth - 2))

    def cells(self, scores: int) -> int:
        return max(self.ensembles * self.slots * self.bins * 2 * scores, LEAST_CELLS)

    # ---- the server ----

    def init_server(self, task: Task, population: Population) -> Server:
        loss, inner, nothing = TreeLoss.of_task(task), 2**self.depth - 1, torch.zeros(0)
        E, C = self.ensembles, loss.scores
        wide = nothing.to(torch.float64)
        marks = torch.zeros(E, 0, inner, dtype=torch.uint8)
        fresh = TreeGrowth.start(self.depth, self.lam, np.zeros(E))
        return Server(
            torch.tensor(COUNT), wide, nothing, torch.zeros(E, C), torch.full((E, C), FIRST_TAU, dtype=torch.float64),
            torch.ones(E, dtype=torch.float64), marks.to(torch.int16), marks, marks.clone(),
            torch.zeros(E, 0, 2**self.depth, C), torch.tensor(0), *map(torch.from_numpy, _marks(fresh)),
            torch.zeros(E, 1, dtype=torch.int16), wide, wide.clone(), wide.clone(),
            torch.tensor(population.participation >= 1), wide.clone(), torch.zeros(3, dtype=torch.int64),
            torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.tensor(loss.outputs),
        )  # fmt: skip

    def plan(self, server: Server, active: Tensor, round: RoundInfo) -> tuple[Server, Tensor]:
        """Nobody is called once all is chosen."""
        return server, active[:0] if int(server.phase) == DONE else active

    def download(self, server: Server, ids: Tensor) -> Down:
        message = {name: getattr(server, name, None) for name in Down.__dataclass_fields__}
        message["used"] = torch.tensor(used_trees(server))
        return Down(**{name: tensor.expand(len(ids), *tensor.shape) for name, tensor in message.items()})

    def step(self, server: Server, mean: Up, round: RoundInfo) -> Server:
        phase = int(server.phase)
        sums, moments = (UNIT * tensor.to(torch.float64).numpy() for tensor in (mean.sums, mean.moments))
        losses = UNIT * mean.losses.to(torch.float64).numpy()
        if phase == COUNT:
            return self._counted(server, sums, moments, round)
        if phase == COUNT_AGAIN:
            edges = bin_edges(server.ends.numpy(), sums.reshape(len(server.ends), -1), self.bins)
            return replace(server, phase=torch.tensor(GROW), edges=torch.from_numpy(edges))
        if phase == JUDGE:
            choice = torch.from_numpy(candidates.best_choice(losses))
            return replace(server, phase=torch.tensor(WEIGH), choice=choice)
        if phase == WEIGH:
            best = int(losses[: len(candidates.WEIGHTS)].argmin())
            shares = torch.from_numpy(candidates.WEIGHTS[best].astype(np.float32))
            return replace(server, phase=torch.tensor(DONE if self._has_ended(server) else GROW), shares=shares)
        return self._grown(server, sums, moments, round)

    def _counted(self, server: Server, sums: Array, moments: Array, round: RoundInfo) -> Server:
        """Cells are divided where there are many rows; the base is that of a model without features."""
        C, task = server.base.shape[1], round.server_task
        ends = divided_cells(first_cells(self.cells(C)), sums.reshape(-1, self.cells(C)))
        assert task is not None  # the loop's
        share = moments[:, SUMS : SUMS + C] / np.maximum(moments[:, WEIGHT, None], 1e-30)
        base = torch.from_numpy(TreeLoss.of_task(task).start(share))
        return replace(server, phase=torch.tensor(COUNT_AGAIN), ends=torch.from_numpy(ends), base=base)

    def _grown(self, server: Server, sums: Array, moments: Array, round: RoundInfo) -> Server:
        task = round.server_task
        assert task is not None  # the loop's
        loss, E, C = TreeLoss.of_task(task), self.ensembles, server.base.shape[1]
        calls = max(round.population.num_clients * round.population.participation, 1.0)
        level, gradients = int(server.level), moments[:, SUMS + 2 * C :]
        if level == 0:
            is_first = len(server.losses) == used_all(server)  # message with these trees
            server = self._judged(server, loss, moments)
            has_ended = self._has_ended(server)
            if has_ended or (is_first and self._chooses and used_all(server) in JUDGED_AT):
                return replace(server, phase=torch.tensor(JUDGE if self._chooses else DONE))
        growth = self._growth(server, loss.least_share * self.min_rows / calls, self.lam / calls)
        wanted = server.wanted.numpy()
        steady = bool(server.steady) if level == 0 else _is_same(server.gradients.numpy(), gradients)
        if steady or not (wanted < 0).any():
            shape = (E, self.slots, len(server.edges), self.bins, 2 * C)
            growth.grow(sums[: math.prod(shape)].reshape(shape), wanted)
        next_wanted = None if growth.is_complete else growth.wanted(self.slots, steady)
        server = replace(server, gradients=torch.from_numpy(gradients.copy()), steady=torch.tensor(steady))
        if next_wanted is None:
            growth.stop()
            return self._with_tree(server, growth)
        marks = dict(zip(("new_feature", "new_split", "new_missing"), map(torch.from_numpy, _marks(growth)), strict=True))
        return replace(
            server, level=torch.tensor(growth.level), wanted=torch.from_numpy(next_wanted), **marks,
            parent=torch.from_numpy(growth.parent), weight=torch.from_numpy(growth.weight),
        )  # fmt: skip

    def _judged(self, server: Server, loss: TreeLoss, moments: Array) -> Server:
        """The loss on left-out rows with all trees so far, and new strengths of the intercepts (3)."""
        C = server.base.shape[1]
        size = moments[:, SUMS + C : SUMS + 2 * C]
        phi = np.ones(len(size))
        if loss.has_variance:
            phi = np.maximum(2 * moments[:, LOSS] / np.maximum(moments[:, WEIGHT], 1e-30), 1e-12)
        tau = np.clip(phi[:, None] / np.maximum(size, 1e-12), 1e-3, 1e9)
        left = moments[1:, LEFT_LOSS].sum() / max(moments[1:, LEFT_WEIGHT].sum(), 1e-30)
        losses = torch.cat([server.losses[: used_all(server)], torch.tensor([left], dtype=torch.float64)])
        return replace(server, tau=torch.from_numpy(tau), phi=torch.from_numpy(phi), losses=losses)

    @property
    def _chooses(self) -> bool:
        return self.folds > 0 and self.personal

    def _has_ended(self, server: Server) -> bool:
        count, worse = used_all(server), used_all(server) - used_trees(server)
        return count >= self.trees or (self.folds > 0 and worse >= self.patience)

    def _growth(self, server: Server, least: float, lam: float) -> TreeGrowth:
        marks = (getattr(server, name).numpy().copy() for name in ("new_feature", "new_split", "new_missing"))
        return TreeGrowth(
            self.depth, lam, np.full(self.ensembles, least), *marks, int(server.level), server.parent.numpy(),
            server.weight.numpy(),
        )  # fmt: skip

    def _with_tree(self, server: Server, growth: TreeGrowth) -> Server:
        fresh = TreeGrowth.start(self.depth, self.lam, np.zeros(self.ensembles))
        marks = dict(zip(("new_feature", "new_split", "new_missing"), map(torch.from_numpy, _marks(fresh)), strict=True))
        parts = dict(zip(("feature", "split", "missing"), _marks(growth), strict=True))
        parts["value"] = growth.values(self.rate)
        longer = {
            name: torch.cat([getattr(server, name), torch.from_numpy(part)[:, None]], 1) for name, part in parts.items()
        }
        nothing = torch.zeros(0, dtype=torch.float64)
        wanted = torch.zeros(self.ensembles, 1, dtype=torch.int16)
        return replace(
            server, level=torch.tensor(0), wanted=wanted, parent=nothing, weight=nothing.clone(), **longer, **marks
        )

    # ---- the clients ----

    def init_client(self, task: Task, data: Cohort) -> Client:
        n, C = len(data), TreeLoss.of_task(task).scores
        score = torch.zeros(1, 1, 1, 1).expand(n, data.train.longest, self.ensembles, C)
        return Client(score, torch.zeros(n, self.ensembles, C), torch.full((n,), -1))

    def client_update(self, task: Task, client: Client, down: Down, data: Cohort) -> tuple[Client, Up]:
        loss, phase = TreeLoss.of_task(task), int(down.phase[0])
        rows = OwnRows.of_split(data.train, self.folds)
        if phase in (COUNT, COUNT_AGAIN):
            return client, self._counts(loss, down, data, rows)
        own, finite = rows.binned(data.train, down.edges[0].numpy())
        moments = torch.zeros(len(data), self.ensembles, SUMS + 4 * loss.scores)
        losses = torch.zeros(len(data), candidates.LOSSES)
        if phase == GROW:
            client, sums, moments = self._histograms(loss, client, down, own, rows)
        else:
            sums = torch.zeros(len(data), own.codes.shape[1] * self.cells(loss.scores))
            judged = self._judgement(loss, down, own, rows)
            found = judged.of_candidates() if phase == JUDGE else judged.of_weights(down.choice[0].numpy())
            losses[:, : found.shape[1]] = torch.from_numpy(found / UNIT)
        sums[~finite] = torch.nan  # a client with values that are no numbers has no update
        return client, Up(sums, moments, losses)

    def _counts(self, loss: TreeLoss, down: Down, data: Cohort, rows: OwnRows) -> Up:
        cells, C = self.cells(loss.scores), loss.scores
        x = flat_rows(data.train.features, torch.from_numpy(rows.rows))
        ends = first_cells(cells) if int(down.phase[0]) == COUNT else down.ends[0].numpy()
        counts = count_cells(x, rows.first, rows.weight[:, 0], ends, cells)
        own = ClientRows(np.zeros((0, x.shape[1]), np.uint8), rows.rows, rows.first, rows.y)
        moments = np.zeros((len(data), self.ensembles, SUMS + 4 * C))
        moments[..., WEIGHT] = own.sums(rows.weight)
        targets = loss.targets(rows.y)[:, None] * rows.weight[..., None]
        moments[..., SUMS : SUMS + C] = own.sums(targets)
        sums = torch.from_numpy((counts / UNIT).astype(np.float32)).flatten(1)
        finite = own.sums((~np.isfinite(x)).any(1).astype(np.float64)) == 0
        sums[~torch.from_numpy(finite)] = torch.nan
        moments_sent = torch.from_numpy((moments / UNIT).astype(np.float32))
        return Up(sums, moments_sent, torch.zeros(len(data), candidates.LOSSES))

    def _histograms(
        self, loss: TreeLoss, client: Client, down: Down, own: ClientRows, rows: OwnRows
    ) -> tuple[Client, Tensor, Tensor]:
        """Histograms (1) of the wanted nodes and the moments, after the scores have caught up with all trees."""
        n, C, E, level = len(client.b), loss.scores, self.ensembles, int(down.level[0])
        tau, phi = down.tau[0].numpy(), down.phi[0].numpy()
        score = client.score.numpy()[rows.owner, rows.position]
        score, b, new_client = self._caught_up(loss, client, down, own, rows, score, tau)
        now = score + b[rows.owner]
        gradient = loss.gradients(now, rows.y) * rows.weight[..., None]
        tree = Trees(*(getattr(down, f"new_{name}")[0].numpy()[None, :, None] for name in ("feature", "split", "missing")),
                     np.zeros((1, E, 1, 2**self.depth, C), np.float32))  # fmt: skip
        node = own.walk(tree, level)[:, :, 0]
        slot = down.wanted[0].numpy()[np.arange(E), node]
        slot = np.where(rows.weight > 0, slot, -1).astype(np.int16)
        histograms = own.histograms(slot, gradient, self.slots, self.bins).reshape(n, -1)
        sums = np.zeros((n, own.codes.shape[1] * self.cells(C)), np.float32)
        np.divide(histograms, UNIT, out=sums[:, : histograms.shape[1]], casting="same_kind")
        total = own.sums(gradient)
        moments = np.zeros((n, E, SUMS + 4 * C))
        moments[..., SUMS + 2 * C :] = total
        if level == 0:
            losses = loss.losses(now, rows.y)
            moments[..., WEIGHT], moments[..., LEFT_WEIGHT] = own.sums(rows.weight), own.sums(rows.left)
            moments[..., LOSS], moments[..., LEFT_LOSS] = own.sums(losses * rows.weight), own.sums(losses * rows.left)
            size = b.astype(np.float64) ** 2 + phi[:, None] / (total[..., C:] + tau)
            moments[..., SUMS + C : SUMS + 2 * C] = size
        return new_client, torch.from_numpy(sums), torch.from_numpy((moments / UNIT).astype(np.float32))

    def _caught_up(
        self, loss: TreeLoss, client: Client, down: Down, own: ClientRows, rows: OwnRows, score: Array, tau: Array
    ) -> tuple[Array, Array, Client]:
        """Scores and intercepts with all trees, a Newton step (2) after each, and the client that remembers them."""
        done, b, trees = client.done.numpy().copy(), client.b.numpy().copy(), shared_trees(down)
        if bool((done == trees.count).all()):
            return score, b, client
        fresh = done < 0
        score[fresh[rows.owner]] = down.base[0].numpy()
        for _ in range(FIRST_STEPS if fresh.any() else 0):
            b[fresh] = newton_step(loss, own, score, rows.weight, b, tau)[fresh]
        done[fresh] = 0
        for t in range(int(done.min()), trees.count):
            late, added = done <= t, np.zeros_like(score)
            own.add(trees.cut(t, t + 1), added)
            score += added * late[rows.owner][:, None, None]
            b[late] = newton_step(loss, own, score, rows.weight, b, tau)[late]
        done[:] = trees.count
        kept = client.score.clone(memory_format=torch.contiguous_format)
        kept.numpy()[rows.owner, rows.position] = score
        return score, b, Client(kept, torch.from_numpy(b), torch.from_numpy(done))

    def _judgement(self, loss: TreeLoss, down: Down, own: ClientRows, rows: OwnRows) -> Judgement:
        folds = slice(1, None)
        model = shared_model(loss, down, self.bins).ensembles(folds)
        return Judgement(PersonalParts(model, own, rows.weight[:, folds].copy()), rows.left[:, folds])

    # ---- models ----

    def personalize(self, task: Task, client: Client, down: Down, data: Cohort) -> Tensor:
        loss = TreeLoss.of_task(task)
        model, edges = shared_model(loss, down, self.bins).ensembles(slice(0, 1)), down.edges[0].numpy()
        if not edges.size:
            return model_rows(model.trees, edges, np.repeat(model.base, len(data), 0), loss.outputs)
        rows = OwnRows.of_split(data.train, 0)
        own, _ = rows.binned(data.train, edges)
        shares, choice = down.shares[0].numpy(), down.choice[0].numpy()
        return personal_rows(PersonalParts(model, own, rows.weight), edges, shares, choice)

    def server_models(self, server: Server) -> ServerModels:
        """The shared trees without an intercept: what suits a client of which no row is known."""
        down = self.download(server, torch.zeros(1, dtype=torch.int64))
        trees = shared_trees(down).cut(0, int(down.used[0])).ensembles(slice(0, 1))
        edges, base = server.edges.numpy(), server.base.numpy()[:1]
        return ServerModels(model_rows(trees, edges, base, int(server.outputs)))

    def figures(self, server: Server) -> dict[str, Any]:
        left = float(server.losses.min()) if len(server.losses) and self.folds else math.nan
        names = ("shared", "leaves", "own", "alone")
        return {
            "trees": used_trees(server), "grown": used_all(server), "left_out_loss": left,
            "intercept_variance": float((server.phi[0] / server.tau[0]).mean()),
        } | {f"share_{name}": float(share) for name, share in zip(names, server.shares, strict=True)}  # fmt: skip


def _marks(growth: TreeGrowth) -> tuple[Array, Array, Array]:
    return growth.feature, growth.split, growth.missing


def used_all(server: Server) -> int:
    return int(server.feature.shape[1])


def used_trees(server: Server) -> int:
    """Trees that models are made of: those with the least loss on left-out rows; all where none are left out."""
    has_folds = len(server.base) > 1 and len(server.losses) > 0
    return int(server.losses.argmin()) if has_folds else used_all(server)


def _is_same(before: Array, now: Array) -> bool:
    """Whether two mean sums of g and h are over the same clients."""
    half = now.shape[1] // 2
    scale = np.maximum(now[:, half:], 1e-30)
    return before.shape == now.shape and bool(
        (np.abs(before - now).reshape(len(now), 2, half) <= SAME * scale[:, None]).all()
    )


def shared_trees(down: Down) -> Trees:
    return Trees(*(getattr(down, name)[0].numpy()[None] for name in ("feature", "split", "missing", "value")))


def shared_model(loss: TreeLoss, down: Down, bins: int) -> SharedModel:
    """The trees that models are made of."""
    trees = shared_trees(down).cut(0, int(down.used[0]))
    return SharedModel(loss, trees, down.base[0].numpy(), down.tau[0].numpy(), down.phi[0].numpy(), bins)
