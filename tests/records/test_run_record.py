"""Records are written and read back as they were."""

from __future__ import annotations

import json
import math

import pytest

from kinfed.core import storage
from kinfed.records.run_record import ClientRecord, FinalRecord, RoundRecord

METRICS = {"accuracy": 0.5, "loss": 0.25}


def read_back(value: object) -> dict[str, object]:
    entry: dict[str, object] = json.loads(storage.to_json(value))
    return entry


def test_a_round_is_read_as_it_was_written() -> None:
    plain = RoundRecord(3, 0.5, 4, 1, 10.0, 20.0, {}, {"groups": 2}, took_part=4)
    line = read_back(plain.to_json(("ditto", 1, None)))
    assert line.items() >= {"algorithm": "ditto", "seed": 1, "round": 3, "personal": None, "all_clients": None}.items()
    assert not {"fold", "clock", "staleness"} & line.keys()
    assert RoundRecord.from_json(line) == plain
    evaluated = RoundRecord(
        4, 0.5, 4, 0, 1.0, 2.0, {"personal": METRICS}, {}, 4, {"personal": METRICS}, clock=9.5, staleness=1.5
    )
    line = read_back(evaluated.to_json(("ditto", 1, 2)))
    assert line["fold"] == 2
    assert line["all_clients"] == {"personal": METRICS, "server": None}
    assert RoundRecord.from_json(line) == evaluated


def test_a_result_is_read_as_it_was_written() -> None:
    everyone = {"personal": METRICS, "server": None, "alternatives": {"local": METRICS}}
    final = FinalRecord(
        label="ditto", seed=2, rounds=5, personal=METRICS, clients=6, evaluated=6, took_part=5, all_clients=everyone,
        bytes_down=3.0, bytes_up=4.0, seconds=1.0, alternatives={"local": METRICS}, folds=2,
    )  # fmt: skip
    entry = read_back(final.to_json())
    assert entry["algorithm"] == "ditto"
    assert not {"label", "privacy", "user_privacy"} & entry.keys()
    assert FinalRecord.from_json(entry) == final
    diverged = FinalRecord.from_json({**entry, "personal": {"loss": None}})
    assert math.isnan(diverged.personal["loss"])


def test_unknown_figures_of_clients_are_absent() -> None:
    row = {"algorithm": "ditto", "seed": 0, "client": "a", "n_train": "7", "n_test": 3, "took_part": True}
    figures = {"personal_accuracy": "0.5", "server_accuracy": "", "personal_loss": None, "epsilon": math.inf}
    client = ClientRecord.from_row(row | figures)
    assert client == ClientRecord("a", 7, 3, {"took_part": 1.0, "personal_accuracy": 0.5})
    assert client.took_part


@pytest.mark.parametrize("value", ["<b>", None, [1], {"a": 1}])
@pytest.mark.parametrize("name", ["seed", "rounds"])
def test_results_that_count_nothing_are_refused(name: str, value: object) -> None:
    entry = read_back(FinalRecord(label="ditto", seed=2, rounds=5, personal=METRICS).to_json())
    with pytest.raises((TypeError, ValueError)):  # which readers of folders name with their file
        FinalRecord.from_json({**entry, name: value})
