"""The ray pool on a real cluster of two nodes: equal to the local pool, also when workers, a node or the driver die."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import command_line
import pytest
import torch
from torch import Tensor, nn

import kinfed
from kinfed.algorithms import make_algorithm, prepare_data
from kinfed.algorithms.base import RoundInfo
from kinfed.algorithms.ditto import Ditto
from kinfed.config.config_reading import make_config
from kinfed.core import backoff
from kinfed.core.plugins import load as load_plugin
from kinfed.data.examples.batches import LocalTraining
from kinfed.data.examples.problem import Problem
from kinfed.engine.contract.objective import SQUARED
from kinfed.engine.task_factory import make_task
from kinfed.errors import ConfigError, PoolError
from kinfed.pools.local_pool import LocalPool
from kinfed.pools.worker import Worker, make_shard
from kinfed.records.compare import same_results
from kinfed.runs.method_run import Interrupted
from kinfed.runs.run_inputs import RunInputs
from kinfed.server.loop import Loop
from kinfed.server.schedule import Schedule
from kinfed.testing import tiny_federation, tiny_model
from kinfed.testing.workbench import expect_equal, outcome
from kinfed.updates.codecs import QSGD
from kinfed.updates.compression import Compression
from kinfed.updates.stages import Stage, Updates

ray = pytest.importorskip("ray", reason='the ray pool needs the package ray: pip install "kinfed[ray]"')

from ray import cloudpickle  # noqa: E402
from ray._common.utils import get_default_ray_temp_dir  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402

from kinfed.pools import ray_processes  # noqa: E402
from kinfed.pools.ray_pool import RayCluster  # noqa: E402
from kinfed.pools.ray_processes import WorkerShare, free, start_workers  # noqa: E402

# Ray leaves files and processes to the garbage collector, which warns about them.
pytestmark = [
    pytest.mark.ray,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import this file

SEED = 3
WORK = LocalTraining(batch=5, steps=4)
STORE = 80_000_000
QUICK = {"health_check_period_ms": 500, "health_check_failure_threshold": 3, "health_check_initial_delay_ms": 0}


@pytest.fixture(scope="module")
def nodes() -> Iterator[Cluster]:
    """Two nodes on this machine, with a core for one worker each."""
    folder = tempfile.mkdtemp(prefix="kf", dir="/tmp")  # a short path: it becomes part of the names of sockets
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    # Ray's Cluster writes its address into the default folder, which nothing makes on a machine that is new to Ray.
    Path(get_default_ray_temp_dir()).mkdir(parents=True, exist_ok=True)
    # There is no GPU; Ray counts what it is told to have.
    head = {"num_cpus": 1, "num_gpus": 1, "include_dashboard": False, "object_store_memory": STORE, "temp_dir": folder}
    cluster = Cluster(initialize_head=True, head_node_args=head | {"_system_config": QUICK})
    try:
        cluster.add_node(num_cpus=1, object_store_memory=STORE)
        cluster.wait_for_nodes()
        yield cluster
    finally:
        cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def cluster(nodes: Cluster) -> Iterator[RayCluster]:
    made = RayCluster(nodes.address, workers=2)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def for_runs(cluster: RayCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs with pool = ray use these workers instead of starting their own."""

    class Lent(RayCluster):
        def __init__(self, address: str | None, workers: int | None, *_: Any, **__: Any) -> None:
            self.pool = cluster.pool  # type: ignore[method-assign]

        def close(self) -> None:
            pass

    monkeypatch.setattr("kinfed.pools.ray_pool.RayCluster", Lent)


def loop_on(where: RayCluster | None, method: Any, data: Any = None, schedule: Schedule | None = None) -> Loop:
    task, data = make_task(tiny_model), tiny_federation() if data is None else data
    data, clients = prepare_data(method, data, data.population(SEED))
    pool: Any = (
        LocalPool(method, task, data, SEED, workers=1) if where is None else where.pool(method, task, data, SEED)
    )
    return Loop(method, task, pool, clients, schedule or Schedule(0.67, dropout=0.2, stragglers=0.3))


def finished(loop: Loop, rounds: int = 4, after: Callable[[int], None] = lambda number: None) -> dict[str, Any]:
    for number in range(1, rounds + 1):
        loop.round()
        after(number)
    found = outcome(loop)
    loop.pool.close()
    return found


def process_of(loop: Loop, slot: int) -> int:
    pool: Any = loop.pool
    number: int = ray.get(pool._slots[slot].worker.process_id.remote())
    return number


# ---- equal to the local pool ----

METHODS = {
    "fedavg": {}, "ditto": {}, "selffl": {}, "fedfomo": {"models": 2}, "cgpfl": {"contexts": 2},
    "heterofl": {}, "fedcp": {}, "knnper": {},  # masked messages; personal models with extensions
}  # fmt: skip


@pytest.mark.parametrize(("name", "clients"), [*((name, 12) for name in METHODS), ("fedfomo", 3)])
def test_results_on_two_nodes_are_those_of_the_local_pool(name: str, clients: int, cluster: RayCluster) -> None:
    method = make_algorithm(name, WORK, METHODS[name])
    data = tiny_federation(tuple(range(4, 4 + clients))).with_validation(0.2, SEED)
    ours, theirs = (finished(loop_on(where, method, data, Schedule())) for where in (cluster, None))
    expect_equal(ours, theirs, f"{name} on Ray is {name}", 1e-5)


def test_numbers_and_weights_of_rows_are_those_of_the_local_pool(cluster: RayCluster) -> None:
    method, data = make_algorithm("ditto", WORK, {}), tiny_federation((5, 9, 2, 7))
    y = data.features.raw[:, 0].to(torch.float64)
    problem = Problem.of_numbers(y[data.train.rows].numpy())
    data = replace(data, labels=y, problem=problem, weights=torch.linspace(0.2, 3, len(y)))
    task = make_task(lambda: nn.Linear(4, 1), objective=SQUARED)
    task.problem = problem
    scores = []
    for where in (cluster, None):
        pool: Any = where.pool(method, task, data, SEED) if where else LocalPool(method, task, data, SEED)
        with Loop(method, task, pool, data.population(SEED), Schedule(0.67)) as loop:
            for _ in range(3):
                loop.round()
            scores.append(loop.evaluate(keep_models=True))
    assert torch.equal(scores[0].models, scores[1].models)
    assert torch.equal(scores[0].personal.sums["rmse"], scores[1].personal.sums["rmse"])


def normed_and_dropping() -> nn.Module:
    """Running statistics, draws, and a layer that torch does not pickle."""
    first = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 6))
    return nn.Sequential(first, nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.3), nn.Linear(6, 3))


@pytest.mark.parametrize("name", ["ditto", "fedbn"])
def test_statistics_draws_and_kept_moments_are_those_of_the_local_pool(name: str, cluster: RayCluster) -> None:
    training = LocalTraining(lr=0.01, batch=5, steps=3, optimizer="adamw", optimizer_state="kept")
    method, data = make_algorithm(name, training, {}), tiny_federation((5, 9, 2, 7))
    task = make_task(normed_and_dropping, example=data.features.gather(torch.arange(2)))
    models = []
    for where in (cluster, None):
        pool: Any = where.pool(method, task, data, SEED) if where else LocalPool(method, task, data, SEED, workers=2)
        with Loop(method, task, pool, data.population(SEED), Schedule(0.67)) as loop:
            for _ in range(3):
                loop.round()
            models.append(loop.evaluate(keep_models=True).models)
    assert torch.equal(*models)


def test_a_lost_node_takes_large_states_with_it_and_the_run_stops_and_says_so(
    nodes: Cluster, cluster: RayCluster
) -> None:
    """States of more than 100 kB lie on the worker's node. The tests after this one have other workers."""
    data = tiny_federation((5, 6, 7, 8, 9, 10))
    task = make_task(
        lambda: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 30_000), torch.nn.Linear(30_000, 3))
    )
    method = Ditto(LocalTraining(batch=5, steps=1))
    pool = cluster.pool(method, task, data, SEED)
    where = {ray.get(slot.worker.__ray_call__.remote(_node)) for slot in pool._slots}
    assert len(where) == 2
    loop = Loop(method, task, pool, data.population(SEED), Schedule())
    loop.round()
    nodes.remove_node(nodes.worker_nodes.copy().pop(), allow_graceful=False)
    try:
        with pytest.raises(PoolError, match="was lost with its machine, and states of its clients too"):
            loop.round()
        assert loop.completed == 1
    finally:
        nodes.add_node(num_cpus=1, object_store_memory=STORE)
        nodes.wait_for_nodes()


def _node(worker: Any) -> str:
    return str(ray.get_runtime_context().get_node_id())


def test_drop_outs_stragglers_bytes_and_rejections_are_those_of_the_local_pool(cluster: RayCluster) -> None:
    def reports(where: RayCluster | None) -> list[tuple[Any, ...]]:
        loop = loop_on(where, Poisoned(WORK))
        found = [loop.round() for _ in range(4)]
        loop.pool.close()
        return [(r.active, r.dropped, r.bytes_down, r.bytes_up, r.rejected) for r in found]

    ours = reports(cluster)
    assert ours == reports(None)
    assert any(rejected for *_, rejected in ours)


@dataclass(frozen=True)
class Poisoned(Ditto):
    """Client 2 sends nothing but NaN."""

    def client_update(self, task: Any, client: Any, down: Any, data: Any) -> Any:
        client, up = super().client_update(task, client, down, data)
        up.delta[data.ids == 2] = torch.nan
        return client, up


PLUGIN = """
from dataclasses import dataclass

from torch import Tensor

from kinfed.algorithms.ditto import Ditto
from kinfed.core.tree import Tree


@dataclass
class HalfUp(Tree):
    delta: Tensor
    count: Tensor | None


@dataclass(frozen=True)
class HalfDitto(Ditto):
    '''Ditto whose clients send half of their change, in a message of their own.'''

    def client_update(self, task, client, down, data):
        client, up = super().client_update(task, client, down, data)
        return client, HalfUp(up.delta / 2, up.count)

    def aggregate(self, server, ids, up, round):
        assert type(up) is HalfUp
        return super().aggregate(server, ids, up, round)
"""


def test_the_algorithm_of_a_plugin_file_runs_in_workers_that_do_not_know_the_file(
    cluster: RayCluster, tmp_path: Path
) -> None:
    file = tmp_path / "half_ditto.py"
    file.write_text(PLUGIN)
    method = load_plugin(file).HalfDitto(WORK)
    ours = finished(loop_on(cluster, method, schedule=Schedule()))
    theirs = finished(loop_on(None, method, schedule=Schedule()))
    expect_equal(ours, theirs, "a plugin on Ray is the plugin", 1e-5)


def test_what_a_method_raises_in_a_worker_is_raised_here(cluster: RayCluster) -> None:
    loop = loop_on(cluster, Fails(WORK))
    with pytest.raises(ConfigError, match="not today") as caught:
        loop.round()
    assert any("in client_update of client(s)" in note for note in caught.value.__notes__)


@dataclass(frozen=True)
class Fails(Ditto):
    def client_update(self, task: Any, client: Any, down: Any, data: Any) -> Any:
        raise ConfigError("not today")


@pytest.mark.usefixtures("for_runs")
def test_epsilon_and_noise_are_those_of_the_local_pool() -> None:
    settings = {"clients": 4, "rounds": 2, "seeds": (0,), "model": "mlr", "dp_noise": 1.0, "algorithms": "ditto"}
    ours, theirs = kinfed.run(pool="ray", **settings).result("ditto"), kinfed.run(**settings).result("ditto")
    assert ours.privacy == theirs.privacy
    torch.testing.assert_close(ours.server_model, theirs.server_model, rtol=0, atol=1e-6)


# ---- losses ----


def test_a_worker_killed_between_rounds_leaves_no_trace(cluster: RayCluster) -> None:
    loop = loop_on(cluster, Ditto(WORK))

    def kill(number: int) -> None:
        if number == 2:
            os.kill(process_of(loop, 1), signal.SIGKILL)

    expect_equal(finished(loop, after=kill), finished(loop_on(None, Ditto(WORK))), "nothing is lost", 1e-5)


def test_a_worker_that_dies_in_the_middle_of_a_round_leaves_no_trace(cluster: RayCluster, tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    trap.touch()
    ours = finished(loop_on(cluster, Dies(WORK, trap=str(trap)), schedule=Schedule()))
    assert not trap.exists()
    expect_equal(ours, finished(loop_on(None, Ditto(WORK), schedule=Schedule())), "nothing is lost", 1e-5)


@dataclass(frozen=True)
class Dies(Ditto):
    """Client 4 ends its process in round 3 if there is a trap, which it removes if that is a file."""

    trap: str = ""

    def client_update(self, task: Any, client: Any, down: Any, data: Any) -> Any:
        if data.round == 3 and 4 in data.ids and os.path.exists(self.trap):
            if os.path.isfile(self.trap):
                os.unlink(self.trap)
            os._exit(1)
        return super().client_update(task, client, down, data)


@dataclass(frozen=True)
class Waits(Ditto):
    """Client 4 waits in round 1 until a file is there."""

    gate: str = ""

    def client_update(self, task: Any, client: Any, down: Any, data: Any) -> Any:
        while data.round == 1 and 4 in data.ids and not os.path.exists(self.gate):
            time.sleep(0.05)
        return super().client_update(task, client, down, data)


def test_a_long_silence_says_which_worker_does_what(
    cluster: RayCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the call is under way: the worker answers beside it."""
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        (tmp_path / "gate").touch()

    monkeypatch.setattr(backoff, "FIRST_REPORT", 0.3)
    loop = loop_on(cluster, Waits(WORK, gate=str(tmp_path / "gate")), schedule=Schedule())
    for slot in cluster._slots:
        monkeypatch.setattr(slot, "say", say)
    finished(loop, rounds=1)
    line = re.compile(
        r"waiting for Ray worker \d, which \(process \d+ on \S+\) trains \d clients in round 1, for \d+ s so far"
    )
    assert line.match(said[0]), said


def test_a_worker_that_dies_again_and_again_stops_the_run_with_the_reason(
    cluster: RayCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kinfed.pools.ray_pool.RESTARTS", 1)
    loop = loop_on(cluster, Dies(WORK, trap=str(tmp_path)), schedule=Schedule())  # a folder is never removed
    with pytest.raises(PoolError, match="ended 2 times in a row"):
        finished(loop)
    assert loop.completed == 2


# ---- checkpoints ----

RUN = {"clients": 6, "algorithms": "ditto,fedfomo", "rounds": 5, "seeds": (0,), "model": "mlr", "checkpoint_every": 1}


def stopped_after(last: int, out: Path, **settings: Any) -> None:
    calls = 0

    def stop() -> bool:
        nonlocal calls
        calls += 1
        return calls > 2 * last

    with pytest.raises(Interrupted):
        kinfed.run(out=out, should_stop=stop, **settings)


def same(one: Path, other: Path) -> list[str]:
    return same_results(one, other, tolerance=1e-5, config=False)


@pytest.mark.parametrize(("first", "then"), [("local", "ray"), ("ray", "local")])
@pytest.mark.usefixtures("for_runs")
def test_a_run_begun_on_one_pool_goes_on_on_the_other(first: str, then: str, tmp_path: Path) -> None:
    kinfed.run(out=tmp_path / "whole", **RUN)
    stopped_after(2, tmp_path / "two", pool=first, **RUN)
    kinfed.run(out=tmp_path / "two", resume=True, pool=then, **RUN)
    assert same(tmp_path / "whole", tmp_path / "two") == []


@pytest.mark.usefixtures("for_runs")
def test_settings_of_ray_are_left_behind_by_a_run_that_is_resumed_on_the_local_pool(tmp_path: Path) -> None:
    settings = RUN | {"algorithms": "ditto"}
    kinfed.run(out=tmp_path / "whole", **settings)
    out = tmp_path / "moved"
    stopped_after(2, out, pool="ray", ray_address="10.0.0.7:6379", workers=2, **settings)
    done = command_line.kinfed("run", "--out", out, "--resume", "--pool", "local", "--no-report", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert same(tmp_path / "whole", out) == []


@pytest.mark.usefixtures("for_runs")
def test_a_driver_killed_at_once_loses_nothing_but_the_round(nodes: Cluster, tmp_path: Path) -> None:
    kinfed.run(out=tmp_path / "whole", **RUN | {"rounds": 12})
    nodes.add_node(num_cpus=2, object_store_memory=STORE)  # for the workers of another driver
    out = tmp_path / "killed"
    command = [
        sys.executable, "-m", "kinfed", "run", "--pool", "ray", "--ray-address", nodes.address, "--workers", "2",
        "--clients", "6", "--algorithms", "ditto,fedfomo", "--rounds", "12", "--seeds", "0", "--model", "mlr",
        "--checkpoint-every", "1", "--out", str(out), "--no-report",
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as driver:
        deadline = time.monotonic() + 300
        while len(list(out.glob("checkpoints/ditto-0/0000000[3-9].json"))) == 0 and time.monotonic() < deadline:
            assert driver.poll() is None, "the run ended before it could be killed"
            time.sleep(0.01)
        driver.send_signal(signal.SIGKILL)
    assert not (out / "summary.json").exists()
    kinfed.run(out=out, resume=True, pool="ray", **RUN | {"rounds": 12})
    assert same(tmp_path / "whole", out) == []


# ---- the cluster ----


def test_a_cluster_for_one_run_starts_and_ends_with_it(tmp_path: Path) -> None:
    code = (
        "import kinfed, ray\n"
        "r = kinfed.run(clients=3, algorithms='ditto', rounds=2, seeds=(0,), model='mlr', pool='ray', workers=1)\n"
        "assert not ray.is_initialized()\n"
        "print(r.result('ditto').personal['loss'])\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    wanted = (
        kinfed.run(clients=3, algorithms="ditto", rounds=2, seeds=(0,), model="mlr").result("ditto").personal["loss"]
    )
    assert float(found.stdout) == pytest.approx(wanted, abs=1e-5)
    assert found.stderr == ""


def test_an_address_without_a_cluster_and_settings_that_do_not_fit_are_refused(cluster: RayCluster) -> None:
    with pytest.raises(ConfigError, match="connected to a Ray cluster already"):
        RayCluster("127.0.0.1:1", 1)
    with pytest.raises(ConfigError, match="ray_address is for pool = ray"):
        make_config(None, {"ray_address": "auto"})
    with pytest.raises(ConfigError, match="state = disk is for the local pool"):
        make_config(None, {"pool": "ray", "state": "disk"})


def test_a_ray_that_cannot_start_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**_: Any) -> None:
        raise Exception("The current node timed out during startup.\nMore")  # as Ray does on a busy machine

    monkeypatch.setattr(ray_processes.ray, "init", init)
    with pytest.raises(PoolError, match=r"Ray could not be started on this machine \(The current node timed out"):
        ray_processes.connect(None, 2)
    with pytest.raises(ConfigError, match=r"no Ray cluster answers at '10\.0\.0\.7:6379'"):
        ray_processes.connect("10.0.0.7:6379", None)


def test_pool_and_address_do_not_belong_to_the_identity_of_a_run() -> None:
    assert make_config(None, {"pool": "ray", "ray_address": "auto"}).fingerprint() == make_config().fingerprint()


def test_workers_with_gpus_ask_ray_for_them_and_send_the_task_there(cluster: RayCluster) -> None:
    """Without a GPU: what Ray sets aside is seen, and torch's meta device stands for the worker's own."""
    share = WorkerShare(cpus=0.0, gpus=0.25)
    assert share.fitting() == 4
    (worker,) = start_workers(1, share)
    try:
        deadline = time.monotonic() + 30.0  # Ray's count follows a little later
        while free("GPU") != 0.75 and time.monotonic() < deadline:
            time.sleep(0.1)
        assert free("GPU") == 0.75
    finally:
        ray.kill(worker)
    worker, task = Worker(), make_task(tiny_model, backend="stacked")
    worker.load_shard(make_shard(tiny_federation(), torch.arange(6)))
    worker.start_run("run", Ditto(training=WORK), task, SEED, device="meta")
    assert worker.pool.task.init(SEED).device.type == worker.pool.federation.features.device.type == "meta"
    assert task.init(SEED).device.type == task.device.type == "cpu"
    assert next(task.module.parameters()).device.type == "cpu"


def test_gpus_of_workers_are_a_setting_of_runs_on_ray() -> None:
    config = make_config(None, {"pool": "ray", "device": "cuda", "ray_gpus": 0.5})
    inputs = RunInputs(config, tiny_federation())
    assert inputs.task().device.type == "cpu"  # the server's; there is no GPU here
    assert inputs.task().backend != "fused"
    for settings in ({"ray_gpus": 1.0}, {"pool": "ray", "ray_gpus": 1.0}, {"pool": "ray", "device": "cuda"}):
        with pytest.raises(ConfigError, match="ray_gpus"):
            make_config(None, settings)


# ---- transactions ----


class LosesSome(Stage):
    """Refuses the update of every client whose number and round are both odd, or both even."""

    name = "loses_some"
    refuses = True

    def at_server(self, updates: Updates, round: RoundInfo) -> Updates:
        lost = (updates.ids + round.number) % 2 == 0
        return updates.without({row: "lost" for row in lost.nonzero().squeeze(1).tolist()})


@pytest.mark.parametrize("killed", [False, True], ids=["", "a worker ends before its clients know"])
def test_refused_updates_leave_their_clients_as_they_were(killed: bool, cluster: RayCluster) -> None:
    method, data, task = make_algorithm("scaffold", WORK, {}), tiny_federation((5, 9, 2, 7)), make_task(tiny_model)
    stages = [Compression(QSGD(levels=3)), LosesSome()]
    found = []
    for where in (cluster, None):
        local = partial(LocalPool, method, task, data, SEED, workers=1, stages=stages)
        pool: Any = local() if where is None else where.pool(method, task, data, SEED, stages)
        loop = Loop(method, task, pool, data.population(SEED), Schedule(), stages)
        if where is not None and killed:
            commit = pool.commit

            def kill_first(ids: Tensor, loop: Loop = loop, commit: Any = commit) -> None:
                if loop.completed == 1:
                    os.kill(process_of(loop, 0), signal.SIGKILL)
                commit(ids)

            pool.commit = kill_first
        found.append(finished(loop))
    expect_equal(found[0], found[1], "a round on Ray is a transaction", 1e-6)


# ---- compiled loops ----


@pytest.mark.parametrize("name", ["fedavg", "apfl"])
def test_compiled_loops_on_ray_are_those_of_the_local_pool(name: str, cluster: RayCluster) -> None:
    """Arrays of a task that arrives in a worker are read-only, and its loss is a copy."""
    pytest.importorskip("numba", reason='compiled loops need numba: pip install "kinfed[fast]"')
    method, data = make_algorithm(name, WORK, {}), tiny_federation((5, 9, 2, 7))
    task, found = make_task(tiny_model, backend="fused"), []
    for where in (None, cluster):  # what is compiled here first, workers load
        pool: Any = where.pool(method, task, data, SEED) if where else LocalPool(method, task, data, SEED)
        found.append(finished(Loop(method, task, pool, data.population(SEED), Schedule())))
    expect_equal(found[1], found[0], f"fused {name} on Ray is fused {name}", 0.0)
