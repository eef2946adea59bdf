"""The benchmark measures what it says; no test here judges a time."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from kinfed.engine.zoo import pretrained
from kinfed.engine.zoo.models import build_model
from kinfed.errors import ConfigError, KinfedError
from kinfed_papers.bench import (
    STEP_WORKLOADS,
    WORKLOADS,
    BenchComparison,
    BenchResult,
    StepComparison,
    print_result,
    run_benchmarks,
)
from kinfed_papers.bench import timing as measuring
from kinfed_papers.bench.contest import AGREEMENT, Timing, disagreement
from kinfed_papers.bench.machine import Limits, measure_limits, peak_mb
from kinfed_papers.bench.plain_loop import PlainLoop, conventional
from kinfed_papers.bench.step_timing import compare_steps
from kinfed_papers.bench.timing import engine
from kinfed_papers.bench.workload import synthetic

TINY = WORKLOADS["mlr"].quick()


def threads_of_a_new_thread() -> int:
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    return seen[0]


@pytest.fixture(scope="module")
def everything() -> BenchResult:
    return run_benchmarks(list(WORKLOADS), repeats=2, threads=(1,), quick=True)


def test_every_workload_is_measured(everything: BenchResult) -> None:
    assert [c.workload for c in everything.comparisons] == list(WORKLOADS)
    for c in everything.comparisons:
        assert len(c.ours.wall) == len(c.ours.cpu) == len(c.other.wall) == 2
        assert min(c.ours.wall + c.other.wall) > 0
        assert c.floor > 0
    assert everything.limits.products.keys() == WORKLOADS.keys()


def test_engine_and_plain_loop_agree_on_equal_batches(everything: BenchResult) -> None:
    found = {c.workload: c.disagreement for c in everything.comparisons}
    assert found.pop("mlr-10k") is None  # measured against the engine itself
    assert all(value is not None and value <= AGREEMENT for value in found.values())


def test_a_loop_that_computes_something_else_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    federation = synthetic(TINY)
    loop = PlainLoop.of_round(TINY, federation)
    loop.labels = 9 - loop.labels
    ours = engine(TINY, federation, 1)
    assert disagreement("mlr", ours, federation, loop) <= AGREEMENT  # equal batches bring their own labels
    monkeypatch.setattr(PlainLoop, "train", lambda *_: None)
    with pytest.raises(KinfedError, match=r"mlr: engine and plain loop should agree to 0\.0001"):
        run_benchmarks(["mlr"], repeats=1, threads=(1,), quick=True)


@pytest.mark.parametrize("name", ["user-dropout", "user-lstm", "user-transformer", "resnet18", "resnet18-momentum"])
def test_steps_of_any_model_are_those_of_plain_torch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of models that draw: the plain loop then draws what the engine draws."""
    monkeypatch.setattr("kinfed_papers.bench.step_timing.PARITY_STEPS", 3)
    small = {"module": lambda _: build_model("resnet18", (3, 8, 8), 10, {"width": 4}), "shape": (3, 8, 8)}
    workload = replace(STEP_WORKLOADS[name].quick(), **(small if name.startswith("resnet") else {}))
    [steps] = compare_steps(workload, 1, (1,), "")
    assert steps.disagreement < 1e-6
    assert steps.backend == ("stacked" if name == "user-lstm" else "rows")
    assert len(steps.ours.cpu) == len(steps.loop.cpu) == 1


@pytest.mark.parametrize("name", ["minilm-last2", "minilm-last2-cached"])  # the loop through the whole model, or not
@pytest.mark.parametrize(("options", "backend"), [({"lora_layers": 1}, "batched"), ({"lora_rank": 0}, "stacked")])
def test_steps_on_activations_are_those_of_plain_torch(
    name: str, options: dict[str, int], backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = dict(zip(pretrained._SIZES, (50, 8, 2, 2, 16, 16, 2, 1e-12), strict=True))
    monkeypatch.setattr(pretrained, "_MINILM", sizes)
    monkeypatch.setattr("kinfed_papers.bench.step_timing.PARITY_STEPS", 3)
    module = lambda _: pretrained.random_minilm((6,), 10, **options)  # noqa: E731
    workload = replace(STEP_WORKLOADS[name].quick(), module=module, shape=(6,), vocabulary=50)
    [steps] = compare_steps(workload, 1, (1,), "")
    assert steps.disagreement < 1e-6
    assert steps.backend == backend


def test_the_number_of_torch_threads_is_left_as_it_was() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        result = run_benchmarks(["mlr"], repeats=1, threads=(2, 1), quick=True)
        assert [c.cores for c in result.comparisons] == [1, 2]
        assert torch.get_num_threads() == 3
        loop = engine(TINY, synthetic(TINY), workers=2)
        loop.round()
        assert torch.get_num_threads() == 3
        assert threads_of_a_new_thread() == 3  # torch hands the number set last to threads that start later
        loop.pool.close()
    finally:
        torch.set_num_threads(before)


def test_plain_loop_trains() -> None:
    federation = synthetic(TINY)
    loop = PlainLoop.of_round(TINY, federation)
    before = loop.parameters()
    assert torch.equal(before, engine(TINY, federation, 1).server.named()["w"])  # from the engine's start
    loop.round()
    assert not torch.equal(loop.parameters(), before)


def test_plain_loop_gives_each_client_whole_batches_of_its_own_examples() -> None:
    federation = synthetic(TINY)
    loop = PlainLoop.of_round(TINY, federation)
    loop.examples = torch.arange(len(loop.labels))  # an example is its own row number
    for client, rows in enumerate(loop.rows):
        batches = [x for x, _ in loop.batches(client)]
        assert [len(x) for x in batches] == [min(TINY.batch, len(rows))] * TINY.steps
        assert all(len(x.unique()) == len(x) and torch.isin(x, rows).all() for x in batches)


@pytest.mark.parametrize("name", WORKLOADS)
def test_conventional_order_of_layers_is_the_same_function(name: str) -> None:
    workload = WORKLOADS[name].quick()
    ours, usual = workload.build(), conventional(workload)
    for p, q in zip(ours.parameters(), usual.parameters(), strict=True):
        q.data.copy_(p.data)
    x = torch.randn(3, *workload.shape, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(usual(x), ours(x))
    kinds = [type(layer).__name__ for layer in usual]
    assert all(kinds[i - 1] == "ReLU" for i, kind in enumerate(kinds) if kind == "MaxPool2d")


def test_synthetic_data_is_a_power_law_and_repeats() -> None:
    workload = WORKLOADS["mlr"]
    federation = synthetic(workload)
    count = federation.train.count
    assert len(count) == 1000
    assert int(count.min()) == workload.fewest
    assert abs(float(count.to(torch.float64).mean()) - workload.examples) < 1
    assert float(count.max()) > 20 * float(count.median())
    raw = federation.features.raw
    assert raw.dtype == torch.uint8
    assert abs(float(raw[:2000].to(torch.float32).mean()) - 127.5) < 1
    assert federation.labels.bincount(minlength=10).min() > 0.09 * len(raw)
    again, other = synthetic(TINY), synthetic(TINY, seed=1)
    assert torch.equal(again.features.raw, synthetic(TINY).features.raw)
    assert not torch.equal(again.features.raw[:4], other.features.raw[:4])


def test_work_is_counted_as_by_hand() -> None:
    result = run_benchmarks(["mlr", "mlp"], repeats=1, threads=(1,), quick=True)
    one, two = result.comparisons
    per_round = 3 * 2 * 4  # clients, steps, examples
    # A product of B x i and i x o takes 2 B i o operations; backward one for the weights, and from the second layer
    # on one for the input.
    assert one.gflop == pytest.approx(per_round * 2 * (2 * 784 * 10) / 1e9)
    assert two.gflop == pytest.approx(per_round * 2 * (2 * 784 * 128 + 3 * 128 * 10) / 1e9)
    assert one.gathered_mb == pytest.approx(per_round * 784 * 5 / 1e6)
    rate = result.limits.products["mlr"]
    assert one.floor == pytest.approx(one.gflop / rate + one.gathered_mb / 1e3 / result.limits.copy_gb)


def made_by_hand() -> BenchResult:
    ours, loop = Timing([0.2, 0.1, 0.4], [0.3, 0.1, 0.5]), Timing([0.8, 0.6, 1.4], [0.9, 0.6, 1.5])
    first = BenchComparison("mlr", "mlr 1x28x28", 2, ours, loop, 7.0, None, 1e-7, 0.5, 80.0, 0.05, 512.0)
    second = BenchComparison("mlr-10k", "mlr, many", 1, loop, ours, None, "mlr", None, 5.0, 800.0, 0.5, None)
    ours, loop = Timing([9.0, 9.0, 9.0], [0.2, 0.1, 0.4]), Timing([1.0, 1.0, 1.0], [0.3, 0.2, 0.4])
    steps = StepComparison("user-mlp", "20 clients", "rows", 101_770, 400, 1, ours, loop, 7e-9)
    return BenchResult(
        [first, second], [steps], Limits(180.0, 14.0, {"mlr": 110.0}), {"processor": "P", "cores": 2} | VERSIONS
    )


VERSIONS: dict[str, str | int] = {"python": "3.11", "torch": "2.13", "system": "Linux"}


def test_figures_follow_from_the_times() -> None:
    first, second = made_by_hand().comparisons
    assert first.ratio == pytest.approx(4.0)
    assert first.best_ratio == pytest.approx(6.0)
    assert first.cpu_ratio == pytest.approx(3.0)
    assert first.distance == pytest.approx(6.0)
    assert 1 / second.ratio == pytest.approx(4.0)
    [steps] = made_by_hand().steps
    assert steps.ratios == pytest.approx([1.5, 2.0, 1.0])  # of processor time, turn by turn
    assert steps.ratio == pytest.approx(1.5)
    assert steps.milliseconds(steps.ours) == pytest.approx(0.5)
    steps.cores = 2
    assert steps.ratio == pytest.approx(1 / 9)  # of the clock


def test_json_holds_every_figure() -> None:
    told = json.loads(made_by_hand().to_json())
    assert told["limits"] == {"peak_gflops": 180.0, "copy_gb": 14.0, "products": {"mlr": 110.0}}
    assert told["machine"]["processor"] == "P"
    first = told["comparisons"][0]
    assert first["workload"] == "mlr"
    assert first["ours"]["wall"] == [0.2, 0.1, 0.4]
    assert first["ratio"] == pytest.approx(4.0)
    assert first["peak_mb"] == 512.0


def test_table_shows_times_ratios_and_limits() -> None:
    out = io.StringIO()
    print_result(made_by_hand(), Console(file=out, width=100))
    text = out.getvalue()
    row = next(line.split() for line in text.splitlines() if line.split()[:2] == ["mlr", "2"])
    assert row == ["mlr", "2", "800.0", "ms", "200.0", "ms", "4.0", "6.0", "7", "6.0x", "0.50", "GB"]
    row = next(line.split() for line in text.splitlines() if line.split()[:1] == ["user-mlp"])
    assert row == ["user-mlp", "rows", "101,770", "1", "0.75", "0.5", "1.50", "1.00-2.00", "7e-09"]
    assert "mlr-10k, 1 core(s): a round takes 4.0 times as long as mlr's" in text
    assert "180 GFLOP/s" in text
    assert "14.0 GB/s" in text


def test_limits_are_rates() -> None:
    limits = measure_limits([TINY], seconds=0.0)
    assert limits.peak_gflops > 0
    assert limits.copy_gb > 0
    assert limits.products["mlr"] > 0


def test_peak_memory_starts_anew() -> None:
    """In a process of its own: what earlier tests left to the allocator would hide the block."""
    if peak_mb() is None:
        pytest.skip("the system does not tell the peak of resident memory")
    code = (
        "import mmap\nfrom kinfed_papers.bench.machine import forget_peak, peak_mb\n"
        "block = mmap.mmap(-1, 256 << 20)\nblock.write(bytes(256 << 20))\nhigh = peak_mb()\nblock.close()\n"
        "forget_peak()\nprint(high - peak_mb())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(done.stdout) > 200


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="mlr"):
        run_benchmarks(["mrl"])
    with pytest.raises(ConfigError, match="repeats must be at least 1; got 0"):
        run_benchmarks(["mlr"], repeats=0)
    with pytest.raises(ConfigError, match="at least 1; got 0"):
        run_benchmarks(["mlr"], threads=(0, 1))


def test_progress_names_each_workload() -> None:
    told: list[str] = []
    run_benchmarks(["mlr"], repeats=1, threads=(1,), quick=True, progress=told.append)
    assert told == ["limits of one core", TINY.title]
    assert measuring.WORKLOADS["mlr"].title == "mlr 1x28x28, 100 of 1,000 clients, 20 steps of 10"
