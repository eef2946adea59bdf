"""Messages of clients to each other in a secure sum, through a server that must not be able to change them.

Bonawitz et al.: Practical Secure Aggregation for Privacy-Preserving Machine Learning, CCS 2017 (the variant against
servers that lie). A round of n clients has five requests:

    train      the client trains, and answers with two public keys and a commitment to a seed, signed with its own key
    share      gets the keys of all; answers with its secrets (the seed b, the private masking key s) in shares, one
               pair for every client, each sealed for its receiver
    mask       gets its pair of everybody who answered (U1); answers with  y = x + PRG(b) + Σ ± PRG(s agreed with v)
    confirm    gets the list of the clients that did (U2); answers with its signature on it
    unmask     gets the signatures; answers with its share of b for clients in U2, of s for those in U1 but not in U2

A client that sent y has its b revealed and its s never, one that did not has s revealed and b never. An honest client
signs one list in a round, t of n clients must have signed it before one of them reveals anything, and t is more than a
half: no two lists can both get there, so never both secrets of one client can.

The sum hides an update among others that the server does not know. It would know them if it could choose them: under a
model that learns nothing, or without steps, an update is zero (Pasquini, Francati, Ateniese: Eluding Secure Aggregation
in Federated Learning via Model Inconsistency, CCS 2022). So what a client was told to train, but for what is its own,
is of the terms that it signs with its keys, and no client adds up with others that were told otherwise.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kinfed.config import RunConfig
from kinfed.core import storage
from kinfed.deploy.secure.masks import SECRET_BYTES, Ring, agreed_key, mask
from kinfed.deploy.transport.client_keys import has_signed
from kinfed.deploy.transport.wire import MessageError, Packet
from kinfed.updates import secure_sum

OF_ONE_CLIENT = ("number", "name", "accepted", "group")  # fields of an order that differ between clients


def terms_of(order: Packet, run: RunConfig, noise: str) -> str:
    """What all clients of a sum must agree on: all that an order to train says to each alike, the settings of the run,
    and the noise that each adds (kinfed.updates.user_level.Share.terms; "": none). A run may be prolonged."""
    header = {name: value for name, value in order.header.items() if name not in OF_ONE_CLIENT}
    parts = [Packet(header, order.groups).digest(), run.dump() | {"rounds": 0}]
    return json.dumps([storage.record_digest(parts), noise])


def noise_in(terms: str) -> float:
    """z of the noise that clients agree to add; 0: none."""
    noise = json.loads(terms)[1] if terms else ""
    return float(json.loads(noise)[0]) if noise else 0.0


def threshold_of(clients: int, share: float) -> int:
    """t: how many of n clients reveal masks together. More than `share` of them, and never less than more than half."""
    return min(int(max(share, 0.5) * clients) + 1, clients)


@dataclass(frozen=True)
class KeyRecord:
    """Keys that a client publishes for one sum."""

    sealing: bytes  # public key: for shares that are sealed for this client
    masking: bytes  # public key: for masks between two clients
    commitment: bytes  # to the seed of the client's own mask
    signature: bytes

    @classmethod
    def read(cls, row: bytes) -> KeyRecord:
        if len(row) != secure_sum.KEYS_BYTES:
            raise MessageError(f"keys of {secure_sum.KEYS_BYTES} bytes are wanted; got {len(row)}")
        parts = [row[begin : begin + SECRET_BYTES] for begin in range(0, 3 * SECRET_BYTES, SECRET_BYTES)]
        return cls(parts[0], parts[1], parts[2], row[3 * SECRET_BYTES :])

    def packed(self) -> bytes:
        return self.sealing + self.masking + self.commitment + self.signature

    def text(self, run: str, round: int, member: Member, terms: str) -> bytes:
        """Text that is signed: an old record, or another client's, proves nothing. `terms`: those of `terms_of`."""
        keys = [part.hex() for part in (self.sealing, self.masking, self.commitment)]
        return json.dumps(["kinfed secure sum: keys", run, round, member.number, member.name, terms, *keys]).encode()

    def is_of(self, run: str, round: int, member: Member, terms: str) -> bool:
        return has_signed(member.key, self.signature, self.text(run, round, member, terms))


@dataclass(frozen=True)
class Member:
    number: int
    name: str
    key: str  # the public key that it belongs to


@dataclass(frozen=True)
class Assembly:
    """Clients of a sum, in the order of their numbers, with their keys. `place`: a client's position in it."""

    run: str
    round: int
    members: tuple[Member, ...]
    records: tuple[KeyRecord, ...]

    @property
    def digest(self) -> str:
        """Digest, equal for all that see the same clients with the same keys."""
        members = [[m.number, m.name, m.key, r.packed().hex()] for m, r in zip(self.members, self.records, strict=True)]
        return hashlib.sha256(json.dumps([self.run, self.round, members]).encode()).hexdigest()

    def place(self, number: int) -> int:
        return [member.number for member in self.members].index(number)

    def purpose(self, what: str, sender: int, receiver: int) -> str:
        return f"kinfed secure sum: {what} {sender} {receiver} {self.digest}"

    def stream(self, me: int, other: int, private: bytes, length: int) -> Ring:
        """The mask between two places as the one at `me` adds it, whose private masking key is given."""
        purpose = self.purpose("mask", min(me, other), max(me, other))
        stream = mask(agreed_key(private, self.records[other].masking, purpose), length)
        return stream if me < other else -stream

    def confirmation(self, place: int, survivors: Sequence[int]) -> bytes:
        """Text that the client at a place signs: the clients in the sum."""
        return json.dumps(["kinfed secure sum: list", self.digest, place, list(survivors)]).encode()

    def has_confirmed(self, place: int, signature: bytes, survivors: Sequence[int]) -> bool:
        """Say whether the client at a place has signed who is in the sum; a signature of zeros stands for none."""
        return any(signature) and has_signed(self.members[place].key, signature, self.confirmation(place, survivors))


def to_rows(rows: Sequence[bytes]) -> Tensor:
    """Rows as a table, uint8 [n, width]."""
    return torch.tensor([list(row) for row in rows], dtype=torch.uint8)


def to_bytes(packet: Packet, group: str, name: str, rows: int, width: int) -> list[bytes]:
    """The rows of a uint8 table of a message."""
    table = packet.group(group).get(name)
    if table is None or table.dtype != torch.uint8 or tuple(table.shape) != (rows, width):
        raise MessageError(f"a message should hold {name}: bytes of shape {[rows, width]}")
    return [bytes(row.tolist()) for row in table]


def to_flags(places: Sequence[int], count: int) -> Tensor:
    """Flags, uint8 [count]: 1 at these places."""
    flags = torch.zeros(count, dtype=torch.uint8)
    flags[list(places)] = 1
    return flags


def to_places(packet: Packet, name: str, count: int) -> list[int]:
    """Places at which the flags of a message are 1, in ascending order."""
    flags = packet.group("lists").get(name)
    if flags is None or flags.dtype != torch.uint8 or tuple(flags.shape) != (count,) or bool((flags > 1).any()):
        raise MessageError(f"a message should hold the list {name} of {count} zeros and ones")
    places: list[int] = flags.nonzero().squeeze(1).tolist()
    return places
