"""User-level privacy: the server's models do not tell whether a client took part at all; or, with noise from
the nodes, not even the server can tell what is in a client's data.

McMahan, Ramage, Talwar, Zhang: Learning Differentially Private Recurrent Language Models, ICLR 2018; the clipping norm
by Andrew, Thakkar, McMahan, Ramaswamy: Differentially Private Learning with Adaptive Clipping, NeurIPS 2021.

    Δ̃ = (1/E) ( Σ_m Δ_m min(1, C/‖Δ_m‖) + N(0, σ²C² I) )

Δ_m is all that client m's update brings into the average, as one vector; the sum runs over the clients that replied,
and E is the number that the schedule expects, a constant: the number that came would tell who did. All clients weigh
the same. With a `quantile` γ the norm C follows that quantile of ‖Δ_m‖, by a noisy count of the updates within C:

    b̃ = ½ + (1/E) ( Σ_m (1[‖Δ_m‖ ≤ C] − ½) + N(0, σ_b²) ),     C ← C exp(−0.2 (b̃ − γ))

The sum has noise (z⁻² − (2σ_b)⁻²)^−½ then, so that sum and count together cost what one sum with noise z does.

Methods need not know: their `step` gets Δ̃ in place of the clients' mean. The server sees all updates and
is trusted; readers of its models are not. What never leaves a client needs no noise and is not covered. With
secure aggregation clients shorten their updates themselves and the server sees Σ alone, still without noise: it is
trusted to add it, and with a sum instead of single updates. Rounding may lengthen an update by h√P/2, with h = 2^−40 C
for up to four million clients: of no account beside the noise.

Noise at the nodes (`at_nodes`; Kairouz, Liu, Steinke: The Distributed Discrete Gaussian Mechanism, ICML 2021) needs no
trust in the server. In the whole numbers of a secure sum every client m of the sum S adds

    [Δ_m min(1, C/‖Δ_m‖) / h] + η_m,        η_m discrete normal of deviation s = ⌈z B / √H⌉ + 1,   B = C/h + √P/2

  * H clients of every sum are honest: the fewest that nodes add up, less those that may tell the server their noise.
    So the server never sees less than H shares, whichever clients drop out: a sum of fewer is not unmasked by any node.
  * B is the longest that an update can be after rounding: what a client changes in the sum.
  * Whole noise is as good as real noise. A discrete normal of variance v is, but for a share of e^−2π²r² of all cases,
    what a normal of variance v − r² becomes by rounding at random (Micciancio, Regev 2007; Peikert 2010), and a sum of
    discrete normals is one of their summed variance, likewise. With r = 6 that share is 10^−308, and the 1 in s makes
    up for r, as s is 1000 at least. So ε is that of the Gaussian sum.
  * The server knows who is in a sum, so nothing is hidden by sampling, and neighbours are a client's data and none at
    all (an update of zero). Every sum that a client is called for costs it one Gaussian answer with noise z.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from kinfed.algorithms import RoundInfo, averaged_rows, mean_from_row
from kinfed.core import Tree, rng, storage
from kinfed.errors import CheckpointError, StorageError
from kinfed.privacy import SECRET_BYTES, Secret, Source
from kinfed.updates.promises import NO_ROBUST_RULE, ClientSampling, UserPrivacy
from kinfed.updates.secure_sum import FixedPoint
from kinfed.updates.stages import Stage, Updates, by_columns

_FORMAT = "kinfed-sums-1"  # of a ledger
CLIP_RATE = 0.2  # of the clipping norm's step towards the quantile, as Andrew et al. choose it
NO_SAMPLING = ClientSampling("fixed", 1.0)  # as the server sees it, who knows whom it calls
TAIL = 16.0  # deviations of a client's noise that the numbers of a sum have room for
WholeNoise = Callable[[int, int], Tensor]  # (deviation, count): int64 [count]
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
                f"{self.path} is damaged, or another run's. Restore it from a copy, which alone says how much "
                "of epsilon is spent"
            )
        return count

    def enter(self, count: int) -> None:
        storage.write_json(self.path, {"format": _FORMAT, "run": self.run, "sums": count}, private=True)


@dataclass(frozen=True)
class Share:
    """What a client adds to a secure sum: its update, shortened to the clipping norm and in units of it, and its share
    of the noise where nodes add that."""

    clip: float  # C
    clients: int  # the most in a sum
    noise: float = 0.0  # z, of the whole sum; 0: the server adds it
    honest: int = 1  # H

    @classmethod
    def of(cls, privacy: UserPrivacy, clients: int, noise: float, least: int) -> Share:
        """`least`: clients in a sum. The server cannot see whether a client shortens its update, but only its own
        privacy rests on it."""
        if not privacy.at_nodes:
            return cls(privacy.clip, clients)
        return cls(privacy.clip, clients, noise, least - privacy.conspirators)

    @property
    def encoding(self) -> FixedPoint:
        """Whole numbers that have room for sums of updates and noise, in units of C."""
        return FixedPoint(1.0 + TAIL * self.noise / math.sqrt(self.honest), self.clients)

    @property
    def terms(self) -> str:
        """What all clients of a sum must agree on: the noise of the others is part of everyone's privacy."""
        return json.dumps([self.noise, self.honest, self.encoding.bits]) if self.noise else ""

    def deviation(self, width: int, honest: int) -> int:
        """s, in steps, for an update of P numbers. A client that takes only `honest` of the sum for honest, itself
        among them, makes up for what the shares z²/H of the others lack."""
        longest = 2.0**self.encoding.bits * (1 + width * 2.0**-52) + math.sqrt(width) / 2  # B, norms taken in double
        variance = max(1 / self.honest, 1 - (max(honest, 1) - 1) / self.honest)
        return math.ceil(self.noise * math.sqrt(variance) * longest) + 1

    def encode(self, row: Tensor, noise: WholeNoise, honest: int | None = None) -> Tensor:
        """int64 [P + 1]: the client's summand, from its update [1, P]; and a weight of one."""
        row = row.detach().to("cpu", torch.float64)
        norm = torch.linalg.vector_norm(row, dim=1, keepdim=True)
        summand = self.encoding.encode(row / norm.clamp_min(self.clip), torch.ones(1))[0]
        if self.noise:
            width = row.shape[1]
            summand[:-1] += noise(self.deviation(width, self.honest if honest is None else honest), width)
        return summand


def seeded_shares(seed: int) -> Callable[[int, int], WholeNoise]:
    """Noise of (round, client) that everyone with the seed can repeat: for simulations only."""
    secret = Secret(seed.to_bytes(SECRET_BYTES, "little", signed=True))
    return lambda round, client: secret.draws(f"share {round} {client}".encode(), bytes(SECRET_BYTES)).whole_noise


class UserLevel(Stage):
    """Clips, adds up and noises the updates of every round of one method under one seed, and counts the rounds."""

    name = "user_level"
    excludes: ClassVar[Mapping[str, str]] = {"robust": NO_ROBUST_RULE}

    def __init__(
        self, privacy: UserPrivacy, template: Tree, averages: tuple[str, ...], source: Source, sampling: ClientSampling,
        expected: float, rounds: range, *, share: Share | None = None, books: SumLedger | None = None,
        shares: Callable[[int, int], WholeNoise] | None = None, calls: Tensor | None = None,
    ) -> None:  # fmt: skip
        """`template`: an update [1, ...] of the method; `expected`: E; `rounds`: those that the run will have; the ones
        before them (a warm start) have been as private as these and count. `share`: what a client adds to the sum,
        where the server sees only that (kinfed.updates.secure_sum); `shares`: in a simulation, the noise by round and
        client; `calls` [K]: sums that clients have been called for before, where nodes add the noise. `books`: the
        ledger of a real server, whose rounds a crash may repeat with other noise; it comes before checkpoints."""
        self.delta, self.quantile, self.sampling, self.expected = privacy.delta, privacy.quantile, sampling, expected
        self.clip, self.at_nodes, self.conspirators = privacy.clip, privacy.at_nodes, privacy.conspirators
        self.hides_absence = not self.at_nodes
        if self.at_nodes:
            assert share is not None
            self.noise = share.noise
        else:
            self.noise = privacy.noise_over(sampling, rounds.stop - 1)
        self.spent = max(rounds.start - 1, 0 if books is None else books.read())  # sums that have been released
        self._template, self._averages, self._source = template, averages, source
        self._share, self._shares, self._books = share, shares, books
        self._before = rounds.start - 1  # rounds of a warm start
        self._calls = torch.zeros(0, dtype=torch.int64) if calls is None else calls  # no node answers for a round twice

    @property
    def count_noise(self) -> float:
        """σ_b; as far above z/2 as is needed to leave most of the budget to the sum."""
        return max(self.expected / COUNT_SHARE, self.noise)

    @property
    def sum_noise(self) -> float:
        """Noise of the sum of updates that is added here, in units of the clipping norm."""
        if self.at_nodes:
            return 0.0
        if self.quantile is None or not self.noise:
            return self.noise
        return 1 / math.sqrt(self.noise**-2 - (2 * self.count_noise) ** -2)

    def admitted(self, active: Tensor) -> Tensor:
        if self.at_nodes:
            self._calls[active] += 1
        return active

    def at_server(self, updates: Updates, round: RoundInfo) -> Updates:
        """Leave Δ̃, also where no client replied, which is not to be seen either unless nodes add the noise."""
        number = round.number + self._before
        if self.at_nodes and not self._averages:
            return updates
        if updates.mean is None and self._shares is not None:
            mean = self._released(self._noisy_sum(updates, number), number)
        elif updates.mean is None:
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

    def _noisy_sum(self, updates: Updates, round: int) -> Tensor:
        """float64 [1, P]: of what clients add to a secure sum, noise and all."""
        assert self._share is not None
        assert self._shares is not None
        total = torch.zeros((), dtype=torch.int64)
        for row, client in zip(averaged_rows(updates.rows, self._averages), updates.ids.tolist(), strict=True):
            total = total + self._share.encode(row[None], self._shares(round, client))
        mean, clients = self._share.encoding.decode(total)
        return self.clip * clients * mean[None]

    def _released(self, total: Tensor, round: int) -> Tree:
        """Δ̃ from the sum [1, W] of a round."""
        self.spent += 1
        if self._books is not None:
            self._books.enter(self.spent)  # before anyone can see it
        if self.sum_noise and self._averages:
            total = total + self.sum_noise * self.clip * self._normal(round, "sum", total)
        return mean_from_row(self._template, self._averages, (total / self.expected).squeeze(0))

    def _sum(self, rows: Tensor, factor: Tensor) -> Tensor:
        """float64 [P]: of the shortened rows; in fixed point, where the server sees nothing else."""
        if self._share is None:
            return by_columns(lambda block: factor @ block.to("cpu", torch.float64), rows)
        encoding, ones, scale = self._share.encoding, torch.ones(len(rows)), factor[:, None] / self.clip

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
        """The largest epsilon of a client, for the server's models of all rounds so far; where nodes add the noise, for
        all that the server sees."""
        return self.sampling.epsilon(self.noise, self._sums, self.delta) if self._averages else 0.0

    @property
    def _sums(self) -> int:
        """Noisy sums that the client was in that was in the most."""
        return int(self._calls.max()) if self.at_nodes else self.spent

    def figures(self) -> dict[str, Any]:
        neighbours = "one client's data or none" if self.at_nodes else self.sampling.neighbours
        return {
            "noise": self.noise, "clip": self.clip, "delta": self.delta, "epsilon": self.epsilon(),
            "expected": self.expected, "neighbours": neighbours, "at_nodes": self.at_nodes,
        } | ({"conspirators": self.conspirators} if self.at_nodes else {})  # fmt: skip

    def summary(self) -> dict[str, Any]:
        """Diagnostics for the summary; an epsilon that is not finite stands as null."""
        renyi = self.sampling.renyi_epsilon(self.noise, self._sums, self.delta) if self._averages else 0.0
        return self.figures() | {
            "accountant": "pld", "epsilon_rdp": renyi, "rounds": self.spent, "sampling": self.sampling.scheme,
            "rate": self.sampling.rate, "quantile": self.quantile, "sum_noise": self.sum_noise,
        }  # fmt: skip

    # ---- for a checkpoint ----

    def named(self) -> dict[str, Tensor]:
        sums = {"clip": torch.tensor(self.clip, dtype=torch.float64), "spent": torch.tensor(self.spent)}
        return sums | ({"calls": self._calls.clone()} if self.at_nodes else {})

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        if tensors.keys() != self.named().keys():
            raise CheckpointError("the checkpoint has no record of user-level privacy; it is of another run")
        self.clip, self.spent = float(tensors["clip"]), int(tensors["spent"])
        self._calls = tensors.get("calls", self._calls).clone()
        if self._books is not None:
            if (count := self._books.read()) < self.spent:
                raise CheckpointError(
                    f"the server's books say that {count} noisy sums were let out, and the checkpoint {self.spent}; "
                    "restore the books from a copy"
                )
            self.spent = count
