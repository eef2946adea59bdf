"""GPFL: rounds by hand with plain modules; FedPer's step where the valve lets features through; the loss of cosines."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from method_bench import ALL, LR, SIZES, accuracy_on, by_hand, close, deep, models, one_body, server, state, weighted
from torch import Tensor, nn

from kinfed.algorithms.fedper import FedPer
from kinfed.algorithms.gpfl import GPFL, Server, ValveLoss, valve_size
from kinfed.algorithms.local import Local
from kinfed.author import Population, Task
from kinfed.data.examples.batches import Batch, LocalTraining
from kinfed.testing.workbench import SEED

HEAD = slice(35, 47)  # of the deep model
R = valve_size(3)


@dataclass(frozen=True)
class OpenValve(GPFL):
    def init_server(self, task: Task, population: Population) -> Server:
        start = super().init_server(task, population)
        return replace(start, valve=torch.zeros_like(start.valve))  # γ = β = 0


def rectified() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 3))


def test_a_step_through_an_open_valve_is_fedpers() -> None:
    found = []
    for method in (OpenValve(ALL, lam=0.0, mu=0.0, guide=False), FedPer(ALL)):
        with by_hand(method, model=rectified) as loop:
            loop.round()
            found.append((server(loop, "shared"), models(loop)[:, :47]))
    close(found[0][0], found[1][0])
    close(found[0][1], found[1][1])


def test_equal_embeddings_say_nothing() -> None:
    """Their part of the loss is log C, whatever the features; with λ, the distance to them as one norm of the batch."""
    phi, y = torch.rand(1, 4, 3), torch.tensor([[0, 1, 2, 0]])
    batch = Batch(phi, y, torch.tensor([[1 / 3, 1 / 3, 1 / 3, 0.0]]), torch.tensor([0]))
    same = torch.ones(1, 3, 3)
    extra = torch.cat([torch.zeros(1, R), same.flatten(1)], 1)
    weight, rows = torch.zeros(1, 3, 3), torch.tensor([0])
    guided = ValveLoss(same, same[:, 0], 0.0, 0.0, True)(phi, weight, None, extra, batch, rows)
    close(guided, torch.tensor([2 * math.log(3)]))
    held = ValveLoss(same, same[:, 0], 0.5, 0.0, False)(phi, weight, None, extra, batch, rows)
    close(held, math.log(3) + 0.5 * (phi[:, :3] - 1).square().sum().sqrt()[None])
    decayed = ValveLoss(same, same[:, 0], 0.0, 0.2, False)(phi, weight, None, extra, batch, rows)
    close(decayed, torch.tensor([math.log(3) + 0.1 * 9]))


def test_rounds_by_hand() -> None:
    """Two of three clients at a time. Bytes are G + R + C d_f down, and one number more up."""
    with by_hand(GPFL(ALL, lam=0.3, mu=0.05), model=deep, participation=0.67) as loop:
        data, start = loop.pool.federation, loop.task.init(SEED)
        body, valve, E = start[:35], server(loop, "valve"), server(loop, "embeddings")
        own: dict[int, Tensor] = {}
        for number in range(1, 4):
            active = loop.schedule.active(SEED, number, 3).tolist()
            sent = []
            for m in active:
                leaves = [t.clone().requires_grad_() for t in (body, own.get(m, start[HEAD]), valve, E)]
                x, y = data.features.gather(data.train[m]), data.labels[data.train[m]]
                grads = torch.autograd.grad(loss_by_hand(leaves, E, x, y), leaves)
                new_body, own[m], new_valve, new_E = (t.detach() - LR * g for t, g in zip(leaves, grads, strict=True))
                sent.append(torch.cat([new_body, new_valve, new_E.flatten()]))
            new = weighted(sent, tuple(SIZES[m] for m in active))
            body, valve, E = new[:35], new[35 : 35 + R], new[35 + R :].view(3, 3)
            report = loop.round()
            assert report.bytes_down == len(active) * 4 * (35 + R + 9)
            assert report.bytes_up == len(active) * 4 * (35 + R + 9 + 1)
            close(server(loop, "shared"), body, 1e-5)
            close(server(loop, "valve"), valve, 1e-5)
            close(server(loop, "embeddings"), E, 1e-5)
            for m, head in own.items():
                close(state(loop, m, "head"), head, 1e-5)
        for m in range(3):
            k = E[data.labels[data.train[m]]].mean(0)
            row = torch.cat([body, own.get(m, start[HEAD]), valve, k, torch.tensor([-2.0])])
            close(models(loop)[m], row, 1e-5)


def loss_by_hand(leaves: list[Tensor], received: Tensor, x: Tensor, y: Tensor) -> Tensor:
    body, head, valve, E = leaves
    hidden = torch.tanh(x.flatten(1) @ body[:16].view(4, 4).T + body[16:20])
    phi = torch.tanh(hidden @ body[20:32].view(3, 4).T + body[32:35])

    def through(k: Tensor) -> Tensor:
        parts = []
        for net in valve.chunk(2):
            inner = torch.relu(k @ net[:9].view(3, 3) + net[9:12])
            parts.append(nn.functional.layer_norm(inner, (3,), net[12:15], net[15:18]))
        return torch.relu(phi * (1 + parts[0]) + parts[1])

    z = through(received[y].mean(0)) @ head[:9].view(3, 3).T + head[9:]
    common = through(received.mean(0))
    cosine = nn.functional.cosine_similarity(common[:, None], E[None], dim=-1)
    decay = 0.025 * (valve.square().sum() + E.square().sum())
    guide = nn.functional.cross_entropy(cosine, y) + 0.3 * (common - received[y]).norm()
    return nn.functional.cross_entropy(z, y) + guide + decay


def test_a_body_is_learnt_together_where_clients_name_classes_their_own_way() -> None:
    work, data = LocalTraining(lr=0.5, batch=12, steps=5), one_body(names=True)
    assert accuracy_on(data, GPFL(work))[0] > accuracy_on(data, Local(work))[0] + 0.08


def test_it_is_not_private() -> None:
    assert GPFL(ALL).privacy(torch.tensor([4])).impossible
