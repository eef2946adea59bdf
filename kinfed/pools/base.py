"""The contract of a pool: clients with their data and states, in any process, to whom the server loop sends messages.

Only messages cross it. `download(ids)` makes the server's messages, one row per client, and `server_model(ids)` the
server's models; both act row by row, may be called for any subset of the ids, as often as a pool needs, and run in the
server's process: a pool of clients in other processes calls them there and sends the rows. A client's state stays in
the pool; `states` and `load` carry it to and from a checkpoint and are for nothing else.

A pool decides how clients are reached, and what to do when they are not. It may leave out of a reply clients that did
not answer; the state of such a client stays as it was before the round. A pool whose clients are asked by messages
gives its results in steps (kinfed.pools.steps), so that several runs can ask them together.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from kinfed.engine import Score
from kinfed.pools.steps import Steps
from kinfed.privacy import Record
from kinfed.updates import Updates

Download = Callable[[Tensor], Any]  # ids [n] -> rows of the method's Down
ServerModelOf = Callable[[Tensor], Tensor | None]  # ids [n] -> [n, P]


@dataclass
class Evaluation:
    """Results of every client on one split."""

    ids: Tensor
    personal: Score | None
    server_model: Score | None  # the server's model for the client
    figures: dict[str, Tensor] = field(default_factory=dict)
    models: Tensor | None = None  # [n, P], with `keep_models`; wider rows: kinfed.engine.personal.personal_models
    alternatives: dict[str, Score] = field(default_factory=dict)  # other models that the method reports, by name
    record: Record | None = None  # as in a reply
    took_part: Tensor | None = None  # bool [n]: whose update has come back in some round; filled in by the server loop


class Pool(Protocol):
    def train(
        self, ids: Tensor, download: Download, round: int, effort: Tensor | None = None, *, hold: bool = False,
        only_mean: bool = False,
    ) -> Updates | Steps[Updates]:  # fmt: skip
        """One round at the clients `ids` (ascending, at least one), each doing its `effort` [n] of the work. A client's
        new state is kept only if its update is in the reply and, with `hold`, among those that `commit` names. With
        `only_mean`, the server needs the mean of the updates alone: a pool that spares it the single ones fills in
        `Updates.mean`, with the bits that the server's own average would have."""

    def commit(self, ids: Tensor) -> None:
        """End a round: the server has taken these clients' updates; what others held is forgotten."""

    def evaluate(
        self, ids: Tensor, download: Download, round: int, *, split: str = "test",
        server_model: ServerModelOf | None = None, keep_models: bool = False,
    ) -> Evaluation | Steps[Evaluation]:  # fmt: skip
        """Personal models, and the server's where `server_model` is given, on one split. Changes nothing. A client
        without a state deploys the server's model, if there is one (kinfed.algorithms.base.deployed_models)."""

    def states(self) -> dict[str, Tensor]:
        """States of all clients that have one: "ids" [n], "rows.<field>" [n, ...] of the method's Client, and
        where local optimizers keep their moments, "moments.rows.<loop>.<moment>" [n, ...]."""

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over what `states` gave, in this pool or in another one; what does not fit is a CheckpointError."""

    def close(self) -> None:
        """End threads, processes and connections. May be called twice."""
