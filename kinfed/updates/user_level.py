"""User-level privacy at the server: nobody can tell from its models whether a client took part at all.

McMahan, Ramage, Talwar, Zhang: Learning Differentially Private Recurrent Language Models, ICLR 2018; the clipping norm
by Andrew, Thakkar, McMahan, Ramaswamy: Differentially Private Learning with Adaptive Clipping, NeurIPS 2021.

    Δ̃ = (1/E) ( Σ_m Δ_m min(1, C/‖Δ_m‖) + N(0, σ²C² I) )

Δ_m is all that client m's update brings into the average, as one vector; the sum runs over the clients that replied,
and E is the number that the schedule expects, a constant: the number that came would tell who did. All clients weigh
the same. With a `quantile` γ the norm C follows that quantile of ‖Δ_m‖, by a noisy count of the updates within C:

    b̃ = ½ + (1/E) ( Σ_m (1[‖Δ_m‖ ≤ C] − ½) + N(0, σ_b²) ),     C ← C exp(−0.2 (b̃ − γ))

The sum has noise (z⁻² − (2σ_b)⁻²)^−½ then, so that sum and count together cost what one sum with noise z does.

Methods need not know: their `step` gets Δ̃ in place of the clients' mean. The server sees all updates and
is trusted; whoever sees only its models is not. What never leaves a client needs no noise and is not covered. With
secure aggregation clients shorten their updates themselves and the server sees Σ alone, still without noise: it is
trusted to add it, and with a sum instead of single updates. Rounding may lengthen an update by h√P/2, with h = 2^−40 C
for up to four million clients: of no account beside the noise.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from kinfed.algorithms import RoundInfo, averaged_rows, mean_from_row
from kinfed.core import Tree, rng, storage
from kinfed.errors import CheckpointError, StorageError
from kinfed.privacy import Source
from kinfed.updates.promises import NO_ROBUST_RULE, ClientSampling, UserPrivacy
from kinfed.updates.secure_sum import FixedPoint
from kinfed.updates.stages import Stage, Updates, by_columns

_FORMAT = "kinfed-sums-1"  # of a ledger
CLIP_RATE = 0.2  # of the clipping norm's step towards the quantile, as Andrew et al. choose it
COUNT_SHARE = 20.0  # the count of updates within the norm has noise of a 20th of the expected clients, as theirs


@dataclass(frozen=True)
class SumLedger:
    """<out>/sums.json of a real server: how many noisy sums of a run were released, counted before each is used."""

    path: Path
    run: str

    def read(self) -> int:
        if not self.path.exists():
            return 0
        record = storage.read_json(self.path, "the number of released sums")
        count = record.get("sums")
        if record.get("format") != _FORMAT or record.get("run") != self.run or type(count) is not int or count < 0:
            raise StorageError(
                f"{self.path} is damaged, or another run's. Restore it from a copy: without it nobody knows how much "
                "of epsilon is spent"
            )
        return count

    def enter(self, count: int) -> None:
        storage.write_json(self.path, {"format": _FORMAT, "run": self.run, "sums": count}, private=True)


class UserLevel(Stage):
    """Clips, adds up and noises the updates of every round of one method under one seed, and counts the rounds."""

    name = "user_level"
    excludes: ClassVar[Mapping[str, str]] = {"robust": NO_ROBUST_RULE}
    hides_absence = True

    def __init__(
        self, privacy: UserPrivacy, template: Tree, averages: tuple[str, ...], source: Source, sampling: ClientSampling,
        expected: float, rounds: range, *, summands: int | None = None, books: SumLedger | None = None,
    ) -> None:  # fmt: skip
        """`template`: an update [1, ...] of the method; `expected`: E; `rounds`: those that the run will have; the ones
        before them (a warm start) have been as private as these and count. `summands`: the most clients of a round,
        where they shorten updates themselves and the server sees only the sum (kinfed.updates.secure_sum). `books`: the
        ledger of a real server, whose rounds a crash may repeat with other noise; it comes before checkpoints."""
        self.delta, self.quantile, self.sampling, self.expected = privacy.delta, privacy.quantile, sampling, expected
        self.clip = privacy.clip
        if privacy.noise is not None:
            self.noise = privacy.noise
        else:
            assert privacy.epsilon is not None  # one of the two is given
            self.noise = sampling.noise_for(privacy.epsilon, rounds.stop - 1, privacy.delta)
        self.spent = max(rounds.start - 1, 0 if books is None else books.read())  # sums that have been released
        self._template, self._averages, self._source = template, averages, source
        self._summands, self._books = summands, books
        self._before = rounds.start - 1  # rounds of a warm start

    @property
    def count_noise(self) -> float:
        """σ_b; as far above z/2 as is needed to leave most of the budget to the sum."""
        return max(self.expected / COUNT_SHARE, self.noise)

    @property
    def sum_noise(self) -> float:
        """Noise of the sum of updates, in units of the clipping norm."""
        if self.quantile is None or not self.noise:
            return self.noise
        return 1 / math.sqrt(self.noise**-2 - (2 * self.count_noise) ** -2)

    def at_server(self, updates: Updates, round: RoundInfo) -> Updates:
        """Leave Δ̃, also where no client replied, which is not to be seen either."""
        number = round.number + self._before
        if updates.mean is None:
            mean = self.mean(updates.rows if len(updates.ids) else None, number)
        else:  # of updates that the clients have shortened themselves, from their secure sum
            parts = [getattr(updates.mean, name).flatten().to("cpu", torch.float64) for name in self._averages]
            mean = self._released(len(updates.ids) * torch.cat(parts)[None], number)
        return replace(updates, mean=mean if self._averages else None, weight=self.expected)

    def mean(self, up: Tree | None, round: int) -> Tree:
        """Δ̃, from the updates of the round (None: no client replied)."""
        rows = [self._flat(name, up) for name in self._averages]
        if not rows:
            return self._released(torch.zeros(1, 0), round)
        norm = torch.stack([torch.linalg.vector_norm(part, dim=1, dtype=torch.float64) for part in rows]).norm(dim=0)
        usable = torch.isfinite(norm).nonzero().squeeze(1)
        rows, norm = [part[usable] for part in rows] if len(usable) < len(norm) else rows, norm[usable]
        factor = (self.clip / norm.clamp_min(self.clip)).cpu()
        mean = self._released(torch.cat([self._sum(part, factor) for part in rows])[None], round)
        if self.quantile is not None:
            self._follow(norm.cpu() <= self.clip, round)
        return mean

    def _released(self, total: Tensor, round: int) -> Tree:
        """Δ̃ from the sum [1, W] of a round."""
        self.spent += 1
        if self._books is not None:
            self._books.enter(self.spent)  # before anybody can see it
        if self.sum_noise and self._averages:
            total = total + self.sum_noise * self.clip * self._normal(round, "sum", total)
        return mean_from_row(self._template, self._averages, (total / self.expected).squeeze(0))

    def _sum(self, rows: Tensor, factor: Tensor) -> Tensor:
        """float64 [P]: of the shortened rows; in fixed point, where the server sees nothing else."""
        if self._summands is None:
            return by_columns(lambda block: factor @ block.to("cpu", torch.float64), rows)
        encoding, ones, scale = unit_sum(self._summands), torch.ones(len(rows)), factor[:, None] / self.clip

        def added(block: Tensor) -> Tensor:
            return encoding.encode(block.to("cpu", torch.float64) * scale, ones)[:, :-1].sum(0) * encoding.step

        return self.clip * by_columns(added, rows)

    def _flat(self, name: str, up: Tree | None) -> Tensor:
        """[n, ·]: one field of all updates."""
        field: Tensor = getattr(self._template, name)[:0] if up is None else getattr(up, name)
        return field.reshape(len(field), getattr(self._template, name)[0].numel())

    def _follow(self, within: Tensor, round: int) -> None:
        """One step of the clipping norm towards the quantile."""
        assert self.quantile is not None
        count = torch.tensor([[float(within.sum()) - 0.5 * len(within)]], dtype=torch.float64)
        if self.noise:
            count += self.count_noise * self._normal(round, "count", count)
        share = 0.5 + float(count) / self.expected
        self.clip *= math.exp(-CLIP_RATE * (share - self.quantile))

    def _normal(self, round: int, purpose: str, at: Tensor) -> Tensor:
        name = rng.fold(rng.root(0, f"user-level {purpose}"), round)
        return self._source(name[None], at).to(torch.float64)

    # ---- what it amounts to ----

    def epsilon(self) -> float:
        """Epsilon of every client, for the server's models of all rounds so far."""
        return self.sampling.epsilon(self.noise, self.spent, self.delta) if self._averages else 0.0

    def figures(self) -> dict[str, Any]:
        return {
            "noise": self.noise, "clip": self.clip, "delta": self.delta, "epsilon": self.epsilon(),
            "expected": self.expected, "neighbours": self.sampling.neighbours,
        }  # fmt: skip

    def summary(self) -> dict[str, Any]:
        """Diagnostics for the summary; an epsilon that is not finite stands as null."""
        renyi = self.sampling.renyi_epsilon(self.noise, self.spent, self.delta) if self._averages else 0.0
        return self.figures() | {
            "accountant": "pld", "epsilon_rdp": renyi, "rounds": self.spent, "sampling": self.sampling.scheme,
            "rate": self.sampling.rate, "quantile": self.quantile, "sum_noise": self.sum_noise,
        }  # fmt: skip

    # ---- for a checkpoint ----

    def named(self) -> dict[str, Tensor]:
        return {"clip": torch.tensor(self.clip, dtype=torch.float64), "spent": torch.tensor(self.spent)}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        if tensors.keys() != self.named().keys():
            raise CheckpointError("the checkpoint has no record of user-level privacy; it is of another run")
        self.clip, self.spent = float(tensors["clip"]), int(tensors["spent"])
        if self._books is not None:
            if (count := self._books.read()) < self.spent:
                raise CheckpointError(
                    f"the server's books say that {count} noisy sums were let out, and the checkpoint {self.spent}; "
                    "restore the books from a copy"
                )
            self.spent = count


def unit_sum(clients: int) -> FixedPoint:
    """Encoding in which updates of this many clients, in units of the clipping norm, are added up securely."""
    return FixedPoint(1.0, clients)


def shortened(privacy: UserPrivacy, up: Tree, averages: tuple[str, ...], clients: int) -> Tensor:
    """int64 [W + 1]: what a client adds to a secure sum: its update [1, ...], shortened to the clipping norm, in units
    of it, and a weight of one. The server cannot see whether a client does this, but only its own privacy rests on
    it."""
    rows = averaged_rows(up, averages).detach().to("cpu", torch.float64)
    norm = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    return unit_sum(clients).encode(rows / norm.clamp_min(privacy.clip), torch.ones(len(rows)))[0]
