"""What the user asks of secure aggregation, and which methods and rounds can give it.

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
    """What the user asks for."""

    largest: float = option(1000.0, "Secure aggregation: largest number that an update may hold.", ge=1e-6, le=1e9)
    least: int = option(LEAST_CLIENTS, "Secure aggregation: minimum number of clients in a sum.", ge=LEAST_CLIENTS)

    def __post_init__(self) -> None:
        check_options(self, "secure_sum")

    def check_method(self, label: str, algorithm: AnyAlgorithm) -> None:
        """Refuse methods whose server does more with updates than to average them."""
        if isinstance(algorithm.averages, str):
            raise ConfigError(
                f"{label} {algorithm.averages}, so its server needs single updates, which secure_sum hides; leave out "
                "the method or secure_sum"
            )

    def check_update(self, label: str, algorithm: AnyAlgorithm, fields: Collection[str], called: int) -> None:
        """Refuse updates with fields that are not averaged, and rounds that call too few clients."""
        from kinfed.algorithms import COUNT

        averages = algorithm.averages
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

    @staticmethod
    def check_server(robust: object, largest_norm: float) -> None:
        """Refuse what a server that sees only sums cannot do."""
        for name, value in (("robust", robust is not None), ("largest_norm", largest_norm > 0)):
            if value:
                raise ConfigError(NO_SINGLE_UPDATES.format(name))
