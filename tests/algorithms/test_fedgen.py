"""FedGen: a round by hand, FedAvg and LG-FedAvg as limits, and a generator whose features the server's head knows."""

from __future__ import annotations

import pytest
import torch
from method_bench import ALL, LR, SIZES, WORKS, by_hand, close, deep, gradient, run, server, weighted
from torch import nn

from kinfed.algorithms.fedavg import FedAvg
from kinfed.algorithms.fedgen import FedGen
from kinfed.algorithms.lgfedavg import LGFedAvg
from kinfed.core import rng
from kinfed.data.examples.batches import LocalTraining
from kinfed.testing import Bench
from kinfed.testing.workbench import SEED, tiny_federation

HEAD = slice(35, 47)  # of the deep model


@pytest.mark.parametrize("training", WORKS.values(), ids=WORKS.keys())
def test_without_generated_features_it_averages(training: LocalTraining) -> None:
    if training.momentum:
        return  # its own steps have none
    ours = run(FedGen(training, alpha=0.0))
    assert torch.equal(ours["server.shared"], run(FedAvg(training))["server.w"])
    ours, theirs = (
        run(FedGen(training, alpha=0.0, share="head", weights="equal")),
        run(LGFedAvg(training, shared_layers=1)),
    )
    assert torch.equal(ours["server.shared"], theirs["server.shared"])
    assert torch.equal(ours["personal models"], theirs["personal models"])


def generated(numbers: torch.Tensor, noise: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Features by a generator with 2 numbers of noise, 5 hidden units, 3 classes and 3 features."""
    inputs = torch.cat([noise, nn.functional.one_hot(y, 3).float()], 1)
    hidden = torch.relu(inputs @ numbers[:25].view(5, 5) + numbers[25:30])
    return hidden @ numbers[30:45].view(5, 3) + numbers[45:]


@pytest.mark.parametrize("share", ["model", "head"])
def test_rounds_by_hand(share: str) -> None:
    """The draws of y and ε are the method's; all else is written out, with torch's own Adam at the server."""
    method = FedGen(ALL, share=share, alpha=0.5, noise=2, hidden=5, server_steps=3, server_lr=0.05)  # type: ignore[arg-type]
    with by_hand(method, model=deep) as loop:
        w = loop.task.init(SEED)
        theta, G = dict.fromkeys(range(3), w), server(loop, "generator").requires_grad_()
        adam, shared = torch.optim.Adam([G], lr=0.05), HEAD if share == "head" else slice(0, 47)
        data = loop.pool.federation
        counts = torch.stack([torch.bincount(data.labels[data.train[m]], minlength=3) for m in range(3)])
        labels = counts.sum(0) / counts.sum()  # p̂

        def draws(key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            u = rng.uniform(rng.fold(key, 0), 100).reshape(-1)
            y = (u[:, None] >= labels.double().cumsum(0)[:2]).sum(1)
            return rng.normal(rng.fold(key, 1), 200).reshape(100, 2).float(), y

        for number in (1, 2):
            for m in range(3):
                theta[m] = theta[m].clone()
                theta[m][shared] = w[shared]
                step = gradient(loop, m, theta[m])
                if number > 1:
                    key = rng.fold(rng.fold(rng.root(SEED, "fedgen"), 2), 0, torch.tensor([m]))
                    noise, y = draws(key)
                    head = theta[m][HEAD].clone().requires_grad_()
                    phi = generated(G.detach(), noise, y)
                    z = phi @ head[:9].view(3, 3).T + head[9:]
                    (slope,) = torch.autograd.grad(0.5 * nn.functional.cross_entropy(z, y), head)
                    step[HEAD] += slope
                theta[m] = theta[m] - LR * step
            w = w.clone()
            w[shared] = weighted([theta[m] for m in range(3)])[shared]
            for k in range(3):
                noise, y = draws(rng.fold(rng.fold(loop.population.key("fedgen"), number - 1), torch.tensor([k])))
                z = generated(G, noise, y) @ w[HEAD][:9].view(3, 3).T + w[HEAD][9:]
                adam.zero_grad()
                nn.functional.cross_entropy(z, y).backward()
                adam.step()
            report = loop.round()
            sent = w[shared].numel()
            assert report.bytes_down == 3 * 4 * (sent + 48 + 3)
            assert report.bytes_up == 3 * 4 * (sent + 3 + 1)
            close(server(loop, "labels"), labels)
            close(server(loop, "shared"), w[shared])
            close(server(loop, "generator"), G.detach(), 1e-5)
    assert sum(SIZES) == int(counts.sum())


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_generator_learns_what_the_head_calls_a_class(seed: int) -> None:
    method = FedGen(LocalTraining(lr=0.1, batch=20, steps=10))
    with Bench(method, federation=tiny_federation()).loop(chunk=None) as loop:
        for _ in range(6):
            loop.round()
        down = loop.algorithm.download(loop.server, torch.tensor([0]))
        y, phi = method.generate(rng.root(seed, "asked")[None], down.generator, down.labels, loop.task.head.inputs)
        said = loop.task.head.logits(down.shared, phi)
        assert float((said.argmax(-1) == y.argmax(-1)).float().mean()) > 0.9
        assert set(y.argmax(-1).unique().tolist()) == {0, 1, 2}


def test_class_shares_are_not_private() -> None:
    assert "shares of classes" in FedGen(ALL).privacy(torch.tensor([4])).impossible  # type: ignore[union-attr]
