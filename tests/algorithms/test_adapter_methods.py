"""FedSA-LoRA, FFA-LoRA and FedDPA: whose matrices travel, and their limits."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from method_bench import ALL, SIZES, WORKS, by_hand, close, models, server, state, weighted
from torch import Tensor, nn

from kinfed.algorithms import make_algorithm
from kinfed.algorithms.fedavg import FedAvg
from kinfed.algorithms.ffa_lora import FFALoRA
from kinfed.algorithms.personal_adapters import PersonalAdapters
from kinfed.data.batches import LocalTraining
from kinfed.engine.task import ModuleTask, make_task
from kinfed.errors import ConfigError
from kinfed.testing.tiny_models import adapted_model, tiny_model
from kinfed.testing.workbench import SEED

A, B = 2 * 4 + 2 * 8, 8 * 2 + 6 * 2  # numbers in the two A and in the two B of the adapted model
HEAD = 6 * 3 + 3
CONSTANT = functools.partial(adapted_model, freeze_a=True)
PAIR = functools.partial(adapted_model, pair=True)


@pytest.mark.parametrize(
    ("name", "model", "sent", "own"),
    [
        ("fedsa_lora", adapted_model, A + HEAD, B),
        ("feddpa", PAIR, A + B + HEAD, A + B),
        ("ffa_lora", CONSTANT, B + HEAD, None),
        ("fedavg", adapted_model, A + B + HEAD, None),
    ],
)
def test_bytes_by_hand(name: str, model: functools.partial[nn.Module], sent: int, own: int | None) -> None:
    with by_hand(make_algorithm(name, ALL), model=model) as loop:
        report = loop.round()
        clients = len(SIZES)
        assert (report.bytes_down, report.bytes_up) == (clients * 4 * sent, clients * 4 * (sent + 1))
        if own is not None:
            assert state(loop, 0, "own").numel() == own


def test_fedsa_by_plain_torch() -> None:
    """Each client its own module; after a round all A and heads are replaced by their mean, no B is."""
    task = make_task(adapted_model)
    modules = [task.module_of(task.init(SEED)) for _ in SIZES]
    with by_hand(make_algorithm("fedsa_lora", ALL), model=adapted_model) as loop:
        data = loop.pool.federation
        for _ in range(3):
            for k, module in enumerate(modules):
                rows = data.train[k]
                trained = [p for p in module.parameters() if p.requires_grad]
                loss = nn.functional.cross_entropy(module(data.features.gather(rows)), data.labels[rows])
                with torch.no_grad():
                    for p, g in zip(trained, torch.autograd.grad(loss, trained), strict=True):
                        p.sub_(g, alpha=0.1)
            named = [dict(module.named_parameters()) for module in modules]
            with torch.no_grad():
                for name in ("1.lora_A", "3.lora_A", "5.weight", "5.bias"):
                    mean = weighted([own[name].clone() for own in named], SIZES)
                    for own in named:
                        own[name].copy_(mean)
            loop.round()
        for k, own in enumerate(named):
            row = torch.cat([own[slot.name].detach().reshape(-1) for slot in task.slots])
            close(models(loop)[k], row, 1e-5)
        assert not torch.equal(named[0]["1.lora_B"], named[1]["1.lora_B"])


@pytest.mark.parametrize("training", WORKS.values(), ids=WORKS.keys())
def test_with_nothing_of_ones_own_it_is_fedavg(training: LocalTraining) -> None:
    found = []
    for method, field in ((PersonalAdapters(training, own=""), "shared"), (FedAvg(training), "w")):
        with by_hand(method, model=adapted_model) as loop:
            for _ in range(3):
                loop.round()
            found.append(server(loop, field))
    assert torch.equal(found[0], found[1])


@pytest.mark.parametrize("training", WORKS.values(), ids=WORKS.keys())
def test_ffa_is_fedavg_bit_for_bit(training: LocalTraining) -> None:
    found = []
    for method in (FFALoRA(training), FedAvg(training)):
        with by_hand(method, model=CONSTANT) as loop:
            for _ in range(3):
                loop.round()
            found.append((server(loop), models(loop)))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))


def test_the_mean_of_b_is_the_mean_of_corrections_only_where_a_is_constant() -> None:
    """Corrections B A of clients after a round, against that of the server's model."""
    gaps = {}
    for model in (CONSTANT, adapted_model):
        task = make_task(model)
        with by_hand(FedAvg(WORKS["steps"], weights="equal"), model=model) as loop:
            for _ in range(2):
                loop.round()
            own, common = models(loop), server(loop)
        products = [_correction(task, row) for row in (*own, common)]
        gaps[model] = float((torch.stack(products[:-1]).mean(0) - products[-1]).abs().max())
    assert gaps[CONSTANT] < 1e-7
    assert gaps[adapted_model] > 1e-5


def _correction(task: ModuleTask, row: Tensor) -> Tensor:
    layer: Any = task.module_of(row).get_submodule("1")
    product: Tensor = (layer.lora_B @ layer.lora_A).detach()
    return product


def test_the_second_adapter_of_feddpa_stays_and_nothing_else() -> None:
    task = make_task(PAIR)
    method = make_algorithm("feddpa", ALL)
    assert isinstance(method, PersonalAdapters)
    split = method.split(task)
    names = {slot.name for slot in task.slots if bool(split.own_mask[slot.start])}
    assert names == {f"{layer}.personal_{matrix}" for layer in "13" for matrix in "AB"}


@pytest.mark.parametrize(
    ("name", "model", "message"),
    [
        ("fedsa_lora", tiny_model, r"keep '\*\.lora_B'.*it trains 1\.weight, .*kinfed\.lora\(model, targets\)"),
        ("feddpa", adapted_model, r"keep '\*\.personal_\*'.*pair=True\), or --set model\.lora_pair=true"),
        ("ffa_lora", tiny_model, r"the model trains none; it trains 1\.weight.*freeze_a=True"),
        ("ffa_lora", adapted_model, r"trains 1\.lora_A; use kinfed\.lora\(.*lora_freeze_a=true"),
    ],
)
def test_models_without_such_adapters_are_refused(name: str, model: functools.partial[nn.Module], message: str) -> None:
    with pytest.raises(ConfigError, match=message), by_hand(make_algorithm(name, ALL), model=model):
        pass
