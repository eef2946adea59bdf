"""FedPer, FedRep and LG-FedAvg: who keeps which layers, steps by hand, FedAvg as the limit of each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from method_bench import (
    ALL,
    LR,
    SIZES,
    WORKS,
    accuracy_on,
    by_hand,
    close,
    deep,
    gradient,
    linear,
    mean,
    models,
    one_body,
    run,
    server,
    state,
    weighted,
)
from torch import Tensor

from kinfed.algorithms import make_algorithm
from kinfed.algorithms.common.partial import PartlyShared
from kinfed.algorithms.fedavg import FedAvg
from kinfed.algorithms.fedper import FedPer
from kinfed.algorithms.fedrep import FedRep
from kinfed.algorithms.lgfedavg import LGFedAvg
from kinfed.algorithms.local import Local
from kinfed.data.examples.batches import LocalTraining
from kinfed.errors import ConfigError, ModelError
from kinfed.testing.workbench import SEED

P = 47  # of the deep model: layers "1", "3" and "5" have 20, 15 and 12 parameters
LOW, MIDDLE, TOP = slice(0, 20), slice(20, 35), slice(35, 47)


def own(*parts: slice) -> Tensor:
    mask = torch.zeros(P, dtype=torch.bool)
    for part in parts:
        mask[part] = True
    return mask


@pytest.mark.parametrize(
    ("method", "kept"),
    [
        (FedPer(ALL), own(TOP)),
        (FedPer(ALL, head_layers=2), own(MIDDLE, TOP)),
        (FedPer(ALL, head_layers=0), own()),
        (FedPer(ALL, head="3"), own(MIDDLE)),
        (FedPer(ALL, head=" 1 , 5"), own(LOW, TOP)),
        (FedRep(ALL), own(TOP)),
        (LGFedAvg(ALL), own(LOW)),
        (LGFedAvg(ALL, shared_layers=1), own(LOW, MIDDLE)),
        (LGFedAvg(ALL, shared_layers=9), own(LOW)),
        (LGFedAvg(ALL, shared="1"), own(MIDDLE, TOP)),
        (LGFedAvg(ALL, shared="1,3,5"), own()),
    ],
    ids=lambda value: "" if isinstance(value, Tensor) else str(value),
)
def test_who_keeps_what(method: PartlyShared, kept: Tensor) -> None:
    """Own layers stay in the client's state, the others are all that travels: |g| down and |g| + 1 up."""
    with by_hand(method, model=deep) as loop:
        assert torch.equal(method.split(loop.task).own_mask, kept)
        shared = int((~kept).sum())
        assert server(loop, "shared").shape == (shared,)
        report = loop.round()
        extra = 1 if method.weights == "examples" else 0
        assert (report.bytes_down, report.bytes_up) == (3 * shared * 4, 3 * (shared + extra) * 4)
        assert state(loop, 0, "own").shape == (P - shared,)
        found = models(loop)
        for m in range(3):
            assert torch.equal(found[m][kept], state(loop, m, "own"))
            assert torch.equal(found[m][~kept], server(loop, "shared"))


@pytest.mark.parametrize("method", [FedPer(ALL), LGFedAvg(ALL), FedPer(ALL, weights="equal")], ids=str)
def test_rounds_by_hand(method: FedPer) -> None:
    """Everybody trains all layers from (own, shared); the server averages the shared ones of those who replied."""
    with by_hand(method, model=deep, participation=0.67) as loop:
        kept = method.split(loop.task).own_mask
        start = loop.task.init(SEED)
        theta = {m: start.clone() for m in range(3)}
        shared = start[~kept]
        for number in range(1, 4):
            active = loop.schedule.active(SEED, number, 3).tolist()
            for m in active:
                theta[m][~kept] = shared
                theta[m] = theta[m] - LR * gradient(loop, m, theta[m])
            rows = [theta[m][~kept] for m in active]
            sizes = tuple(SIZES[m] for m in active)
            shared = weighted(rows, sizes) if method.weights == "examples" else mean(rows)
            loop.round()
            close(server(loop, "shared"), shared)
            for m in range(3):
                close(state(loop, m, "own"), theta[m][kept])


def test_fedrep_fits_the_head_first_and_then_the_representation() -> None:
    """head_steps on the head with the base fixed, then the work's steps on the base with the new head fixed."""
    method = FedRep(ALL.with_steps(2), head_steps=3)
    with by_hand(method, model=deep) as loop:
        kept = method.split(loop.task).own_mask
        for _ in range(2):
            sent = []
            heads = []
            for m in range(3):
                theta = torch.empty(P)
                theta[kept], theta[~kept] = state(loop, m, "own"), server(loop, "shared")
                for _ in range(3):
                    theta = theta - LR * gradient(loop, m, theta) * kept
                for _ in range(2):
                    theta = theta - LR * gradient(loop, m, theta) * ~kept
                sent.append(theta[~kept])
                heads.append(theta[kept])
            loop.round()
            close(server(loop, "shared"), mean(sent))
            for m in range(3):
                close(state(loop, m, "own"), heads[m])


def test_fedreps_head_takes_as_many_steps_as_the_work_where_none_are_given() -> None:
    training = ALL.with_steps(2)
    with by_hand(FedRep(training), model=deep) as plain, by_hand(FedRep(training, head_steps=2), model=deep) as named:
        plain.round()
        named.round()
        assert torch.equal(models(plain), models(named))


LIMITS = {
    "fedper": (lambda training: FedPer(training, head_layers=0), "examples"),
    "fedrep": (lambda training: FedRep(training, head_layers=0), "equal"),
    "lgfedavg": (lambda training: LGFedAvg(training, shared="1,3,5"), "equal"),
}


@pytest.mark.parametrize("name", LIMITS)
@pytest.mark.parametrize("training", WORKS.values(), ids=WORKS.keys())
def test_everything_shared_is_fedavg(name: str, training: LocalTraining) -> None:
    make, weights = LIMITS[name]
    ours, theirs = run(make(training)), run(FedAvg(training, weights=weights))
    close(ours["server.shared"], theirs["server.w"])
    close(ours["personal models"], theirs["server.w"].expand(6, -1))


def test_own_layers_never_leave() -> None:
    """A client that is not called keeps its layers; the shared ones it is judged with are the current ones."""
    with by_hand(FedPer(ALL), model=deep, participation=0.4) as loop:
        start = loop.task.init(SEED)[TOP]
        loop.round()
        (active,) = loop.schedule.active(SEED, 1, 3).tolist()
        for m in range(3):
            assert torch.equal(models(loop)[m][TOP], start) is (m != active)
        assert loop.algorithm.server_models(loop.server) is None


@pytest.mark.parametrize("name", ["fedper", "fedrep", "lgfedavg"])
def test_a_model_of_one_layer_has_nothing_to_split(name: str) -> None:
    wanted = "keeps lower layers" if name == "lgfedavg" else "must leave some layers to share"
    with pytest.raises(ConfigError, match=wanted), by_hand(make_algorithm(name, ALL), model=linear):
        pass


def test_a_one_layer_model_may_be_shared_on_purpose() -> None:
    for method in (FedPer(ALL, head_layers=0), LGFedAvg(ALL, shared="1")):
        with by_hand(method, model=linear) as loop:
            loop.round()
            assert server(loop, "shared").shape == (15,)


def test_a_layer_that_does_not_exist_is_named() -> None:
    with (
        pytest.raises(ModelError, match="no layer 'fc9'; its layers are 1, 3, 5"),
        by_hand(FedPer(ALL, head="fc9"), model=deep),
    ):
        pass


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("fedper", {"head_layers": -1}, "head_layers must be at least 0"),
        ("fedper", {"weights": "none"}, r"weights must be examples \| equal"),
        ("fedrep", {"head_steps": 0}, "head_steps must be at least 1"),
        ("lgfedavg", {"shared_layers": 0}, "shared_layers must be at least 1"),
    ],
)
def test_bad_options(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_algorithm(name, ALL, options)


def test_own_heads_suit_own_names_of_classes_and_own_lower_layers_moved_inputs() -> None:
    """What the methods were invented for: a body for all learns which inputs matter, where alone nobody has enough
    examples and one model for all contradicts itself; where inputs are moved it is the body that must differ."""
    work = LocalTraining(lr=0.5, batch=12, steps=5)
    names, inputs = one_body(names=True), one_body(inputs=True)
    alone, _ = accuracy_on(names, Local(work))
    _, common = accuracy_on(names, FedAvg(work))
    assert common is not None
    for method in (FedPer(work), FedRep(work)):
        assert accuracy_on(names, method)[0] > max(alone, common) + 0.08
    assert accuracy_on(inputs, LGFedAvg(work), rounds=8)[0] > accuracy_on(inputs, FedPer(work), rounds=8)[0] + 0.1
