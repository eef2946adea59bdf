"""What a site sends in a round of a finished run, and whether other sites get to see it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kinfed.algorithms import RoundInfo, make_algorithm
from kinfed.runs import RunOutcome


@dataclass(frozen=True)
class SentMessage:
    fields: tuple[str, ...] = ()  # of the method's Up, as its options have it
    bytes: int = 0  # of a site in a round, on average over the run
    handed_on: bool = False  # the server passes it on to other sites


def sent_message(result: RunOutcome, label: str) -> SentMessage:
    """Of a run in which all sites take part in every round. Fields are those of a message that the first site really
    makes: which of them there are depends on the method's options."""
    method, config = result.result(label), result.config
    options = dict(config.algorithms[label])
    algorithm = make_algorithm(options.pop("method"), config.training, options)
    data, ids = result.federations[method.seed], torch.arange(1)
    population, task = data.population(method.seed), result.task
    server, _ = algorithm.plan(
        algorithm.init_server(task, population),
        torch.arange(data.num_clients),
        RoundInfo(1, population, task.trainable),
    )
    cohort = data.cohort(ids, method.seed, 1)
    _, up = algorithm.client_update(task, algorithm.init_client(task, cohort), algorithm.download(server, ids), cohort)
    size = (method.bytes_up - data.statistics_bytes[1]) / (method.rounds * data.num_clients)
    return SentMessage(tuple(up.named()), round(size), "hands models on" in algorithm.traits)
