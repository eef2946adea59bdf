"""FedEx-LoRA, FLoRA and HetLoRA: a round in plain torch, exact sums of products, limits, ranks by client, and bytes."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from method_bench import ALL, LR, SIZES, TWO_STEPS, by_hand, close, models, server
from torch import Tensor, nn

from kinfed.algorithms import make_algorithm
from kinfed.algorithms.common.low_rank import adapters_of, matrix
from kinfed.algorithms.fedavg import FedAvg
from kinfed.algorithms.fedex_lora import FedExLoRA
from kinfed.algorithms.flora import FLoRA
from kinfed.algorithms.hetlora import HetLoRA
from kinfed.engine.task_factory import make_task
from kinfed.engine.zoo.adapter_files import save_adapter
from kinfed.engine.zoo.lora import adapted_layers
from kinfed.errors import ConfigError, ModelError
from kinfed.testing.workbench import SEED, adapted_model

RESIDUAL = functools.partial(adapted_model, residual=True)
A, B, R, HEAD = 2 * 4 + 2 * 8, 8 * 2 + 6 * 2, 8 * 4 + 6 * 8, 6 * 3 + 3
P = A + B + R + HEAD
SHARE = torch.tensor(SIZES).double() / sum(SIZES)


def trained(loop: Any, m: int, theta: Tensor, steps: int, still: Tensor) -> Tensor:
    """Steps of plain autograd on all of a client's examples; `still` columns stay."""
    data = loop.pool.federation
    x, y = data.features.gather(data.train[m]), data.labels[data.train[m]]
    for _ in range(steps):
        module = loop.task.module_of(theta)
        named = dict(module.named_parameters())
        slots = [named[slot.name] for slot in loop.task.slots]
        grads = torch.autograd.grad(nn.functional.cross_entropy(module(x), y), slots, allow_unused=True)
        flat = [torch.zeros(slot.numel()) if g is None else g.reshape(-1) for g, slot in zip(grads, slots, strict=True)]
        theta = theta - LR * torch.where(still, 0.0, torch.cat(flat))
    return theta


def corrections(theta: Tensor, task: Any) -> list[Tensor]:
    """B A + R of every adapted layer, in float64."""
    parts = []
    for adapter in adapters_of("test", task, residual=False):
        product = matrix(theta, adapter.B).double() @ matrix(theta, adapter.A).double()
        parts.append(product if adapter.R is None else product + matrix(theta, adapter.R).double())
    return parts


@pytest.mark.parametrize("name", ["fedex_lora", "flora"])
def test_what_the_server_has_is_the_mean_of_what_clients_have(name: str) -> None:
    """For three rounds: W of the server is Σ p_m W_m, which the means of A and B alone miss."""
    with by_hand(make_algorithm(name, TWO_STEPS), model=RESIDUAL) as loop:
        task, w = loop.task, server(loop)
        still = torch.cat([torch.full((slot.stop - slot.start,), "residual" in slot.name) for slot in task.slots])
        for _ in range(3):
            theta = [trained(loop, m, w, 2, still) for m in range(3)]
            wanted = [
                sum(p * part for p, part in zip(SHARE, layer, strict=True))
                for layer in zip(*(corrections(row, task) for row in theta), strict=True)
            ]
            loop.round()
            w = server(loop)
            for ours, theirs in zip(corrections(w, task), wanted, strict=True):
                close(ours, theirs, 1e-6)  # type: ignore[arg-type]
            close(w[-HEAD:], sum(p * row[-HEAD:] for p, row in zip(SHARE, theta, strict=True)), 1e-6)  # type: ignore[arg-type]
            for m in range(3):
                close(models(loop)[m], theta[m], 1e-5)
    means = [sum(p * row for p, row in zip(SHARE, theta, strict=True))]
    gap = max(float((a - b).abs().max()) for a, b in zip(corrections(means[0].float(), task), wanted, strict=True))  # type: ignore[union-attr]
    assert gap > 1e-5


def test_fedex_lora_averages_both_matrices_as_fedavg() -> None:
    """In the first round, before a residual differs; and to other methods residuals are columns that nothing moves."""
    rows = []
    for method in (FedExLoRA(ALL), FedAvg(ALL)):
        with by_hand(method, model=RESIDUAL) as loop:
            loop.round()
            rows.append(server(loop))
            residual = [matrix(rows[-1], one.R) for one in adapters_of("test", loop.task, residual=True) if one.R]
            assert any(bool(r.any()) for r in residual) == isinstance(method, FedExLoRA)
            for r in residual:
                r.zero_()
    close(rows[0], rows[1])


def test_flora_begins_every_round_with_new_adapters() -> None:
    with by_hand(FLoRA(ALL), model=RESIDUAL) as loop:
        starts = [server(loop)]
        for _ in range(2):
            loop.round()
            starts.append(server(loop))
        for adapter in adapters_of("test", loop.task, residual=True):
            assert not any(bool(matrix(w, adapter.B).any()) for w in starts)
            close(matrix(starts[2], adapter.A), matrix(loop.task.init(SEED, 2), adapter.A))
            assert not torch.equal(matrix(starts[1], adapter.A), matrix(starts[2], adapter.A))


def test_hetlora_by_hand() -> None:
    """Norms of B A weigh adapters and head, and ranks that a client lacks are zeros."""
    with by_hand(HetLoRA(ALL, ranks="2,1"), model=adapted_model) as loop:
        task, w = loop.task, server(loop)
        rank = [(2, 1)[level] for level in loop.server.level.tolist()]
        adapters = adapters_of("test", task, residual=False)
        for _ in range(2):
            rows, norms = [], []
            for m in range(3):
                still = torch.zeros(len(w), dtype=torch.bool)
                for adapter in adapters:
                    matrix(still, adapter.A)[rank[m] :] = True
                    matrix(still, adapter.B)[:, rank[m] :] = True
                row = trained(loop, m, torch.where(still, 0.0, w), 1, still)
                rows.append(row)
                norms.append(sum(part.square().sum() for part in corrections(row, task)) ** 0.5)
            w = sum(n / sum(norms) * row for n, row in zip(norms, rows, strict=True)).float()  # type: ignore[union-attr]
            loop.round()
            close(server(loop), w, 1e-6)


def test_hetlora_with_all_ranks_is_fedavg() -> None:
    rows = []
    for method in (HetLoRA(TWO_STEPS, weights="examples"), FedAvg(TWO_STEPS)):
        with by_hand(method, model=adapted_model, participation=0.67) as loop:
            for _ in range(3):
                loop.round()
            rows.append(server(loop))
    close(rows[0], rows[1])


@pytest.mark.parametrize(
    ("name", "options", "model", "down", "up"),
    [
        ("fedex_lora", {}, RESIDUAL, P, P - R + 1),
        ("flora", {}, RESIDUAL, P, P - R + 1),
        ("hetlora", {}, adapted_model, P - R, P - R),
        ("hetlora", {"ranks": "1"}, adapted_model, (A + B) // 2 + HEAD, (A + B) // 2 + HEAD),
    ],
)
def test_bytes_by_hand(name: str, options: Any, model: Any, down: int, up: int) -> None:
    """Numbers of four bytes; where clients have ranks, a bit for each column says which they have."""
    with by_hand(make_algorithm(name, ALL, options), model=model) as loop:
        report = loop.round()
        marks = 0 if name == "fedex_lora" else -(-loop.task.num_params // 8)
        assert (report.bytes_down, report.bytes_up) == (3 * (4 * down + marks), 3 * (4 * up + marks))


@pytest.mark.parametrize("name", ["fedex_lora", "flora"])
def test_models_without_residuals_are_refused(name: str) -> None:
    with (
        pytest.raises(ConfigError, match=r"needs residuals.*residual=True"),
        by_hand(make_algorithm(name, ALL), model=adapted_model),
    ):
        pass


@pytest.mark.parametrize("ranks", ["3", "0", "1.5", "a"])
def test_ranks_that_the_model_does_not_have_are_refused(ranks: str) -> None:
    with (
        pytest.raises(ConfigError, match="whole numbers from 1 to the model's 2"),
        by_hand(HetLoRA(ALL, ranks=ranks), model=adapted_model),
    ):
        pass


def test_an_adapters_file_refuses_what_it_has_no_place_for(tmp_path: Path) -> None:
    model = RESIDUAL()
    save_adapter(model, tmp_path / "zero")
    for layer in adapted_layers(model).values():
        assert layer.residual is not None
        layer.residual.data += 1
    with pytest.raises(ModelError, match="no place for residuals"):
        save_adapter(model, tmp_path / "more")


@pytest.mark.parametrize("backend", ["rows", "vmap", "batched"])
def test_gradients_leave_residuals_alone_on_every_path(backend: str) -> None:
    task = make_task(RESIDUAL, backend=backend)
    theta = task.init(1)[None] + 0.1
    with by_hand(FedExLoRA(ALL), model=RESIDUAL) as loop:
        data = loop.pool.federation.cohort(torch.tensor([1]), SEED, 1)
        _, batch = next(iter(data.train.batches(ALL)))
        g = task.grad(theta, batch)[0]
    for adapter in adapters_of("test", task, residual=True):
        assert adapter.R is not None
        assert not bool(matrix(g, adapter.R).any())
        assert bool(matrix(g, adapter.A).any())
