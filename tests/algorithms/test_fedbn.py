"""FedBN: own normalization layers, by their type."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from method_bench import ALL, WORKS, by_hand, close, linear, models, run, server, state, weighted
from torch import nn

from kinfed.algorithms.fedavg import FedAvg
from kinfed.algorithms.fedbn import FedBN
from kinfed.algorithms.local import Local
from kinfed.data.examples.batches import LocalTraining
from kinfed.data.federations.federation import Federation
from kinfed.engine.task_factory import make_task
from kinfed.errors import ConfigError
from kinfed.server.schedule import Schedule
from kinfed.testing import Bench, tiny_federation
from kinfed.testing.workbench import SEED, normalized_model

SIZES = (2, 6, 4)


def test_rounds_by_plain_torch() -> None:
    """Each client its own module, whose other layers are replaced by their mean after a round; bytes by hand."""
    task = make_task(normalized_model)
    modules = [task.module_of(task.init(SEED)).train() for _ in SIZES]
    with by_hand(FedBN(ALL), sizes=SIZES, model=normalized_model) as loop:
        data = loop.pool.federation
        for _ in range(3):
            for k, module in enumerate(modules):
                rows = data.train[k]
                module.zero_grad()
                nn.functional.cross_entropy(module(data.features.gather(rows)), data.labels[rows]).backward()
                with torch.no_grad():
                    for p in module.parameters():
                        p -= 0.1 * p.grad  # type: ignore[operator]
            states = [module.state_dict() for module in modules]
            for name in ("1.weight", "1.bias", "4.weight", "4.bias"):
                mean = weighted([own[name].clone() for own in states], SIZES)
                for own in states:
                    own[name].copy_(mean)
            report = loop.round()
            shared = 4 * 6 + 6 + 6 * 3 + 3
            assert (report.bytes_down, report.bytes_up) == (3 * 4 * shared, 3 * 4 * (shared + 1))
        assert server(loop, "shared").numel() == shared
        assert state(loop, 0, "own").numel() == 4 * 6  # scale, shift, running mean and variance
        for k, own in enumerate(states):
            close(models(loop)[k], task.flatten(own), 1e-5)


@pytest.mark.parametrize("training", WORKS.values(), ids=WORKS.keys())
def test_of_one_client_it_is_fedavg(training: LocalTraining) -> None:
    """Up to rounding, w + (u − w), of what travels."""
    found = []
    for method in (FedBN(training), FedAvg(training)):
        with by_hand(method, sizes=(7,), model=normalized_model) as loop:
            for _ in range(3):
                loop.round()
            found.append(models(loop))
    close(found[0], found[1], 1e-5)


def test_all_layers_but_one_own() -> None:
    """What is own trains as if alone as long as what is shared does not move: a frozen shared layer makes it Local."""
    task = make_task(normalized_model, frozen=("1",))
    found = []
    for method in (FedBN(WORKS["steps"], own="2,4.weight"), Local(WORKS["steps"])):
        with Bench(method, federation=tiny_federation(SIZES)).loop(Schedule(), task=task) as loop:
            loop.round()
            found.append(models(loop))
    close(found[0][:, : 6 + 6 + 18], found[1][:, : 6 + 6 + 18], 1e-6)


def test_layers_are_found_by_type_whatever_their_name() -> None:
    def net() -> nn.Module:
        return nn.Sequential(
            nn.Linear(4, 6), nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6)), nn.BatchNorm1d(6), nn.Linear(6, 3)
        )

    task = make_task(net)
    split = FedBN().split(task)
    own = {slot.name for slot in task.slots if bool(split.own_mask[slot.start])}
    affine = {"1.1.weight", "1.1.bias", "2.weight", "2.bias"}
    assert own == affine | {"2.running_mean", "2.running_var"}
    named = FedBN(own="0, 2.running_*").split(task).own_mask
    assert int(named.sum()) == 4 * 6 + 6 + 12


def test_a_model_without_normalization_is_refused() -> None:
    with pytest.raises(ConfigError, match="the model has none; its layers are 1"), by_hand(FedBN(), model=linear):
        pass


def shifted_features() -> Federation:
    """Six clients, three classes; every client sees its features through a scale and shift of its own."""
    generator = torch.Generator().manual_seed(3)
    owner = torch.arange(6).repeat_interleave(40)
    y = torch.randint(3, (len(owner),), generator=generator)
    x = 2.0 * torch.eye(3, 4)[y] + 0.5 * torch.randn(len(owner), 4, generator=generator)
    scale = torch.rand(6, 4, generator=generator) * 4 + 0.2
    shift = 6 * torch.randn(6, 4, generator=generator)
    x = x * scale[owner] + shift[owner]
    return Federation.from_arrays(x.numpy(), y.numpy(), owner.numpy(), test_fraction=0.5, num_classes=3)


def input_normalized() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(4), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def test_it_takes_out_shifts_of_features_where_one_model_for_all_cannot() -> None:
    """What it was invented for: better than FedAvg's fine-tuned models, to say nothing of its server model."""
    training = LocalTraining(lr=0.2, batch=20, steps=8)

    def accuracies(method: FedBN | FedAvg) -> list[float]:
        with Bench(method, federation=shifted_features(), model=input_normalized).loop(Schedule()) as loop:
            for _ in range(6):
                loop.round()
            found = loop.evaluate()
            scores = [score for score in (found.personal, found.server_model) if score is not None]
            return [float(score.correct.sum() / score.count.sum()) for score in scores]

    (ours,) = accuracies(FedBN(training))
    personal, common = accuracies(FedAvg(training))
    assert ours > 0.9
    assert ours > personal + 0.05
    assert ours > common + 0.2


def test_weights() -> None:
    equal, counted = (run(replace(FedBN(ALL, own="1"), weights=w))["server.shared"] for w in ("equal", "examples"))
    assert not torch.equal(equal, counted)
