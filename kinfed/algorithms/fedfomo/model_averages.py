"""FedFomo with model averages: clients judge averages with and without a model instead of the model itself.

Zhang et al.: Personalized Federated Learning with First Order Model Optimization, ICLR 2021, Appendix A.4, Eq. (14).

    Q_i: N models, client i's own among them once it has one;      avg = mean of Q_i,      avg_{−n} = mean of Q_i \\ n
    w_n = L_i(avg_{−n}) − L_i(avg)                                                                        Eq. (14)
    θ_i ← avg + Σ_n w*_n (θ_n − avg),      w* as in FedFomo; avg itself where no weight is positive

Choice of Q_i, affinities and options are FedFomo's; the distance is off by default (`norm`), as Eq. (14) has none.

When things happen. A client can weigh averages only after it has got them, so a combination formed by the server
from these weights would need a second exchange per round. With `combine="server"` the weights that go up in one
round are used at the client's *next* one: the server mixes the latest uploads of the models weighed then, and the
client begins its training there. Down are N averages without one model, the average, and this start: (M + 2) d.

What averages hide. Nothing from a client that does the sum: θ_n = N avg − (N − 1) avg_{−n}. Since that is so, the
client may as well form the combination itself, θ_n − avg = (N − 1) (avg − avg_{−n}), at once and with one model
less to download: `combine="client"`. Neither keeps models secret from a curious client; noise in training does.

Differences of averages are exact up to rounding only, and a variance must not become negative by that: running
statistics (of BatchNorm, say) of avg_{−n} are summed from those of the other models, and a combination formed by the
client has those of avg.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kinfed.algorithms.common import one_model
from kinfed.algorithms.fedfomo.affinity import Norm, mixing_weights, validation_or_train, weigh
from kinfed.algorithms.fedfomo.fomo_server import FomoServer, Server, Up
from kinfed.author import Cohort, Range, RoundInfo, Task, Tree, mean_losses, option, sgd, weighted_sum


@dataclass
class Client(one_model.Client):
    unusable: Tensor  # [n] int64 averages so far whose loss was not finite


@dataclass
class Down(Tree):
    averages: Tensor  # [n, N + 1, P]  avg, then avg_{−n} for every n of Q_i; [n, 0, P] while N < 2
    start: Tensor  # [n, 1, P] the combination formed by the server; [n, 0, P] if there is none


@dataclass(frozen=True)
class FedFomoMA(FomoServer[Client, Down]):
    models: int = option(
        5, "N: models averaged per client and round, its own included", ge=2, tune=Range(2, 5, log=False, whole=True)
    )
    norm: Norm = option("none", "divide w_n by the distance of avg_{−n} from avg; none in the paper")
    combine: Literal["server", "client"] = option(
        "server", "who forms the combination: the server, one activation later, or the client, at once"
    )

    def init_client(self, task: Task, data: Cohort) -> Client:
        return Client.start(task, data, torch.zeros(len(data), dtype=torch.int64))

    def plan(self, server: Server, active: Tensor, round: RoundInfo) -> tuple[Server, Tensor]:
        return self.choose_candidates(server, active, server.uploaded[active] > 0, round), active

    def download(self, server: Server, ids: Tensor) -> Down:
        members = server.plan[ids].to(server.theta.device)
        n, count = members.shape
        nothing = server.theta.new_zeros(n, 0, server.theta.shape[1])
        if count < 2:
            return Down(nothing, nothing)
        # The members' models, the first of them twice: it becomes the sum of all.
        twice = torch.cat([members[:, :1], members], 1)
        averages = server.theta.index_select(0, twice.flatten()).view(n, count + 1, -1)
        average, without = averages[:, 0], averages[:, 1:]
        for number in range(1, count):
            average += without[:, number]
        average.div_(count - 1)
        behind = slice(int(server.trained), None)
        others = _means_of_others(without[..., behind])
        torch.add(average[:, None], without, alpha=-1 / (count - 1), out=without)  # (Σ θ − θ_n) / (N − 1)
        without[..., behind] = others
        average.mul_((count - 1) / count)
        if self.combine == "client":
            return Down(averages, nothing)
        start = average.clone()
        for row, client in zip(start.unbind(0), ids.tolist(), strict=True):
            if bool(server.mix[client].any()):
                _mix_(row, server.theta, server.heard[client], server.mix[client])
        return Down(averages, start[:, None])

    def client_update(self, task: Task, client: Client, down: Down, data: Cohort) -> tuple[Client, Up]:
        w, unusable = self._weigh(task, down, data)
        start = self._start(task, client, down, w)
        if self.newcomers == "train":
            start = torch.where(client.seen[:, None].to(start.device), start, client.theta)
        theta = sgd(task, start, data.train.batches(self.training))
        reported = torch.zeros(len(data), self.models)
        reported[:, : w.shape[1]] = w.to(torch.float32)
        return Client(theta, torch.ones_like(client.seen), client.unusable + unusable.to(client.unusable.device)), Up(
            theta, reported, None
        )

    @torch.no_grad()
    def _weigh(self, task: Task, down: Down, data: Cohort) -> tuple[Tensor, Tensor]:
        """Signed weights [n, N] of the models in Q_i, and how many averages were unusable [n]."""
        if not down.averages.shape[1]:
            return torch.zeros(len(data), 0, dtype=torch.float64), torch.zeros(len(data), dtype=torch.int64)
        average, *without = down.averages.unbind(1)
        loss = mean_losses(task, [average, *without], validation_or_train(data))
        return weigh(loss[:, 1:] - loss[:, :1], without, average, self.norm, task.trainable)  # Eq. (14)

    def _start(self, task: Task, client: Client, down: Down, w: Tensor) -> Tensor:
        """[n, P]: where the client's training begins; its own last model while there is nothing to average."""
        if not down.averages.shape[1]:
            return client.theta
        if self.combine == "server":
            return down.start[:, 0]
        average, *without = down.averages.unbind(1)
        share = mixing_weights(w)
        # avg + Σ w* (θ_n − avg) with θ_n − avg = (N − 1) (avg − avg_{−n}); the sum of w* is 0 or 1
        rest = 1 + (len(without) - 1) * share.sum(1, keepdim=True)
        mixed = weighted_sum([average, *without], torch.cat([rest, (1 - len(without)) * share], 1))
        mixed[:, task.trainable.stop :] = average[:, task.trainable.stop :]
        return mixed

    def personalize(self, task: Task, client: Client, down: Down, data: Cohort) -> dict[str, Tensor]:
        models = {"post_federate": self._combined(task, client, down, data), "post_train": client.theta}
        return models if self.evaluate == "post_federate" else dict(reversed(models.items()))

    def _combined(self, task: Task, client: Client, down: Down, data: Cohort) -> Tensor:
        # The server's combination is ready; only the client's own needs the weights of this moment.
        w = self._weigh(task, down, data)[0] if self.combine == "client" else torch.zeros(len(data), 0)
        return self._start(task, client, down, w)

    def client_figures(self, client: Client) -> dict[str, Tensor]:
        return {"unusable_models": client.unusable.to(torch.float32)}


def _means_of_others(rows: Tensor) -> Tensor:
    """[n, N, S]: of rows [n, N, S] the mean of all but one, for each of them, by sums alone."""
    count = rows.shape[1]
    means = torch.zeros_like(rows)
    for number in range(count):
        for other in range(count):
            if other != number:
                means[:, number] += rows[:, other]
    return means.div_(count - 1)


def _mix_(row: Tensor, models: Tensor, whose: Tensor, share: Tensor) -> None:
    """row ← Σ_j share[j] models[whose[j]], without a copy of these models; many have no share."""
    row.zero_()
    for j in share.nonzero().squeeze(1).tolist():
        row.add_(models[int(whose[j])], alpha=float(share[j]))
