"""Updates that travel as codes (kinfed.updates.codecs), and what senders remember for it.

Every field of an update with several float32 numbers per client is coded; counts, masks, single numbers and fields that
are declared `exact` travel as they are. Of a field that is `masked_by` another, the numbers in its mask are coded.

A codec that is not unbiased needs a memory at the client, which is part of its state: kept when it is not called,
written to checkpoints, and changed only by an update that arrives. Which memory depends on what the field is.

    changes of a model                   e ← e + v,  send c = C(e),  e ← e − ĉ         (error feedback)
    anything else, such as a model       send c = C(v − h),  h ← h + ĉ                  (the server has the same h)

A method may declare a field `renewed`, which gives it the second memory: a change of SCAFFOLD's is a mean of gradients
too, and control variates from what error feedback has piled up would be spikes (digits, top 5 %: 90.9 % at the server
against 84.4 %). ĉ is what the code c says. With error feedback the sum of all that arrived plus e is the sum of all
that was to be sent (Stich, Cordonnier, Jaggi 2018; Karimireddy, Rebjock, Stich, Jaggi: Error Feedback Fixes SignSGD,
ICML 2019). That makes no sense for a model, of which one hundredth is no model: there the difference to what the server
knows of it is coded, as in EF21 (Richtárik, Sokolov, Fatkhullin, NeurIPS 2021), and h arrives. A real server would hold
h of every client.

Rows that are not finite pass as they are: they are rejected anyway.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kinfed.core import EXACT, MASKED_BY, RENEWED, Tree, rng, unpacked
from kinfed.data import Moments
from kinfed.updates.codecs import Codec
from kinfed.updates.stages import SentUpdates, Stage


@dataclass(frozen=True)
class CodedField:
    name: str
    rows: Tensor  # [n, d]
    mask: Tensor | None  # bool [n, d]: the numbers that travel; None: all
    renewed: bool  # it says how things are now


class Compression(Stage):
    name = "compression"

    def __init__(self, codec: Codec, changes: tuple[str, ...] = ()) -> None:
        """`changes`: the fields that are changes of a model: these get error feedback."""
        self.codec, self.changes = codec, changes
        self.remembers = not codec.unbiased

    def at_client(self, up: Tree, memory: Moments, key: Tensor) -> SentUpdates:
        arrived: dict[str, Tensor] = {}
        remembered: dict[str, Tensor] = {}
        saved = 0
        for position, field in enumerate(coded_fields(up)):
            before = memory.tensors.get(field.name)
            before = torch.zeros_like(field.rows) if before is None else before.cpu()
            feedback = field.name in self.changes and not field.renewed
            wanted = field.rows
            if self.remembers:
                wanted = wanted + before if feedback else wanted - before
            value, nbytes = self._transmit(wanted, field.mask, rng.fold(key, position))
            if self.remembers and feedback:
                remembered[field.name] = wanted - value
            elif self.remembers:
                remembered[field.name] = value = before + value
            if field.mask is not None:
                value = value * field.mask
            like = getattr(up, field.name)
            arrived[field.name] = value.reshape(like.shape).to(like.device)
            numbers = field.rows.numel() if field.mask is None else int(field.mask.sum())
            saved += numbers * field.rows.element_size() - nbytes
        sent = dataclasses.replace(up, **arrived)
        return SentUpdates(sent, Moments(remembered), up.nbytes - saved)

    def _transmit(self, rows: Tensor, mask: Tensor | None, key: Tensor) -> tuple[Tensor, int]:
        """Rows as they arrive, and the bytes of their codes."""
        arrived, nbytes = rows.clone(), 0
        finite = torch.isfinite(rows.sum(1, dtype=torch.float64))
        if mask is None:
            nbytes = self.codec.nbytes(rows.shape[1]) * len(rows)
            if bool(finite.any()):
                code = self.codec.encode(rows[finite], key[finite])
                arrived[finite] = self.codec.decode(code, rows.shape[1])
            return arrived, nbytes
        for row, columns in enumerate(mask):
            d = int(columns.sum())
            nbytes += self.codec.nbytes(d) if d else 0
            if not bool(finite[row]):
                continue
            arrived[row] = 0
            if d:
                code = self.codec.encode(rows[row, columns][None], key[row : row + 1])
                arrived[row, columns] = self.codec.decode(code, d)[0]
        return arrived, nbytes


def coded_fields(up: Tree) -> Iterator[CodedField]:
    """The fields of updates of which each client sends several float32 numbers, as flat rows."""
    for field in dataclasses.fields(up):
        value = getattr(up, field.name)
        if EXACT in field.metadata or not isinstance(value, Tensor) or value.dtype != torch.float32:
            continue
        if value.dim() < 2 or not len(value):
            continue
        rows = value.detach().cpu().flatten(1)
        if rows.shape[1] < 2:
            continue
        name = field.metadata.get(MASKED_BY)
        mask = None if name is None else unpacked(getattr(up, name).cpu(), rows.shape[1])
        yield CodedField(field.name, rows, mask, RENEWED in field.metadata)
