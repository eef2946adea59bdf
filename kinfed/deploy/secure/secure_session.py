"""A client's part in secure sums: what it remembers between requests, and what it refuses.

A request may come twice, because an answer was lost on the way, or from a server that begins a round again: the same
one gets the same answer. Another one in its place is refused, and so is another round in which the client has masked an
update already: in two sums of one update and different clients, a client in only one of them stands in the
difference. So a server that stops between masks and its checkpoint loses that round only if other clients are there
when it comes back.

<vault>/<run>/<client>/sum.json                its secrets and the answers of the sum under way (mode 600)
                       sum-update.safetensors  the update as whole numbers, until the next one takes its place
                       sum-peers.json          the keys that other clients had when they were first seen
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kinfed.config import RunConfig
from kinfed.core import storage
from kinfed.deploy.node.node_settings import Refused
from kinfed.deploy.node.vault_entry import VaultEntry
from kinfed.deploy.secure import masks
from kinfed.deploy.secure.secure_messages import (
    Assembly,
    KeyRecord,
    Member,
    noise_in,
    terms_of,
    threshold_of,
    to_bytes,
    to_places,
    to_rows,
)
from kinfed.deploy.transport.client_keys import fingerprint, read_public_keys, sign
from kinfed.deploy.transport.wire import CONFIRM, MASK, SHARE, UNMASK, MessageError, Packet
from kinfed.errors import StorageError
from kinfed.updates import secure_sum

FORMAT = 1
_FILE, _UPDATE, _PEERS = "sum.json", "sum-update.safetensors", "sum-peers.json"


@dataclass(frozen=True)
class SumState:
    """Memory of one sum. Bytes are hexadecimal."""

    round: int
    order: str = ""  # digest of the order to train that the sum is for
    header: dict[str, Any] = field(default_factory=dict)  # of the answer to it
    sealing: str = ""  # private keys
    masking: str = ""
    seed: str = ""  # b
    record: str = ""
    terms: str = ""  # of the sum, as the record signs them
    clients: list[list[Any]] = field(default_factory=list)  # [number, name, key] of all
    records: list[str] = field(default_factory=list)
    kept: str = ""  # the client's own pair of shares
    pairs: dict[str, str] = field(default_factory=dict)  # by place: the pairs of others
    senders: list[int] = field(default_factory=list)  # U1, as places
    survivors: list[int] = field(default_factory=list)  # U2, which this client has signed
    questions: dict[str, str] = field(default_factory=dict)  # digests of requests, by kind; the file calls them so
    sealed: list[str] = field(default_factory=list)  # the answer to `share`
    masked_round: int = 0  # the last one in which an update was masked


@dataclass(frozen=True)
class Owner:
    """The client that takes part, and its terms."""

    number: int
    name: str
    identity: tuple[Path, bytes]  # the private key that the client belongs to, and where it is from
    least: int  # clients in a sum
    threshold: float  # share of clients above which they reveal masks together
    peers: str = ""  # folder with the public keys of all clients; "": the first that are seen are believed


class SecureSession:
    """Hold the entry's lock from before one is made until its answer is kept."""

    def __init__(self, entry: VaultEntry, owner: Owner) -> None:
        self.entry, self.owner = entry, owner
        self._about = {"format": FORMAT, "run": entry.run, "client": owner.name}
        self._state = self._read()

    # ---- the five requests ----

    def check_round(self, round: int) -> None:
        """Refuse a round before anything is computed for it."""
        if round <= self._state.masked_round:
            raise Refused(
                f"{self.owner.name} has masked an update of round {self._state.masked_round} already, and round "
                f"{round} is asked for: the same update in two sums could expose a single client; the round is lost"
            )

    def again(self, order: Packet) -> Packet | None:
        """The answer to an order, if the present sum is for it."""
        return self._published(self._state) if self._state.order == order.digest() else None

    def open(
        self, order: Packet, run: RunConfig, vector: Tensor, noise: str, header: Mapping[str, Any]
    ) -> Packet:  # fmt: skip
        """Keep the update that an order was for, encoded as int64 [W + 1], and publish keys for its sum in an answer
        with this header. `noise`: what all add to theirs (kinfed.updates.user_level.Share.terms)."""
        round, terms = order.require("round", int), terms_of(order, run, noise)
        self.check_round(round)
        sealing, masking, seed = (masks.new_secret() for _ in range(3))
        unsigned = KeyRecord(masks.public_key(sealing), masks.public_key(masking), masks.commitment(seed), b"")
        where, private = self.owner.identity
        text = unsigned.text(self.entry.run, round, Member(self.owner.number, self.owner.name, ""), terms)
        record = replace(unsigned, signature=sign(private, where, text)).packed()
        update = {"update": vector}
        storage.write_tensors(self.entry.folder / _UPDATE, update, {"round": str(round)}, private=True)
        masked, keys = self._state.masked_round, (sealing.hex(), masking.hex(), seed.hex())
        state = SumState(
            round, order.digest(), dict(header), *keys, record=record.hex(), terms=terms, masked_round=masked
        )
        self._write(state)
        return self._published(state)

    def _published(self, state: SumState) -> Packet:
        return Packet(state.header, {"keys": {"record": to_rows([bytes.fromhex(state.record)])}})

    @property
    def digest(self) -> str:
        """Digest of the keys of the present sum, and so of the update that waits for it."""
        return hashlib.sha256(self._state.record.encode()).hexdigest()

    @property
    def noise(self) -> float:
        """z of the present sum, where nodes add it."""
        return noise_in(self._state.terms)

    def answer(self, kind: str, order: Packet) -> Packet:
        if order.require("round", int) != self._state.round or not self._state.record:
            raise Refused(f"{self.owner.name} has no update of round {order.header['round']} for a secure sum")
        digest, before = order.digest(), self._state.questions.get(kind)
        if before not in (None, digest):
            raise Refused(f"{self.owner.name} was asked to {kind} in another way before; it answers once in a round")
        answers: Mapping[str, Callable[[Packet], Packet]] = {
            SHARE: self._share, MASK: self._mask, CONFIRM: self._confirm, UNMASK: self._unmask,
        }  # fmt: skip
        self._changes: dict[str, Any] = {}
        answer = answers[kind](order)
        if before is None:  # on the disk before it leaves
            questions = {**self._state.questions, kind: digest}
            self._write(replace(self._state, questions=questions, **self._changes))
        return answer

    def _share(self, order: Packet) -> Packet:
        if self._state.sealed:
            return Packet({}, {"shares": {"sealed": to_rows([bytes.fromhex(row) for row in self._state.sealed])}})
        clients = order.require("clients", list)
        records = to_bytes(order, "keys", "records", len(clients), secure_sum.KEYS_BYTES)
        self._state = replace(self._state, clients=clients, records=[record.hex() for record in records])
        assembly = self._assembly()
        self._check_members(assembly)
        me, count = assembly.place(self.owner.number), len(clients)
        threshold = threshold_of(count, self.owner.threshold)
        seeds = masks.split_secret(bytes.fromhex(self._state.seed), threshold, count)
        keys = masks.split_secret(bytes.fromhex(self._state.masking), threshold, count)
        private, sealed = bytes.fromhex(self._state.sealing), []
        for place, record in enumerate(assembly.records):
            if place == me:
                sealed.append(bytes(secure_sum.SEALED_BYTES))
                continue
            purpose = assembly.purpose("shares", me, place)
            key = masks.agreed_key(private, record.sealing, purpose)
            sealed.append(masks.seal(key, seeds[place] + keys[place], purpose))
        self._changes = {"sealed": [row.hex() for row in sealed], "kept": (seeds[me] + keys[me]).hex()}
        return Packet({}, {"shares": {"sealed": to_rows(sealed)}})

    def _mask(self, order: Packet) -> Packet:
        assembly = self._assembly()
        me, count = assembly.place(self.owner.number), len(assembly.members)
        senders = to_places(order, "senders", count)
        self._check_list(assembly, senders, "would share secrets")
        sealed = to_bytes(order, "shares", "sealed", count, secure_sum.SEALED_BYTES)
        private, pairs = bytes.fromhex(self._state.sealing), {}
        for place in senders:
            if place != me:
                purpose = assembly.purpose("shares", place, me)
                key = masks.agreed_key(private, assembly.records[place].sealing, purpose)
                pairs[str(place)] = masks.unseal(key, sealed[place], purpose).hex()
        vector = self._masked(assembly, me, senders)
        self._changes = {"pairs": pairs, "senders": senders, "masked_round": self._state.round}
        return Packet({}, {"sum": {"masked": torch.from_numpy(vector.view(np.int64))}})

    def _masked(self, assembly: Assembly, me: int, senders: list[int]) -> masks.Ring:
        """y = x + PRG(b) + Σ ± PRG(agreed)"""
        update = storage.read_tensors(self.entry.folder / _UPDATE)["update"]  # int64 [W + 1]
        total: masks.Ring = update.numpy().view(np.uint64) + masks.mask(bytes.fromhex(self._state.seed), len(update))
        private = bytes.fromhex(self._state.masking)
        for place in senders:
            if place != me:
                total = total + assembly.stream(me, place, private, len(total))
        return total

    def _confirm(self, order: Packet) -> Packet:
        assembly = self._assembly()
        me, survivors = assembly.place(self.owner.number), to_places(order, "survivors", len(assembly.members))
        self._check_list(assembly, survivors, "would be in the sum")
        if strangers := sorted({*survivors} - {*self._state.senders}):
            name = assembly.members[strangers[0]].name
            raise Refused(f"{name} would be in the sum, and {self.owner.name} has no share of its secrets")
        self._changes = {"survivors": survivors}
        where, private = self.owner.identity
        signature = sign(private, where, assembly.confirmation(me, survivors))
        return Packet({}, {"list": {"signature": to_rows([signature])}})

    def _unmask(self, order: Packet) -> Packet:
        assembly = self._assembly()
        me, count, state = assembly.place(self.owner.number), len(assembly.members), self._state
        survivors = to_places(order, "survivors", count)
        if not survivors or survivors != state.survivors:
            raise Refused(f"{self.owner.name} has not signed this list of clients, and reveals nothing for it")
        signatures = to_bytes(order, "lists", "signatures", count, secure_sum.SIGNATURE_BYTES)
        signed = sum(assembly.has_confirmed(place, signatures[place], survivors) for place in survivors)
        if signed < (least := threshold_of(count, self.owner.threshold)):
            raise Refused(f"{signed} clients have signed who is in the sum, and {least} must; nothing was revealed")
        shares, size = [], secure_sum.SHARE_BYTES
        for place in range(count):
            pair = bytes.fromhex(state.kept if place == me else state.pairs.get(str(place), ""))
            shares.append((pair[:size] if place in survivors else pair[size:]) or bytes(size))
        return Packet({}, {"shares": {"revealed": to_rows(shares)}})

    # ---- checks ----

    def _check_members(self, assembly: Assembly) -> None:
        """Refuse keys that their owners have not signed, or without the client's own among them."""
        owner, members = self.owner, assembly.members
        numbers = [member.number for member in members]
        if numbers != sorted(set(numbers)) or len({member.name for member in members}) < len(members):
            raise MessageError("the clients of a secure sum should be different ones, in order")
        if (owner.number, owner.name) not in [(member.number, member.name) for member in members]:
            raise Refused(f"{owner.name} is not among the clients of the sum")
        if assembly.records[assembly.place(owner.number)].packed().hex() != self._state.record:
            raise Refused(f"the keys in the name of {owner.name} are not its own")
        self._check_list(assembly, list(range(len(members))), "take part")
        self._check_peers(members)
        for member, record in zip(members, assembly.records, strict=True):
            if not record.is_of(assembly.run, assembly.round, member, self._state.terms):
                raise Refused(
                    f"the keys in the name of {member.name} are not signed by it, for a sum on these terms: of the "
                    "same model, settings and noise"
                )
        public = [key for record in assembly.records for key in (record.sealing, record.masking)]
        if len(set(public)) < len(public):
            raise Refused("two clients of the sum have the same keys")

    def _check_list(self, assembly: Assembly, places: list[int], what: str) -> None:
        """Refuse too few clients or owners, and a list without this client."""
        least = self.owner.least
        if what != "take part":
            least = max(least, threshold_of(len(assembly.members), self.owner.threshold))
        owners = len({assembly.members[place].key for place in places})
        if len(places) < least or owners < self.owner.least:
            raise Refused(
                f"{len(places)} clients with {owners} keys {what}; {self.owner.name} adds up {least} at least, of "
                f"{self.owner.least} owners"
            )
        if assembly.place(self.owner.number) not in places:
            raise Refused(f"{self.owner.name} is not among the clients that {what}")

    def _check_peers(self, members: tuple[Member, ...]) -> None:
        """Refuse other keys than those that the owner of the node wrote down, or else those that were seen first."""
        seen = self.entry.folder / _PEERS
        if self.owner.peers:
            known, where = read_public_keys(Path(self.owner.peers).expanduser()), self.owner.peers
        else:
            known, where = storage.read_json(seen) if seen.exists() else {}, str(seen)
        for member in members:
            if self.owner.peers and member.name not in known:
                raise Refused(f"{where} has no {member.name}.pub, so {member.name} cannot be verified")
            if known.get(member.name, member.key) != member.key:
                raise Refused(
                    f"{member.name} would have key {fingerprint(member.key)}; {where} has "
                    f"{fingerprint(known[member.name])} for it"
                )
        if not self.owner.peers:
            storage.write_json(seen, known | {member.name: member.key for member in members}, private=True)

    # ---- memory ----

    def _assembly(self) -> Assembly:
        if not self._state.clients:
            raise Refused(f"{self.owner.name} has not been told who takes part")
        members = tuple(_member(client) for client in self._state.clients)
        records = tuple(KeyRecord.read(bytes.fromhex(record)) for record in self._state.records)
        return Assembly(self.entry.run, self._state.round, members, records)

    def _read(self) -> SumState:
        path = self.entry.folder / _FILE
        if not path.exists():
            return SumState(0)
        record = storage.read_json(path, "the memory of a secure sum")
        if {name: record.pop(name, None) for name in self._about} != self._about:
            raise StorageError(
                f"{path} is of another run, client or version of kinfed. Move it away: the round is lost"
            )
        return SumState(**record)

    def _write(self, state: SumState) -> None:
        self._state = state
        storage.write_json(self.entry.folder / _FILE, asdict(state) | self._about, private=True)


def _member(client: Any) -> Member:
    if not isinstance(client, list) or [type(part) for part in client] != [int, str, str]:
        raise MessageError("a client of a secure sum has a number, a name and a key")
    return Member(*client)


def read_vector(packet: Packet, width: int) -> masks.Ring:
    """The masked update of an answer."""
    vector = packet.group("sum").get("masked")
    if vector is None or vector.dtype != torch.int64 or tuple(vector.shape) != (width,):
        raise MessageError(f"a masked update is {width} whole numbers")
    return np.ascontiguousarray(vector.numpy()).view(np.uint64)
