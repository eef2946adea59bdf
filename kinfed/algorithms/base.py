"""The contract of a method: what is kept, what travels, and what happens at each end.

An algorithm is a frozen dataclass; its fields are its hyper-parameters. State and messages are trees of tensors
declared at the head of the method's file. One round, for every method and every pool:

    active = call(server, active)                          who is called: the schedule's choice, as a rule
    server = prepare(server, active)                       plan the round (who gets which models, sums over the active)
    down   = download(server, ids)                         rows for any subset of the active clients
    client, up = client_update(task, client, down, data)   at the clients; `client` stays there
    server = aggregate(server, ids, up)                    of those who replied, in ascending order of ids

Evaluation uses `prepare`, `download`, `personalize` on copies and changes nothing.
`download` must act row by row: download(server, ids)[r] equals download(server, ids[r]), so that a pool may ask
for it in chunks and never hold all clients' messages at once.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from kinfed.core.tree import Nothing, Tree
from kinfed.data.batches import LocalTraining
from kinfed.data.federation import Cohort, Federation, Population
from kinfed.engine.task import Task
from kinfed.errors import ConfigError

Server = TypeVar("Server", bound=Tree)
Client = TypeVar("Client", bound=Tree)
Down = TypeVar("Down", bound=Tree)
Up = TypeVar("Up", bound=Tree)


EXAMPLE_COUNT = "the number of training examples of each client"


@dataclass(frozen=True)
class Algorithm(Generic[Server, Client, Down, Up]):
    training: LocalTraining = field(default_factory=LocalTraining)

    needs_validation: ClassVar[bool] = False  # clients need validation examples
    min_clients: ClassVar[int] = 1
    keeps_stragglers: ClassVar[bool] = False  # partial work of slow clients is used instead of dropped
    # A method with steps of its own may have no place for these; it refuses a work that has them.
    takes_momentum: ClassVar[bool] = True
    takes_weight_decay: ClassVar[bool] = True
    symmetric: ClassVar[bool] = True  # renumbering the clients renumbers the results; False where draws go by id
    # Training examples reach what leaves a client through gradients only. Where they do not, noise on gradients hides
    # nothing, and the method is refused under differential privacy; `leaks` says what it is.
    private: ClassVar[bool] = True
    leaks: ClassVar[tuple[str, ...]] = ()  # what leaves a client, computed from its data outside any gradient

    def exchange(self, federation: Federation, clients: Population) -> tuple[Federation, Population]:
        """Before everything else: what clients hold and the server knows, for a method that has examples shared.
        Whoever makes a pool and a loop from a federation gives them what this returns."""
        return federation, clients

    def init_server(self, task: Task, clients: Population) -> Server:
        raise NotImplementedError

    def init_client(self, task: Task, data: Cohort) -> Client:
        return Nothing()  # type: ignore[return-value]

    def call(self, server: Server, active: Tensor) -> Tensor:
        """Ids (ascending) to call this round, for a method with a round that needs others than the schedule chose."""
        return active

    def prepare(self, server: Server, ids: Tensor) -> Server:
        """Called once with all active ids before their downloads; may not change `server` in place."""
        return server

    def download(self, server: Server, ids: Tensor) -> Down:
        raise NotImplementedError

    def client_update(self, task: Task, client: Client, down: Down, data: Cohort) -> tuple[Client, Up]:
        raise NotImplementedError

    def aggregate(self, server: Server, ids: Tensor, up: Up) -> Server:
        raise NotImplementedError

    def averaged(self) -> str:
        """The field of Up that reaches the server's state through its mean over all clients of the round alone, any
        other field being a weight in that mean: a robust average may then take the mean's place (kinfed.server.robust).
        "" where nothing is sent. ConfigError with the reason where more is done with updates than that."""
        raise ConfigError(
            f"{type(self).__name__} does more with clients' updates than to average all of them (it compares them, "
            "groups them or hands them on), so a robust average could not keep its promise; leave out robust or the "
            "method"
        )

    def personalize(self, task: Task, client: Client, down: Down, data: Cohort) -> Tensor:
        """[n, P]: the model each client would deploy now. May use training and validation data, never test.

        Wider rows are mixtures of K models, [n, K (P + 1)] (kinfed.engine.mixture)."""
        raise NotImplementedError

    def adopt(self, task: Task, server: Server, data: Cohort) -> Server:
        """The server as it serves clients who join after the run: what it keeps by client has rows for them at the end,
        as `init_server` makes them (runs.adopt). For a method that must find their place, from their training and
        validation data only, or that cannot serve them (ConfigError with the reason)."""
        return server

    def alternatives(self, task: Task, client: Client, down: Down, data: Cohort) -> dict[str, Tensor]:
        """Other models [n, P] that are reported under the method's name, scored beside the personal ones."""
        return {}

    def global_model(self, server: Server) -> Tensor | None:
        """[P], where the method has one model for all."""
        return None

    def global_models(self, server: Server, ids: Tensor) -> Tensor | None:
        """[n, P]: the server's model for each client (a context or cluster model); evaluated as "global"."""
        w = self.global_model(server)
        return None if w is None else w.expand(len(ids), -1)

    def server_figures(self, server: Server) -> dict[str, Any]:
        """The method's own numbers for the journal: floats, or tensors (written at evaluated rounds only)."""
        return {}

    def client_figures(self, client: Client) -> dict[str, Tensor]:
        """Per-client diagnostics [n], collected with the evaluation."""
        return {}

    def check(self, task: Task, clients: Population) -> None:
        """Refuse settings that cannot work, before anything runs."""
        if clients.num_clients < self.min_clients:
            raise ConfigError(
                f"{type(self).__name__} needs at least {self.min_clients} clients; got {clients.num_clients}"
            )
        for name, taken in (("momentum", self.takes_momentum), ("weight_decay", self.takes_weight_decay)):
            if not taken and getattr(self.training, name):
                raise ConfigError(
                    f"{type(self).__name__}'s local steps are its own, without {name}; "
                    f"got {getattr(self.training, name)}; set it to 0 for this method"
                )

    def leaked(self) -> dict[str, str]:
        """`leaks` and what these options add to them, each with the way to avoid it ("" where there is none)."""
        counts = {EXAMPLE_COUNT: 'weights = "equal"'} if getattr(self, "weights", "equal") == "examples" else {}
        return dict.fromkeys(self.leaks, "") | counts

    def gradients(self, count: Tensor) -> dict[int, Tensor] | None:
        """What a client with `count` [n] training examples computes in a round at most: on how many batches [n] it
        takes k gradients, by k. None: there is no bound. Differential privacy plans with it, and holds it against
        what is really done."""
        return {1: self.training.num_steps(count)}

    def personal_gradients(self, count: Tensor) -> dict[int, Tensor]:
        """The same for `personalize`, whose batches are of a stream of its own."""
        return {}

    def options(self) -> dict[str, Any]:
        """Hyper-parameters as plain values (the journal and reports show them)."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "training"}


def best_fit(task: Task, models: Tensor, data: Cohort) -> Tensor:
    """[n] int64: which of the models [C, P] has the least loss on each client's training examples; of equals the first,
    and a loss that is not finite loses."""
    loss = torch.stack([task.mean_loss(w.expand(len(data), -1), data.train) for w in models], 1)
    return torch.argmin(loss.nan_to_num(nan=torch.inf), 1)


def mean_of(rows: Tensor, weight: Tensor) -> Tensor:
    """sum_m p_m rows[m] with p = weight / sum(weight); accumulated in float64 so that order hardly matters."""
    weight = weight.to(rows.device, torch.float64)
    p = weight / weight.sum()
    out = torch.zeros(rows.shape[1], dtype=torch.float64, device=rows.device)
    # In blocks of a megabyte, which stay in cache: several times as fast as a float64 copy of all rows.
    for some, share in zip(torch.split(rows, 128), torch.split(p, 128), strict=True):
        width = (1 << 17) // max(len(some), 1)
        for block, mean in zip(torch.split(some, width, 1), torch.split(out, width), strict=True):
            mean.addmv_(block.to(torch.float64).T, share)
    return out.to(rows.dtype)
