"""Conformance of a method: all checks of its contract in one call, and how near it is to an independent implementation.

    kinfed.testing.check_algorithm("ditto")          # a ContractError names the first check that fails
    kinfed.testing.check_reference("ditto")          # 8.9e-08, or a ContractError that names round and tensor

The references are in kinfed.testing.reference_methods; register one for a method of your own with
`kinfed.testing.reference`.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from kinfed.algorithms import make_algorithm
from kinfed.data import Federation, LocalTraining
from kinfed.server import Loop, Schedule
from kinfed.testing import declarations, hardship, invariance, messages, reference_methods, running_statistics  # noqa: F401
from kinfed.testing.reference_case import LR, STEPS, ReferenceCase, Stage, network
from kinfed.testing.reference_case import REFERENCES as REFERENCES
from kinfed.testing.workbench import CHECKS, SEED, Bench, ContractError, Method, tiny_federation

SIZES, ROUNDS, WITHIN = (2, 6, 4), 4, 1e-6
# What a class or the engine decides, whatever the options and the data: where a method has passed all checks, its
# variants need not pass these again.
OF_THE_CLASS = (
    *("settings_are_plain", "message_types_are_declared", "workers_do_not_matter", "gradient_paths_agree"),
    *("outsiders_are_left_alone", "global_generators_are_untouched", "who_is_evaluated_does_not_matter"),
)
VARIANT_CHECKS = tuple(name for name in CHECKS if name not in OF_THE_CLASS)


def check_variant(method: str | Method, *, options: Mapping[str, Any] | None = None) -> None:
    """Put a method that has passed all checks, with other options, to those that options can break."""
    bench = Bench(method, options=options)
    for name in VARIANT_CHECKS:
        CHECKS[name](bench)


def check_algorithm(
    method: str | Method,
    *,
    options: Mapping[str, Any] | None = None,
    federation: Federation | None = None,
    model: Callable[[], nn.Module] | None = None,
) -> None:
    """Put a method, by its registered name or as an object, to all checks. Raises ContractError at the first that
    fails. A method that needs special data or a special model brings them; a few clients and parameters will do.

    Example:

        >>> kinfed.testing.check_algorithm("fedprox", options={"mu": 0.1})
    """
    bench = Bench(method, options=options, federation=federation, model=model)
    for check in CHECKS.values():
        check(bench)


# ---- references ----


def check_reference(name: str, method: Method | None = None, *, within: float = WITHIN) -> float:
    """The largest gap between a method and its registered reference over some rounds, two of three clients at a time:
    absolute for numbers below 1, relative above. Raises ContractError if it is more than `within`, or bytes differ.
    `method` takes the place of the registered one; its training is that of the reference."""
    write, options = REFERENCES[name]
    training = LocalTraining(lr=LR, batch=100, steps=STEPS)
    algorithm = make_algorithm(name, training, options) if method is None else replace(method, training=training)
    federation = tiny_federation(SIZES)
    largest = 0.0
    with Bench(algorithm, federation=federation, model=network).loop(Schedule(participation=0.67)) as loop:
        rounds = [loop.schedule.active(SEED, number, len(SIZES)).tolist() for number in range(1, ROUNDS + 1)]
        case = _case(loop, federation, rounds)
        for number, wanted in enumerate(write(case, **options), 1):
            report = loop.round()
            if (numbers := wanted.pop("numbers", None)) is not None:
                sent, right = (report.bytes_down, report.bytes_up), [round(4 * each) for each in numbers]
                right = [len(rounds[number - 1]) * each for each in right]
                if list(sent) != right:
                    raise ContractError(f"{name}: round {number} takes {right} bytes down and up; got {list(sent)}")
            for where, gap in _gaps(loop.state(), wanted):
                largest = max(largest, gap)
                if not gap <= within:
                    raise ContractError(f"{name}: {where} is off by {gap:.2g} after round {number}")
    return largest


def _gaps(state: Mapping[str, Tensor], wanted: Stage) -> Iterator[tuple[str, float]]:
    """A compared quantity, and how far it is from what a reference wants."""
    for key, value in wanted.items():
        owner, _, field = key.partition(" ")
        if owner == "server":
            yield key, _gap(state[f"server.{field}"], value)
            continue
        for client, row in value.items():
            place = int((state["clients.ids"] == client).nonzero())
            yield f"{key} of client {client}", _gap(state[f"clients.rows.{field}"][place], row)


def _gap(ours: Tensor, theirs: Tensor) -> float:
    size = theirs.double().abs().clamp_min(1)
    return float(((ours.double() - theirs.double()).abs() / size).max())


def _case(loop: Loop, data: Federation, rounds: list[list[int]]) -> ReferenceCase:
    rows = [data.train[m] for m in range(len(SIZES))]
    public = torch.zeros(0, dtype=torch.int64) if data.public is None else data.public
    first = loop.algorithm.init_client(loop.task, data.cohort(torch.tensor([0]), SEED, 1)).named()
    return ReferenceCase(
        [data.features.gather(part) for part in rows], [data.labels[part] for part in rows], loop.task.init(SEED),
        rounds, (data.features.gather(public), data.labels[public]), loop.server.named(),
        {name: tensor[0] for name, tensor in first.items()},
    )  # fmt: skip
