"""One algorithm under one seed: what is evaluated, written and told, and who decides between rounds."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kinfed.algorithms.base import ServerModels
from kinfed.algorithms.ditto import Ditto
from kinfed.algorithms.fedavg import FedAvg
from kinfed.algorithms.local import Local
from kinfed.data.examples.batches import LocalTraining
from kinfed.data.federations.federation import Federation
from kinfed.engine.scoring.score import Score
from kinfed.pools.base import Evaluation
from kinfed.records.run_files import RunFiles
from kinfed.records.run_folder import RunFolder
from kinfed.runs.method_run import Interrupted, MethodRun
from kinfed.runs.observer import NullObserver
from kinfed.runs.results import ClientTable, MethodResult
from kinfed.server.loop import Loop, RoundReport
from kinfed.server.schedule import Schedule
from kinfed.testing import Bench, tiny_federation
from kinfed.testing.workbench import SEED

WORK = LocalTraining(batch=5, steps=2)


@contextmanager
def method_run(
    algorithm: Any, rounds: int, data: Federation | None = None, **more: Any
) -> Iterator[tuple[MethodRun, list[str]]]:
    """The run, and the splits that its pool is asked to evaluate, one by one."""
    bench, splits = Bench(algorithm), []
    data = data or bench.federation
    with bench.loop(Schedule(), federation=data) as loop:
        evaluate = loop.pool.evaluate

        def watched(*args: Any, **options: Any) -> Evaluation:
            splits.append(options["split"])
            return evaluate(*args, **options)

        loop.pool.evaluate = watched  # type: ignore[method-assign]
        yield MethodRun("mine", loop, ClientTable.from_federation(data), rounds, **more), splits


def opened(path: Path, resume: bool = False) -> RunFolder:
    return RunFolder.open(path, {"rounds": 4}, "mine", resume=resume)


@pytest.mark.parametrize(("every", "times"), [(0, 1), (1, 4), (2, 2), (3, 2)])
def test_every_round_is_evaluated_at_most_once(every: int, times: int) -> None:
    with method_run(Ditto(WORK), 4, eval_every=every, keep_models=True) as (run, splits):
        result = run.execute()
        assert splits == ["test"] * times
        assert result.evaluation.models is not None  # those of the last round, from that one evaluation


def test_a_finished_run_is_evaluated_again_for_its_result_only(tmp_path: Path) -> None:
    with opened(tmp_path) as folder, method_run(Ditto(WORK), 4, eval_every=2, folder=folder) as (run, _):
        first = run.execute()
    with (
        opened(tmp_path, resume=True) as folder,
        method_run(Ditto(WORK), 4, eval_every=2, folder=folder) as (run, splits),
    ):
        again = run.execute()
        assert splits == ["test"]
    assert again.to_json() == first.to_json()


def test_models_may_be_judged_on_validation_examples() -> None:
    with method_run(Ditto(WORK), 2, eval_every=1, split="val") as (run, splits):
        run.execute()
        assert splits == ["val", "val"]


def test_a_caller_may_decide_between_rounds_and_finds_them_saved(tmp_path: Path) -> None:
    with opened(tmp_path) as folder:
        with method_run(FedAvg(WORK), 5, folder=folder, checkpoint_every=1) as (run, _):
            for report in run.rounds():
                assert RunFiles(folder.path).records()[-1]["round"] == report.round
                if report.round == 2:
                    break
        snapshot = folder.checkpoints.latest(f"mine-{SEED}")
        assert snapshot is not None
        assert snapshot.round == 2
        with method_run(FedAvg(WORK), 5, folder=folder) as (run, _):
            assert [report.round for report in run.rounds()] == [3, 4, 5]
            result = run.finish()
    assert result.bytes_up == sum(record["bytes_up"] for record in RunFiles(folder.path).records())


@dataclass
class Ear(NullObserver):
    heard: list[Any]

    def started(self, label: str, seed: int, first: int, rounds: int) -> None:
        self.heard.append((label, seed, first, rounds))

    def round(self, label: str, seed: int, report: RoundReport, personal: Any, server: Any) -> None:
        self.heard.append((report.round, personal is not None))

    def note(self, text: str) -> None:
        self.heard.append(text)


def test_an_observer_hears_of_rounds_evaluations_and_rejections() -> None:
    ear, data = Ear([]), tiny_federation()
    data.features.raw[data.train[4]] = torch.nan
    with method_run(FedAvg(WORK), 3, data, eval_every=2, observer=ear) as (run, _):
        run.execute()
    bad = "dropped 1 update(s) with NaN or infinity, of client-4"
    assert ear.heard == [
        ("mine", SEED, 0, 3),
        f"mine, round 1: {bad}", (1, False), f"mine, round 2: {bad}", (2, True), f"mine, round 3: {bad}", (3, True),
    ]  # fmt: skip


def test_a_run_that_is_asked_to_stop_saves_its_round_first(tmp_path: Path) -> None:
    with opened(tmp_path) as folder, method_run(Local(WORK), 4, folder=folder, should_stop=lambda: True) as (run, _):
        with pytest.raises(Interrupted):
            run.execute()
        snapshot = folder.checkpoints.latest(f"mine-{SEED}")
    assert snapshot is not None
    assert snapshot.round == 1


@dataclass(frozen=True)
class TwoModels(FedAvg):
    """Clients of even numbers have the first model."""

    def server_models(self, server: Any) -> ServerModels:
        return ServerModels(torch.stack([server.w, server.w + 1]), torch.arange(6) % 2)


def test_which_client_has_which_server_model_is_in_the_journal_and_with_the_models(tmp_path: Path) -> None:
    with (
        opened(tmp_path) as folder,
        method_run(TwoModels(WORK), 3, eval_every=2, keep_models=True, folder=folder) as (run, _),
    ):
        result = run.execute()
        w = run.loop.server.w
    files = RunFiles(tmp_path)
    assert [record["method"].get("assignment") for record in files.records()] == [None, *[[0, 1, 0, 1, 0, 1]] * 2]
    models = files.models("mine", SEED).server
    assert models is not None
    assert torch.equal(models.rows(torch.tensor([0, 3])), torch.stack([w, w + 1]))
    assert result.server_model is None


def result_of(count: int, evaluated: Tensor) -> MethodResult:
    score = Score(torch.full((count,), 2.0), torch.full((count,), 1.5), torch.full((count,), 4))
    clients = ClientTable([f"c{k}" for k in range(count)], torch.arange(count) + 1, torch.full((count,), 4))
    evaluation = Evaluation(evaluated, score, None, took_part=torch.ones(count, dtype=torch.bool))
    return MethodResult(
        label="mine", seed=0, rounds=1, personal={}, server=None, clients=count, evaluated=len(evaluated),
        took_part=count, all_clients={}, bytes_down=0, bytes_up=0, seconds=0.0, diverged=False, evaluation=evaluation,
        client_table=clients,
    )  # fmt: skip


def test_lines_of_clients_by_hand() -> None:
    result = result_of(3, torch.tensor([0, 1, 2]))
    evaluation = replace(
        result.evaluation,
        ids=torch.tensor([0, 2]),
        personal=Score(torch.tensor([1.0, 0.0]), torch.tensor([3.0, 0.0]), torch.tensor([4, 0])),
        took_part=torch.tensor([True, False]),
    )
    result = replace(result, evaluation=evaluation, privacy={"epsilon": [1.0, 2.0, 3.0]})
    assert result.client_columns() == {
        "algorithm": ["mine"] * 2, "seed": [0, 0], "client": ["c0", "c2"], "n_train": [1, 3], "n_test": [4, 4],
        "took_part": [True, False],
        "personal_accuracy": [0.25, None], "personal_loss": [0.75, None],
        "server_accuracy": [None, None], "server_loss": [None, None], "epsilon": [1.0, 3.0],
    }  # fmt: skip


def test_lines_of_very_many_clients_take_no_time() -> None:
    result = result_of(100_000, torch.arange(100_000))
    began = time.perf_counter()
    result.client_columns()
    assert time.perf_counter() - began < 3


def test_a_loop_closes_its_pool() -> None:
    closed: list[str] = []

    class Pool:
        def close(self) -> None:
            closed.append("pool")

    with Bench(Local(WORK)).loop() as inner:
        with Loop(inner.algorithm, inner.task, Pool(), inner.population):  # type: ignore[arg-type]
            assert not closed
        assert closed == ["pool"]
