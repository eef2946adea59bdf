"""The promises of user-level privacy and of secure aggregation: their settings, which methods and rounds admit them,
and what rounds of sampled clients cost. kinfed.updates.user_level and secure_sum keep them.

The settings are also those of a run, whose options the command line shows: what needs torch is imported where it is
used.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from kinfed.core import check_options, option
from kinfed.errors import ConfigError

if TYPE_CHECKING:
    from kinfed.algorithms import AnyAlgorithm
    from kinfed.engine import Task

Sampling = Literal["fixed", "poisson"]

NO_ROBUST_RULE = (
    "user-level privacy needs a sum that one client changes by the clipping norm at most, which no robust rule "
    "guarantees; leave out robust (clipping also limits hostile clients) or the user_ settings"
)
LEAST_CLIENTS = 3  # the fewest in a sum that nodes ever agree to: with two, each would know the other's update
NO_SINGLE_UPDATES = (
    "{} judges single updates, and with secure_sum the server sees only their sum; leave out one of the two"
)


@dataclass(frozen=True)
class UserPrivacy:
    """Settings of user-level privacy. Either the noise is given, or the epsilon that it is to be found for."""

    noise: float | None = option(
        None, "User-level privacy of the server's models: noise in units of the clipping norm.",
        ge=0.01, le=1e6, or_zero=True,
    )  # fmt: skip
    epsilon: float | None = option(
        None, "User-level privacy: find the noise for this epsilon instead.", ge=1e-3, le=1e6
    )
    clip: float = option(1.0, "Largest norm of a client's update (default 1).", ge=1e-9, le=1e9)
    delta: float = option(1e-5, "Delta of the user-level epsilon (default 1e-5).", ge=1e-10, lt=1)
    quantile: float | None = option(
        None, "Adaptive clipping: user_clip is the start and follows this quantile of updates' norms.", gt=0, lt=1
    )
    at_nodes: bool = option(
        False, "Nodes add the noise of user-level privacy themselves, inside secure sums: epsilon holds against the "
        "server, too.",
    )  # fmt: skip
    conspirators: int = option(
        0, "With user_at_nodes: this many clients of a sum may tell the server their noise.", ge=0
    )

    def __post_init__(self) -> None:
        if (self.noise is None) == (self.epsilon is None):
            raise ConfigError(
                "user-level privacy takes either a noise (user_noise) or the epsilon to find it for (user_epsilon); "
                + ("got neither" if self.noise is None else f"got both, {self.noise} and {self.epsilon}")
            )
        check_options(self, "user-level privacy")
        if self.at_nodes and self.quantile is not None:
            raise ConfigError(
                "user_quantile counts short updates at the server, and with user_at_nodes the server is not to know "
                "that count; give user_clip alone"
            )
        if self.conspirators and not self.at_nodes:
            raise ConfigError(
                "user_conspirators says whose noise does not count where the nodes add it; set user_at_nodes, too"
            )

    def check_sums(self, secure: SecureSettings | None) -> None:
        """Refuse noise at nodes whose updates the server would see one by one, or that no honest client adds."""
        if not self.at_nodes:
            return
        if secure is None:
            raise ConfigError(
                "user_at_nodes has every node add a share of the noise that only a sum of many makes whole; set "
                "secure_sum, too"
            )
        if self.conspirators >= secure.least:
            raise ConfigError(
                f"of {secure.least} clients in a sum (secure_least) {self.conspirators} are taken for conspirators, "
                "and no client is left that adds noise; raise secure_least or lower user_conspirators"
            )

    def noise_over(self, sampling: ClientSampling, sums: int) -> float:
        """Noise z of every sum: the set one, or the least with which this number of sums keeps to epsilon."""
        if self.noise is not None:
            return self.noise
        assert self.epsilon is not None  # one of the two is given
        return sampling.noise_for(self.epsilon, sums, self.delta)

    def check(self, label: str, algorithm: AnyAlgorithm, task: Task) -> tuple[str, ...]:
        """The fields of updates that get noise. Refuses what would make epsilon untrue, or would break the model."""
        from kinfed.algorithms import changes_data, required_averaging

        averaging = required_averaging(
            algorithm, label, "noise on the sum of updates would not hide a client", "the user_ settings"
        )
        if averaging.noise_drowns:
            raise ConfigError(f"{label} {averaging.noise_drowns}; leave out the method or the user_ settings")
        if changes_data(algorithm):
            raise ConfigError(
                f"{label} has clients share examples before training, which no noise hides; leave out the method or "
                "the user_ settings"
            )
        if bool(algorithm.sent_columns(task)[task.trainable.stop :].any()):
            raise ConfigError(
                f"{label} would average running statistics (of BatchNorm, say): noise makes variances negative; take a "
                "model with GroupNorm or LayerNorm, or fedbn, whose clients keep them"
            )
        return averaging.fields

    def notes(
        self, label: str, algorithm: AnyAlgorithm, num_clients: int, sampling: ClientSampling, task: Task, noise: float
    ) -> Iterator[str]:
        """Sentences before the first round, whose sums have this noise."""
        if not algorithm.sends:
            yield f"{label}: nothing leaves the clients, so user-level privacy has nothing to do"
            return
        if self.noise == 0:
            yield f"{label}: updates are clipped but without noise: there is no user-level privacy, epsilon is infinite"
        if getattr(algorithm, "weights", "examples") == "examples":
            yield f"{label}: user-level privacy weighs all clients the same, whatever their numbers of examples"
        needed, called = algorithm.clients_for_noise(task, noise), sampling.rate * num_clients
        if called < needed:
            yield (
                f"{label}: a round asks {called:.0f} clients, and with noise of {noise:.3g} clipping norms in their "
                f"total what is fitted to it may be worse than the mean of the target; about {needed:,.0f} clients "
                "would do, or fewer rounds, or a larger user_epsilon. user_clip should be near the length of a "
                "client's sums"
            )
        if self.delta * num_clients >= 1:
            yield (
                f"{label}: user_delta {self.delta:g} is not below 1/{num_clients}, so large that even publishing one "
                "client's data at random would count as private; choose a smaller user_delta"
            )
        if self.at_nodes:
            others = f" and up to {self.conspirators} clients that conspire with it" if self.conspirators else ""
            yield (
                f"{label}: nodes add the noise themselves; epsilon holds against the server{others}, and says what a "
                "client's data change, not whether it takes part"
            )
        elif sampling.replaces:
            yield (
                f"{label}: rounds call a fixed number of clients, which is accounted with neighbours that differ in "
                "one client's data; sampling = poisson gives about the same epsilon with half of the noise"
            )


@dataclass(frozen=True)
class ClientSampling:
    """How the clients of a round are chosen, as far as epsilon depends on it."""

    scheme: Sampling
    rate: float  # chance of every client to be called; 1 where everybody may see who was

    @property
    def replaces(self) -> bool:
        """Whether neighbours differ in one client's data. Otherwise in one client more or less: where all are called,
        a fixed number is no sample, and what one of them adds is all that its absence changes."""
        return self.scheme == "fixed" and self.rate < 1

    @property
    def neighbours(self) -> str:
        return "replace one client" if self.replaces else "add or remove one client"

    def epsilon(self, noise: float, rounds: int, delta: float) -> float:
        from kinfed.privacy import Event, epsilon, fixed_size_epsilon

        if self.replaces:
            return fixed_size_epsilon(self.rate, rounds, noise, delta)
        return epsilon((Event(self.rate, 1, rounds),) if rounds else (), noise, delta)

    def renyi_epsilon(self, noise: float, rounds: int, delta: float) -> float:
        """Epsilon by Rényi accounting, the looser bound that other libraries report."""
        from kinfed.privacy import Event, fixed_size_renyi_epsilon, renyi_epsilon

        if self.replaces:
            return fixed_size_renyi_epsilon(self.rate, rounds, noise, delta)
        return renyi_epsilon((Event(self.rate, 1, rounds),) if rounds else (), noise, delta)

    def noise_for(self, target: float, rounds: int, delta: float) -> float:
        """The least noise with which no client's epsilon exceeds the target after this many rounds."""
        from kinfed.privacy import Event, fixed_size_noise, noise_for

        if self.replaces:
            return fixed_size_noise(target, self.rate, rounds, delta)
        return noise_for(target, [(Event(self.rate, 1, rounds),)], delta)


@dataclass(frozen=True)
class SecureSettings:
    largest: float = option(1000.0, "Secure aggregation: largest number that an update may hold.", ge=1e-6, le=1e9)
    least: int = option(LEAST_CLIENTS, "Secure aggregation: minimum number of clients in a sum.", ge=LEAST_CLIENTS)

    def __post_init__(self) -> None:
        check_options(self, "secure_sum")

    def averaged_fields(self, label: str, algorithm: AnyAlgorithm) -> tuple[str, ...]:
        """The fields of updates that are added up. Refuses methods whose server does more than to average them."""
        from kinfed.algorithms import required_averaging

        reason = "its server needs single updates, which secure_sum hides"
        return required_averaging(algorithm, label, reason, "secure_sum").fields

    def check_update(self, label: str, algorithm: AnyAlgorithm, fields: Collection[str], called: int) -> None:
        """Refuse updates with fields that are not averaged, and rounds that call too few clients."""
        from kinfed.algorithms import COUNT

        averages = self.averaged_fields(label, algorithm)
        others = sorted({*fields} - {*averages, COUNT})
        if averages and others:
            raise ConfigError(
                f"{label} also sends {', '.join(others)}, which is neither averaged nor a number of examples; leave "
                "out the method or secure_sum"
            )
        if averages and called < self.least:
            raise ConfigError(
                f"secure_sum adds up {self.least} updates at least (secure_least), and {called} client(s) are called "
                "in a round; raise participation"
            )
