"""The round at which every client, and the server, would have stopped, by validation rows alone.

After every due evaluation the models are also scored on validation rows, by the headline metric and, where that is
equal, by the loss. A client that has not become better in `patience` such evaluations has stopped, at the round of its
best: a client by its personal model on its own rows, the server by its model on the rows of all. What the model of that
round did on test rows is kept from the evaluation of that round, and nothing is chosen by it.

A client that has stopped goes on training for the others; the model that it would deploy is an earlier one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from kinfed.algorithms import ServerModels
from kinfed.core import Tree
from kinfed.engine import Metric, Score
from kinfed.errors import ConfigError
from kinfed.pools import Evaluation

STOPPED, SERVER_STOPPED = "early_stopped", "server_early_stopped"  # scored beside the models of the last round
LAST, SERVER_LAST = "last_round", "server_last_round"  # and the other way round
PREFIX = "early_stopping."  # of tensors in a checkpoint


@dataclass
class Best(Tree):
    """One entry for every evaluated client; of the server's model the first four are the same for all."""

    round: Tensor  # [n] int64
    value: Tensor  # [n] float64, the greater the better; NaN where it is undefined, -inf of a model that has diverged
    loss: Tensor  # [n] float64; NaN without validation rows, inf of a model that has diverged
    waited: Tensor  # [n] int64: evaluations since
    correct: Tensor  # [n] on test rows, as all that follows
    test_loss: Tensor  # [n]
    count: Tensor  # [n]
    sums: Tensor  # [n, M, 2] by metric
    models: Tensor | None  # [n, P]

    def after(self, now: Best, patience: int) -> Best:
        """The best so far, after models that are `now`."""
        unknown = now.loss.isnan()  # without validation rows the last evaluation counts
        equal = (now.value == self.value) | (now.value.isnan() & self.value.isnan())
        better = unknown | (now.value > self.value) | (equal & (now.loss < self.loss))
        better &= self.waited < patience
        if self.models is not None and now.models is not None and self.models.shape != now.models.shape:
            raise ConfigError(
                f"stopped_models keeps models of several rounds side by side, and they have {self.models.shape[1]} and "
                f"{now.models.shape[1]} numbers; leave it out for this method"
            )
        waited = replace(self, waited=self.waited + 1)
        changed = {
            name: torch.where(better.view(-1, *(1 for _ in new.shape[1:])), new, waited.named()[name])
            for name, new in now.named().items()
        }
        return Best(**{one.name: changed.get(one.name) for one in fields(Best)})  # type: ignore[arg-type]


@dataclass
class EarlyStopping:
    patience: int  # evaluations
    metric: Metric
    keeps_models: bool = False  # whether results are those of the rounds where clients and the server stopped
    clients: Best | None = None
    server: Best | None = None
    server_models: ServerModels | None = None  # of the round where the server stopped, with `keeps_models`
    names: tuple[str, ...] = ()  # of metrics

    def look(self, round: int, validation: Evaluation, test: Evaluation, models: ServerModels | None) -> None:
        """After a round, scored on both."""
        if validation.personal is not None and test.personal is not None:
            models_now = test.models if self.keeps_models else None
            now = self._now(round, validation.personal, test.personal, models_now)
            self.clients = now if self.clients is None else self.clients.after(now, self.patience)
        if validation.server_model is not None and test.server_model is not None:
            whole = validation.server_model
            correct, loss, count = (part.sum(0, keepdim=True) for part in (whole.correct, whole.loss, whole.count))
            one = Score(correct, loss, count, {name: sums.sum(0, keepdim=True) for name, sums in whole.sums.items()})
            now = self._now(round, one, test.server_model, None)
            before = self.server
            self.server = now if before is None else before.after(now, self.patience)
            if self.keeps_models and (before is None or int(self.server.round[0]) == round):
                self.server_models = models

    def _now(self, round: int, validation: Score, test: Score, models: Tensor | None) -> Best:
        n = len(test.count)
        value = validation.metric(self.metric.name).to(torch.float64)
        value = (value if self.metric.higher_is_better else -value).expand(n)
        loss = (validation.loss / validation.count).expand(n)
        has_diverged = loss.isnan() & (validation.count > 0)  # worse than any model; without rows nothing is known
        value = torch.where(has_diverged, -torch.inf, value)
        loss = torch.where(has_diverged, torch.inf, loss)
        self.names = tuple(test.sums)
        sums = [test.sums[name] for name in self.names]
        return Best(
            torch.full((n,), round), value, loss, torch.zeros(n, dtype=torch.int64),
            test.correct, test.loss, test.count,
            torch.stack(sums, 1) if sums else torch.zeros(n, 0, 2, dtype=torch.float64), models,
        )  # fmt: skip

    @property
    def all_stopped(self) -> bool:
        """Whether no result can change any more."""
        known = [one for one in (self.clients, self.server) if one is not None]
        return bool(known) and all(bool((one.waited >= self.patience).all()) for one in known)

    def figures(self) -> dict[str, int]:
        """How many clients have stopped so far, and the server's round if it has."""
        stopped = {} if self.clients is None else {"clients": int((self.clients.waited >= self.patience).sum())}
        if self.server is not None and int(self.server.waited[0]) >= self.patience:
            stopped["server_round"] = int(self.server.round[0])
        return stopped

    def applied(self, evaluation: Evaluation) -> Evaluation:
        """The evaluation of the last round with the models of the rounds where clients and server stopped: beside the
        last ones, or in their place."""
        personal, server = self._score(self.clients), self._score(self.server)
        names = (LAST, SERVER_LAST) if self.keeps_models else (STOPPED, SERVER_STOPPED)
        beside = (evaluation.personal, evaluation.server_model) if self.keeps_models else (personal, server)
        more = {name: one for name, one in zip(names, beside, strict=True) if one is not None}
        evaluation = replace(evaluation, alternatives=evaluation.alternatives | more)
        if not self.keeps_models:
            return evaluation
        models = evaluation.models if self.clients is None or self.clients.models is None else self.clients.models
        return replace(
            evaluation, personal=personal or evaluation.personal, server_model=server or evaluation.server_model,
            models=models,
        )  # fmt: skip

    def _score(self, best: Best | None) -> Score | None:
        if best is None:
            return None
        sums = dict(zip(self.names, best.sums.unbind(1), strict=True))
        return Score(best.correct, best.test_loss, best.count, sums)

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint keeps."""
        parts = {"clients": self.clients, "server": self.server}
        state = {
            f"{PREFIX}{kind}.{name}": t for kind, best in parts.items() if best for name, t in best.named().items()
        }
        if self.server_models is not None:
            state[f"{PREFIX}models"] = self.server_models.models
            if self.server_models.assignment is not None:
                state[f"{PREFIX}assignment"] = self.server_models.assignment
        return state

    def load(self, tensors: Mapping[str, Tensor], names: tuple[str, ...]) -> None:
        """Take over what `tensors` gave, with the names of metrics."""
        own = {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items() if name.startswith(PREFIX)}
        parts = {
            kind: {name.removeprefix(f"{kind}."): t for name, t in own.items() if name.startswith(f"{kind}.")}
            for kind in ("clients", "server")
        }
        best: list[Any] = [{"models": None} | part if part else None for part in parts.values()]
        self.clients, self.server = (None if one is None else Best(**one) for one in best)
        self.server_models = ServerModels(own["models"], own.get("assignment")) if "models" in own else None
        self.names = names
