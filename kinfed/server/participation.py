"""Settings of participation in a round. Also settings of a run: this file needs no torch."""

from dataclasses import dataclass

from kinfed.core import check_options, option
from kinfed.updates import Sampling


@dataclass(frozen=True)
class Participation:
    """Share of the clients that is active in a round, and failures among them."""

    participation: float = option(1.0, "Share of clients active in a round, in (0, 1].", gt=0, le=1)
    dropout: float = option(0.0, "Chance that an active client never replies.", ge=0, lt=1)
    stragglers: float = option(0.0, "Chance that a client does only part of its work.", ge=0, lt=1)
    sampling: Sampling = option("fixed", "Clients of a round: a fixed number, or each one independently (poisson).")

    def __post_init__(self) -> None:
        check_options(self, "schedule")
