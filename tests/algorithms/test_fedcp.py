"""FedCP: the gate, the discrepancy of features and a round by hand; FedPer where the gate is open on one side."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from method_bench import ALL, LR, SIZES, TWO_STEPS, by_hand, close, deep, models, run, server, state, weighted
from torch import Tensor, nn

from kinfed.algorithms.fedcp import KERNELS, FeatureGate, FedCP, Server, gate_noise, mean_discrepancy, policy_size
from kinfed.algorithms.fedper import FedPer
from kinfed.author import Population, Task
from kinfed.data.examples.batches import Batch, LocalTraining
from kinfed.testing import Bench, tiny_federation
from kinfed.testing.workbench import SEED

HEAD = slice(35, 47)  # of the deep model
R = policy_size(3)


@dataclass(frozen=True)
class OpenGate(FedCP):
    """r = 1: the gate's norm has scale 0, and a shift to the personal side that no noise overcomes."""

    def init_server(self, task: Task, population: Population) -> Server:
        start = super().init_server(task, population)
        policy = torch.zeros_like(start.policy)
        width = task.head.inputs
        policy[-2 * width : -width] = 200.0
        return replace(start, policy=policy)


def without_bias() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3, bias=False))


def test_with_an_open_gate_it_is_fedper() -> None:
    training = LocalTraining(batch=5, steps=4, momentum=0.9)
    found = []
    for method in (OpenGate(training, lam=0.0), FedPer(training)):
        with by_hand(method, model=without_bias) as loop:
            for _ in range(4):
                loop.round()
            found.append(models(loop)[:, :32])
    close(found[0], found[1])


def test_half_a_gate_and_equal_heads_are_one_head() -> None:
    """ψ = 0: r = s = 1/2, and z is Wφ + 2b."""
    phi, weight, bias = torch.randn(2, 5, 3), torch.randn(2, 4, 3), torch.randn(2, 4)
    extra = torch.cat([weight.flatten(1), bias, torch.zeros(2, R)], 1)
    z = FeatureGate().logits(phi, weight, bias, extra)
    close(z, torch.bmm(phi, weight.mT) + 2 * bias[:, None], 1e-5)


def test_discrepancies_by_hand() -> None:
    x = torch.randn(2, 4, 3)
    weight = torch.tensor([[0.25] * 4, [0.5, 0.5, 0.0, 0.0]])
    close(mean_discrepancy(x, x, weight), torch.zeros(2))
    one, other = torch.zeros(1, 1, 1), torch.full((1, 1, 1), 3.0)
    apart = 2 * len(KERNELS) - 2 * sum(math.exp(-9 / (2 * a)) for a in KERNELS)
    close(mean_discrepancy(one, other, torch.ones(1, 1)), torch.tensor([apart]), 1e-5)
    padded = x.clone()
    padded[1, 2:] = 99.0  # weight 0
    y = torch.randn(2, 4, 3)
    close(mean_discrepancy(x, y, weight)[1], mean_discrepancy(padded, y, weight)[1])


def test_rounds_by_hand() -> None:
    """Plain modules and autograd; two of three clients at a time. Bytes are d + R down, d + R + 1 up."""
    with by_hand(FedCP(TWO_STEPS, lam=2.0, tau=0.7), model=deep, participation=0.67) as loop:
        data, w, policy = loop.pool.federation, loop.task.init(SEED), server(loop, "policy")
        own: dict[int, Tensor] = {}
        for number in range(1, 4):
            active = loop.schedule.active(SEED, number, 3).tolist()
            sent = []
            for m in active:
                start = own.get(m, w[HEAD])
                values = [w[:35], start, policy]
                for _, batch in data.cohort(torch.tensor([m]), SEED, number).train.batches(TWO_STEPS):
                    leaves = [t.clone().requires_grad_() for t in values]
                    grads = torch.autograd.grad(loss_by_hand(leaves, start, w, batch), leaves)
                    values = [t.detach() - LR * g for t, g in zip(leaves, grads, strict=True)]
                body, head, psi = values
                own[m] = head
                sent.append(torch.cat([body, (head + w[HEAD]) / 2, psi]))
            new = weighted(sent, tuple(SIZES[m] for m in active))
            w, policy = new[:47], new[47:]
            report = loop.round()
            assert report.bytes_down == len(active) * 4 * (47 + R)
            assert report.bytes_up == len(active) * 4 * (47 + R + 1)
            close(server(loop), w, 1e-5)
            close(server(loop, "policy"), policy, 1e-5)
            for m, head in own.items():
                close(state(loop, m, "head"), head, 1e-5)
        rows = models(loop)
        for m in range(3):
            close(rows[m], torch.cat([w[:35], own.get(m, w[HEAD]), w[HEAD], policy, torch.tensor([-1.0])]), 1e-5)


def loss_by_hand(leaves: list[Tensor], begin: Tensor, w: Tensor, batch: Batch) -> Tensor:
    body, head, policy = leaves
    x, y = batch.x[0], batch.y[0]

    def features(row: Tensor) -> Tensor:
        a = torch.tanh(x.flatten(1) @ row[:16].view(4, 4).T + row[16:20])
        return torch.tanh(a @ row[20:32].view(3, 4).T + row[32:35])

    phi, before = features(body), features(w[:35])
    W = head[:9].view(3, 3)
    start = begin[:9].view(3, 3).sum(0)
    hidden = (phi * (start / start.norm())) @ policy[:18].view(3, 6) + policy[18:24]
    normal = nn.functional.layer_norm(hidden, (6,), policy[24:30], policy[30:36]).relu()
    gumbel = gate_noise(batch, 3)[0].float()
    pair = torch.stack([normal[:, :3] + gumbel, normal[:, 3:]]) / 0.7
    r, s = torch.softmax(pair, 0)
    z = (phi * r) @ W.T + head[9:] + (phi * s) @ w[35:44].view(3, 3).T + w[44:47]
    kernel = lambda a, b: sum(torch.exp(-((a[:, None] - b) ** 2).sum(-1) / (2 * k)) for k in KERNELS)  # noqa: E731
    apart = (kernel(phi, phi) + kernel(before, before) - 2 * kernel(phi, before)).mean()
    return nn.functional.cross_entropy(z, y) + 2.0 * apart


def test_noise_is_of_the_client_the_step_and_the_example() -> None:
    data = tiny_federation().cohort(torch.arange(6), SEED, 1).train
    batches = [batch for _, batch in data.batches(LocalTraining(batch=4, steps=2))]
    first, second = (gate_noise(batch, 5) for batch in batches)
    assert torch.equal(first, gate_noise(batches[0], 5))
    assert len({float(value) for value in torch.cat([first[1:3].flatten(), second[1:3].flatten()])}) == 80
    alone = next(iter(data.take(torch.tensor([2])).batches(LocalTraining(batch=4, steps=1))))[1]
    assert torch.equal(gate_noise(alone, 5)[0], first[2])


def test_heads_of_ones_own_solve_what_one_head_cannot() -> None:
    """Half of the clients call the classes by other names."""
    data = tiny_federation((30,) * 4)
    labels = data.labels.clone()
    for m in (2, 3):
        for rows in (data.train[m], data.test[m]):
            labels[rows] = (labels[rows] + 1) % 3
    bench = Bench(FedCP(LocalTraining(lr=0.2, batch=10, steps=20), lam=0.5), federation=replace(data, labels=labels))
    with bench.loop() as loop:
        for _ in range(8):
            loop.round()
        evaluation = loop.evaluate()
    assert evaluation.personal is not None
    assert evaluation.server_model is not None
    personal, common = (float(s.correct.sum() / s.count.sum()) for s in (evaluation.personal, evaluation.server_model))
    assert personal > 0.85
    assert personal > common + 0.2


def test_chunks_and_steps_leave_states_alike() -> None:
    """Clients with unequal numbers of steps, first seen at different times."""
    found = run(FedCP(LocalTraining(batch=3, steps=None, epochs=2)), rounds=3)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in found.values())


def test_it_is_not_private() -> None:
    assert FedCP(ALL).privacy(torch.tensor([4])).impossible
