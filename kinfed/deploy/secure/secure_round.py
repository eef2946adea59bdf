"""The server's part in secure sums: it carries messages between clients, and can take masks off their sum only. Its
pool of all nodes sees the sum of a round, and no update.

Clients may go away between any two requests; as long as enough of them answer the last one, the sum is that of all
whose masked updates came. Where too few do, or shares do not give the secrets that their owners committed to, there is
no sum, and the round is as if no client had replied.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kinfed.algorithms import COUNT, mean_from_row
from kinfed.core import Tree
from kinfed.deploy.secure.masks import Ring, commitment, join_secret, mask, public_key
from kinfed.deploy.secure.secure_messages import (
    Assembly,
    KeyRecord,
    Member,
    terms_of,
    threshold_of,
    to_bytes,
    to_flags,
    to_rows,
)
from kinfed.deploy.secure.secure_session import read_vector
from kinfed.deploy.server.node_pool import NodePool
from kinfed.deploy.server.server_privacy import share_of
from kinfed.deploy.transport.wire import CONFIRM, MASK, SHARE, UNMASK, MessageError, Packet, tree_of
from kinfed.errors import KinfedError
from kinfed.pools import Steps
from kinfed.updates import SecureSettings, Updates, secure_sum

# (kind, requests by client's number, what to do with an answer, how many are needed): reasons of those without one
Ask = Callable[[str, Mapping[int, Packet], Callable[[int, Packet], None], int], Steps[None]]


class NoSum(KinfedError):
    """Too few clients for a secure sum, or secrets that do not fit; nothing was learnt."""


@dataclass
class SecureRound:
    """One sum, of the clients that have trained."""

    ask: Ask
    assembly: Assembly
    width: int  # W
    least: int  # clients in the sum
    threshold: float
    nbytes_down: int = 0
    nbytes_up: int = 0

    def total(self) -> Steps[tuple[list[int], Tensor]]:
        """Numbers of the clients in the sum, and the sum, int64 [W + 1]; NoSum if there is none."""
        assembly, count = self.assembly, len(self.assembly.members)
        if count < self.least:
            raise NoSum(f"{count} updates are too few to be added up, which takes {self.least}")
        sealed = yield from self._shares()
        senders = sorted(sealed)
        vectors = yield from self._masked(senders, sealed)
        survivors = sorted(vectors)
        signatures = yield from self._confirmed(survivors)
        revealed = yield from self._revealed(survivors, signatures)
        total = sum(vectors.values(), np.zeros(self.width + 1, np.uint64))
        for place in survivors:
            seed = self._joined(place, revealed)
            if commitment(seed) != assembly.records[place].commitment:
                raise NoSum(f"the shares of {assembly.members[place].name}'s own mask do not fit what it announced")
            total = total - mask(seed, len(total))
        for absentee in [place for place in senders if place not in vectors]:
            total = total + self._left_over(absentee, survivors, self._joined(absentee, revealed))
        return [assembly.members[place].number for place in survivors], torch.from_numpy(total.view(np.int64))

    # ---- the four requests after training ----

    def _shares(self) -> Steps[dict[int, list[bytes]]]:
        """Secrets that each client has sealed for the others, by place."""
        members, count = self.assembly.members, len(self.assembly.members)
        clients = [[member.number, member.name, member.key] for member in members]
        records = to_rows([record.packed() for record in self.assembly.records])
        request = Packet({"clients": clients}, {"keys": {"records": records}})
        return self._put(
            SHARE, dict.fromkeys(range(count), request),
            lambda answer: to_bytes(answer, "shares", "sealed", count, secure_sum.SEALED_BYTES), "shared their secrets",
        )  # fmt: skip

    def _masked(self, senders: Sequence[int], sealed: Mapping[int, list[bytes]]) -> Steps[dict[int, Ring]]:
        count, blank = len(self.assembly.members), bytes(secure_sum.SEALED_BYTES)
        flags = {"senders": to_flags(senders, count)}
        requests = {
            place: Packet({}, {
                "lists": flags,
                "shares": {"sealed": to_rows([sealed[one][place] if one in sealed else blank for one in range(count)])},
            })
            for place in senders
        }  # fmt: skip
        return self._put(MASK, requests, lambda answer: read_vector(answer, self.width + 1), "sent masked updates")

    def _confirmed(self, survivors: Sequence[int]) -> Steps[dict[int, bytes]]:
        request = Packet({}, {"lists": {"survivors": to_flags(survivors, len(self.assembly.members))}})
        return self._put(
            CONFIRM, dict.fromkeys(survivors, request),
            lambda answer: to_bytes(answer, "list", "signature", 1, secure_sum.SIGNATURE_BYTES)[0],
            "signed who is in the sum",
            lambda place, signature: self.assembly.has_confirmed(place, signature, survivors),
        )  # fmt: skip

    def _revealed(self, survivors: Sequence[int], signatures: Mapping[int, bytes]) -> Steps[dict[int, list[bytes]]]:
        """Revealed shares: by the place of the revealing client, then by the place of their owner."""
        count = len(self.assembly.members)
        rows = to_rows([signatures.get(place, bytes(secure_sum.SIGNATURE_BYTES)) for place in range(count)])
        request = Packet({}, {"lists": {"survivors": to_flags(survivors, count), "signatures": rows}})
        return self._put(
            UNMASK, dict.fromkeys(sorted(signatures), request),
            lambda answer: to_bytes(answer, "shares", "revealed", count, secure_sum.SHARE_BYTES),
            "revealed their shares",
        )  # fmt: skip

    def _put(
        self, kind: str, requests: Mapping[int, Packet], read: Callable[[Packet], Any], done: str,
        check: Callable[[int, Any], bool] = lambda place, value: True,
    ) -> Steps[dict[int, Any]]:  # fmt: skip
        """Ask the clients at these places; returns the values that came."""
        members, values = self.assembly.members, dict[int, Any]()
        self.nbytes_down += sum(request.nbytes for request in requests.values())

        def take(number: int, answer: Packet) -> None:
            place = self.assembly.place(number)
            self.nbytes_up += answer.nbytes
            value = read(answer)
            if not check(place, value):
                raise MessageError(f"an answer to {kind} that its client has not signed")
            values[place] = value

        needed = threshold_of(len(members), self.threshold)
        if kind in (SHARE, MASK):
            needed = max(self.least, needed)
        yield from self.ask(kind, {members[place].number: request for place, request in requests.items()}, take, needed)
        if len(values) < needed:
            raise NoSum(f"{len(values)} of {len(requests)} clients have {done}, and {needed} must")
        return values

    # ---- taking masks off ----

    def _joined(self, place: int, revealed: Mapping[int, list[bytes]]) -> bytes:
        """The secret of the client at a place, from what the others revealed of it."""
        shares = {holder: rows[place] for holder, rows in revealed.items() if any(rows[place])}
        try:
            return join_secret(shares, threshold_of(len(self.assembly.members), self.threshold))
        except MessageError as error:
            raise NoSum(f"{self.assembly.members[place].name}: {error}") from None

    def _left_over(self, absentee: int, survivors: Sequence[int], private: bytes) -> Ring:
        """Sum that cancels the masks of the survivors with a client that went away after sharing its secrets."""
        assembly, width = self.assembly, self.width + 1
        if public_key(private) != assembly.records[absentee].masking:
            raise NoSum(f"the shares of {assembly.members[absentee].name}'s masking key do not fit what it announced")
        streams = (assembly.stream(absentee, place, private, width) for place in survivors)
        return sum(streams, np.zeros(width, np.uint64))


class SecureNodePool(NodePool):
    def __init__(self, settings: SecureSettings, *arguments: Any) -> None:
        """The other arguments are those of a NodePool."""
        super().__init__(*arguments)
        averages = settings.averaged_fields(self.deployment.method, self.algorithm)
        self.settings, self.averages = settings, averages
        self._terms_of_round = 0, ""
        self._width = sum(self._sample[name].numel() for name in averages)
        counts = self.roster.counts[:, 0]
        self._share = share_of(self.deployment, len(counts))
        self._by_examples = COUNT in self._sample and self._share is None
        if self._share is not None:
            self._fixed_point = self._share.encoding
            self._train_terms = {"user_noise": self._share.noise}
        else:
            declared = int(counts.sum()) if self._by_examples else len(counts)
            most = math.ceil(declared * (1 + self.deployment.drift))
            self._fixed_point = secure_sum.FixedPoint(settings.largest, most)
            self._train_terms = {"total": self._fixed_point.total}

    def _read_update(self, k: int, order: Packet, answer: Packet) -> KeyRecord:
        """Keys, where a plain pool gets an update."""
        if unknown := answer.groups.keys() - {"keys"}:
            raise MessageError(f"an answer to a secure round holds keys and nothing else; got {min(unknown)} too")
        record = KeyRecord.read(to_bytes(answer, "keys", "record", 1, secure_sum.KEYS_BYTES)[0])
        round = order.header["round"]
        if self._terms_of_round[0] != round:  # the same for all, and a digest of the model
            noise = "" if self._share is None else self._share.terms
            self._terms_of_round = round, terms_of(order, self.deployment.run, noise)
        if not record.is_of(self.run, round, self._member(k), self._terms_of_round[1]):
            raise MessageError(
                f"keys for a secure sum that {self.roster.names[k]} has not signed, or for another model and other "
                "settings than it was sent: all must have the same version of kinfed"
            )
        return record

    def _combine(self, answers: Mapping[int, Any], round: int, needed: int, updates: Updates) -> Steps[Updates]:
        numbers = sorted(answers)
        members = tuple(self._member(k) for k in numbers)
        assembly = Assembly(self.run, round, members, tuple(answers[k] for k in numbers))
        least, threshold = max(needed, self.settings.least), self.deployment.secure_threshold
        secure = SecureRound(partial(self._ask_members, round), assembly, self._width, least, threshold)
        try:
            in_sum, total = yield from secure.total()
            mean, weight = self._mean(in_sum, total), float(total[-1])
            updates = replace(updates, ids=torch.tensor(in_sum), mean=mean, weight=weight)
        except NoSum as error:
            self.no_sum = str(error)
            if self._about is None:
                self.exchange.say(f"round {round}: no secure sum: {error}; nothing was changed")
        return replace(updates, nbytes=updates.nbytes + secure.nbytes_up, nbytes_down=secure.nbytes_down)

    def _member(self, k: int) -> Member:
        return Member(k, self.roster.names[k], self.roster.keys[k])

    def _ask_members(
        self, round: int, kind: str, requests: Mapping[int, Packet], take: Callable[[int, Packet], None], needed: int
    ) -> Steps[None]:
        orders = {}
        for k, request in requests.items():
            header = {"kind": kind, "run": self.run, "round": round, "number": k, "name": self.roster.names[k]}
            orders[self.roster.names[k]] = Packet({**header, **(self._about or {}), **request.header}, request.groups)
        return self._ask(kind, orders, take, needed, f"round {round}, {kind}")

    def _mean(self, in_sum: list[int], total: Tensor) -> Tree:
        if not self._fixed_point.holds(total):
            raise NoSum("the sum is beyond what updates within secure_range can add up to; a client sent no update")
        mean, weight = self._fixed_point.decode(total)
        declared = int(self.roster.counts[in_sum, 0].sum()) if self._by_examples else len(in_sum)
        allowed = self.deployment.drift * declared if self._by_examples else 0
        if abs(weight - declared) > allowed:
            raise NoSum(f"the clients of the sum say {weight} examples together, and said {declared} at the start")
        if self._share is not None:
            mean = mean * self._share.clip
        return mean_from_row(tree_of(self._checks.up, self._sample), self.averages, mean)
