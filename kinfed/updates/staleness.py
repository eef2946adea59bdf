"""Rules for updates that come late: how many the server waits for, and how much a stale one counts.

An update has staleness s when the server has made s steps since its client got the model. FedBuff (Nguyen, Malik, Zhan,
Yousefpour, Rabbat, Malek, Huba: Federated Learning with Buffered Asynchronous Aggregation, AISTATS 2022, Algorithm 1)
makes a step for every `buffer` updates, FedAsync (Xie, Koyejo, Gupta: Asynchronous Federated Optimization, 2019,
Algorithm 1) for every single one:

    FedBuff     w ← w + Σ_i p_i s(s_i) Δ_i         Δ_i = θ_i − the model that client i started from;  p as the method's
    FedAsync    w ← (1 − α s(s_i)) w + α s(s_i) θ_i

    s(s) = (1 + s)^−a (polynomial, a = ½);  1 for s ≤ b, else 1/(a (s − b) + 1) (hinge, a = 10, b = 4);  1 (constant)

FedBuff's Σ is the method's own average, so that its server optimizer, weights and smoothing stay: with equal weights it
is the paper's η_g/K Σ Δ_i s(s_i). FedAsync's clients take the method's local steps: FedProx has the paper's proximal
term.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from kinfed.algorithms import DELTA, Algorithm, AnyAlgorithm, RoundInfo, averaged_changes
from kinfed.core import Registry, check_options, option
from kinfed.data import Federation, Population
from kinfed.engine import Task
from kinfed.errors import ConfigError
from kinfed.updates.stages import Stage, Updates

POLYNOMIAL_EXPONENT, HINGE_SLOPE = 0.5, 10.0  # a of the two papers


@dataclass(frozen=True)
class Synchronous:
    """Every round waits for all whom it has called."""


@dataclass(frozen=True, kw_only=True)
class StalenessRule:
    """Common parts of both rules. Fields are options."""

    mixes_models: ClassVar[bool] = False  # a client's model is mixed into the server's, not its change added

    staleness: Literal["polynomial", "hinge", "constant"] = option(
        "polynomial", "how the weight falls with staleness s"
    )
    a: float | None = option(
        None, "of polynomial (1 + s)^−a (½ if none is given) or hinge 1/(a (s − b) + 1) (10)", gt=0
    )
    b: float = option(4.0, "of hinge: staleness up to which updates count in full", ge=0)

    def __post_init__(self) -> None:
        check_options(self)
        if self.a is not None and self.staleness == "constant":
            raise ConfigError(
                "a is the rate at which stale updates lose weight, and with constant they do not; leave it out"
            )

    @property
    def size(self) -> int:
        """Updates that a step of the server waits for."""
        return 1

    def weight(self, staleness: Tensor) -> Tensor:
        """float64 [n] of staleness [n]."""
        s = staleness.double()
        if self.staleness == "polynomial":
            return (1 + s) ** -(POLYNOMIAL_EXPONENT if self.a is None else self.a)
        if self.staleness == "hinge":
            slope = HINGE_SLOPE if self.a is None else self.a
            return torch.where(s <= self.b, 1.0, 1 / (slope * (s - self.b).clamp_min(0) + 1))
        return torch.ones_like(s)


@dataclass(frozen=True, kw_only=True)
class FedBuff(StalenessRule):
    buffer: int = option(10, "K: updates that a step of the server waits for", ge=1)

    @property
    def size(self) -> int:
        return self.buffer


@dataclass(frozen=True, kw_only=True)
class FedAsync(StalenessRule):
    mixes_models = True

    mixing: float = option(0.6, "α: the share of a fresh model in the new one", gt=0, le=1)


def shortened_fields(
    label: str, algorithm: AnyAlgorithm, task: Task, data: Federation, population: Population
) -> tuple[str, ...]:
    """The fields of updates that staleness shortens. Refuses methods whose updates cannot be given less weight."""
    if type(algorithm).plan is not Algorithm.plan:
        raise ConfigError(
            f"{label} plans each round for the clients that take part in it, and asynchronous clients come one by one; "
            "leave out the method or --mode"
        )
    changes, reason = averaged_changes(algorithm, task, data, population)
    if reason:
        raise ConfigError(
            f"{label} {reason}, so a stale update cannot be given less weight; leave out the method or --mode"
        )
    return changes


class Staleness(Stage):
    name = "staleness"

    def __init__(self, rule: StalenessRule, changes: tuple[str, ...], update_bytes: int) -> None:
        """`changes`: the fields of updates that staleness shortens; `update_bytes`: of an update, for the clock."""
        self.rule, self.changes, self.update_bytes = rule, changes, update_bytes

    def check(self, algorithm: AnyAlgorithm, called: int) -> None:
        if isinstance(self.rule, FedAsync) and self.changes and self.changes != (DELTA,):
            raise ConfigError(
                f"{type(algorithm).__name__}'s updates hold {', '.join(self.changes)}, and FedAsync mixes whole "
                "models; use --mode fedbuff"
            )

    def at_server(self, updates: Updates, round: RoundInfo) -> Updates:
        weight = float(self.rule.weight(torch.tensor([updates.lag])))
        fields = {name: getattr(updates.rows, name) for name in self.changes}
        if isinstance(self.rule, FedAsync):
            weight *= self.rule.mixing
            if updates.drift is not None:  # θ − w = Δ + (the model that the client started from) − w
                fields = {name: rows + updates.drift for name, rows in fields.items()}
        if weight != 1:
            fields = {name: weight * rows for name, rows in fields.items()}
        return replace(updates, rows=replace(updates.rows, **fields))


MODES: Registry[type[Any]] = Registry("mode")
MODES.register("sync", Synchronous, summary="rounds that wait for all whom they have called")
MODES.register(
    "fedbuff", FedBuff, title="FedBuff", summary="asynchronous: a step for every few updates, stale ones count less",
    reference="Nguyen, Malik, Zhan, Yousefpour, Rabbat, Malek, Huba: Federated Learning with Buffered Asynchronous "
    "Aggregation, AISTATS 2022",
)  # fmt: skip
MODES.register(
    "fedasync", FedAsync, title="FedAsync", summary="asynchronous: every model is mixed in as it comes",
    reference="Xie, Koyejo, Gupta: Asynchronous Federated Optimization, 2019",
)  # fmt: skip
MODES.register("async", FedBuff, title="FedBuff", summary="fedbuff, by a name that is easier to guess")
