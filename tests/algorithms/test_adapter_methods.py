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
from kinfed.core import rng
from kinfed.data.examples.batches import LocalTraining
from kinfed.data.examples.features import Features
from kinfed.data.examples.problem import Problem
from kinfed.data.examples.ragged import Ragged
from kinfed.data.federations.federation import Federation
from kinfed.engine.task_factory import ModuleTask, make_task
from kinfed.engine.zoo.lora import lora
from kinfed.errors import ConfigError
from kinfed.server.loop import Loop
from kinfed.server.schedule import Schedule
from kinfed.testing import Bench, tiny_federation
from kinfed.testing.workbench import SEED, adapted_model, tiny_model

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


def test_feddpa_by_plain_torch() -> None:
    """In turns: own adapters upon the received ones, then the received ones and the head as if own ones were not there;
    two of three clients at a time, on full batches, so that both turns see the same examples."""
    task = make_task(PAIR)
    start = task.init(SEED)
    with by_hand(make_algorithm("feddpa", ALL.with_steps(2)), model=PAIR, participation=0.67) as loop:
        own = loop.algorithm.split(task).own_mask
        data, kept, common = loop.pool.federation, dict.fromkeys(range(3), start[own]), start[~own]
        for number in range(1, 4):
            active = loop.schedule.active(SEED, number, 3).tolist()
            sent = []
            for m in active:
                x, y = data.features.gather(data.train[m]), data.labels[data.train[m]]
                for trains_own in (True, False):
                    row = torch.empty(task.num_params)
                    row[~own], row[own] = common, kept[m] if trains_own else start[own]
                    for _ in range(2):
                        module = task.module_of(row)
                        named = dict(module.named_parameters())
                        trained = [named[slot.name] for slot in task.slots]
                        grads = torch.autograd.grad(nn.functional.cross_entropy(module(x), y), trained)
                        step = torch.cat([g.reshape(-1) for g in grads])
                        row = row - 0.1 * torch.where(own == trains_own, step, 0.0)
                    if trains_own:
                        kept[m] = row[own]
                sent.append(row[~own])
            common = weighted(sent, tuple(SIZES[m] for m in active))
            loop.round()
            close(server(loop, "shared"), common, 1e-5)
            for m in range(3):
                close(state(loop, m, "own"), kept[m], 1e-5)


@pytest.mark.parametrize("training", WORKS.values(), ids=WORKS.keys())
def test_what_feddpa_shares_is_fedavgs(training: LocalTraining) -> None:
    """That of a model whose second adapters are constants that correct nothing."""
    without = make_task(PAIR, frozen=("*.personal_*",))
    with by_hand(make_algorithm("feddpa", training), model=PAIR, participation=0.67) as ours:
        for _ in range(3):
            ours.round()
    bench = Bench(FedAvg(training), federation=tiny_federation(SIZES))
    with bench.loop(Schedule(participation=0.67), task=without) as theirs:
        for _ in range(3):
            theirs.round()
    close(server(ours, "shared"), server(theirs))


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


# Planted data.


def planted(x: Tensor, y: Tensor, owner: Tensor, clients: int, train: int) -> Federation:
    """The first `train` examples of every client are for training, the others for testing."""
    rows = torch.arange(len(y))
    test = rows >= train * clients
    return Federation(
        Features(x), y, Problem.of_classes(2),
        train=Ragged.grouped(rows[~test], owner[~test], clients), val=Ragged.empty(clients),
        test=Ragged.grouped(rows[test], owner[test], clients), names=[str(m) for m in range(clients)],
    )  # fmt: skip


def one_direction(seed: int) -> Federation:
    """20 clients with 20 training examples of 16 inputs. One direction, x₀ + x₁, decides for all of them, but every
    other client calls the two classes by each other's name."""
    clients, count, width = 20, 20 * 40, 16
    x = rng.normal(rng.root(seed, "planted"), count * width).reshape(count, width).to(torch.float32)
    owner = torch.arange(count) % clients
    y = (x[:, 0] + x[:, 1] > 0).long() ^ (owner % 2)
    return planted(x, y, owner, clients, 20)


def own_blocks(seed: int) -> Federation:
    """16 clients whose inputs lie in one of four blocks of three, and a thirteenth input that is always 1. The first
    input of a block decides for all, around a threshold of −2 for half of the clients and of 2 for the others."""
    clients, count, width = 16, 16 * 48, 13
    x = rng.normal(rng.root(seed, "planted"), count * width).reshape(count, width).to(torch.float32)
    owner = torch.arange(count) % clients
    x *= torch.arange(width) // 3 == (owner % 4)[:, None]
    x[:, -1] = 1.0
    y = (3 * x[:, 0:12:3].sum(1) + torch.where(owner // 4 % 2 == 0, 2.0, -2.0) > 0).long()
    return planted(x, y, owner, clients, 24)


def trained(name: str, data: Federation, work: LocalTraining, rounds: int, **adapters: bool) -> Loop:
    """The loop after some rounds, of a linear layer whose frozen weights are random and whose adapters have rank 2."""
    width = data.features.raw.shape[1]

    def model() -> nn.Module:
        return lora(nn.Sequential(nn.Flatten(), nn.Linear(width, 2)), "1", rank=2, alpha=4.0, train="", **adapters)

    with Bench(make_algorithm(name, work), federation=data, model=model).loop(Schedule(), chunk=None) as loop:
        for _ in range(rounds):
            loop.round()
    return loop


def accuracies(loop: Loop) -> tuple[float, float]:
    """Of personal models and of the server's (0 where there is none) on all test examples."""
    found = loop.evaluate()
    personal, common = (
        0.0 if score is None else float(score.correct.sum() / score.count.sum())
        for score in (found.personal, found.server_model)
    )
    return personal, common


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_shared_a_finds_the_common_direction_and_an_own_b_its_sign(seed: int) -> None:
    """What FedSA-LoRA was invented for. 20 examples are too few to find one direction among 16 inputs alone; one
    adapter for all contradicts itself, B averages to nothing, also with an A that stays random. A moves alike for both
    signs, since its gradient Bᵀδxᵀ has that of B twice: shared, it has 400 examples to be learnt from."""
    data, work = one_direction(seed), LocalTraining(lr=0.3, batch=100, steps=2)
    ours, _ = accuracies(trained("fedsa_lora", data, work, 40))
    alone, _ = accuracies(trained("local", data, work, 40))
    tuned, common = accuracies(trained("fedavg", data, work, 40))
    ffa_tuned, ffa_common = accuracies(trained("ffa_lora", data, work, 40, freeze_a=True))
    assert ours > 0.93
    assert ours > max(alone, ffa_tuned) + 0.1
    assert ours > tuned + 0.03  # FedAvg's model after the client's own steps, which alone give it a sign
    assert max(common, ffa_common) < 0.6


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_an_own_adapter_has_the_shift_of_a_client_and_the_shared_one_serves_others(seed: int) -> None:
    """What FedDPA was invented for. Own thresholds are out of reach for one adapter, other clients' blocks for a client
    alone: it has no example of them. With two adapters own test examples are as good as alone, and whoever comes with
    inputs of any block and a threshold of 0 is served by the shared one, which a client has that never trained."""
    data, work = own_blocks(seed), LocalTraining(lr=0.5, batch=100, steps=5)
    x = data.features.raw
    others = (x[:, 0:12:3].sum(1) > 0).long()

    def right_on_others(loop: Loop, rows: Tensor) -> float:
        return float((loop.task.logits(rows, x.expand(len(rows), -1, -1)).argmax(-1) == others).float().mean())

    ours = trained("feddpa", data, work, 8, pair=True)
    split = ours.algorithm.split(ours.task)
    newcomer = split.join(split.take_own(ours.task.init(SEED))[None], server(ours, "shared")[None])
    alone, fedavg = trained("local", data, work, 8), trained("fedavg", data, work, 8)
    assert accuracies(ours)[0] > 0.92
    assert accuracies(fedavg)[1] < 0.8
    assert right_on_others(ours, newcomer) > 0.93
    assert right_on_others(alone, models(alone)) < 0.65
