"""Settings of secure aggregation, and which methods and rounds admit it.

The settings are also those of a run, whose options the command line shows: what needs torch is imported where it is
used."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kinfed.core import check_options, option
from kinfed.errors import ConfigError

if TYPE_CHECKING:
    from kinfed.algorithms import AnyAlgorithm

LEAST_CLIENTS = 3  # the fewest in a sum that nodes ever agree to: with two, each would know the other's update
NO_SINGLE_UPDATES = (
    "{} judges single updates, and with secure_sum the server sees only their sum; leave out one of the two"
)


@dataclass(frozen=True)
class SecureSettings:
    """Settings of secure aggregation."""

    largest: float = option(1000.0, "Secure aggregation: largest number that an update may hold.", ge=1e-6, le=1e9)
    least: int = option(LEAST_CLIENTS, "Secure aggregation: minimum number of clients in a sum.", ge=LEAST_CLIENTS)

    def __post_init__(self) -> None:
        check_options(self, "secure_sum")

    def averaged_fields(self, label: str, algorithm: AnyAlgorithm) -> tuple[str, ...]:
        """The fields of updates that are added up. Refuses methods whose server does more than to average them."""
        from kinfed.algorithms import required_averaging

        return required_averaging(
            algorithm, label, "its server needs single updates, which secure_sum hides", "secure_sum"
        ).fields

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
