"""Which clients are evaluated where not all are."""

from __future__ import annotations

import torch

from kinfed.server.schedule import Schedule


def test_evaluated_clients_are_drawn_from_those_who_are_called() -> None:
    schedule, rounds = Schedule(participation=0.05), range(1, 6)
    called = set(torch.cat([schedule.active(3, number, 100) for number in rounds]).tolist())
    sample = schedule.evaluated(3, rounds, 100, 8)
    assert len(sample) == 8
    assert set(sample.tolist()) <= called
    assert sample.tolist() == sorted(set(sample.tolist()))
    assert torch.equal(sample, schedule.evaluated(3, rounds, 100, 8))
    assert not torch.equal(sample, schedule.evaluated(4, rounds, 100, 8))


def test_others_are_evaluated_where_too_few_are_called() -> None:
    schedule, rounds = Schedule(participation=0.05), range(1, 3)
    called = set(torch.cat([schedule.active(0, number, 100) for number in rounds]).tolist())
    sample = set(schedule.evaluated(0, rounds, 100, 40).tolist())
    assert called < sample
    assert len(sample) == 40
    assert schedule.evaluated(0, rounds, 100, 200).tolist() == list(range(100))
