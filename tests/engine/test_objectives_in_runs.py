"""Whole runs with objectives beside classes and single numbers, each against a loop of plain torch: what is trained,
evaluated and deployed is the same network, to 1e-6."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import kinfed
from kinfed.data import Federation

CLIENTS, EACH, STEPS, RATE = 2, 10, 4, 0.2
CLIENT = np.arange(CLIENTS * EACH) % CLIENTS
TESTED = np.arange(CLIENTS * EACH) >= CLIENTS * (EACH - 2)
NOTHING = -100
_numbers = np.random.default_rng(5)
X = _numbers.normal(size=(CLIENTS * EACH, 6)).astype("float32")
WORDS = _numbers.integers(1, 9, (CLIENTS * EACH, 7))
WORDS[::3, 5:] = 0  # padding
Loss = Callable[[Tensor, Tensor], Tensor]


def chain(outputs: int) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, outputs))


class SpeaksAsTransformers(nn.Module):
    """A tagger that takes a mask and answers with more than logits, as models of Hugging Face do."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(pad_token_id=0)
        self.words, self.classifier = nn.Embedding(9, 4), nn.Linear(8, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> dict[str, Tensor]:
        h = self.words(input_ids)
        there = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        mean = (h * there[..., None]).sum(-2, keepdim=True) / there.sum(-1)[..., None, None].clamp_min(1)
        return {"logits": self.classifier(torch.cat([h, mean.expand_as(h)], -1)), "last_hidden_state": h}


def plain_tagger(module: nn.Module, x: Tensor) -> Tensor:
    z: Tensor = SpeaksAsTransformers.forward(module, x, (x != 0).long())["logits"]  # type: ignore[arg-type]
    return z


class AbsoluteError(nn.Module):
    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        return (z - y).abs().mean(1)


def focal_by_class(z: Tensor, y: Tensor) -> Tensor:
    p = torch.softmax(z, 1).gather(1, y[:, None])[:, 0]
    return -torch.tensor([1.0, 3.0, 1.0])[y] * (1 - p) ** 2 * p.log()


def dice(z: Tensor, y: Tensor) -> Tensor:
    """Overlap of areas: no sum over positions at all, but one value per example."""
    p, area = torch.softmax(z, 1)[:, 1], (y == 1).float()
    both = (p * area).flatten(1).sum(1)
    return 1 - (2 * both + 1) / (p.flatten(1).sum(1) + area.flatten(1).sum(1) + 1)


def mean_over(known: Tensor, values: Tensor) -> Tensor:
    """[N] means over the places of an example that are known."""
    values, known = torch.where(known, values, 0.0).flatten(1), known.flatten(1)
    return values.sum(1) / known.sum(1).clamp_min(1)


def labels_by_hand(z: Tensor, y: Tensor) -> Tensor:
    known = ~y.isnan()
    return mean_over(known, F.binary_cross_entropy_with_logits(z, torch.where(known, y, 0.0), reduction="none"))


def several_by_hand(z: Tensor, y: Tensor) -> Tensor:
    known = ~y.isnan()
    return mean_over(known, (z - torch.where(known, y, 0.0)).square() / 2)


def positions_by_hand(z: Tensor, y: Tensor) -> Tensor:
    z = z if z.shape[1:-1] == y.shape[1:] else z.movedim(1, -1)
    return mean_over(y != NOTHING, F.cross_entropy(z.movedim(-1, 1), y, ignore_index=NOTHING, reduction="none"))


def with_gaps(values: np.ndarray, gap: float) -> np.ndarray:
    values = values.astype("float64") if np.isnan(gap) else values
    values[1::4, 0] = gap
    return values


def segmenter() -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 1))


def language_model() -> nn.Module:
    return nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 9))


COUNTS = np.exp(X[:, 0]).round()
MEAN_COUNT = float(COUNTS[~TESTED].mean())
AREAS = (X.reshape(-1, 2, 3) > 0).astype("int64")
TAGS = np.where(WORDS == 0, NOTHING, WORDS % 3)
FOLLOWING = np.where(WORDS[:, 1:] == 0, NOTHING, WORDS[:, 1:])
# Examples, targets, what the federation is told, the loss of the run, the same by hand, the network.
CASES: dict[str, tuple[np.ndarray, np.ndarray, dict[str, Any], Any, Loss, Callable[[], nn.Module]]] = {
    "labels with gaps": (X, with_gaps(X[:, :3] > 0, np.nan), {"task": "multilabel"}, "auto", labels_by_hand, chain(3)),
    "several numbers with gaps": (X, with_gaps(X[:, :2] * 3, np.nan), {}, "auto", several_by_hand, chain(2)),
    "counts": (X, COUNTS, {"task": "counts"}, "auto",
               lambda z, y: F.poisson_nll_loss(z[:, 0], y / MEAN_COUNT, reduction="none"), chain(1)),
    "a quantile": (X, X[:, 0] * 2, {}, "quantile:0.9",
                   lambda z, y: torch.maximum(0.9 * (y - z[:, 0]), 0.1 * (z[:, 0] - y)), chain(1)),
    "a focal loss with weights of classes": (X, np.digitize(X[:, 0], [-0.5, 0.5]), {}, focal_by_class, focal_by_class,
                                             chain(3)),
    "reconstruction": (X, X, {"task": "regression"}, AbsoluteError(), AbsoluteError(), chain(6)),
    "segmentation": (X, with_gaps(AREAS.copy(), NOTHING), {"task": "dense", "num_classes": 2}, "auto",
                     positions_by_hand, segmenter),
    "overlap of areas": (X, AREAS, {"task": "dense", "num_classes": 2}, dice, dice, segmenter),
    "next tokens": (WORDS[:, :-1], FOLLOWING, {"task": "dense", "num_classes": 9, "tokens": True}, "auto",
                    positions_by_hand, language_model),
    "tags, by a model of transformers": (WORDS, TAGS, {"task": "dense", "num_classes": 3, "tokens": True}, "auto",
                                         positions_by_hand, SpeaksAsTransformers),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_run_trains_as_plain_torch(name: str) -> None:
    x, y, told, loss, by_hand, model = CASES[name]
    data = Federation.from_arrays(x, y, CLIENT, test_rows=TESTED, **told)
    result = kinfed.run(
        federation=data, model=model, loss=loss, algorithms="local,fedavg", rounds=1, steps=STEPS, batch=100, lr=RATE,
        participation=1.0, seeds=(0,),
    )  # fmt: skip
    start = kinfed.run(
        federation=data, model=model, loss=loss, algorithms="local", rounds=1, steps=1, batch=100, lr=1e-30, seeds=(0,),
        participation=1.0,
    )  # fmt: skip
    forward = plain_tagger if model is SpeaksAsTransformers else lambda module, x: module(x)
    trained, rows_of = [], [data.train[k] for k in range(CLIENTS)]
    for client, rows in enumerate(rows_of):
        plain = model()
        plain.load_state_dict(start.personal_model(client, "local").module.state_dict())
        optimizer = torch.optim.SGD(plain.parameters(), RATE)
        for _ in range(STEPS):
            optimizer.zero_grad()
            by_hand(forward(plain, data.features.gather(rows)), data.targets[rows]).mean().backward()
            optimizer.step()
        trained.append(plain.state_dict())
        ours = result.personal_model(client, "local").module.state_dict()
        for key, value in plain.state_dict().items():
            torch.testing.assert_close(ours[key], value, rtol=1e-6, atol=1e-6)
        if told.get("task") != "counts":  # whose reported loss leaves out what no model changes
            tests = data.test[client]
            with torch.no_grad():
                wanted = by_hand(forward(plain, data.features.gather(tests)), data.targets[tests]).mean()
            lines = result.clients().set_index(["client", "algorithm"])
            reported = lines.loc[(data.names[client], "local"), "personal_loss"]
            assert reported == pytest.approx(float(wanted), abs=1e-4)
    weight = torch.tensor([len(rows) for rows in rows_of], dtype=torch.float64)
    shared = result.server_model("fedavg").module.state_dict()
    for key, value in shared.items():
        both = sum(float(w / weight.sum()) * state[key] for w, state in zip(weight, trained, strict=True))
        torch.testing.assert_close(value, both, rtol=1e-6, atol=1e-6)
