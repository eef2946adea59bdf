"""Private gradients: DP-SGD (Abadi et al., CCS 2016) as a task around any other task.

    ĝ = (1/L) ( Σ_i g_i min(1, c/‖g_i‖) + N(0, σ²c² I) ),     L = q n, the expected size of the sample

g_i is the gradient of example i, the sum runs over a Poisson sample, and L is a constant, unlike the size of the
sample, which would tell who was in it. No example moves the sum by more than c.

Methods need not know: they ask a task for gradients, and get these. Clipped sums are gradients with other weights,
one per example, so no task ever holds a gradient per example and parameter. Whatever a method does with ĝ
afterwards (momentum, proximal terms, averaging, clustering of models) costs no privacy.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kinfed.core import rng
from kinfed.data import Batch, PoissonSample, Split
from kinfed.engine import FeatureLoss, Head, ModuleTask, Score, Task, is_separable, weighing_ones
from kinfed.errors import ConfigError, ModelError
from kinfed.privacy.ledger import Ledger
from kinfed.privacy.noise import Source

TRAINING, EVALUATION = 0, 1


@dataclass
class Record:
    """Requests to a task between two moments: gradients by sample, and whether models were evaluated on examples."""

    phase: int = TRAINING
    calls: dict[int, int] = field(default_factory=dict)  # gradients so far on each sample, by its key
    samples: dict[int, tuple[int, float]] = field(default_factory=dict)  # whose sample it is, and its q
    evaluated_models: bool = False

    def next_index(self, ids: Tensor, draw: PoissonSample) -> Tensor:
        """[n] how many gradients came before this one on each row's sample, which it now counts among them."""
        before = []
        for client, key, q in zip(ids.tolist(), draw.key.tolist(), draw.q.tolist(), strict=True):
            before.append(self.calls.get(key, 0))
            self.calls[key] = before[-1] + 1
            self.samples[key] = (client, q)
        return torch.tensor(before, dtype=torch.int64)

    def join(self, other: Record) -> None:
        """Add what another process recorded at the same time. A sample belongs to one client, a client to one process:
        should both records hold a sample, its gradients were taken twice and add up."""
        for key, gradients in other.calls.items():
            self.calls[key] = self.calls.get(key, 0) + gradients
        self.samples |= other.samples
        self.evaluated_models |= other.evaluated_models

    def ledger(self) -> Ledger:
        ledger = Ledger()
        for key, gradients in self.calls.items():
            ledger.add(*self.samples[key], gradients)
        return ledger


class PrivateTask(Task):
    """`inner`, with gradients clipped to norm `clip` per example and noise of `noise` times that norm in their sum.

    Every gradient goes into a record; `recording` opens it. Threads may train different clients at once."""

    def __init__(self, inner: Task, clip: float, noise: float, source: Source) -> None:
        if not 0 < clip < float("inf"):
            raise ConfigError(f"the clipping norm must be positive and finite; got {clip}")
        if not 0 <= noise < float("inf"):
            raise ConfigError(f"noise is a multiple of the clipping norm, 0 or more; got {noise}")
        if inner.objective.couples:
            raise ConfigError(
                f"loss {inner.objective.name} compares the examples of a batch, so that there is no gradient of a "
                "single one to clip and no privacy to account for; leave loss out, or leave out the dp_ settings"
            )
        if isinstance(inner, ModuleTask) and not inner.has_example_gradients:
            raise ModelError(
                "differential privacy clips every example's own gradient, which models with running statistics "
                "(BatchNorm) or random operations (dropout) do not have; use GroupNorm or LayerNorm in place of "
                "BatchNorm, and leave out dropout"
            )
        self.inner, self.clip, self.noise, self.source = inner, clip, noise, source
        self.num_params, self.slots, self.device = inner.num_params, inner.slots, inner.device
        self.backend, self.classifies, self.objective = inner.backend, inner.classifies, inner.objective
        self.problem, self.metric = inner.problem, inner.metric
        self.one_row_at_a_time = inner.one_row_at_a_time
        self._record: Record | None = None
        self._lock = threading.Lock()
        self._inside = threading.local()

    @contextmanager
    def recording(self, phase: int = TRAINING) -> Iterator[Record]:
        """A record of what is asked inside. There is one at a time: what went into an inner record would be missing
        from the outer one, and epsilon would be too small."""
        record = Record(phase)
        with self._lock:
            if self._record is not None:
                raise RuntimeError("a record of private gradients is open already; close it before another one")
            self._record = record
        try:
            yield record
        finally:
            self._record = None

    def __getstate__(self) -> dict[str, Any]:
        """Tasks travel to other processes; records and locks stay."""
        return {name: value for name, value in self.__dict__.items() if name not in ("_lock", "_record", "_inside")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._record, self._lock, self._inside = None, threading.Lock(), threading.local()

    def init(self, seed: int, number: int = 0) -> Tensor:
        return self.inner.init(seed, number)

    def norm_layers(self) -> tuple[str, ...]:
        return self.inner.norm_layers()

    @property
    def head(self) -> Head:
        return self.inner.head

    def grad(self, theta: Tensor, batch: Batch, feature_loss: FeatureLoss | None = None) -> Tensor:
        draw = batch.sample
        if draw is None:
            raise ConfigError(
                "a private gradient needs a Poisson sample of the client's examples; these were chosen otherwise: use "
                "steps and poisson = true in the method's local work"
            )
        if feature_loss is not None and not is_separable(feature_loss):
            raise ConfigError(
                "the method's loss at features or logits is not declared to be a sum over examples, so one example's "
                "share of a gradient cannot be clipped; if it is such a sum, declare it: separable(feature_loss)"
            )
        name = self._name_gradients(batch.ids, draw)
        self._inside.gradient = True  # what a feature loss asks for goes into gradients that are clipped
        try:
            g = self._clipped(theta, batch, draw, None if feature_loss is None else weighing_ones(feature_loss))
        finally:
            self._inside.gradient = False
        if self.noise:
            scale = (self.noise * self.clip / draw.expected).to(theta.device, theta.dtype)
            g.addcmul_(self.source(name, theta), scale[:, None])
        return g

    def _name_gradients(self, ids: Tensor, draw: PoissonSample) -> Tensor:
        """The names of these gradients; from now on they count."""
        if self._record is None:
            raise RuntimeError("no record of private gradients is kept here; ask for them inside `recording()`")
        with self._lock:
            index = self._record.next_index(ids, draw)
        return rng.fold(draw.key, self._record.phase, index)

    def _clipped(self, theta: Tensor, batch: Batch, draw: PoissonSample, feature_loss: FeatureLoss | None) -> Tensor:
        """(1/L) Σ_i g_i min(1, c/‖g_i‖). An example whose gradient is not finite counts as one with gradient 0.

        g_i is the gradient of the example's loss times what a method makes it weigh: weights are usually 1/L."""
        weight = batch.weight * draw.expected[:, None].to(batch.weight)
        norm = self.inner.example_norms(theta, batch, feature_loss) * weight
        finite = torch.isfinite(norm)
        factor = torch.where(finite, (self.clip / norm.clamp_min(torch.finfo(norm.dtype).tiny)).clamp_max(1.0), 0.0)
        batch = replace(batch, weight=batch.weight * factor)
        if bool(finite.all()):
            return self.inner.grad(theta, batch, feature_loss)
        # 0 times a gradient that is not finite is not 0: other examples of the row take the places of such ones.
        column = torch.arange(norm.shape[1], device=norm.device).expand_as(norm)
        usable = torch.where(finite, column, finite.to(torch.int64).argmax(1, keepdim=True))
        row = torch.arange(len(norm), device=norm.device)[:, None]
        g = self.inner.grad(theta, replace(batch, x=batch.x[row, usable], y=batch.y[row, usable]), feature_loss)
        return torch.where(finite.any(1, keepdim=True), g, 0.0)

    def logits(self, theta: Tensor, x: Tensor) -> Tensor:
        self._note_evaluation()
        return self.inner.logits(theta, x)

    def features_and_logits(self, theta: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        self._note_evaluation()
        return self.inner.features_and_logits(theta, x)

    def losses(self, theta: Tensor, batch: Batch) -> Tensor:
        self._note_evaluation()
        return self.inner.losses(theta, batch)

    def score(self, theta: Tensor, part: Split) -> Score:
        self._note_evaluation()
        return self.inner.score(theta, part)

    def scores_alone(self, theta: Tensor, part: Split) -> bool:
        return False  # every evaluation is recorded, so that none is left out

    def evaluate(self, theta: Tensor, part: Split) -> Score:
        self._note_evaluation()
        return self.inner.evaluate(theta, part)

    def _note_evaluation(self) -> None:
        if self._record is not None and not getattr(self._inside, "gradient", False):
            self._record.evaluated_models = True


@contextmanager
def recorded(task: Task, phase: int) -> Iterator[Record | None]:
    """The record of a private task, in a place of its own such as another process; None for any other task."""
    if not isinstance(task, PrivateTask):
        yield None
        return
    with task.recording(phase) as record:
        yield record
