"""Privacy at a real server: the budget of examples, and user-level noise, choice of clients and released sums.

In a simulation noise and samples are functions of the run's seed. At a real server anyone with the app's settings has
the seed, and every node has. So here

  * the noise of a sum comes from random bytes that are drawn for it and forgotten (kinfed.privacy.noise.fresh_noise);
  * who is called comes from the system's random numbers, anew at every attempt at a round: epsilon counts on samples
    that are independent of each other and that only the server knows;
  * sums are counted on the disk before they are used (`SumLedger`). A server that is killed after a model has left, and
    before its checkpoint, repeats the round with other noise and another sample: that is a further sum, and counts.

The server is trusted with all of it, as in a simulation. No node can tell whether it adds noise. With noise from the
nodes (`user_at_nodes`) there is nothing to trust it with: it may tell everybody whom it calls, and nodes keep their own
books.
"""

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kinfed.algorithms import privacy_profile
from kinfed.deploy.server.enrol import Roster
from kinfed.deploy.settings import STANDARD, Deployment
from kinfed.deploy.transport.wire import message_types, tree_of
from kinfed.engine import Task
from kinfed.errors import ConfigError
from kinfed.privacy import PrivacyBudget, fresh_noise, make_budget, seeded_noise
from kinfed.server import Schedule
from kinfed.updates import UserLevel, user_level

FILE = "sums.json"  # in the run's folder


@dataclass(frozen=True)
class SecretSchedule(Schedule):
    """Choice of clients by the system's random numbers: never the same twice, and known to it alone."""

    def active(self, seed: int, round: int, num_clients: int) -> Tensor:
        source = secrets.SystemRandom()
        if self.sampling == "poisson":
            chosen = [k for k in range(num_clients) if source.random() < self.participation]
        else:
            chosen = sorted(source.sample(range(num_clients), self.size(num_clients)))
        return torch.tensor(chosen, dtype=torch.int64)


def make_user_level(
    deployment: Deployment, run: str, folder: Path, num_clients: int, task: Task, update: Mapping[str, Tensor]
) -> UserLevel | None:
    """User-level privacy, if the settings ask for it. `update`: one as the method makes it [1, ...]."""
    config, algorithm = deployment.run, deployment.algorithm
    privacy = config.user_privacy
    if privacy is None:
        return None
    averages = privacy.check(deployment.method, algorithm, task)
    template = tree_of(message_types(algorithm)[1], update).map(torch.zeros_like)
    schedule, rounds = config.schedule, range(1, config.rounds + 1)
    expected, share = schedule.expected_replies(num_clients, keeps_stragglers=False), share_of(deployment, num_clients)
    if privacy.at_nodes:
        calls = torch.zeros(num_clients, dtype=torch.int64)
        sampling = user_level.NO_SAMPLING
        return UserLevel(privacy, template, averages, fresh_noise, sampling, expected, rounds, share=share, calls=calls)
    return UserLevel(
        privacy, template, averages, fresh_noise, schedule.client_sampling(num_clients), expected, rounds,
        books=user_level.SumLedger(folder / FILE, run),
    )  # fmt: skip


def share_of(deployment: Deployment, num_clients: int) -> user_level.Share | None:
    """What clients add to secure sums under user-level privacy; None without one of the two."""
    config = deployment.run
    privacy, secure, schedule = config.user_privacy, config.secure, config.schedule
    if privacy is None or secure is None:
        return None
    noise = 0.0
    if privacy.at_nodes:
        calls = schedule.calls(deployment.seed, range(1, config.rounds + 1), num_clients)
        noise = privacy.noise_over(user_level.NO_SAMPLING, int(calls.max()))
    return user_level.Share.of(privacy, num_clients, noise, secure.least)


def notes(deployment: Deployment, stage: UserLevel, num_clients: int, task: Task) -> list[str]:
    """Sentences for the operator before the first round."""
    config, label = deployment.run, deployment.method
    privacy = config.user_privacy
    assert privacy is not None
    return [
        *privacy.notes(label, deployment.algorithm, num_clients, stage.sampling, task, stage.noise),
        f"{label}: user-level noise {stage.noise:.4g} on every sum, of {stage.expected:g} clients expected; "
        + ("every node adds a share of it" if stage.at_nodes else "the server adds it, and is trusted to"),
    ]


def make_example_budget(
    deployment: Deployment, roster: Roster, task: Task, say: Callable[[str], None]
) -> PrivacyBudget:
    """The private form of a run's task, and what is counted of it; ConfigError if the method has no epsilon."""
    config, algorithm, label = deployment.run, deployment.algorithm, deployment.method
    privacy, count = config.privacy, roster.counts[:, 0]
    assert privacy is not None
    privacy.check_method(label, algorithm, count)
    profile = privacy_profile(algorithm, count)
    if profile is None or profile.per_round is None:
        raise ConfigError(
            f"{label} sets no limit on the gradients per round, so the privacy spent by a client that does not answer "
            "could not be counted; limit its local steps, for example with l_max"
        )
    if "needs validation" in algorithm.traits and not bool((roster.counts[:, 1] > 0).all()):
        raise ConfigError(f"{label} judges models on validation examples, and a client has none")
    for note in privacy.notes(label, algorithm, count):
        say(note)
    if deployment.scaling == STANDARD:
        say(f"{label}: not covered by epsilon: sums of features over each client's training examples")
    num_clients, seed = len(roster.names), deployment.seed
    if (
        config.user_privacy is not None and not config.user_at_nodes
    ):  # who will be called is a secret: plan for everybody in every round
        calls = torch.full((num_clients,), config.rounds)
    else:
        calls = config.schedule.calls(seed, range(1, config.rounds + 1), num_clients)
    return make_budget(privacy, algorithm, task, seeded_noise(seed), count, calls)
