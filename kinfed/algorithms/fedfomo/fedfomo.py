"""FedFomo: every client mixes its own choice of other clients' models, judged on its own validation examples.

Zhang, Sapra, Fidler, Yeung, Alvarez: Personalized Federated Learning with First Order Model Optimization, ICLR 2021.

    min Σ_i L_i(θ_i),      L_i the mean loss of client i's validation examples, which may come from any distribution
    w_n = (L_i(θ_i^old) − L_i(θ_n)) / ‖θ_n − θ_i^old‖                                                      Eq. (3)
    θ_i ← θ_i^old + Σ_n w*_n (θ_n − θ_i^old),      w*_n = max(w_n, 0) / Σ_k max(w_k, 0)                     Eq. (13)

The candidates n are the client's own trained model, which costs no download, and M − 1 uploads of others, chosen by
the server: those of the highest affinity P[i, n], the sum of all w_n so far, now and then (ε) a random one.
M = 1 is local training that forgets a round in which the validation loss rose.

Decisions where paper, released code and other implementations differ:
  * θ_i^old is the model at the *start* of the last local training (the released code's too). Were it the trained
    one, the own candidate would weigh 0/0 and the early stopping that the paper speaks of could not happen.
  * Without a positive weight the client keeps θ_i^old: its last training is discarded.
  * ‖·‖ is Euclidean (`norm`; the released default is l1, its "l2" the squared distance), of trainable parameters:
    running statistics (of BatchNorm, say) are mixed with the rest and have no distance. A model at distance 0
    weighs nothing. P is updated by signed weights as they are (`affinity_update`).
  * P starts as the identity; ties are broken at random, without which "equal chance" is not true.
  * ε falls by subtraction, 0.3, 0.25, ..., 0 (`decay`). Client sampling and exploration draw anew in every round;
    the released code re-seeds and repeats both.
  * Evaluated is a fresh combination without further training (`evaluate`), as in the released code; the model after
    the last training is scored beside it. Out of distribution the two differ by much.
  * Losses are means over all validation examples, without augmentation. A candidate whose loss is not finite weighs
    nothing and is counted. A client without validation examples is judged by its training examples.
  * The published commands also offer averages of groups of clients that the server finds in P (`subglobal`); it is
    off by default, because the paper's text does not know them.

All clients of a round are sent the same number of models, so that messages have equal rows and bytes are those of
models really sent. While fewer than M models exist, it is the number that every active client can get.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kinfed.algorithms.base import EXAMPLE_COUNT, PrivacyProfile, RoundInfo
from kinfed.algorithms.fedfomo.affinity import groups, mixing_weights, validation_or_train, weigh
from kinfed.algorithms.fedfomo.fomo_server import FomoServer, Server, Up
from kinfed.author import Cohort, Task, Tree, example_counts, mean_losses, option, rng, sgd, weighted_mean, weighted_sum


@dataclass
class Client(Tree):
    old: Tensor  # [n, P]  θ_i^old, where the last local training began
    theta: Tensor  # [n, P]  where it ended
    seen: Tensor  # [n] bool: has trained
    kept: Tensor  # [n] bool, the last combination found nothing better than θ_i^old
    unusable: Tensor  # [n] int64 candidates so far whose loss was not finite


@dataclass
class Down(Tree):
    models: Tensor  # [n, m − 1, P] of other clients
    averages: Tensor  # [n, g, P]


@dataclass(frozen=True)
class FedFomo(FomoServer[Client, Down]):
    subglobal: int = option(
        0, "groups of clients, found in P, whose averages (and the average of these) everyone is sent as well", ge=0
    )

    def init_client(self, task: Task, data: Cohort) -> Client:
        start = task.init(data.seed).expand(len(data), -1)
        never = torch.zeros(len(data), dtype=torch.bool)
        return Client(start, start, never, never, torch.zeros(len(data), dtype=torch.int64))

    def plan(self, server: Server, active: Tensor, round: RoundInfo) -> tuple[Server, Tensor]:
        return self.choose_candidates(server, active, torch.ones(len(active), dtype=torch.bool), round), active

    def download(self, server: Server, ids: Tensor) -> Down:
        plan = server.plan[ids, 1:].to(server.theta.device)
        models = server.theta.index_select(0, plan.flatten())  # whole rows at once, which theta[plan] does not copy
        models = models.view(*plan.shape, server.theta.shape[1])
        return Down(models, server.averages.expand(len(ids), -1, -1))

    def client_update(self, task: Task, client: Client, down: Down, data: Cohort) -> tuple[Client, Up]:
        mixed, w, unusable = self._combine(task, client, down, data)
        if self.newcomers == "train" and not bool(client.seen.all()):
            mixed = torch.where(client.seen[:, None].to(mixed.device), mixed, client.old)
        stays = client.seen & ~(w > 0).any(1).to(client.seen.device)
        theta = sgd(task, mixed, data.train.batches(self.training))
        sent = down.models.shape[1] + 1
        reported = torch.zeros(len(data), self.models)
        reported[:, :sent] = w[:, :sent].to(torch.float32)
        count = example_counts("examples", data) if self.subglobal else None
        seen = torch.ones_like(client.seen)
        return Client(mixed, theta, seen, stays, client.unusable + unusable.to(client.unusable.device)), Up(
            theta, reported, count
        )

    @torch.no_grad()
    def _combine(self, task: Task, client: Client, down: Down, data: Cohort) -> tuple[Tensor, Tensor, Tensor]:
        """The mixed models [n, P], the signed weights of all candidates, and how many of them were unusable [n]."""
        candidates = [client.theta, *down.models.unbind(1), *down.averages.unbind(1)]
        loss = mean_losses(task, [client.old, *candidates], validation_or_train(data))
        gain = loss[:, :1] - loss[:, 1:]
        w, unusable = weigh(gain, candidates, client.old, self.norm, task.trainable)  # Eq. (3)
        share = mixing_weights(w)  # Eq. (13)
        mixed, keeps = weighted_sum(candidates, share), share.sum(1) == 0
        if bool(keeps.any()):
            mixed = torch.where(keeps[:, None].to(mixed.device), client.old, mixed)
        return mixed, w, unusable

    def aggregate(self, server: Server, ids: Tensor, up: Up, round: RoundInfo) -> Server:
        new = super().aggregate(server, ids, up, round)
        if up.count is None:
            return new
        count = server.count.clone()
        count[ids] = up.count.to("cpu", torch.float64)
        members = self.on_offer(new).nonzero().squeeze(1)
        seed = rng.numpy_seed(rng.fold(round.population.key("fomo"), round.number))
        label = groups(new.affinity.rows(members, members), self.subglobal, seed)
        parts = [members[label == g] for g in range(int(label.max()) + 1)]
        means = torch.stack([weighted_mean(new.theta[part], count[part]) for part in parts])
        return replace(new, count=count, averages=torch.cat([means, means.mean(0, keepdim=True)]))

    def personalize(self, task: Task, client: Client, down: Down, data: Cohort) -> dict[str, Tensor]:
        models = {"post_federate": self._combine(task, client, down, data)[0], "post_train": client.theta}
        return models if self.evaluate == "post_federate" else dict(reversed(models.items()))

    def client_figures(self, client: Client) -> dict[str, Tensor]:
        return {"kept_baseline": client.kept.to(torch.float32), "unusable_models": client.unusable.to(torch.float32)}

    def privacy(self, count: Tensor) -> PrivacyProfile:
        profile = super().privacy(count)
        sizes = {EXAMPLE_COUNT: "subglobal = 0"} if self.subglobal else {}
        return replace(profile, uncovered={**profile.uncovered, **sizes})
