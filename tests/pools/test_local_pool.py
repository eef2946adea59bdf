"""The local pool: chunks, threads and order are invisible; errors and bad updates are not."""

from __future__ import annotations

import ctypes
import platform
import subprocess
import sys
import threading
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kinfed.algorithms.common.averaging import ModelDown
from kinfed.algorithms.ditto import Ditto
from kinfed.algorithms.fedavg import FedAvg
from kinfed.algorithms.local import Local
from kinfed.core import threads
from kinfed.data.examples.batches import LocalTraining
from kinfed.data.federations.federation import Federation
from kinfed.engine.task_factory import make_task
from kinfed.engine.training.sgd import sgd
from kinfed.errors import PoolError
from kinfed.pools import local_pool
from kinfed.pools.local_pool import LocalPool
from kinfed.pools.memory import KEEP_BYTES, keep_freed_memory
from kinfed.testing import tiny_federation, tiny_model
from kinfed.testing.workbench import hooked

WORK = LocalTraining(batch=5, steps=4)
SEED = 3


def pool_of(method: Any, data: Federation | None = None, *, path: str = "auto", **options: Any) -> LocalPool:
    return LocalPool(method, make_task(tiny_model, backend=path), data or tiny_federation(), SEED, **options)


def start_of(pool: LocalPool) -> Any:
    w = pool.task.init(SEED)
    return lambda ids: ModelDown(w.expand(len(ids), -1))


def watched(method: Any, **hooks: Any) -> tuple[Any, list[list[int]]]:
    """The method, and the ids of every chunk it is given to train."""
    chunks: list[list[int]] = []

    def client_update(inner: Any, task: Any, client: Any, down: Any, data: Any) -> Any:
        chunks.append(data.ids.tolist())
        return inner(task, client, down, data)

    return hooked(method, client_update=client_update, **hooks), chunks


@pytest.mark.parametrize("chunk", [1, 2, 4, 100])
@pytest.mark.parametrize("workers", [1, 3])
def test_replies_are_each_clients_own_in_ascending_order(chunk: int, workers: int) -> None:
    pool = pool_of(FedAvg(training=WORK), chunk=chunk, workers=workers)
    reply = pool.train(torch.tensor([0, 2, 3, 5]), start_of(pool), round=2)
    assert reply.ids.tolist() == [0, 2, 3, 5]
    assert reply.rows.count.tolist() == [1, 16, 7, 10]
    w = pool.task.init(SEED)
    for row, k in enumerate(reply.ids):
        cohort = pool.federation.cohort(k[None], SEED, 2)
        alone = sgd(pool.task, w[None], cohort.train.batches(WORK))
        torch.testing.assert_close(reply.rows.delta[row], alone[0] - w, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(pool.clients.take(k[None]).named()["theta"], alone, rtol=1e-5, atol=1e-6)
    assert pool.clients.seen.tolist() == sorted([0, 2, 3, 5], key=lambda k: -[1, 4, 16, 7, 13, 10][k])
    pool.close()


def test_clients_of_like_size_share_a_chunk() -> None:
    method, chunks = watched(FedAvg(training=WORK))
    pool = pool_of(method, chunk=2, workers=1)
    pool.train(torch.arange(6), start_of(pool), round=1)
    assert chunks == [[2, 4], [5, 3], [1, 0]]  # 16 and 13, 10 and 7, 4 and 1 examples
    pool.close()


def test_chunks_fit_the_cache_spread_over_threads_and_are_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    data, example = tiny_federation((3,) * 20), 6 * 115  # operations of a step for one example

    def sizes(path: str = "auto", workers: int = 2) -> list[int]:
        method, chunks = watched(FedAvg(training=WORK))
        pool = pool_of(method, data, path=path, workers=workers)
        pool.train(torch.arange(20), start_of(pool), round=1)
        pool.close()
        return sorted((len(ids) for ids in chunks), reverse=True)

    assert sizes() == [20]  # so small a model is not worth cutting the cohort
    monkeypatch.setattr(local_pool, "STEP_FLOPS", 9 * example * WORK.batch)
    assert sizes() == [10, 10]  # nine clients' steps are too little work for a chunk, ten are enough
    monkeypatch.setattr(local_pool, "STEP_FLOPS", 0)
    assert sizes(workers=1) == sizes(workers=2) == sizes(workers=7) == [10, 10]
    monkeypatch.setattr(local_pool, "MIN_CHUNKS", 4)
    assert sizes() == [5, 5, 5, 5]
    monkeypatch.setattr(local_pool, "CHUNK_BYTES", 3 * 4 * 115)
    assert sizes() == [3, 3, 3, 3, 3, 3, 2]  # room for three models of 115 parameters
    monkeypatch.setattr(local_pool, "CHUNK_BYTES", 4)
    assert sizes() == [1] * 20  # a model that is larger than the cache still trains
    monkeypatch.undo()
    assert sizes("rows") == [1] * 20  # row by row there is nothing to gain from a chunk


def test_chunks_run_in_the_workers_on_one_torch_thread_each() -> None:
    seen: set[tuple[str, int]] = set()

    def personalize(inner: Any, *args: Any) -> Tensor:
        seen.add((threading.current_thread().name, torch.get_num_threads()))
        return inner(*args)  # type: ignore[no-any-return]

    method, _ = watched(FedAvg(training=WORK), personalize=personalize)
    pool = pool_of(method, chunk=1, workers=2)
    pool.evaluate(torch.arange(6), start_of(pool), 0)
    assert {threads for _, threads in seen} == {1}
    assert {name for name, _ in seen} <= {"kinfed_0", "kinfed_1"}
    pool.close()


def test_states_are_kept_in_the_same_order_whichever_chunk_is_done_first() -> None:
    """A checkpoint lists clients in the order they came; it must not depend on the threads."""
    last_done = threading.Event()

    def client_update(inner: Any, task: Any, client: Any, down: Any, data: Any) -> Any:
        if 2 in data.ids.tolist():  # the first chunk waits for the last
            assert last_done.wait(60)
        out = inner(task, client, down, data)
        if 0 in data.ids.tolist():
            last_done.set()
        return out

    pool = pool_of(hooked(FedAvg(training=WORK), client_update=client_update), chunk=2, workers=3)
    reply = pool.train(torch.arange(6), start_of(pool), 1)
    alone = pool_of(FedAvg(training=WORK), chunk=2, workers=1)
    assert torch.equal(reply.rows.delta, alone.train(torch.arange(6), start_of(alone), 1).rows.delta)
    assert pool.clients.seen.tolist() == alone.clients.seen.tolist() == [2, 4, 5, 3, 1, 0]
    pool.close()
    alone.close()


def test_effort_belongs_to_its_client() -> None:
    found: dict[int, float] = {}

    def client_update(inner: Any, task: Any, client: Any, down: Any, data: Any) -> Any:
        found.update(zip(data.ids.tolist(), data.train.effort.tolist(), strict=True))
        return inner(task, client, down, data)

    pool = pool_of(hooked(FedAvg(training=WORK), client_update=client_update), chunk=2)
    effort = torch.tensor([0.1, 1.0, 0.5, 0.75])
    pool.train(torch.tensor([0, 2, 3, 5]), start_of(pool), 1, effort)
    assert found == {0: pytest.approx(0.1), 2: 1.0, 3: 0.5, 5: 0.75}
    pool.close()


@pytest.mark.parametrize("chunk", [1, 3, 6])
def test_bad_rows_are_cut_out_of_their_chunk(chunk: int) -> None:
    """One row of the message, another of the state: both are refused, their neighbours are not."""

    def client_update(inner: Any, task: Any, client: Any, down: Any, data: Any) -> Any:
        new, up = inner(task, client, down, data)
        up.delta[data.ids == 2] = torch.nan
        new.theta[data.ids == 5, 7] = torch.inf
        return new, up

    pool = pool_of(hooked(FedAvg(training=WORK), client_update=client_update), chunk=chunk)
    clean = pool_of(FedAvg(training=WORK), chunk=chunk)
    reply = pool.train(torch.arange(6), start_of(pool), 1)
    whole = clean.train(torch.arange(6), start_of(clean), 1)
    good = [0, 1, 3, 4]
    assert (reply.ids.tolist(), sorted(reply.refused)) == (good, [2, 5])
    assert torch.equal(reply.rows.delta, whole.rows.delta[good])
    assert reply.rows.count.tolist() == [1, 4, 7, 13]
    assert reply.nbytes == whole.nbytes == 6 * (4 * 115 + 4)
    assert sorted(pool.clients.seen.tolist()) == good
    pool.close()
    clean.close()


def test_an_update_may_show_the_state_that_the_round_replaces() -> None:
    """What a client sends is copied before its new state takes the place of the old one."""

    def send_old_state(inner: Any, task: Any, client: Any, down: Any, data: Any) -> Any:
        new, up = inner(task, client, down, data)
        return new, replace(up, delta=client.v)

    method = hooked(Ditto(training=WORK), client_update=send_old_state)
    with closing(pool_of(method, chunk=3, workers=1)) as pool:
        ids, down = torch.arange(6), start_of(pool)
        pool.train(ids, down, 1)
        before = pool.clients.take(ids).named()["v"]
        reply = pool.train(ids, down, 2)
        assert torch.equal(reply.rows.delta, before)
        assert not torch.equal(pool.clients.take(ids).named()["v"], before)


def test_nobody_left_is_an_empty_reply() -> None:
    def client_update(inner: Any, *args: Any) -> Any:
        new, up = inner(*args)
        return new, up.map(lambda tensor: tensor * torch.nan)

    pool = pool_of(hooked(FedAvg(training=WORK), client_update=client_update))
    reply = pool.train(torch.tensor([1, 4]), start_of(pool), 1)
    assert (reply.ids.tolist(), reply.rows, sorted(reply.refused)) == ([], None, [1, 4])
    assert pool.clients.seen.tolist() == []
    pool.close()


def test_evaluation_scores_each_clients_model_on_its_own_examples() -> None:
    pool = pool_of(Ditto(training=WORK), chunk=2, workers=2)
    pool.train(torch.tensor([1, 2, 4]), start_of(pool), 1)
    other = pool.task.init(99)
    asked = torch.tensor([4, 0, 2])
    for split in ("train", "test"):
        found = pool.evaluate(
            asked, start_of(pool), 1, split=split, server_model=lambda who: other.expand(len(who), -1), keep_models=True
        )
        assert found.models is not None
        assert found.personal is not None
        assert found.server_model is not None
        assert found.ids.tolist() == [4, 0, 2]
        for row, k in enumerate(asked):
            own = pool.clients.take(k[None]).named()["v"] if int(k) else other[None]  # client 0 has not trained
            torch.testing.assert_close(found.models[row : row + 1], own, rtol=0, atol=0)
            examples = pool.federation.split(split)[int(k)]
            x, y = pool.federation.features.gather(examples), pool.federation.labels[examples]
            for score, theta in ((found.personal, own), (found.server_model, other[None])):
                z = pool.task.logits(theta, x[None])[0]
                loss = nn.functional.cross_entropy(z, y, reduction="sum")
                assert float(score.loss[row]) == pytest.approx(float(loss), rel=1e-5)
                assert int(score.correct[row]) == int((z.argmax(1) == y).sum())
                assert int(score.count[row]) == len(y)
    assert sorted(pool.clients.seen.tolist()) == [1, 2, 4]  # client 0 was only looked at
    pool.close()


def test_client_figures_come_in_the_order_asked_for() -> None:
    method = hooked(Local(training=WORK), client_figures=lambda inner, client: {"norm": client.theta.norm(dim=1)})
    pool = pool_of(method, chunk=2)
    pool.train(torch.tensor([0, 3, 5]), start_of(pool), 1)
    asked = torch.tensor([5, 0, 3])
    norms = pool.evaluate(asked, start_of(pool), 1).figures["norm"]
    for row, k in enumerate(asked):
        assert float(norms[row]) == pytest.approx(float(pool.clients.take(k[None]).named()["theta"].norm()))
    assert len(set(norms.tolist())) == 3
    pool.close()


def test_evaluation_reads_the_rounds_own_batches() -> None:
    rounds: set[int] = set()

    def personalize(inner: Any, task: Any, client: Any, down: Any, data: Any) -> Any:
        rounds.add(data.round)
        return inner(task, client, down, data)

    pool = pool_of(hooked(FedAvg(training=WORK), personalize=personalize))
    pool.evaluate(torch.arange(6), start_of(pool), 17)
    assert rounds == {17}
    pool.close()


def test_errors_say_where_they_happened() -> None:
    def fails(inner: Any, task: Any, client: Any, down: Any, data: Any) -> Any:
        if 3 in data.ids.tolist():
            raise RuntimeError("a bug in the method")
        return inner(task, client, down, data)

    pool = pool_of(hooked(FedAvg(training=WORK), client_update=fails, personalize=fails), chunk=2)
    with pytest.raises(RuntimeError, match="a bug in the method") as caught:
        pool.train(torch.arange(6), start_of(pool), 4)
    assert caught.value.__notes__ == ["in client_update of client(s) [5, 3] in round 4"]
    with pytest.raises(RuntimeError, match="a bug in the method") as caught:
        pool.evaluate(torch.arange(6), start_of(pool), 4)
    assert caught.value.__notes__ == ["in personalize of client(s) [2, 3] in round 4"]
    pool.close()


def test_a_closed_pool_leaves_no_thread_and_opens_again() -> None:
    before = set(threading.enumerate())
    pool = pool_of(FedAvg(training=WORK), chunk=3, workers=2)
    first = pool.train(torch.arange(6), start_of(pool), 1)
    assert set(threading.enumerate()) > before
    pool.close()
    pool.close()
    assert set(threading.enumerate()) == before
    again = pool.train(torch.arange(6), start_of(pool), 1)
    assert torch.equal(first.rows.delta, again.rows.delta)
    pool.close()


def test_chunks_on_an_accelerator_fill_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is none here: what is tested is what follows from the memory that it would have free."""
    pool = pool_of(FedAvg(training=WORK), workers=1)
    clients = 10 * local_pool.CHUNK_BYTES // (4 * pool.task.num_params)
    on_the_processor = -(-clients // pool._chunk_size(clients))
    for free, chunks in ((1 << 40, local_pool.MIN_CHUNKS), (1, on_the_processor), (None, on_the_processor)):
        other = pool_of(FedAvg(training=WORK), workers=1)
        monkeypatch.setattr(other.task, "device", torch.device("cuda"))
        monkeypatch.setattr(local_pool, "device_memory", lambda device, free=free: free)
        assert -(-clients // other._chunk_size(clients)) == chunks
    assert on_the_processor >= 10


@pytest.mark.parametrize("path", ["stacked", "rows"])
def test_models_equal_to_the_servers_are_scored_once(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of clients that were never called; the others have a score of their own."""
    pool = pool_of(FedAvg(training=WORK), path=path, chunk=6, workers=1)
    w = pool.task.init(SEED)
    pool.train(torch.tensor([1, 4]), start_of(pool), 1)
    scored: list[int] = []
    evaluate = pool.task.evaluate

    def counted(theta: torch.Tensor, examples: Any) -> Any:
        scored.append(len(theta))
        return evaluate(theta, examples)

    monkeypatch.setattr(pool.task, "evaluate", counted)
    evaluation = pool.evaluate(torch.arange(6), start_of(pool), 1, server_model=lambda ids: w.expand(len(ids), -1))
    monkeypatch.undo()
    alone = pool.evaluate(torch.arange(6), start_of(pool), 1)  # no server's model, so all are computed
    assert sorted(scored) == [2, 6]
    assert evaluation.server_model is not None
    for name in ("correct", "loss", "count"):
        personal, server = (getattr(score, name) for score in (evaluation.personal, evaluation.server_model))
        assert torch.allclose(personal, getattr(alone.personal, name), rtol=1e-6)
        assert torch.equal(personal[[0, 2, 3, 5]], server[[0, 2, 3, 5]])
    assert not torch.equal(evaluation.personal.loss[[1, 4]], evaluation.server_model.loss[[1, 4]])
    for name, values in evaluation.personal.sums.items():
        assert torch.allclose(values, alone.personal.sums[name], rtol=1e-6, equal_nan=True)
    if alone.personal.error is not None:
        assert torch.allclose(evaluation.personal.error, alone.personal.error, rtol=1e-5, equal_nan=True)
    pool.close()


def test_a_round_in_one_piece_needs_no_thread_and_gives_the_same_bits() -> None:
    before, replies = set(threading.enumerate()), []
    for chunk in (6, 2):
        pool = pool_of(FedAvg(training=WORK), chunk=chunk, workers=2)
        replies.append(pool.train(torch.arange(6), start_of(pool), 1))
        assert (set(threading.enumerate()) == before) == (chunk == 6)
        pool.close()
    assert torch.equal(replies[0].ids, replies[1].ids)
    assert torch.equal(replies[0].rows.delta, replies[1].rows.delta)


def test_a_single_worker_is_the_callers_thread_with_one_thread_of_torch() -> None:
    seen: set[tuple[int, int]] = set()

    def personalize(inner: Any, *args: Any) -> Tensor:
        seen.add((threading.get_ident(), torch.get_num_threads()))
        return inner(*args)  # type: ignore[no-any-return]

    method, chunks = watched(FedAvg(training=WORK), personalize=personalize)
    pool = pool_of(method, chunk=1, workers=1)
    before = torch.get_num_threads(), set(threading.enumerate())
    alone = pool.train(torch.arange(6), start_of(pool), 1)
    pool.evaluate(torch.arange(6), start_of(pool), 1)
    assert len(chunks) == 6
    assert seen == {(threading.get_ident(), 1)}
    assert (torch.get_num_threads(), set(threading.enumerate())) == before
    pool.close()
    several = pool_of(FedAvg(training=WORK), chunk=1, workers=3)
    assert torch.equal(several.train(torch.arange(6), start_of(several), 1).rows.delta, alone.rows.delta)
    several.close()


def test_a_state_that_is_only_deployed_is_made_once_for_training() -> None:
    """FedAvg's clients do not read theirs: no start is copied for each of them in every round."""
    asked: list[list[int]] = []

    def init_client(inner: Any, task: Any, data: Any) -> Any:
        asked.append(data.ids.tolist())
        return inner(task, data)

    pool = pool_of(hooked(FedAvg(training=WORK), init_client=init_client), chunk=2, workers=1)
    for number in (1, 2, 3):
        pool.train(torch.arange(6), start_of(pool), number)
    assert len(asked) == 1
    assert pool.clients.take(torch.arange(6)).seen.tolist() == [True] * 6
    pool.close()


@pytest.mark.parametrize("failure", ["no thread", "error in a thread", "thread that hangs"])
def test_worker_threads_that_do_not_start_are_an_error(failure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has started must not wait for the others for ever, and torch's own setting comes back."""
    release, before = threading.Event(), (torch.get_num_threads(), set(threading.enumerate()))
    start, set_num_threads = threading.Thread.start, torch.set_num_threads

    def start_the_first_only(thread: threading.Thread) -> None:
        if thread.name == "kinfed_1":
            raise RuntimeError("can't start new thread")
        start(thread)

    def fail_in_the_second(count: int) -> None:
        if threading.current_thread().name == "kinfed_1":
            if failure == "error in a thread":
                raise RuntimeError("no such setting")
            release.wait(60)
        set_num_threads(count)

    if failure == "no thread":
        monkeypatch.setattr(threading.Thread, "start", start_the_first_only)
    else:
        monkeypatch.setattr(torch, "set_num_threads", fail_in_the_second)
    monkeypatch.setattr(threads, "START_SECONDS", 0.2 if failure == "thread that hangs" else 60.0)
    pool = pool_of(FedAvg(training=WORK), workers=3, chunk=3)
    began = time.monotonic()
    with pytest.raises(PoolError, match="not all of 3 worker threads started; use fewer with --workers"):
        pool.train(torch.arange(6), start_of(pool), 1)
    assert time.monotonic() - began < 30
    release.set()
    for thread in set(threading.enumerate()) - before[1]:
        thread.join(30)
    assert (torch.get_num_threads(), set(threading.enumerate())) == before
    monkeypatch.undo()
    assert len(pool.train(torch.arange(6), start_of(pool), 1).ids) == 6  # the next attempt finds nothing in its way
    pool.close()


def test_states_on_disk_give_the_same_bits(tmp_path: Path) -> None:
    in_memory, on_disk = pool_of(Ditto(training=WORK)), pool_of(Ditto(training=WORK), state_folder=tmp_path)
    for round, ids in enumerate((torch.tensor([1, 4]), torch.arange(6), torch.tensor([0, 1, 5])), 1):
        for pool in (in_memory, on_disk):
            pool.train(ids, start_of(pool), round)
    assert list(tmp_path.iterdir()) == []
    for name, tensor in in_memory.clients.named().items():
        assert torch.equal(tensor, on_disk.clients.named()[name])
    in_memory.close()
    on_disk.close()


FAULTS = """
import contextlib, io, resource, sys, torch
from kinfed.cli.app import main

def page_faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        torch.ones(10, 1 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

sys.argv = ["kinfed", "--version"]
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    main()
page_faults()
print(page_faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the setting is glibc's")
def test_memory_of_past_rounds_is_used_again_by_the_command() -> None:
    """Tensors of 40 MB come and go, more than the C library keeps by itself; hardly a page is asked for again."""
    process = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, check=True)
    assert int(process.stdout) < 10_000  # one tensor alone has as many pages


def test_a_pool_leaves_the_memory_of_its_process_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """To keep freed memory is for the command to decide; a library is a guest in its process."""
    calls: list[tuple[int, int]] = []
    libc = SimpleNamespace(mallopt=lambda name, value: calls.append((name, value)) or 1)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: libc)
    keep_freed_memory.cache_clear()
    pool = pool_of(FedAvg(training=WORK))
    pool.train(torch.arange(6), start_of(pool), 1)
    pool.close()
    assert calls == []
    assert keep_freed_memory()
    assert {value for _, value in calls} == {KEEP_BYTES}
    keep_freed_memory.cache_clear()
