"""What user-level privacy promises: its settings, which methods admit it, and what rounds of sampled clients cost.

The mechanism that keeps the promise is kinfed.updates.user_level.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from kinfed.algorithms import AnyAlgorithm, changes_data, required_averaging
from kinfed.engine import Task
from kinfed.errors import ConfigError
from kinfed.privacy import Event

Sampling = Literal["fixed", "poisson"]

_COMPUTABLE = {
    "noise": (0.01, 1e6), "epsilon": (1e-3, 1e6), "clip": (1e-9, 1e9), "delta": (1e-10, 1.0),
}  # fmt: skip

NO_ROBUST_RULE = (
    "user-level privacy needs a sum that one client changes by the clipping norm at most, which no robust rule "
    "guarantees; leave out robust (clipping also limits hostile clients) or the user_ settings"
)


@dataclass(frozen=True)
class UserPrivacy:
    """What the user asks for. Either the noise is given, or the epsilon that it is to be found for."""

    noise: float | None = None
    """z: standard deviation of the noise in the sum of a round, in units of the clipping norm."""
    epsilon: float | None = None
    """Of the server's models of all rounds together, for every client; the noise is found by the accountant."""
    clip: float = 1.0
    """C: the largest norm of a client's update; longer ones are scaled down to it."""
    delta: float = 1e-5
    """The chance with which epsilon may not hold."""
    quantile: float | None = None
    """γ: the clipping norm begins at `clip` and follows this quantile of the updates' norms; None: it stays."""

    def __post_init__(self) -> None:
        if (self.noise is None) == (self.epsilon is None):
            raise ConfigError(
                "user-level privacy takes either a noise (user_noise) or the epsilon to find it for (user_epsilon); "
                + ("got neither" if self.noise is None else f"got both, {self.noise} and {self.epsilon}")
            )
        for name, (low, high) in _COMPUTABLE.items():
            value = getattr(self, name)
            if value is None or (name == "noise" and value == 0):
                continue
            if not low <= value <= high:
                raise ConfigError(f"user_{name} must lie between {low:g} and {high:g}; got {value:g}")
        if not self.delta < 1:
            raise ConfigError(f"user_delta is a chance in (0, 1), well below one over the clients; got {self.delta}")
        if self.quantile is not None and not 0 < self.quantile < 1:
            raise ConfigError(f"user_quantile is a share of the updates in (0, 1); got {self.quantile}")

    def check(self, label: str, algorithm: AnyAlgorithm, task: Task) -> tuple[str, ...]:
        """The fields of updates that get noise. Refuses what would make epsilon untrue, or would break the model."""
        fields = required_averaging(
            algorithm, label, "noise on the sum of updates would not hide a client", "the user_ settings"
        ).fields
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
        return fields

    def notes(self, label: str, algorithm: AnyAlgorithm, num_clients: int, sampling: ClientSampling) -> Iterator[str]:
        """What a reader of the results must know."""
        if not algorithm.sends:
            yield f"{label}: nothing leaves the clients, so user-level privacy has nothing to do"
            return
        if self.noise == 0:
            yield f"{label}: updates are clipped but without noise: there is no user-level privacy, epsilon is infinite"
        if getattr(algorithm, "weights", "examples") == "examples":
            yield f"{label}: user-level privacy weighs all clients the same, whatever their numbers of examples"
        if self.delta * num_clients >= 1:
            yield (
                f"{label}: user_delta {self.delta:g} is not below 1/{num_clients}, so large that even publishing one "
                "client's data at random would count as private; choose a smaller user_delta"
            )
        if sampling.replaces:
            yield (
                f"{label}: rounds call a fixed number of clients, which is accounted with neighbours that differ in "
                "one client's data; sampling = poisson gives about the same epsilon with half of the noise"
            )


@dataclass(frozen=True)
class ClientSampling:
    """How the clients of a round are chosen, as far as epsilon depends on it."""

    scheme: Sampling
    rate: float  # chance of every client to be called

    @property
    def replaces(self) -> bool:
        """Whether neighbours differ in one client's data. Otherwise in one client more or less: where all are called,
        a fixed number is no sample, and what one of them adds is all that its absence changes."""
        return self.scheme == "fixed" and self.rate < 1

    @property
    def neighbours(self) -> str:
        return "replace one client" if self.replaces else "add or remove one client"

    def epsilon(self, noise: float, rounds: int, delta: float) -> float:
        from kinfed.privacy import epsilon, fixed_size_epsilon

        if self.replaces:
            return fixed_size_epsilon(self.rate, rounds, noise, delta)
        return epsilon((Event(self.rate, 1, rounds),) if rounds else (), noise, delta)

    def renyi_epsilon(self, noise: float, rounds: int, delta: float) -> float:
        from kinfed.privacy import fixed_size_renyi_epsilon, renyi_epsilon

        if self.replaces:
            return fixed_size_renyi_epsilon(self.rate, rounds, noise, delta)
        return renyi_epsilon((Event(self.rate, 1, rounds),) if rounds else (), noise, delta)

    def noise_for(self, target: float, rounds: int, delta: float) -> float:
        """The least noise with which no client's epsilon exceeds the target after so many rounds."""
        from kinfed.privacy import fixed_size_noise, noise_for

        if self.replaces:
            return fixed_size_noise(target, self.rate, rounds, delta)
        return noise_for(target, [(Event(self.rate, 1, rounds),)], delta)
