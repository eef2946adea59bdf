"""L2SGD: moves that keep the mean, its limits, run lengths as the coin would toss them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from method_bench import ALL, LR, WORKS, by_hand, close, gradient, quadratic, run, server, state

from kinfed.algorithms import make_algorithm
from kinfed.algorithms.base import RoundInfo
from kinfed.algorithms.l2gd import L2GD
from kinfed.algorithms.local import Local
from kinfed.data import Population
from kinfed.data.examples.batches import LocalTraining
from kinfed.errors import ConfigError
from kinfed.server.loop import Loop
from kinfed.testing import CHECKS, Bench
from kinfed.testing.workbench import SEED

THETA = 0.3


def planned(loop: Loop) -> tuple[int, int]:
    """Moves and steps of the round to come; one move of no special length without geometric lengths."""
    everyone = torch.arange(loop.population.num_clients)
    server, _ = loop.algorithm.plan(loop.server, everyone, RoundInfo(loop.completed + 1, loop.population))
    return (1, 0) if server.moves is None else (int(server.moves), int(server.steps))


def test_rounds_by_hand() -> None:
    """x ← x − θ (x − x̄), then x ← x − η ∇f(x), only at those who are called; x̄ is the mean over all."""
    with by_hand(L2GD(ALL, theta=THETA), participation=0.67) as loop:
        x = [loop.task.init(SEED) for _ in range(3)]
        for number in range(1, 5):
            mean = torch.stack(x).mean(0)
            close(server(loop, "mean"), mean)
            for m in loop.schedule.active(SEED, number, 3).tolist():
                moved = x[m] - THETA * (x[m] - mean)
                x[m] = moved - LR * gradient(loop, m, moved)
            loop.round()
            for m in range(3):
                close(state(loop, m, "x"), x[m])


@pytest.mark.parametrize("geometric", [False, True])
def test_moves_leave_the_sum_of_models_as_it_was(geometric: bool) -> None:
    """With everyone in the round and a rate of almost nothing, only the moves remain; they shrink the spread."""
    quiet = LocalTraining(lr=1e-12, batch=100, steps=3)
    with by_hand(L2GD(quiet, theta=THETA, geometric=geometric)) as loop:
        rows = {k: torch.full((15,), float(k * k)) for k in range(3)}
        client = loop.pool.clients.take(torch.arange(3)).clone()
        for k, row in rows.items():
            client.x[k] = row
        loop.pool.clients.put(torch.arange(3), client)
        total = torch.stack(list(rows.values())).sum(0)
        loop.server = replace(loop.server, mean=total / 3)
        spread = 4.0
        for _ in range(4):
            moves = planned(loop)[0]
            loop.round()
            found = torch.stack([state(loop, k, "x") for k in range(3)])
            close(found.sum(0), total, 1e-5)
            spread *= (1 - THETA) ** moves
            close(found[2] - found[0], torch.full((15,), spread), 1e-5)
            close(server(loop, "mean"), total / 3, 1e-5)


@pytest.mark.parametrize("training", WORKS.values(), ids=WORKS.keys())
def test_without_moves_it_is_local_training(training: LocalTraining) -> None:
    ours, theirs = run(L2GD(training, theta=0.0)), run(Local(training))
    assert torch.equal(ours["personal models"], theirs["personal models"])


def test_the_fixed_point_on_a_quadratic() -> None:
    """One exact step and one move per round: x* = x − θ(x − x̄) − (η/s)(x − θ(x − x̄) − z), a linear system in x."""
    with quadratic(L2GD(ALL, theta=THETA)) as (loop, world):
        for _ in range(400):
            loop.round()
        n = len(world.s)
        move = (1 - THETA) * torch.eye(n).double() + THETA / n
        step = torch.diag(1 - LR / world.s)
        wanted = torch.linalg.solve(torch.eye(n).double() - step @ move, (LR / world.s)[:, None] * world.z)
        close(torch.stack([state(loop, k, "x") for k in range(n)]), wanted, 1e-5)
        close(server(loop, "mean"), wanted.mean(0), 1e-5)


def test_run_lengths_are_geometric() -> None:
    """The coin shows a move with probability p = 1/(L + 1): runs of steps are 1/p long on average, of moves
    1/(1 − p), and both are at least 1."""
    method = L2GD(LocalTraining(steps=4), geometric=True)

    class Start:
        def init(self, seed: int) -> torch.Tensor:
            return torch.zeros(1)

    population = Population(3, 5)
    server = method.init_server(Start(), population)  # type: ignore[arg-type]
    steps, moves = [], []
    for number in range(1, 4001):
        plan: Any = method.plan(server, torch.arange(3), RoundInfo(number, population))[0]
        steps.append(int(plan.steps))
        moves.append(int(plan.moves))
    assert min(steps) == min(moves) == 1
    assert sum(steps) / 4000 == pytest.approx(5, rel=0.05)
    assert sum(moves) / 4000 == pytest.approx(1.25, rel=0.03)
    assert sum(s == 1 for s in steps) / 4000 == pytest.approx(0.2, abs=0.025)
    assert sum(m == 1 for m in moves) / 4000 == pytest.approx(0.8, abs=0.025)


def test_planned_lengths_are_what_clients_do() -> None:
    method = L2GD(ALL.with_steps(3), theta=THETA, geometric=True)
    with quadratic(method, clients=2) as (loop, world):
        x = torch.zeros(2, 1, dtype=torch.float64)
        lengths = set()
        for _ in range(6):
            moves, steps = planned(loop)
            mean = x.mean(0)
            lengths.add((steps, moves))
            x = mean + (1 - THETA) ** moves * (x - mean)
            x = world.z + (1 - LR / world.s[:, None]) ** steps * (x - world.z)
            loop.round()
            close(torch.stack([state(loop, k, "x") for k in range(2)]), x, 1e-5)
        assert len(lengths) > 1


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench("l2sgd", options={"geometric": True})


@pytest.mark.parametrize("check", ["resume_is_exact", "trees_keep_their_shape", "chunks_do_not_matter", "it_learns"])
def test_the_contract_holds_with_geometric_lengths(bench: Bench, check: str) -> None:
    CHECKS[check](bench)


def test_bytes_are_one_model_each_way() -> None:
    with by_hand(L2GD(ALL)) as loop:
        report = loop.round()
        assert (report.bytes_down, report.bytes_up) == (3 * 15 * 4, 3 * 15 * 4)
    with by_hand(L2GD(ALL, geometric=True)) as loop:
        assert loop.round().bytes_down == 3 * (15 * 4 + 2 * 8)  # and two numbers


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"theta": 0.6}, r"theta must be in \[0, 0.5\]; got 0.6"),
        ({"theta": -0.1}, r"theta must be in \[0, 0.5\]"),
        ({"geometric": True, "epochs": 1}, "give steps instead of epochs"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_algorithm("l2sgd", ALL, options)
