"""The road of an update from a client to the server, and the stages along it.

    client:   client_update → [at_client of every stage] → the message
    server:   the messages → [at_server of every stage] → `aggregate` of the rows that are left, or `step` of their mean

A stage is one thing that happens to updates on this road: a codec, a bound on norms, a robust rule, a sum, noise.
Stages come in one order (`ORDER`), in whatever order they are named. A stage that leaves only a mean of the updates
needs a method whose server only averages (`AveragingAlgorithm`), and hands the mean over as `Updates.mean`.

A round is a transaction: a client's new state counts once the server has taken its update. What a stage refuses, or
leaves unused, leaves both sides as they were before the round. Where a stage changes what arrives, the client is told
what the server heard (`Algorithm.heard`), and remembers that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from kinfed.algorithms import AnyAlgorithm, RoundInfo
from kinfed.core import Registry, Tree
from kinfed.data import Moments
from kinfed.errors import ConfigError
from kinfed.privacy import PrivacyBudget, Record

BLOCK = 1 << 20  # values that are sorted, converted or encoded at once
OWN = "own"  # stands for stages of other names, such as a user's
ORDER = ("privacy", "compression", "staleness", "screening", OWN, "secure_sum", "robust", "user_level")


@dataclass
class Updates:
    """Updates of a cohort: rows belong to `ids`, in ascending order, until a stage leaves nothing but their mean."""

    ids: Tensor  # [n] clients whose updates are used
    rows: Any  # Tree [n, ...]; None if no client replied
    nbytes: int  # of all updates sent, the refused ones too
    refused: dict[int, str] = field(default_factory=dict)  # by client, why its update is not used; "": not finite
    mean: Any = None  # Tree: the averaged fields, without the axis of clients; then `rows` are of no use any more
    weight: float = 1.0  # sum of the weights that the mean stands for
    record: Record | None = None  # of private tasks in other processes; None if the loop's own task recorded it
    nbytes_down: int = 0  # of messages to the clients beside what `download` made
    lag: int = 0  # of asynchronous updates: steps of the server since they started
    drift: Tensor | None = None  # [P] of those: the server's model that they started from, less the present one
    note: str = ""  # what a reader must know about this round

    def without(self, reasons: Mapping[int, str]) -> Updates:
        """Leave out the updates in these rows, whose clients are refused for the reason given."""
        if not reasons:
            return self
        ids = self.ids.tolist()
        keep = torch.tensor([row for row in range(len(ids)) if row not in reasons], dtype=torch.int64)
        return replace(
            self, ids=self.ids[keep], rows=self.rows.take(keep) if len(keep) else None,
            refused=self.refused | {ids[row]: reason for row, reason in reasons.items()},
        )  # fmt: skip

    def unused(self, note: str) -> Updates:
        """Use none of them, for a reason that the round's note gives."""
        return replace(self, ids=self.ids[:0], rows=None, note=note)


class SentUpdates(NamedTuple):
    """Updates as they arrive, and what it took."""

    up: Tree
    memory: Moments  # what clients remember of it
    nbytes: int


class Stage:
    """One thing that happens to updates. All methods but one's own may be left as they are."""

    name: ClassVar[str]  # its place in ORDER, and before the names of its tensors in a checkpoint
    refuses: ClassVar[bool] = False  # it may leave an update unused that a client has computed
    remembers: bool = False  # clients keep something for it from one update to the next
    excludes: ClassVar[Mapping[str, str]] = {}  # names of stages that it cannot stand beside, with the reason
    hides_absence: bool = False  # a round without any reply is one like all others

    def check(self, algorithm: AnyAlgorithm, called: int) -> None:
        """Refuse methods, and numbers of clients in a round, that the stage cannot serve."""

    def admitted(self, active: Tensor) -> Tensor:
        """Ids of those among the active clients that may be asked."""
        return active

    def training(self, ids: Tensor) -> AbstractContextManager[Record | None]:
        """Surround the training of these clients; records of other processes are joined to the one that it yields."""
        return nullcontext()

    def evaluating(self) -> AbstractContextManager[Record | None]:
        """Surround an evaluation, in the same way."""
        return nullcontext()

    def at_client(self, up: Tree, memory: Moments, key: Tensor) -> SentUpdates:
        """Change updates [n, ...] of some clients before they are sent. `memory`: what they remembered before, empty
        where nothing has been sent yet; `key` [n]: for draws."""
        return SentUpdates(up, memory, up.nbytes)

    def at_server(self, updates: Updates, round: RoundInfo) -> Updates:
        """Change, leave out or combine the updates of a round."""
        return updates

    def named(self) -> dict[str, Tensor]:
        """Tensors of a checkpoint."""
        return {}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over what `named` gave."""


STAGES: Registry[type[Stage]] = Registry("stage")
for _name, _place, _summary in (
    ("privacy", "stages:ExampleLevel", "a budget for gradients of single examples"),
    ("compression", "compression:Compression", "updates travel as codes"),
    ("staleness", "staleness:Staleness", "late updates count less"),
    ("screening", "screening:Screening", "updates that cannot be used are left out"),
    ("secure_sum", "secure_sum:SecureSum", "the server sees the sum of updates only"),
    ("robust", "robust:RobustAverage", "an average that a few hostile clients cannot move far"),
    ("user_level", "user_level:UserLevel", "noise on the sum of shortened updates hides whole clients"),
):
    STAGES.register(_name, f"kinfed.updates.{_place}", summary=_summary)

AnyStage = TypeVar("AnyStage", bound=Stage)


def by_columns(function: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """function(rows), [n, P] -> [P], a block of columns at a time: no copy of all rows is made."""
    width = max(1, BLOCK // max(len(rows), 1))
    return torch.cat([function(block) for block in torch.split(rows, width, 1)])


class Road(Sequence[Stage]):
    """Stages from the client to the server, in one order. Refuses those that cannot stand side by side."""

    def __init__(self, stages: Iterable[Stage] = ()) -> None:
        place = {name: number for number, name in enumerate(ORDER)}
        self._stages = sorted(stages, key=lambda stage: place.get(stage.name, place[OWN]))
        for stage in self._stages:
            for other in self._stages:
                if other.name in stage.excludes:
                    raise ConfigError(stage.excludes[other.name])

    def __getitem__(self, index: Any) -> Any:
        return self._stages[index]

    def __len__(self) -> int:
        return len(self._stages)

    def find(self, kind: type[AnyStage]) -> AnyStage | None:
        return next((stage for stage in self._stages if isinstance(stage, kind)), None)

    def at_clients(self) -> tuple[Stage, ...]:
        """Stages that change updates before they are sent."""
        return tuple(stage for stage in self._stages if type(stage).at_client is not Stage.at_client)

    @property
    def reads_updates(self) -> bool:
        """True where a stage at the server needs single updates."""
        return any(type(stage).at_server is not Stage.at_server for stage in self._stages)

    def at_server(self, updates: Updates, round: RoundInfo) -> Updates:
        """Send updates through the stages at the server."""
        for stage in self._stages:
            if len(updates.ids) or stage.hides_absence:
                updates = stage.at_server(updates, round)
        return updates


class ExampleLevel(Stage):
    """Keeps a budget of the gradients that a private task takes (kinfed.privacy.budget)."""

    name = "privacy"

    def __init__(self, budget: PrivacyBudget) -> None:
        self.budget = budget

    def admitted(self, active: Tensor) -> Tensor:
        return self.budget.within_budget(active)

    def training(self, ids: Tensor) -> AbstractContextManager[Record]:
        return self.budget.recording(ids)

    def evaluating(self) -> AbstractContextManager[Record]:
        return self.budget.evaluating()

    def named(self) -> dict[str, Tensor]:
        return self.budget.named()

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self.budget.load(tensors)
