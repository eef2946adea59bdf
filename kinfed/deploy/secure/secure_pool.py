"""The pool of all nodes where updates are added up securely: the server sees the sum of a round, and no update."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kinfed.algorithms import COUNT, mean_from_row
from kinfed.core import Tree
from kinfed.deploy.secure.secure_messages import Assembly, KeyRecord, Member
from kinfed.deploy.secure.secure_round import NoSum, SecureRound, read_record
from kinfed.deploy.server.node_pool import NodePool
from kinfed.deploy.transport.wire import MessageError, Packet, tree_of
from kinfed.updates import SecureSettings, Updates, secure_sum, user_level


class SecureNodePool(NodePool):
    def __init__(self, settings: SecureSettings, *arguments: Any) -> None:
        """The other arguments are those of a NodePool."""
        super().__init__(*arguments)
        averages = settings.averaged_fields(self.deployment.method, self.algorithm)
        self.settings, self.averages = settings, averages
        self._width = sum(self._sample[name].numel() for name in averages)
        counts, self._user_privacy = self.roster.counts[:, 0], self.deployment.run.user_privacy
        self._by_examples = COUNT in self._sample and self._user_privacy is None
        if self._user_privacy is not None:
            self._fixed_point = user_level.unit_sum(len(counts))
        else:
            declared = int(counts.sum()) if self._by_examples else len(counts)
            most = math.ceil(declared * (1 + self.deployment.drift))
            self._fixed_point = secure_sum.FixedPoint(settings.largest, most)
        self._train_terms = {"total": self._fixed_point.total}

    def _read_update(self, k: int, round: int, answer: Packet) -> KeyRecord:
        """Keys, where a plain pool gets an update."""
        if strange := answer.groups.keys() - {"keys"}:
            raise MessageError(f"an answer to a secure round holds keys and nothing else; got {min(strange)} too")
        return read_record(answer, self.run, round, self._member(k))

    def _combine(self, answers: Mapping[int, Any], round: int, needed: int, updates: Updates) -> Updates:
        numbers = sorted(answers)
        members = tuple(self._member(k) for k in numbers)
        assembly = Assembly(self.run, round, members, tuple(answers[k] for k in numbers))
        least, threshold = max(needed, self.settings.least), self.deployment.secure_threshold
        secure = SecureRound(partial(self._ask_members, round), assembly, self._width, least, threshold)
        try:
            in_sum, total = secure.total()
            updates = replace(updates, ids=torch.tensor(in_sum), mean=self._mean(in_sum, total))
        except NoSum as error:
            self.exchange.say(f"round {round}: no secure sum: {error}; nothing was changed")
        return replace(updates, nbytes=updates.nbytes + secure.nbytes_up, nbytes_down=secure.nbytes_down)

    def _member(self, k: int) -> Member:
        return Member(k, self.roster.names[k], self.roster.keys[k])

    def _ask_members(
        self, round: int, kind: str, requests: Mapping[int, Packet], take: Callable[[int, Packet], None], needed: int
    ) -> None:
        orders = {}
        for k, request in requests.items():
            header = {"kind": kind, "run": self.run, "round": round, "number": k, "name": self.roster.names[k]}
            orders[self.roster.names[k]] = Packet(header | request.header, request.groups)
        self._ask(kind, orders, take, needed, f"round {round}, {kind}")

    def _mean(self, in_sum: list[int], total: Tensor) -> Tree:
        if not self._fixed_point.holds(total):
            raise NoSum("the sum is beyond what updates within secure_range can add up to; a client sent no update")
        mean, weight = self._fixed_point.decode(total)
        declared = int(self.roster.counts[in_sum, 0].sum()) if self._by_examples else len(in_sum)
        allowed = self.deployment.drift * declared if self._by_examples else 0
        if abs(weight - declared) > allowed:
            raise NoSum(f"the clients of the sum say {weight} examples together, and said {declared} at the start")
        if self._user_privacy is not None:
            mean = mean * self._user_privacy.clip
        return mean_from_row(tree_of(self._checks.up, self._sample), self.averages, mean)
