"""Compressed updates: bytes as sent, memories of what was not, and the same wherever clients live."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kinfed
from kinfed.algorithms import make_algorithm
from kinfed.algorithms.common.averaging import DeltaUp
from kinfed.algorithms.common.masked_rows import MaskedUp
from kinfed.algorithms.common.message_shape import averaged_changes
from kinfed.config.config_reading import make_config
from kinfed.core import rng
from kinfed.core.bitpack import packed
from kinfed.data.examples.optimizer_state import Moments
from kinfed.deploy.settings import Deployment
from kinfed.errors import CheckpointError, ConfigError
from kinfed.pools.local_pool import LocalPool
from kinfed.pools.worker import Worker, compact, make_shard
from kinfed.server.loop import Loop
from kinfed.server.schedule import Schedule
from kinfed.testing.workbench import ROUNDS, SEED, WORK, Bench, expect_equal, outcome, state_of, tiny_federation
from kinfed.updates.codecs import CODECS, QSGD, Codec, TopK, as_bytes, as_floats
from kinfed.updates.compression import Compression

FEEDBACK = Compression(TopK(0.1), ("delta",))
RANDOM = Compression(QSGD(levels=3))
KNOWN = Compression(TopK(0.2))


def loop_of(bench: Bench, compression: Compression | None, workers: int = 1, chunk: int | None = 2) -> Loop:
    algorithm, task = replace(bench.algorithm), bench.make_task()
    population = bench.federation.population(SEED)
    stages = [] if compression is None else [compression]
    pool = LocalPool(algorithm, task, bench.federation, SEED, workers=workers, chunk=chunk, stages=stages)
    return Loop(algorithm, task, pool, population, Schedule(0.67, dropout=0.2), stages)


def finished(bench: Bench, compression: Compression | None, **where: Any) -> dict[str, Tensor]:
    with loop_of(bench, compression, **where) as loop:
        for _ in range(ROUNDS):
            loop.round()
        return outcome(loop)


# ---- messages ----


def test_what_arrived_and_what_is_remembered_add_up_to_what_was_sent() -> None:
    """Error feedback: Σ arrived + e = Σ v, exactly in whole numbers."""
    memory, total, arrived = Moments(), torch.zeros(3, 20), torch.zeros(3, 20)
    for round in range(6):
        key = rng.fold(rng.root(0, "updates"), round, torch.arange(3))
        v = rng.bits(key, 20).remainder(1000).float() - 500
        up, memory, nbytes = FEEDBACK.at_client(DeltaUp(v, torch.ones(3)), memory, key)
        assert nbytes == 3 * (TopK(0.1).nbytes(20) + 4)  # the codes, and the numbers of examples as they are
        assert int((up.delta != 0).sum()) <= 3 * 2
        total, arrived = total + v, arrived + up.delta
    assert torch.equal(arrived + memory.tensors["delta"], total)


def test_the_server_follows_what_is_no_change_by_differences() -> None:
    """A model that stays is known completely once all its numbers have been sent."""
    theta, memory = torch.arange(1.0, 21.0).expand(2, 20), Moments()
    compression, key = Compression(TopK(0.25)), torch.zeros(2, dtype=torch.int64)
    for known in (5, 10, 15, 20):
        up, memory, _ = compression.at_client(DeltaUp(theta, None), memory, key)
        assert int((up.delta[0] == theta[0]).sum()) == known
        assert torch.equal(memory.tensors["delta"], up.delta)


def test_masked_numbers_alone_are_sent_and_counted() -> None:
    mask = torch.zeros(2, 40, dtype=torch.bool)
    mask[0, 5:15], mask[1, ::2] = True, True
    up = MaskedUp(
        torch.where(mask, torch.randn(2, 40, generator=torch.Generator().manual_seed(0)), 0.0), packed(mask), None
    )
    for compression in (RANDOM, FEEDBACK):
        arrived, _, nbytes = compression.at_client(up, Moments(), torch.arange(2))
        assert not bool(arrived.delta[~mask].any())
        assert nbytes == sum(compression.codec.nbytes(d) for d in (10, 20)) + 2 * 5
        assert torch.equal(arrived.bits, up.bits)


def test_a_row_that_is_not_finite_stays_so_and_harms_no_other() -> None:
    v = torch.ones(3, 8)
    v[1, 3] = torch.nan
    for compression in (RANDOM, FEEDBACK):
        up, _, _ = compression.at_client(DeltaUp(v, None), Moments(), torch.arange(3))
        assert up.finite_rows(3).tolist() == [True, False, True]


# ---- runs ----


def test_all_numbers_of_a_row_are_the_method_itself() -> None:
    bench = Bench(make_algorithm("fedavg", WORK, {}))
    whole = finished(bench, Compression(TopK(1.0), ("delta",)))
    assert not bool(whole.pop("clients.compression.rows.delta").any())
    expect_equal(whole, finished(bench, None), "top-k of all numbers is no compression")


@pytest.mark.parametrize(
    ("name", "compression"), [("ditto", FEEDBACK), ("heterofl", FEEDBACK), ("fedamp", KNOWN), ("fedproto", RANDOM)]
)
def test_threads_chunks_and_a_checkpoint_give_the_same_bits(name: str, compression: Compression) -> None:
    bench = Bench(make_algorithm(name, WORK, {}))
    once = finished(bench, compression)
    expect_equal(finished(bench, compression, workers=2, chunk=1), once, "workers and chunks change nothing")
    with loop_of(bench, compression) as loop:
        loop.round()
        completed, state = loop.completed, state_of(loop)
    with loop_of(bench, compression) as loop:
        loop.load(completed, state)
        for _ in range(ROUNDS - 1):
            loop.round()
        expect_equal(outcome(loop), once, "resuming changes nothing")


def by_id(worker: Worker) -> dict[str, Tensor]:
    states = worker.states()
    return {name: tensor[torch.argsort(states["ids"])] for name, tensor in states.items()}


def test_a_worker_in_another_process_gives_back_what_clients_remember() -> None:
    """As Ray's workers do: the state after a round is all that a new worker needs."""
    bench = Bench(make_algorithm("fedavg", WORK, {}))
    ids, task = torch.arange(3), bench.make_task()

    def started() -> Worker:
        worker = Worker()
        worker.load_shard(make_shard(bench.federation, ids))
        worker.start_run("run", bench.algorithm, task, SEED, [FEEDBACK])
        return worker

    down = compact(bench.algorithm.download(bench.algorithm.init_server(task, bench.federation.population(SEED)), ids))
    first, second = started(), started()
    reply, snapshot = first.train(ids, down, 1, None)
    assert reply.nbytes == 3 * (FEEDBACK.codec.nbytes(task.num_params) + 4)
    second.restore([snapshot.ids], snapshot)
    expect_equal(by_id(second), by_id(first), "a snapshot restores what clients remember")
    assert bool(first.states()["compression.rows.delta"].any())
    expect_equal(
        second.train(ids, down, 2, None)[0].rows.named(), first.train(ids, down, 2, None)[0].rows.named(), "and goes on"
    )
    first.close(), second.close()


def test_states_without_what_compression_left_out_are_refused() -> None:
    bench = Bench(make_algorithm("fedavg", WORK, {}))
    with loop_of(bench, None) as loop:
        loop.round()
        completed, state = loop.completed, state_of(loop)
    with loop_of(bench, FEEDBACK) as loop, pytest.raises(CheckpointError, match="without what compressed updates"):
        loop.load(completed, state)


def test_who_sends_changes() -> None:
    """Error feedback goes to changes of the server's models, which zeros leave as they are."""
    changes = {}
    for name in ("fedavg", "fedadam", "fedper", "gpfl", "fedmd", "fedamp"):
        bench = Bench(name)
        population = bench.federation.population(SEED)
        changes[name] = averaged_changes(bench.algorithm, bench.make_task(), bench.federation, population)
    assert changes["fedavg"] == changes["fedadam"] == changes["fedper"] == (("delta",), "")
    assert changes["gpfl"] == (("delta", "valve", "embeddings"), "")
    assert "not changes" in changes["fedmd"][1]
    assert "every single model" in changes["fedamp"][1]


def test_a_compressed_run_resumes_bit_for_bit_and_counts_what_it_sent(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "federation": tiny_federation(), "algorithms": "ditto", "seeds": (0,), "rounds": 4, "steps": 3, "model": "mlr",
        "participation": 0.5, "eval_every": 0,
    }  # fmt: skip
    coded = kinfed.run(**settings, compress="topk:0.2", out=tmp_path / "once")
    plain = kinfed.run(**settings)
    d, calls = coded.task.num_params, 4 * 3
    assert plain.result("ditto").bytes_up == calls * 4 * (d + 1)
    assert coded.result("ditto").bytes_up == calls * (TopK(0.2).nbytes(d) + 4)
    assert coded.result("ditto").bytes_down == plain.result("ditto").bytes_down
    stop = iter([False, False, True])
    with pytest.raises(kinfed.KinfedError):
        kinfed.run(**settings, compress="topk:0.2", out=tmp_path / "twice", should_stop=lambda: next(stop))
    kinfed.run(**settings, compress="topk:0.2", out=tmp_path / "twice", resume=True)
    files = [next((tmp_path / name / "models").glob("ditto*")).read_bytes() for name in ("once", "twice")]
    assert files[0] == files[1]


@pytest.mark.parametrize("name", ["apple", "pfedfda", "mrmtl"])
def test_every_kind_of_message_can_be_sent(name: str) -> None:
    bench = Bench(make_algorithm(name, WORK, {}))
    for compression in (RANDOM, KNOWN):
        assert torch.isfinite(finished(bench, compression)["personal models"]).all()


# ---- settings ----


def test_the_short_form_is_the_first_option() -> None:
    short = make_config(None, {"compress": "qsgd:4"})
    assert short.codec == QSGD(levels=4)
    assert short == make_config(None, {"compress": {"name": "qsgd", "levels": 4}})
    assert make_config(None, {"compress": "topk:0.5"}, ("compress.share=0.25",)).codec == TopK(0.25)
    assert make_config(None, {"compress": "qsgd"}, ("compress.bucket=64",)).codec == QSGD(bucket=64)


def test_a_codec_without_options_takes_no_short_form() -> None:
    class Whole(Codec):
        """Numbers as they are."""

        def nbytes(self, d: int) -> int:
            return 4 * d

        def encode(self, rows: Tensor, key: Tensor) -> Tensor:
            return as_bytes(rows)

        def decode(self, code: Tensor, d: int) -> Tensor:
            return as_floats(code)

    CODECS.register("whole", dataclass(frozen=True)(Whole))
    try:
        with pytest.raises(ConfigError, match="whole has no options"):
            make_config(None, {"compress": "whole:3"})
    finally:
        CODECS.unregister("whole")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"compress": "qsdg"}, "qsgd"),
        ({"compress": "qsgd:many"}, "levels"),
        ({"compress": "topk:2"}, "share"),
        ({"compress": "topk", "secure_sum": True}, "cannot be added up"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_config(None, settings)


def test_deployments_refuse_it_with_the_reason() -> None:
    with pytest.raises(ConfigError, match="nodes send their updates as they are"):
        Deployment.parse({"compress": "qsgd:4"})
