"""CFL: one model for all until training stalls while clients still pull apart; then two, and so on.

Sattler, Müller, Samek: Clustered Federated Learning: Model-Agnostic Distributed Multitask Optimization under Privacy
Constraints, IEEE TNNLS 2021, Algorithms 2 and 3.

    cluster c with model w_c:  Δ_i = θ_i − w_c after local training
    split if ‖mean Δ_i‖ < ε₁  and  max ‖Δ_i‖ > ε₂:   near a stationary point of the cluster, not of its members
    in two parts that make the largest cosine between them, α_cross, small;   w_c ← w_c + mean of Δ_i of its members

Without a split it is FedAvg with equal weights. The personal model is the cluster's.

Decisions:
  * Members of a part are named by their ids. Released code (and code that copies it) keeps positions inside the
    parent, so that from the second split on clients end up in each other's clusters.
  * `linkage="complete"` on the cosines, as in that code. It does not always find the best cut; "single" does: it
    cuts the weakest edge of the maximum spanning tree, which minimizes α_cross exactly.
  * ε₁ and ε₂ depend on the model and the learning rate; `eps1_rel` and `eps2_rel` give them as shares of the largest
    update of the first round. Both norms are among the figures, because a run that never splits should show why.
  * Partial participation: a cluster is judged by the last update of every member since the cluster came to be, and
    only when there is one of each; until then a split is postponed. For this the server keeps one update per client.
  * An update of length zero has the cosine 0 with all others.
  * Norms and cosines are those of trainable parameters, without running statistics (of BatchNorm, say), which are
    averaged in every cluster.
  * In the round of a split each part already takes the mean of its own members' updates, as in the released notebook.
  * The part with more members (or the lowest id) keeps the cluster's number, so numbers do not jump in figures;
    `parent` and `born` say from which cluster and in which round each other one was split: the tree.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from kinfed.algorithms.common.averaging import ChangeUp
from kinfed.algorithms.common.clustering import HasClusters, agglomerate, moved_by_cluster
from kinfed.author import Cohort, ModelDown, Population, RoundInfo, Task, mean_update, sgd
from kinfed.core import Nothing, Range, Tree, kernels, option, take_rows


@dataclass
class Server(Tree):
    model: Tensor  # [C, P]
    cluster: Tensor  # [N] int64 cluster of each client
    parent: Tensor  # [C] int64 cluster that each was split from, −1 for the first
    born: Tensor  # [C] int64 round of that split, 0 for the first
    last: Tensor  # [S, T] last update of each client's trainable parameters since its cluster came to be
    owner: Tensor  # [S] int64 whose, ascending
    mean_norm: Tensor  # [C] float64 ‖mean Δ‖ when the cluster (or the one it comes from) was last judged, 0 before
    max_norm: Tensor  # [C] float64 max ‖Δ‖ then
    scale: Tensor  # [] float64 largest ‖Δ‖ of the first round


Up = ChangeUp  # [n, P] Δ_i


@dataclass(frozen=True)
class CFL(HasClusters[Server, Up]):
    eps1: float = option(
        0.4, "ε₁: a cluster may be split once the norm of its mean update is below this", gt=0, tune=Range(0.02, 2.0)
    )
    eps2: float = option(
        1.6, "ε₂: ... and the largest norm of a member's update is above this", gt=0, tune=Range(0.1, 10.0)
    )
    eps1_rel: float | None = option(
        None, "ε₁ as a share of the largest update of the first round, instead of eps1", gt=0
    )
    eps2_rel: float | None = option(
        None, "ε₂ as a share of the largest update of the first round, instead of eps2", gt=0
    )
    t_min: int = option(20, "rounds before the first split", ge=0)
    min_size: int = option(3, "clusters with fewer members are not split", ge=2)
    linkage: Literal["complete", "single"] = option(
        "complete", "how parts are found: complete (released code), or single (the best cut)"
    )
    gamma_max: float | None = option(
        None, "split only if √((1 − α_cross)/2) exceeds this: the parts must differ more than noise would make them",
        ge=0, lt=1,
    )  # fmt: skip

    single_updates = "compares updates and splits clients by them"

    def init_server(self, task: Task, population: Population) -> Server:
        w, none = task.init(population.seed), torch.zeros(1, dtype=torch.float64)
        cluster, owner = torch.zeros(population.num_clients, dtype=torch.int64), torch.empty(0, dtype=torch.int64)
        return Server(
            w[None], cluster, parent=torch.tensor([-1]), born=torch.tensor([0]),
            last=w[task.trainable][None, :][:0].clone(), owner=owner,
            mean_norm=none, max_norm=none.clone(), scale=none[0].clone(),
        )  # fmt: skip

    def client_update(self, task: Task, client: Nothing, down: ModelDown, data: Cohort) -> tuple[Nothing, Up]:
        return client, Up(sgd(task, down.w, data.train.batches(self.training)) - down.w)

    def aggregate(self, server: Server, ids: Tensor, up: Up, round: RoundInfo) -> Server:
        owner, last = _latest(server, ids, up.delta[:, round.trainable])
        size = kernels.norm(last).cpu()
        scale = server.scale if bool(server.scale) else size.max()
        eps1 = self.eps1 if self.eps1_rel is None else self.eps1_rel * float(scale)
        eps2 = self.eps2 if self.eps2_rel is None else self.eps2_rel * float(scale)
        cluster, parent, born = server.cluster.clone(), server.parent.tolist(), server.born.tolist()
        mean_norm, max_norm = server.mean_norm.tolist(), server.max_norm.tolist()
        known = torch.ones(len(owner), dtype=torch.bool)
        for c in range(len(server.model)):
            members = (server.cluster == c).nonzero().squeeze(1)
            rows = torch.isin(owner, members).nonzero().squeeze(1)
            if len(rows) < len(members):
                continue  # a client has not been heard since the cluster was made
            updates = take_rows(last, rows)
            mean_norm[c] = float(mean_update(updates, None).norm(dtype=torch.float64))
            max_norm[c] = float(size[rows].max())
            stalls = mean_norm[c] < eps1 and max_norm[c] > eps2
            if not stalls or len(members) < self.min_size or round.number <= self.t_min:
                continue
            leaves = self._cut(updates)
            if leaves is None:
                continue
            cluster[members[leaves]] = len(parent)
            parent.append(c)
            born.append(round.number)
            mean_norm.append(mean_norm[c])
            max_norm.append(max_norm[c])
            known[rows] = False
        origin = torch.cat([torch.arange(len(server.model)), torch.tensor(parent[len(server.model) :]).long()])
        model = moved_by_cluster(server.model[origin], cluster[ids], up.delta, None)
        if not bool(known.all()):
            owner, last = owner[known], last[known]
        return Server(
            model, cluster, torch.tensor(parent), torch.tensor(born), last, owner,
            torch.tensor(mean_norm, dtype=torch.float64), torch.tensor(max_norm, dtype=torch.float64), scale,
        )  # fmt: skip

    def _cut(self, updates: Tensor) -> Tensor | None:
        """bool [n]: the part that leaves, or None if the parts would not differ enough."""
        second = agglomerate(updates, self.linkage, "cosine", clusters=2) == 1
        if self.gamma_max is not None:
            cross = float(kernels.cosines(updates)[~second.numpy()][:, second.numpy()].max())  # α_cross
            if not math.sqrt((1 - cross) / 2) > self.gamma_max:
                return None
        return second if int(second.sum()) * 2 <= len(second) else ~second

    def figures(self, server: Server) -> dict[str, Any]:
        judged = server.mean_norm[server.max_norm > 0]
        smallest, largest = float(judged.min()) if len(judged) else 0.0, float(server.max_norm.max())
        norms = {"smallest_mean_update": smallest, "largest_update": largest}
        return {"clusters": len(server.model), **norms, "parent": server.parent, "born": server.born}


def _latest(server: Server, ids: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
    """Ids (ascending) and updates of all who have one, those of this round in place of older ones."""
    place = torch.searchsorted(server.owner, ids).clamp_max(max(len(server.owner) - 1, 0))
    if len(server.owner) and torch.equal(server.owner[place], ids):
        return server.owner, server.last.index_copy(0, place.to(delta.device), delta)
    older = (~torch.isin(server.owner, ids)).nonzero().squeeze(1)
    if not len(older):
        return ids, delta
    owner = torch.cat([server.owner[older], ids])
    order = torch.argsort(owner)
    joined = torch.cat([server.last.index_select(0, older.to(delta.device)), delta])
    return owner[order], joined.index_select(0, order.to(delta.device))
