"""The batched study against the methods themselves in the loop."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from kinfed.algorithms import make_algorithm
from kinfed.data.batches import LocalTraining
from kinfed.errors import ConfigError
from kinfed.pools.local_pool import LocalPool
from kinfed.reproduce.studies.synthetic import Method, Protocol, Worlds, ditto, fedavg, perfedavg, pfedme, selffl
from kinfed.reproduce.studies.synthetic_study import (
    ESTIMATED,
    INDEPENDENT,
    KINDS,
    KNOWN,
    RATES,
    errors,
    methods,
    only,
    run_study,
    table,
)
from kinfed.server.loop import Loop, Schedule
from kinfed.theory.gaussian import Case, draw

F64 = torch.float64
CASE = Case(s0=0.02, low=3, high=7, clients=6)
PROTOCOL = Protocol(lr=2e-3, steps=6, warm=2, rounds=9)
SEEDS = (5, 6)


def in_the_loop(
    name: str, options: dict[str, Any], seed: int, rate: float, protocol: Protocol
) -> tuple[Tensor, Tensor]:
    """The protocol with the method's class: FedAvg first, then the method from its model."""
    world = draw(CASE, seed)
    task = world.task(protocol.start, F64)
    training = LocalTraining(lr=protocol.lr, batch=100, steps=protocol.steps)
    first = 1
    for method, own, last in (("fedavg", {}, protocol.warm), (name, options, protocol.warm + protocol.rounds)):
        algorithm = make_algorithm(method, training, own)
        pool = LocalPool(algorithm, task, world.federation, seed, workers=1)
        loop = Loop(algorithm, task, pool, world.federation.population(seed, rate), Schedule(rate), first_round=first)
        while loop.completed < last:
            loop.round()
        models, server_models = loop.evaluate(keep_models=True).models, algorithm.server_models(loop.server)
        pool.close()
        assert models is not None
        assert server_models is not None
        task.start, first = server_models.models[0], last + 1
    return server_models.models[0, 0], models.squeeze(1)


def options_of(rules: Any) -> dict[str, Any]:
    return asdict(rules)


CHECKED: dict[str, tuple[Method, str, dict[str, Any]]] = {
    "fedavg": (fedavg, "fedavg", {}),
    "equal": (partial(fedavg, equal=True), "fedavg", {"weights": "equal"}),
    "control": (partial(fedavg, smooth=True), "selffl_control", {}),
    "ditto": (partial(ditto, lam=3.0), "ditto", {"lam": 3.0}),
    "pfedme": (
        partial(pfedme, inner_steps=5, personal_lr=2e-3),
        "pfedme",
        {"inner_steps": 5, "personal_lr": 2e-3},
    ),
    "pfedme by examples": (
        partial(pfedme, equal=False, inner_steps=2, personal_lr=1e-3),
        "pfedme",
        {"inner_steps": 2, "personal_lr": 1e-3, "weights": "examples"},
    ),
    "pfedme to the end": (pfedme, "pfedme", {"inner_steps": 30, "personal_lr": 1.2e-2}),
    "perfedavg": (perfedavg, "perfedavg", {}),
    "perfedavg adapting": (partial(perfedavg, adapt_steps=4), "perfedavg", {"adapt_steps": 4}),
    "known": (partial(selffl, rules=KNOWN), "selffl", options_of(KNOWN)),
    "estimated": (partial(selffl, rules=ESTIMATED), "selffl", options_of(ESTIMATED)),
    "start only": (partial(selffl, rules=only("init")), "selffl", options_of(only("init"))),
    "steps only": (partial(selffl, rules=only("steps")), "selffl", options_of(only("steps"))),
    "weights only": (partial(selffl, rules=only("agg")), "selffl", options_of(only("agg"))),
    "mean, all, exact": (
        partial(selffl, rules=replace(ESTIMATED, var0="mean", var_m="sum", domain="all", posterior="exact")),
        "selffl",
        options_of(replace(ESTIMATED, var0="mean", var_m="sum", domain="all", posterior="exact")),
    ),
    "Algorithm 2": (
        partial(selffl, rules=KNOWN, augmented=True),
        "selffl_augmented",
        options_of(KNOWN) | {"tol": 1e-13, "max_extra": 100},
    ),
}


@pytest.mark.parametrize("name", CHECKED)
def test_a_batched_method_is_the_method(name: str):
    # Algorithm 2 trains to convergence in every round: in a few large steps, and for fewer rounds.
    compare(name, 0.5, replace(PROTOCOL, lr=1e-2, rounds=4) if name == "Algorithm 2" else PROTOCOL)


@pytest.mark.parametrize("name", ["fedavg", "ditto", "pfedme", "estimated"])
def test_so_it_is_where_some_clients_never_take_part(name: str):
    compare(name, 0.17, replace(PROTOCOL, rounds=3))


def compare(name: str, rate: float, protocol: Protocol) -> None:
    batched, method, options = CHECKED[name]
    worlds = Worlds.draw(CASE, SEEDS)
    warm = fedavg(worlds, worlds.active(rate, 1, protocol.warm), torch.zeros(2, dtype=F64), protocol, rate)
    last = protocol.warm + protocol.rounds
    state = batched(worlds, worlds.active(rate, protocol.warm + 1, last), warm.server, protocol, rate)
    for r, seed in enumerate(SEEDS):
        server, personal = in_the_loop(method, options, seed, rate, protocol)
        torch.testing.assert_close(state.server[r], server, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(state.personal[r], personal, rtol=1e-5, atol=1e-5)


def test_the_same_clients_take_part():
    worlds = Worlds.draw(CASE, (0, 3))
    for rate in (0.17, 0.5, 1.0):
        active = worlds.active(rate, 4, 6)
        for t in range(3):
            for r, seed in enumerate((0, 3)):
                expected = Schedule(rate).active(seed, 4 + t, 6)
                assert active[t, r].nonzero().squeeze(1).tolist() == expected.tolist()


def test_errors_by_hand():
    worlds = Worlds.draw(CASE, (1,))
    best = worlds.model
    state = fedavg(worlds, worlds.active(1.0, 1, 1), torch.zeros(1, dtype=F64), PROTOCOL, 1.0)
    found = errors(worlds, state)
    assert float(found.server) == pytest.approx(abs(float(state.server) - 1.6))
    assert float(found.server_best) == pytest.approx(abs(float(state.server - best.theta_G)))
    assert float(found.local) == pytest.approx(float((state.personal - worlds.theta).abs().mean()))
    assert float(found.local_best) == pytest.approx(float((state.personal - best.theta_FL).abs().mean()))


def test_a_small_study_and_its_tables():
    cells = run_study(3, rates=(0.5, 1.0), protocol=Protocol(warm=2, rounds=3))
    labels = {cell.method for cell in cells}
    assert set(methods(CASE)) < labels
    text = table(cells, "heterogeneous", "server")
    assert text.splitlines()[0].startswith("| heterogeneous: global error, truth theta_0 | C=0.5 | C=1 | s.e. |")
    widths = {line.count("|") for line in text.splitlines()}
    assert widths == {5}
    assert "| *independent implementation* | 0.2690 | 0.2040 | |" in text
    again = run_study(3, rates=(0.5, 1.0), protocol=Protocol(warm=2, rounds=3))
    assert again == cells


def test_the_study_finds_what_the_documentation_says():
    """Fewer repeats and rates than the table in docs/selffl.md, same protocol: the differences it is read by."""
    control, plain, exact = "control: FedAvg-w + smoothing", "FedAvg-w", "Self-FL, known, exact posterior"
    known, estimated = "Self-FL, known variances", "Self-FL, estimated"
    cells = run_study(40, seed=9, rates=(0.1, 1.0), chosen=(control, plain, known, estimated, exact))
    at = {(c.case, c.method, c.participation, c.kind): c.mean for c in cells}

    def local(case: str, method: str, rate: float | None) -> float:
        return at[case, method, rate, "local"]

    def server(case: str, method: str, rate: float) -> float:
        return at[case, method, rate, "server_best"]

    for case in ("homogeneous", "heterogeneous"):
        # few active clients: the smoothing average is what makes the server model steady
        assert server(case, control, 0.1) < 0.5 * server(case, plain, 0.1)
        assert server(case, known, 0.1) < 0.5 * server(case, plain, 0.1)
        # personal models gain beyond it
        for rate in (0.1, 1.0):
            for method in (known, estimated):
                assert local(case, method, rate) < 0.85 * local(case, control, rate)
    # but in the heterogeneous case not over learning alone, as the paper's posterior predicts
    alone = local("heterogeneous", "theta^G and every client alone (z)", None)
    assert local("heterogeneous", known, 1.0) > 1.15 * alone
    assert local("heterogeneous", exact, 1.0) < 1.05 * alone
    assert at["heterogeneous", "theta^G and theta^FL of the paper", None, "local"] > 1.15 * alone


def test_references_name_what_the_study_runs():
    for case, method, kind in INDEPENDENT:
        assert case in ("homogeneous", "heterogeneous")
        assert method in methods(CASE)
        assert kind in KINDS
        assert len(INDEPENDENT[case, method, kind]) == len(RATES)


def test_unknown_methods_are_refused():
    with pytest.raises(ConfigError, match="unknown method of the study 'FedAvg'"):
        run_study(1, chosen=("FedAvg",))
