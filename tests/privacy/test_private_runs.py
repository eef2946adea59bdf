"""Private runs: what every method is counted for, who is left out, what is refused, and what is written down."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count as counting
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kinfed
from kinfed.algorithms import ALGORITHMS, make_algorithm
from kinfed.algorithms.base import EXAMPLE_COUNT, Algorithm, PrivacyProfile, gradient_steps, privacy_profile
from kinfed.algorithms.fedavg import FedAvg
from kinfed.cli.app import main
from kinfed.config.config_reading import make_config
from kinfed.data import Cohort, Federation
from kinfed.data.examples.batches import LocalTraining
from kinfed.engine.task_factory import Task, make_task
from kinfed.engine.training.sgd import sgd
from kinfed.errors import CheckpointError, ConfigError
from kinfed.pools.local_pool import LocalPool
from kinfed.privacy.budget import make_budget
from kinfed.privacy.ledger import Event, dominates, merge
from kinfed.privacy.noise import seeded_noise
from kinfed.privacy.policy import Privacy
from kinfed.records.compare import same_results
from kinfed.runs.method_run import Interrupted
from kinfed.runs.run_checks import leave_out_what_cannot_run
from kinfed.runs.run_inputs import RunInputs
from kinfed.server.loop import Loop
from kinfed.server.schedule import Schedule
from kinfed.testing import Bench, tiny_federation, tiny_model
from kinfed.updates import ExampleLevel

Method = Algorithm[Any, Any, Any, Any]
WORK = LocalTraining(batch=5, steps=4, poisson=True, lr=0.05)
SIZES = (3, 4, 16, 7, 13, 10)


def federation(sizes: tuple[int, ...] = SIZES, *, validation: bool = False) -> Federation:
    made = tiny_federation(sizes)
    return made.with_validation(0.25, 0) if validation else made


@contextmanager
def private_loop(
    method: Method,
    privacy: Privacy,
    data: Federation | None = None,
    schedule: Schedule | None = None,
    *,
    rounds: int = 3,
    workers: int = 1,
    chunk: int | None = 2,
) -> Iterator[Loop]:
    schedule = schedule or Schedule(0.67)
    data = Bench(method, federation=federation()).federation if data is None else data
    active = [schedule.active(0, number, len(data)) for number in range(1, rounds + 1)]
    calls = torch.bincount(torch.cat(active), minlength=len(data))
    budget = make_budget(privacy, method, make_task(Bench(method).model), seeded_noise(0), data.train.count, calls)
    pool = LocalPool(method, budget.task, data, 0, workers=workers, chunk=chunk)
    try:
        yield Loop(method, budget.task, pool, data.population(0), schedule, [ExampleLevel(budget)])
    finally:
        pool.close()


def method(name: str, **options: Any) -> Method:
    own = {"own": "*.bias"} if name == "fedbn" else {}  # the model has no normalization layers
    return make_algorithm(name, WORK, own | options)


COUNT = torch.tensor(SIZES)


def profile(name: str, **options: Any) -> PrivacyProfile:
    declared = privacy_profile(method(name, **options), COUNT)
    assert declared is not None
    return declared


PRIVATE = [name for name in ALGORITHMS if not profile(name).impossible]
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *(
        (name, {}) for name in {ALGORITHMS[name].target: name for name in reversed(PRIVATE)}.values()
    ),  # one of each class
    ("ditto", {"personal_steps": 6}),
    ("ditto", {"finetune": 2}),
    ("fedrep", {"head_steps": 2}),
    ("fedrep", {"head_layers": 0}),
    ("pfedme", {"recompute": True, "inner_steps": 2}),
    ("perfedavg", {"adapt_steps": 3, "finetune": 1}),
    ("selffl", {"l_init": 9, "l_max": 2}),
    ("selffl", {"l_max": None}),
    ("l2sgd", {"geometric": True}),
    ("fedfomo", {"subglobal": 2}),
]


@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_methods_compute_what_they_declare_and_declare_what_is_uncovered(
    name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = method(name, **options)
    sent: list[Any] = []
    original = type(made).client_update

    def client_update(self: Any, task: Any, client: Any, down: Any, data: Cohort) -> tuple[Any, Any]:
        client, up = original(self, task, client, down, data)
        sent.append((up, data.train.count))
        return client, up

    monkeypatch.setattr(type(made), "client_update", client_update)
    with private_loop(made, Privacy(noise=0.5)) as loop:
        assert loop.privacy is not None
        before = loop.privacy.ledger
        exact = True
        for _ in range(3):
            loop.round()  # raises where more is computed than `per_round` says
            round_ledger = {k: n - before.batches.get(k, 0) for k, n in loop.privacy.ledger.batches.items()}
            before = loop.privacy.ledger
            declared = privacy_profile(made, loop.pool.federation.train.count)  # type: ignore[attr-defined]
            assert declared is not None
            if declared.per_round is None:
                continue
            for client in {entry[0] for entry, batches in round_ledger.items() if batches}:
                asked = {k: n for (m, _, k), n in round_ledger.items() if m == client and n}
                exact &= asked == {k: int(n[client]) for k, n in declared.per_round.items() if int(n[client])}
        adaptive = name.startswith(("selffl", "fedala")) or options == {"head_layers": 0}
        assert exact or adaptive
        loop.evaluate()  # raises where personalization takes what `per_personalization` does not say
    uncovered = profile(name, **options).uncovered
    for up, count in sent:
        counts = [tensor for tensor in up.named().values() if tensor.shape == count.shape]
        assert EXAMPLE_COUNT in uncovered or not any(torch.equal(t, count.to(t.dtype)) for t in counts)
    if uncovered.get(EXAMPLE_COUNT):
        option, value = uncovered[EXAMPLE_COUNT].split(" = ")
        remedy = {option: {"true": True, "0": 0}.get(value, value.strip('"'))}
        assert EXAMPLE_COUNT not in profile(name, **options | remedy).uncovered


@dataclass(frozen=True)
class Greedy(FedAvg):
    """Takes twice the gradients it says."""

    def train(self, task: Task, w: Tensor, data: Cohort) -> Tensor:
        once = sgd(task, w, data.train.batches(self.training))
        return sgd(task, once, data.train.batches(self.training, stream="again"))


@dataclass(frozen=True)
class Peeping(FedAvg):
    """Judges the result on training examples."""

    def train(self, task: Task, w: Tensor, data: Cohort) -> Tensor:
        task.mean_loss(w, data.train)
        return super().train(task, w, data)


@dataclass(frozen=True)
class Adapting(FedAvg):
    stream: str = "adapt"
    steps: int = 0

    def personalize(self, task: Task, client: Any, down: Any, data: Cohort) -> Tensor:
        return sgd(task, down.w, data.train.batches(self.training, stream=self.stream))

    def privacy(self, count: Tensor) -> PrivacyProfile:
        return gradient_steps(
            self.training.num_steps(count), per_personalization={1: torch.full_like(count, self.steps)}
        )


def test_methods_that_ask_more_than_they_say_are_stopped() -> None:
    with private_loop(Greedy(WORK), Privacy(noise=1.0)) as loop, pytest.raises(ConfigError, match="more gradients"):
        loop.round()
    with private_loop(Peeping(WORK, "equal"), Privacy(noise=1.0)) as loop, pytest.raises(ConfigError, match="judges"):
        loop.round()
    with (
        private_loop(Adapting(WORK), Privacy(noise=1.0)) as loop,
        pytest.raises(ConfigError, match="takes gradients to personalize"),
    ):
        loop.evaluate()
    with private_loop(Adapting(WORK, stream="batches", steps=4), Privacy(noise=1.0)) as loop:
        loop.round()
        with pytest.raises(ConfigError, match="stream of their own"):
            loop.evaluate()


def test_training_that_nobody_recorded_is_an_error() -> None:
    with private_loop(method("local"), Privacy(noise=1.0)) as loop:
        assert loop.privacy is not None
        with pytest.raises(RuntimeError, match="no gradient was recorded"), loop.privacy.recording(torch.tensor([1])):
            pass


def test_chunks_and_workers_do_not_matter() -> None:
    def models(workers: int, chunk: int | None) -> Tensor:
        with private_loop(method("ditto"), Privacy(noise=1.0), workers=workers, chunk=chunk) as loop:
            for _ in range(3):
                loop.round()
            found = loop.evaluate(keep_models=True).models
            assert found is not None
            return found

    usual = models(1, 2)
    assert torch.equal(models(2, 2), usual)
    assert torch.allclose(models(1, 1), usual, atol=1e-5)
    assert torch.allclose(models(1, None), usual, atol=1e-5)


def test_noise_is_that_of_the_simulation_only_where_there_is_some() -> None:
    """Without noise and with a norm that nothing exceeds, private training is training on Poisson samples."""
    data = federation()
    with private_loop(method("fedavg"), Privacy(noise=0.0, clip=1e6), data) as loop:
        loop.round()
        private = loop.state()["server.w"]
    plain = kinfed.simulate(data, tiny_model, method("fedavg"), participation=0.67)
    plain.round()
    assert torch.allclose(private, plain.state()["server.w"], atol=1e-6)


# ---- what is refused and said ----


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({}, "got neither"),
        ({"noise": 1.0, "epsilon": 2.0}, "got both"),
        ({"noise": -1.0}, "noise must be"),
        ({"noise": math.nan}, "noise must be"),
        ({"noise": 1.0, "clip": 0.0}, "clip must be"),
        ({"epsilon": 0.0}, "epsilon must be"),
        ({"noise": 1.0, "budget": math.inf}, "budget must be"),
        ({"noise": 1.0, "delta": 0.0}, "delta must be"),
        ({"noise": 1.0, "delta": 1.0}, "delta must be"),
        ({"noise": 0.0, "budget": 1.0}, "epsilon is infinite"),
    ],
)
def test_settings_that_promise_nothing_are_refused(settings: dict[str, float], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Privacy(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name not in PRIVATE])
def test_methods_that_gradients_alone_do_not_make_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} cannot be private: "):
        Privacy(noise=1.0).check(name, method(name), federation())


def test_methods_refused_are_those_that_use_training_examples_otherwise() -> None:
    refused = {name for name in ALGORITHMS if name not in PRIVATE}
    assert {"ifca", "fedem", "mocha", "selffl_augmented", "fedavg_data"} <= refused
    assert {"local", "fedavg", "ditto", "fedfomo", "cgpfl", "selffl", "perfedavg_hf", "pfedme"} <= set(PRIVATE)


def test_samples_must_be_poisson() -> None:
    made = make_algorithm("fedavg", WORK, {"poisson": False})
    with pytest.raises(ConfigError, match="does not draw Poisson samples"):
        Privacy(noise=1.0).check("fedavg", made, federation())
    with pytest.raises(ConfigError, match="no epochs; give steps"):
        make_algorithm("fedavg", WORK, {"epochs": 2})
    with pytest.raises(ConfigError, match="no epochs; give steps"):
        make_algorithm("selffl", WORK, {"fixed_epochs": 2}).check(make_task(tiny_model), federation().population(0))


def test_judging_by_training_examples_is_refused() -> None:
    made, privacy = method("fedfomo"), Privacy(noise=1.0)
    privacy.check("fedfomo", made, federation(validation=True))
    with pytest.raises(ConfigError, match=r"6 client\(s\) have none"):
        privacy.check("fedfomo", made, federation())
    with pytest.raises(ConfigError, match="some of them are training examples"):
        privacy.check("fedfomo", made, federation((1, 4, 16), validation=True))


def test_strict_is_strict() -> None:
    strict = Privacy(noise=1.0, strict=True)
    with pytest.raises(ConfigError, match=r'number of training examples.*; set mine\.weights = "equal"'):
        strict.check("mine", method("fedavg"), federation())
    with pytest.raises(ConfigError, match="leave the method out"):
        strict.check("fedfomo", method("fedfomo"), federation(validation=True))
    for name, options in (("local", {}), ("fedavg", {"weights": "equal"}), ("selffl", {}), ("cgpfl", {"lam": 2.0})):
        strict.check(name, method(name, **options), federation())


@pytest.mark.parametrize(("name", "options"), [("selffl", {"l_max": None}), ("l2sgd", {"geometric": True})])
def test_what_has_no_bound_has_no_plan(name: str, options: dict[str, Any]) -> None:
    made = method(name, **options)
    Privacy(noise=1.0).check(name, made, federation())
    for privacy in (Privacy(epsilon=3.0), Privacy(noise=1.0, budget=3.0)):
        with pytest.raises(ConfigError, match="no largest number of gradients"):
            privacy.check(name, made, federation())


def test_notes_say_what_epsilon_does_not() -> None:
    count = torch.tensor([5, 200])
    assert list(Privacy(noise=1.0).notes("local", method("local"), count)) == []
    assert "infinite" in next(Privacy(noise=0.0).notes("local", method("local"), count))
    (said,) = Privacy(noise=1.0).notes("fedavg", method("fedavg"), count)
    assert said == f"fedavg: not covered by epsilon: {EXAMPLE_COUNT}"
    (said,) = Privacy(noise=1.0, delta=0.005).notes("local", method("local"), count)
    assert "not below 1/200" in said
    assert list(Privacy(noise=1.0, delta=0.0049).notes("local", method("local"), count)) == []


# ---- whole runs ----

SMALL: dict[str, Any] = {
    "algorithms": "fedavg,ditto,perfedavg", "rounds": 6, "seeds": (0,), "participation": 0.67, "batch": 5, "steps": 3,
    "eval_every": 2, "checkpoint_every": 2, "dp_noise": 1.5, "model": tiny_model,
}  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("dp_accounting", reason="the extra dp is not installed")
    folder = tmp_path_factory.mktemp("private") / "run"
    kinfed.run(**SMALL, federation=federation(), out=folder)
    return folder


def results(folder: Path) -> dict[str, Any]:
    return {r["algorithm"]: r["privacy"] for r in json.loads((folder / "summary.json").read_text())["results"]}


def test_epsilon_counts_every_gradient_of_every_round(finished: Path) -> None:
    """By hand: how often each client was called, three batches each time, and what the method does with them."""
    from kinfed.privacy.accountant import epsilon, renyi_epsilon

    schedule = Schedule(0.67)
    calls = sum(torch.bincount(schedule.active(0, number, 6), minlength=6) for number in range(1, 7))
    assert isinstance(calls, Tensor)
    found = results(finished)
    for name, each in (("fedavg", {1: 3}), ("ditto", {2: 3}), ("perfedavg", {1: 6})):
        by_hand = []
        for n, times in zip(SIZES, calls.tolist(), strict=True):
            q = min(1.0, 5 / n)
            events = tuple(Event(q, k, batches * times) for k, batches in each.items())
            after = (Event(q, 1, 1),) if name == "perfedavg" else ()
            by_hand.append(merge(events, after))
        exact = [epsilon(events, 1.5, 1e-5) for events in by_hand]
        assert found[name]["epsilon"] == pytest.approx(exact, rel=1e-12)
        assert found[name]["epsilon_max"] == max(exact)
        assert found[name]["epsilon_mean"] == pytest.approx(sum(exact) / 6)
        rdp = max(renyi_epsilon(events, 1.5, 1e-5) for events in by_hand)
        assert found[name]["epsilon_max_rdp"] == pytest.approx(rdp)
        assert found[name]["epsilon_max"] < rdp
    assert found["fedavg"]["epsilon_max"] < found["perfedavg"]["epsilon_max"]
    assert found["fedavg"]["not_covered"] == [EXAMPLE_COUNT]
    assert found["perfedavg"]["not_covered"] == []


def test_epsilon_is_written_where_it_is_looked_for(finished: Path) -> None:
    found = results(finished)
    assert {k: found["ditto"][k] for k in ("accountant", "noise", "clip", "delta", "limit", "refused")} == {
        "accountant": "pld", "noise": 1.5, "clip": 1.0, "delta": 1e-5, "limit": None, "refused": [],
    }  # fmt: skip
    with (finished / "clients.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["algorithm"] == "ditto"]
    assert [float(row["epsilon"]) for row in rows] == pytest.approx(found["ditto"]["epsilon"])
    lines = [json.loads(line) for line in (finished / "rounds.jsonl").read_text().splitlines()]
    curve = [line["method"].get("privacy") for line in lines if line["algorithm"] == "fedavg"]
    assert [entry is None for entry in curve] == [True, False] * 3
    largest = [entry["epsilon_max"] for entry in curve if entry]
    assert largest == sorted(largest)
    assert largest[-1] == pytest.approx(found["fedavg"]["epsilon_max"])


@pytest.mark.parametrize("stop_after", [2, 8])
def test_a_private_run_resumes_to_the_same_bits(finished: Path, tmp_path: Path, stop_after: int) -> None:
    calls = counting()
    with pytest.raises(Interrupted):
        kinfed.run(
            **SMALL, federation=federation(), out=tmp_path / "cut", should_stop=lambda: next(calls) >= stop_after
        )
    kinfed.run(**SMALL, federation=federation(), out=tmp_path / "cut", resume=True)
    assert same_results(finished, tmp_path / "cut") == []


def test_a_budget_leaves_clients_out_before_they_exceed_it(tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting", reason="the extra dp is not installed")
    from kinfed.privacy.accountant import most_rounds

    settings = SMALL | {
        "algorithms": {"fedavg": {}, "selffl": {"l_max": 6}}, "participation": 1.0, "dp_budget": 4.0, "dp_noise": 2.5,
        "dp_delta": 1e-3,
    }  # fmt: skip
    kinfed.run(**settings, federation=federation(), out=tmp_path / "whole")
    found = results(tmp_path / "whole")
    lines = [json.loads(line) for line in (tmp_path / "whole" / "rounds.jsonl").read_text().splitlines()]
    for name in ("fedavg", "selffl"):
        assert {"client-0", "client-1"} <= set(found[name]["refused"])
        assert "client-2" not in found[name]["refused"]  # 16 examples: sampled least
        assert found[name]["epsilon_max"] <= found[name]["limit"] == 4.0
        mine = [line for line in lines if line["algorithm"] == name]
        assert [line["active"] for line in mine] == sorted((line["active"] for line in mine), reverse=True)
        assert mine[0]["active"] == 6 > mine[-1]["active"] == 6 - len(found[name]["refused"])
        message = mine[0]["bytes_down"] / 6
        assert all(line["bytes_down"] == line["active"] * message for line in mine)  # who is left out gets nothing
        assert all(line["dropped"] == 0 for line in mine)
        assert mine[-1]["method"]["privacy"]["refused"] == len(found[name]["refused"])
    allowed = [most_rounds((), (Event(min(1.0, 5 / n), 1, 3),), 2.5, 1e-3, 4.0, 6) for n in SIZES]
    active = [sum(allowed[m] >= line["round"] for m in range(6)) for line in lines if line["algorithm"] == "fedavg"]
    assert [line["active"] for line in lines if line["algorithm"] == "fedavg"] == active  # not a round too early
    calls = counting()
    with pytest.raises(Interrupted):
        kinfed.run(**settings, federation=federation(), out=tmp_path / "cut", should_stop=lambda: next(calls) >= 8)
    kinfed.run(**settings, federation=federation(), out=tmp_path / "cut", resume=True)
    assert same_results(tmp_path / "whole", tmp_path / "cut") == []


def test_a_budget_reserves_what_the_personal_model_will_cost() -> None:
    """Rounds of one gradient each, and three more for the model that a client uses in the end. A budget that forgot
    those would let every client exceed it."""
    pytest.importorskip("dp_accounting", reason="the extra dp is not installed")
    from kinfed.privacy.accountant import epsilon, most_rounds

    noise, delta, budget = 2.5, 1e-3, 4.0
    privacy = Privacy(noise=noise, delta=delta, budget=budget)
    one = LocalTraining(batch=5, steps=1, poisson=True)
    tuned = make_algorithm("fedavg", one, {"finetune": 3})
    rates = [min(1.0, 5 / n) for n in SIZES]
    allowed = [most_rounds((Event(q, 1, 3),), (Event(q, 1, 1),), noise, delta, budget, 10) for q in rates]
    assert allowed != [most_rounds((), (Event(q, 1, 1),), noise, delta, budget, 10) for q in rates]
    with private_loop(tuned, privacy, schedule=Schedule(1.0), rounds=10) as loop:
        active = [loop.round().active for _ in range(10)]
        assert loop.privacy is not None
        assert loop.privacy.largest_epsilon() <= budget
        spent = [sum(e.batches for e in events) - 3 for events in loop.privacy.events()]
    assert spent == allowed
    assert active == [sum(rounds > number for rounds in allowed) for number in range(10)]
    more = [epsilon((Event(q, 1, rounds + 4),), noise, delta) for q, rounds in zip(rates, allowed, strict=True)]
    assert all(e > budget for e, rounds in zip(more, allowed, strict=True) if rounds < 10)


def test_the_noise_for_an_epsilon_covers_the_personal_model() -> None:
    pytest.importorskip("dp_accounting", reason="the extra dp is not installed")
    settings = SMALL | {"dp_noise": None, "dp_epsilon": 5.0, "algorithms": {"fedavg": {"finetune": 6}}}
    privacy = kinfed.run(**settings, federation=federation()).result("fedavg").privacy
    assert privacy is not None
    assert 4.9 <= privacy["epsilon_max"] <= 5.0
    assert privacy["refused"] == []  # with too little noise the limit would leave clients out


def test_a_round_without_anyone_left_changes_nothing() -> None:
    pytest.importorskip("dp_accounting", reason="the extra dp is not installed")
    with private_loop(method("fedfomo"), Privacy(noise=1.0, budget=1e-3)) as loop:
        before = {name: tensor.clone() for name, tensor in loop.state().items() if name.startswith("server.")}
        report = loop.round()
        assert (report.round, report.active, report.dropped, report.bytes_down, report.bytes_up) == (1, 0, 0, 0, 0)
        assert loop.completed == 1
        assert all(torch.equal(loop.state()[name], tensor) for name, tensor in before.items())
        assert loop.privacy is not None
        assert loop.privacy.epsilon() == [0.0] * 6


def test_noise_is_found_for_the_plan_of_the_run() -> None:
    pytest.importorskip("dp_accounting", reason="the extra dp is not installed")
    settings = SMALL | {"dp_noise": None, "dp_epsilon": 5.0, "algorithms": "fedavg,ditto"}
    result = kinfed.run(**settings, federation=federation())
    fedavg, ditto = (result.result(name).privacy for name in ("fedavg", "ditto"))
    assert fedavg is not None
    assert ditto is not None
    for privacy in (fedavg, ditto):
        assert 4.98 <= privacy["epsilon_max"] <= 5.0
        assert privacy["refused"] == []
    assert ditto["noise"] > 1.3 * fedavg["noise"]


def test_a_warm_start_is_private_and_counted(tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting", reason="the extra dp is not installed")
    settings = SMALL | {"algorithms": {"fedavg": {"weights": "equal"}}, "rounds": 2, "dp_strict": True}
    warm = kinfed.run(**settings, warm_start=4, federation=federation(), out=tmp_path / "warm")
    whole = kinfed.run(**settings | {"rounds": 6}, federation=federation())
    assert warm.result().privacy is not None
    assert whole.result().privacy is not None
    assert warm.result().privacy["epsilon"] == whole.result().privacy["epsilon"]  # type: ignore[index]
    assert torch.equal(warm.result().server_model, whole.result().server_model)  # type: ignore[arg-type]
    calls = counting()
    with pytest.raises(Interrupted):
        kinfed.run(**settings, warm_start=4, federation=federation(), out=tmp_path / "cut",
                   should_stop=lambda: next(calls) >= 5)  # fmt: skip
    kinfed.run(**settings, warm_start=4, federation=federation(), out=tmp_path / "cut", resume=True)
    assert same_results(tmp_path / "warm", tmp_path / "cut") == []
    with pytest.raises(ConfigError, match="warm start is common"):
        kinfed.run(**settings | {"dp_noise": None, "dp_epsilon": 3.0}, warm_start=4, federation=federation())


def test_clipping_alone_says_so() -> None:
    pytest.importorskip("dp_accounting", reason="the extra dp is not installed")
    result = kinfed.run(**SMALL | {"dp_noise": 0.0, "rounds": 1, "algorithms": "local"}, federation=federation())
    privacy = result.result().privacy
    assert privacy is not None
    assert privacy["epsilon_max"] == math.inf


def test_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("dp_accounting", reason="the extra dp is not installed")
    # A batch is all of a client's examples: epsilon is the same for all, and soon computed.
    small = ["--clients", "4", "--model", "mlr", "--rounds", "1", "--seeds", "0", "--steps", "2", "--no-report",
             "--batch", "100000"]  # fmt: skip

    def command(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["kinfed", "run", *small, *arguments])
        with monkeypatch.context() as patch:
            patch.chdir(tmp_path)
            try:
                main()
                code = 0
            except SystemExit as stop:
                code = int(stop.code or 0)
        said = capsys.readouterr()
        return code, " ".join(said.out.split()), " ".join(said.err.split())

    code, out, _ = command("--algorithms", "local,fedavg", "--dp-noise", "3", "--dp-clip", "0.5", "--out", "noisy")
    assert code == 0
    assert f"fedavg: not covered by epsilon: {EXAMPLE_COUNT}" in out
    assert "s/round epsilon" in out
    assert results(tmp_path / "noisy")["local"]["clip"] == 0.5
    code, out, _ = command("--algorithms", "local", "--dp-epsilon", "2", "--dp-delta", "1e-3", "--out", "found")
    assert code == 0
    assert "for epsilon 2" in out
    assert results(tmp_path / "found")["local"]["delta"] == 1e-3
    code, _, err = command("--algorithms", "fedavg", "--dp-noise", "1", "--dp-strict", "--dp-budget", "2")
    assert code == 2
    assert 'set fedavg.weights = "equal"' in err
    code, _, err = command("--algorithms", "fedavg", "--dp-budget", "2")
    assert code == 2
    assert "got neither" in err


def test_methods_are_refused_before_a_folder_exists(tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting", reason="the extra dp is not installed")
    for changes, says in (
        ({"algorithms": "fedavg,ifca"}, "ifca cannot be private"),
        ({"dp_strict": True}, "dp_strict: epsilon does not cover"),
        ({"epochs": 1, "steps": None}, "knows no epochs"),
        ({"dp_noise": None, "dp_clip": 1.0}, "got neither"),
        ({"public": 0.3}, r"fedavg: \d+ of the clients' own examples would be made public"),
        ({"dp_noise": None, "user_noise": 1.0, "algorithms": "fedmd"}, "fedmd: .* would be made public"),
    ):
        with pytest.raises(ConfigError, match=says):
            kinfed.run(**SMALL | changes, federation=federation(), out=tmp_path / "run")
        assert not (tmp_path / "run").exists()


def test_all_methods_that_can_be_private_run_on_all_examples() -> None:
    """Those that need public examples are left out with the reason, and so no client gives any away."""
    pytest.importorskip("dp_accounting", reason="the extra dp is not installed")
    inputs = RunInputs(make_config(None, SMALL | {"algorithms": "all", "model": "mlr"}), federation())
    leave_out_what_cannot_run(inputs)
    assert "own examples would be made public" in inputs.left_out["fedbe"]
    assert inputs.federation(0).public is None


def test_checkpoints_of_another_kind_are_refused() -> None:
    with private_loop(method("local"), Privacy(noise=1.0)) as loop:
        loop.round()
        state = loop.state()
        with pytest.raises(CheckpointError, match="no record of what clients' data were asked"):
            loop.load(1, {k: v for k, v in state.items() if k != "privacy.q"})
        with pytest.raises(CheckpointError, match="refused"):
            loop.load(1, state | {"privacy.refused": torch.zeros(5, dtype=torch.bool)})
        assert loop.privacy is not None
        asked = loop.privacy.ledger
        loop.load(1, state)
        assert loop.privacy.ledger == asked


def test_stragglers_are_counted_for_what_they_do() -> None:
    schedule = Schedule(1.0, stragglers=0.9)
    with private_loop(method("fedprox"), Privacy(noise=1.0), schedule=schedule) as loop:
        loop.round()
        assert loop.privacy is not None
        done = [sum(e.batches for e in events) for events in loop.privacy.events()]
        effort = schedule.completed_share(0, 1, torch.arange(6))
        assert done == torch.ceil(effort * 4 - 1e-6).long().tolist()
        assert min(done) < 4
        assert all(dominates((Event(1.0, 1, 4),), events) for events in loop.privacy.events())


def test_simulated_clients_do_not_share_what_is_asked() -> None:
    """Two methods on one task have budgets of their own."""
    with (
        private_loop(method("local"), Privacy(noise=1.0)) as one,
        private_loop(replace(method("local")), Privacy(noise=1.0)) as other,
    ):
        one.round()
        assert one.privacy is not None
        assert other.privacy is not None
        assert one.privacy.ledger.batches
        assert not other.privacy.ledger.batches
