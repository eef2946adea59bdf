"""Kin: every client learns as much alone, from everyone and from clients like it as its own data ask for.

The completion of three answers to one question. Self-FL weighs alone against everyone by uncertainty, FedFomo asks by
validation examples whose models help, CGPFL finds groups; each wins on some federations and loses on others. Kin finds
out by itself, per client, from candidates that two gradients per step pay for:

    alone      a_i, trained on the client's examples only: Local's model, bit for bit
    together   w, one model for all by FedAvg; or the model of the client's group, once groups have proved themselves
    adapted    what local steps make of `together`: a running mean of FedAvg's fine-tuned models, which cost nothing

A client deploys the mixture Σ_j π_j p_j(y | x). Its shares π come from its own validation examples, shrunk towards
what the population found (`shares.py`): the server keeps a running mean m of them, which counts like `strength`
examples, and the temperature at which each kind of candidate is as sure as it should be.

Groups are found from the directions in which clients' own models left the common start (`groups.py`), of which each
sends a sketch of 256 numbers. That grouping is only a proposal: for some rounds (`trial`) common and group models are
trained in turns, both from the common model on, and clients send the validation loss of what their steps made of
either. Groups stay if the paired differences over clients say so (mean at least `evidence` standard errors above 0):
compared are models after local steps, since what a client's own few steps repair, labels that are rare with it, say,
is no reason for groups. A trial goes on while the evidence is in between; where it speaks for one model (`DOUBT`),
that goes on, and groups are looked for again when ten times as many rounds have passed.

Messages are FedAvg's, some 290 numbers more up and six more down. A client that never trained deploys what the server
has for it. Validation examples decide shares and nothing else, unless `refit` gives them back to training where a
model is deployed; test examples decide nothing.

Decided: shares of models' outputs and not a mean of their parameters, since alone and together lie in different
basins (`deploy = "merged"` makes one model of together and adapted where one model is needed, or takes the client's
own where that has the larger part; temperatures are the mixture's alone). A trial's rounds train one branch each, so
that its bytes are FedAvg's: where groups are refused, the common model has lost half of them. Between the rounds of a
trial, clients are served by the model whose turn it is. A candidate that diverged is dropped, and local steps of the
common model that end in numbers that are not finite count as not taken: training alone must not suffer from them. A
further candidate that is held near `together` as in Ditto costs half a gradient per step more, and gains a tenth of a
point in the mean: left out. Safe shares (`shares = "safe"`) are not the default: they are insurance where clients are
best alone, and cost where they are not. Digits, 50 clients of labels with α = 0.5, seeds 20-22: 91.3 % in the mean and
66.6 for the worst tenth, likely shares 93.2 and 72.5; four rotations, 20 clients: 90.0 and 79.0, likely 91.4 and 81.2.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from kinfed.algorithms.base import Algorithm, PrivacyProfile, RoundInfo, ServerModels, gradient_steps
from kinfed.algorithms.common.averaging import Weights, example_counts, mean_update
from kinfed.algorithms.common.clustering import join_best_cluster, moved_by_cluster
from kinfed.algorithms.kin.groups import BUCKETS, centres, find_groups, no_sketches, sketch, with_sketches
from kinfed.algorithms.kin.shares import (
    LEAST,
    TEMPERATURES,
    UNKNOWN,
    WORST,
    calibrated,
    can_calibrate,
    evidence,
    population_mean,
)
from kinfed.author import Cohort, Population, Range, Task, Tree, mean_losses, option, rng, sgd, take_rows
from kinfed.engine import mixture_rows

CANDIDATES = ("alone", "together", "adapted")
NONE = -1  # the group of a client that has none
COMMON, TRIAL, GROUPED = range(3)  # phases
KNOWN = 256  # clients whose sketches are enough to look for groups
ENOUGH_REPLIES = 2  # of a client, before its direction says something
DOUBT = 1.0  # standard errors by which groups must be better for a trial to go on
LONGEST_TRIAL = 5  # times `trial` rounds: then what is not clear is refused
AGAIN = 10  # times as many rounds pass before groups are looked for again
MEASURE_EVERY, MEASURE_AT = 3, 1  # of a client's rounds, in the second, fifth, ... it measures its shares
MEMORY = 0.5  # of the running means of shares, losses and adapted models, from one round to the next
UNIT = TEMPERATURES.index(1.0)


@dataclass
class Server(Tree):
    w: Tensor  # [P] the common model
    omega: Tensor  # [K, P] models of the groups; K = 0 while there are none
    centre: Tensor  # [K, D] mean sketch of each group
    group: Tensor  # [N] int64, −1 for clients without
    sketch: Tensor  # [N, D] of each client's own model when it last replied
    replies: Tensor  # [N] int64
    prior: Tensor  # [3] float64 m, a running mean of the shares
    heat: Tensor  # [3, G] float64 running mean of a round's losses at each temperature
    loss: Tensor  # [N, 2] float64, in this trial: validation loss adapted from common and group model; UNKNOWN
    phase: Tensor  # [] int64
    since: Tensor  # [] int64 the round that the phase began in
    by_group: Tensor  # [] bool: this round trains the groups' models


@dataclass
class Client(Tree):
    alone: Tensor  # [n, P] never leaves the client
    adapted: Tensor  # [n, P] running mean of models received, each after the client's steps
    pi: Tensor  # [n, 3] float64 shares when last measured
    replies: Tensor  # [n] int64


@dataclass
class Down(Tree):
    w: Tensor  # [n, P] together: the common or the group's model
    prior: Tensor  # [n, 3] float64 m
    temperature: Tensor  # [n, 3] int64 places in TEMPERATURES


@dataclass
class Up(Tree):
    delta: Tensor  # [n, P] of the model received
    sketch: Tensor  # [n, D]
    trial: Tensor  # [n] float64 mean validation loss of the model sent back; UNKNOWN without validation examples
    pi: Tensor  # [n, 3] float64
    loss: Tensor  # [n, 3, G] float64 sums over validation examples, at each temperature
    examples: Tensor  # [n] float64 of validation; 0 where shares and losses were not measured in this round
    count: Tensor | None  # [n] examples; absent with equal weights


@dataclass(frozen=True)
class Kin(Algorithm[Server, Client, Down, Up]):
    strength: float = option(
        10.0, "s: as many validation examples the population's shares count for", gt=0, tune=Range(1.0, 100.0)
    )
    max_groups: int = option(8, "most groups that are looked for; 1: none are", ge=1)
    clearness: float = option(0.1, "least mean silhouette of a grouping that is tried", ge=-1, le=1)
    trial: int = option(6, "rounds in which common and group models are compared, in turns", ge=2)
    evidence: float = option(3.0, "standard errors by which groups must be better to stay", ge=0)
    weights: Weights = option("examples", "weights of the averages: by N_m, or equal")
    deploy: Literal["mixture", "merged"] = option("mixture", "a mixture of the candidates, or one merged model")
    shares: Literal["likely", "safe"] = option(
        "likely", "deployed shares: likely ones, or safe ones that can hardly cost more than the own model"
    )
    refit: int = option(
        0, "rounds of local steps, with validation examples, that alone and adapted take where they are deployed", ge=0
    )

    traits = frozenset({"needs validation"})
    single_updates = "groups clients by what they send of themselves"

    def init_server(self, task: Task, population: Population) -> Server:
        n, w = population.num_clients, task.init(population.seed)
        prior = torch.full((len(CANDIDATES),), 1 / len(CANDIDATES), dtype=torch.float64, device=w.device)
        heat = prior.new_zeros(len(CANDIDATES), len(TEMPERATURES))
        return Server(
            w, w.new_zeros(0, len(w)), centre=w.new_zeros(0, BUCKETS), group=torch.full((n,), NONE),
            sketch=no_sketches(n, w), replies=torch.zeros(n, dtype=torch.int64), prior=prior, heat=heat,
            loss=prior.new_full((n, 2), UNKNOWN), phase=torch.tensor(COMMON), since=torch.tensor(1),
            by_group=torch.tensor(False),
        )  # fmt: skip

    def init_client(self, task: Task, data: Cohort) -> Client:
        start = task.init(data.seed).expand(len(data), -1)
        pi = torch.full((len(data), len(CANDIDATES)), 1 / len(CANDIDATES), dtype=torch.float64, device=task.device)
        return Client(start, start, pi, torch.zeros(len(data), dtype=torch.int64, device=task.device))

    def plan(self, server: Server, active: Tensor, round: RoundInfo) -> tuple[Server, Tensor]:
        turn = (round.number - int(server.since)) % 2 == 1  # a trial begins with the common model
        by_group = int(server.phase) == GROUPED or (int(server.phase) == TRIAL and turn)
        return replace(server, by_group=torch.tensor(by_group)), active

    def download(self, server: Server, ids: Tensor) -> Down:
        n, temperature = len(ids), self._temperature(server)
        return Down(self.server_models(server).rows(ids), server.prior.expand(n, -1), temperature.expand(n, -1))

    def _temperature(self, server: Server) -> Tensor:
        """[3] int64: where each candidate's losses are least; 1 before anything is known."""
        known = bool(server.heat.any())
        return server.heat.argmin(1) if known else torch.full((len(CANDIDATES),), UNIT, device=server.heat.device)

    def client_update(self, task: Task, client: Client, down: Down, data: Cohort) -> tuple[Client, Up]:
        alone = sgd(task, client.alone, data.train.batches(self.training))
        u = sgd(task, down.w, data.train.batches(self.training, loop=1))
        # Steps that diverged are as if not taken: with them the whole answer, and with it the own model, would be lost.
        u = torch.where(torch.isfinite(u).all(1)[:, None], u, down.w)
        begins = (client.replies == 0) | ~torch.isfinite(client.adapted).all(1)  # a mean never recovers from NaN
        adapted = torch.where(begins[:, None], u, torch.lerp(u, client.adapted, MEMORY))
        direction = (alone - task.init(data.seed))[:, task.trainable]
        pi, loss, examples = self._measured(task, client, (alone, down.w, adapted), down, data)
        trial = mean_losses(task, [u], data.val)[:, 0].nan_to_num(nan=UNKNOWN, posinf=WORST).to(task.device)
        count = example_counts(self.weights, data)
        up = Up(u - down.w, sketch(direction, data.seed), trial, pi, loss, examples, count)
        return Client(alone, adapted, pi, client.replies + 1), up

    def _measured(
        self, task: Task, client: Client, candidates: tuple[Tensor, ...], down: Down, data: Cohort
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Shares [n, 3], losses [n, 3, G] and validation examples [n] of the clients whose turn it is; others keep
        their shares, without examples."""
        rows = (client.replies % MEASURE_EVERY == MEASURE_AT).nonzero().squeeze(1)
        pi, examples = client.pi.clone(), client.pi.new_zeros(len(data))
        loss = client.pi.new_zeros(len(data), len(CANDIDATES), len(TEMPERATURES))
        if len(rows):
            prior, temperature = (take_rows(part, rows) for part in (down.prior, down.temperature))
            models = [take_rows(theta, rows) for theta in candidates]
            validation = evidence(task, models, data.val.take(rows.cpu()))
            pi[rows] = validation.shares(prior, temperature, self.strength)
            loss[rows], examples[rows] = validation.total_losses(), validation.count
        return pi, loss, examples

    def aggregate(self, server: Server, ids: Tensor, up: Up, round: RoundInfo) -> Server:
        server = self._remember(server, ids, up)
        if bool(server.by_group):
            server = self._train_groups(server, ids, up)
        else:
            server = replace(server, w=server.w + mean_update(up.delta, up.count))
        phase = int(server.phase)
        if phase == COMMON:
            return self._propose(server, round)
        return self._judge(server, round) if phase == TRIAL else server

    def _remember(self, server: Server, ids: Tensor, up: Up) -> Server:
        """The server with what the replies say of their clients, and of the population."""
        loss = server.loss.clone()
        loss[ids, int(server.by_group)] = up.trial.to(loss.device)
        measured = up.examples > 0
        prior, heat = server.prior, server.heat
        if bool(measured.any()):
            memory = MEMORY if bool(heat.any()) else 0.0
            prior = memory * prior + (1 - memory) * population_mean(up.pi[measured])
            heat = memory * heat + (1 - memory) * up.loss[measured].sum(0)
        known = (server.replies > 0).nonzero().squeeze(1)
        sketch = with_sketches(server.sketch, known, ids, up.sketch)
        replies = server.replies.index_add(0, ids, torch.ones_like(ids))
        return replace(server, sketch=sketch, replies=replies, prior=prior, heat=heat, loss=loss)

    def _train_groups(self, server: Server, ids: Tensor, up: Up) -> Server:
        """FedAvg in every group; a new client joins the nearest one for the rounds to come."""
        group, new = server.group.clone(), server.group[ids] == NONE
        omega = moved_by_cluster(server.omega, group[ids], up.delta, up.count)
        group[ids[new]] = torch.cdist(up.sketch[new], server.centre).argmin(1).to(group.device)
        return replace(server, omega=omega, group=group)

    def _propose(self, server: Server, round: RoundInfo) -> Server:
        """Begin a trial of groups, where enough clients are known and some grouping stands out."""
        known = (server.replies >= ENOUGH_REPLIES).nonzero().squeeze(1)
        enough = min(0.9 * len(server.replies), KNOWN)
        too_soon = int(server.since) > 1 and round.number < AGAIN * int(server.since)
        if self.max_groups == 1 or len(known) < enough or too_soon:
            return server
        sketches = server.sketch[known]
        label = find_groups(sketches, self.max_groups, self.clearness, rng.numpy_seed(round.key("kin-groups")))
        if label is None:
            return replace(server, since=torch.tensor(round.number))
        group = torch.full_like(server.group, NONE)
        group[known] = label.to(group.device)
        centre = centres(sketches, label.to(sketches.device))
        omega, loss = server.w.repeat(len(centre), 1), torch.full_like(server.loss, UNKNOWN)
        trial = {"phase": torch.tensor(TRIAL), "since": torch.tensor(round.number + 1)}
        return replace(server, omega=omega, centre=centre, group=group, loss=loss, **trial)

    def _judge(self, server: Server, round: RoundInfo) -> Server:
        """End the trial where it has lasted long enough and most clients have been heard on both sides."""
        rounds = round.number - int(server.since) + 1
        both = (server.loss != UNKNOWN).all(1)
        most = int(both.sum()) >= 0.75 * int((server.group != NONE).sum())
        if rounds < self.trial or not (most or rounds >= LONGEST_TRIAL * self.trial):
            return server
        gain = server.loss[both, 0] - server.loss[both, 1]
        errors = float(gain.mean() / (gain.std() / len(gain) ** 0.5).clamp_min(1e-12)) if len(gain) > 1 else 0.0
        if errors >= self.evidence:
            return replace(server, phase=torch.tensor(GROUPED))
        if errors >= DOUBT and rounds < LONGEST_TRIAL * self.trial:
            return server
        group, ended = torch.full_like(server.group, NONE), torch.tensor(round.number)
        without = replace(server, omega=server.omega[:0], centre=server.centre[:0], group=group)
        return replace(without, phase=torch.tensor(COMMON), since=ended)

    def personalize(self, task: Task, client: Client, down: Down, data: Cohort) -> dict[str, Tensor]:
        candidates: tuple[Tensor, ...] = (client.alone, down.w, client.adapted)
        validation = evidence(task, candidates, data.val)
        deployed = validation.safe_shares if self.shares == "safe" else validation.shares
        pi = deployed(down.prior, down.temperature, self.strength)
        pi[client.replies == 0] = pi.new_tensor([LEAST, 1 - 2 * LEAST, LEAST])
        pi = validation.without_diverged(pi)
        if self.refit:
            refitted = self._refitted(task, client, down, data)
            pairs = zip(refitted, candidates, strict=True)
            candidates = tuple(torch.where(torch.isfinite(new).all(1)[:, None], new, old) for new, old in pairs)
        healthy = validation.stand_ins(candidates)
        personal = self._mixture(task, healthy, pi, down) if self.deploy == "mixture" else self._merged(healthy, pi)
        return {"personal": personal, **dict(zip(CANDIDATES, candidates, strict=True))}

    def _mixture(self, task: Task, candidates: tuple[Tensor, ...], pi: Tensor, down: Down) -> Tensor:
        """The mixture of candidates at the temperatures that their shares were found at."""
        if not task.classifies or can_calibrate(task):
            models = [calibrated(task, theta, down.temperature[:, j]) for j, theta in enumerate(candidates)]
            return mixture_rows(torch.stack(models, 1), pi)
        return mixture_rows(torch.stack(candidates, 1), pi, pi.new_tensor(TEMPERATURES)[down.temperature])

    def _refitted(self, task: Task, client: Client, down: Down, data: Cohort) -> tuple[Tensor, Tensor, Tensor]:
        """The candidates with what validation examples teach: alone goes on, adapted begins again at together."""
        every = data.train.joined(data.val)
        batches = every.batches(self.training, self.refit * self.training.num_steps(every.count), stream="refit")
        return sgd(task, client.alone, batches), down.w, sgd(task, down.w, batches)

    def _merged(self, candidates: tuple[Tensor, ...], pi: Tensor) -> Tensor:
        alone, together, adapted = candidates
        share = (pi[:, 2] / (pi[:, 1] + pi[:, 2]))[:, None].to(together.dtype)
        return torch.where((pi[:, 0] > 0.5)[:, None], alone, torch.lerp(together, adapted, share))

    def server_models(self, server: Server) -> ServerModels:
        """The common model and, in rounds of the groups, theirs."""
        if not bool(server.by_group):
            return ServerModels(server.w[None])
        return ServerModels(torch.cat([server.w[None], server.omega]), server.group + 1)

    def place_newcomer(self, task: Task, server: Server, data: Cohort) -> Server:
        """Newcomers join the group whose model fits their training examples best, if groups have formed."""
        if not len(server.omega):
            return server
        return replace(server, group=join_best_cluster(task, server.omega, server.group, data))

    def figures(self, server: Server) -> dict[str, Any]:
        temperature = self._temperature(server).tolist()
        return {
            "groups": len(server.omega) if int(server.phase) == GROUPED else 1,
            "on_trial": len(server.omega) if int(server.phase) == TRIAL else 0,
            **{f"mean_{name}": float(share) for name, share in zip(CANDIDATES, server.prior, strict=True)},
            **{f"temperature_{name}": TEMPERATURES[t] for name, t in zip(CANDIDATES, temperature, strict=True)},
            "assignment": server.group,
        }

    def client_figures(self, client: Client) -> dict[str, Tensor]:
        return {name: client.pi[:, j] for j, name in enumerate(CANDIDATES)}

    def privacy(self, count: Tensor) -> PrivacyProfile | None:
        if self.refit:
            return None  # the budget knows of training examples alone
        leak = "shares of its models, and losses, computed from validation examples"
        return gradient_steps({2: self.training.num_steps(count)}, weights=self.weights, uncovered={leak: ""})
