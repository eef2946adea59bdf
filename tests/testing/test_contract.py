"""Every registered method keeps the contract; and each of the contract's checks notices a method that does not."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from kinfed.algorithms import ALGORITHMS, deployed_models
from kinfed.algorithms.base import Algorithm, RoundInfo
from kinfed.algorithms.common.averaging import DeltaUp, ModelDown
from kinfed.algorithms.common.masked_rows import MaskedDown, MaskedUp
from kinfed.algorithms.common.one_model import Client
from kinfed.algorithms.fedavg import FedAvg, Server
from kinfed.algorithms.heterofl import HeteroFL
from kinfed.algorithms.moon import MOON
from kinfed.data import Cohort, Federation
from kinfed.data.examples.batches import LocalTraining
from kinfed.engine.task_factory import Task
from kinfed.errors import ConfigError
from kinfed.pools import local_pool
from kinfed.testing import (
    CHECKS,
    VARIANT_CHECKS,
    Bench,
    ContractError,
    check_algorithm,
    tiny_federation,
)

WORK = LocalTraining(batch=5, steps=5)
METHOD_TESTS = Path(__file__).parents[1] / "algorithms"


def linear_model() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 3))


# What some methods need in place of the usual.
SETTINGS: dict[str, dict[str, Any]] = {
    # Four contexts for the four clients of a round: two clients are equally far from their mean, and rounding would
    # decide which of them keeps the context's number.
    "cgpfl": {"options": {"contexts": 2}},
    "mocha": {"model": linear_model},
    "fedala": {"options": {"max_passes": 3}},  # fifty show no more, and take their time
    "pfedsim": {"options": {"fedavg_rounds": 1}},  # the second phase is what is new in it
    "lotteryfl": {"options": {"accuracy": 0.3}},  # so that some prune in a few rounds
    "fedpa": {"options": {"fedavg_rounds": 1}},
    "fedbn": {"options": {"own": "1"}},  # the usual model has no normalization layers
    "selffl_augmented": {"options": {"max_extra": 3}},  # ten epochs beyond the early stop show nothing more than three
    # A hypernetwork is trained for hundreds of rounds; in a dozen only larger steps show that it learns.
    "pfedhn": {"options": {"server_lr": 0.1}},
}


@functools.cache
def bench(name: str) -> Bench:
    return Bench(name, **SETTINGS.get(name, {}))


def cases() -> Iterator[tuple[str, str]]:
    """Of methods that share a class, the first is put to all checks."""
    classes: set[type] = set()
    for name in ALGORITHMS:
        target = ALGORITHMS[name].target
        yield from ((name, check) for check in (VARIANT_CHECKS if target in classes else CHECKS))
        classes.add(target)


@pytest.mark.parametrize(("name", "check"), list(cases()))
def test_contract(name: str, check: str) -> None:
    CHECKS[check](bench(name))


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_every_method_has_tests_of_its_own_that_count_its_bytes(name: str) -> None:
    """The contract asks nothing that only one method promises: steps by hand, limits, planted data and bytes by hand
    are in tests/algorithms, in a file that imports the method or makes it by its name."""
    module = ALGORITHMS[name].target.__module__
    files = [path.read_text(encoding="utf-8") for path in METHOD_TESTS.glob("test_*.py")]
    own = [text for text in files if f"from {module} import" in text or f'"{name}"' in text]
    assert any("bytes_up" in text for text in own), f"no test counts what {name} sends"


# Methods that break one promise each.


@dataclass(frozen=True)
class HasAnObjectAsOption(FedAvg):
    rule: Callable[[float], float] = abs


@dataclass(frozen=True)
class MixesItsRows(FedAvg):
    def client_update(self, task: Task, client: Client, down: ModelDown, data: Cohort) -> tuple[Client, DeltaUp]:
        new, up = super().client_update(task, client, down, data)
        return new, DeltaUp(up.delta.mean(0, keepdim=True).expand_as(up.delta), up.count)


@dataclass(frozen=True)
class DependsOnTheGradientPath(FedAvg):
    def train(self, task: Task, w: Tensor, data: Cohort) -> Tensor:
        return super().train(task, w, data) * (1.01 if task.backend == "rows" else 1.0)


@dataclass(frozen=True)
class RemembersInItself(FedAvg):
    rounds: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "rounds", [])

    def aggregate(self, server: Server, ids: Tensor, up: DeltaUp, round: RoundInfo) -> Server:
        self.rounds.append(1)
        new = super().aggregate(server, ids, up, round)
        return replace(new, w=new.w / len(self.rounds))


@dataclass(frozen=True)
class PlansInPlace(FedAvg):
    def plan(self, server: Server, active: Tensor, round: RoundInfo) -> tuple[Server, Tensor]:
        server.w *= 0.9
        return server, active


@dataclass(frozen=True)
class DrawsFromTorch(FedAvg):
    def aggregate(self, server: Server, ids: Tensor, up: DeltaUp, round: RoundInfo) -> Server:
        return super().aggregate(server, ids, DeltaUp(up.delta + 0 * torch.rand(1), up.count), round)


@dataclass(frozen=True)
class DrawsFromNumpy(FedAvg):
    def personalize(self, task: Task, client: Client, down: ModelDown, data: Cohort) -> Tensor:
        return super().personalize(task, client, down, data) + 0 * np.random.rand()


@dataclass(frozen=True)
class AdaptsOnTestData(FedAvg):
    def personalize(self, task: Task, client: Client, down: ModelDown, data: Cohort) -> Tensor:
        return super().train(task, down.w, replace(data, train=data.test))


@dataclass(frozen=True)
class ExtrapolatesWholeRows(FedAvg):
    def aggregate(self, server: Server, ids: Tensor, up: DeltaUp, round: RoundInfo) -> Server:
        return replace(server, w=server.w + 9 * up.delta.mean(0))


@dataclass(frozen=True)
class MeasuresWholeRows(FedAvg):
    def aggregate(self, server: Server, ids: Tensor, up: DeltaUp, round: RoundInfo) -> Server:
        near = up.delta / up.delta.norm(dim=1, keepdim=True).clamp_min(1.0)
        return super().aggregate(server, ids, DeltaUp(near, up.count), round)


@dataclass(frozen=True)
class AveragesInPlace(FedAvg):
    def aggregate(self, server: Server, ids: Tensor, up: DeltaUp, round: RoundInfo) -> Server:
        server.w += up.delta.mean(0)
        return server


@dataclass(frozen=True)
class DownloadsTheCohort(FedAvg):
    def download(self, server: Server, ids: Tensor) -> ModelDown:
        return ModelDown((server.w * len(ids)).expand(len(ids), -1))


@dataclass(frozen=True)
class SendsOneRow(FedAvg):
    def client_update(self, task: Task, client: Client, down: ModelDown, data: Cohort) -> tuple[Client, DeltaUp]:
        new, up = super().client_update(task, client, down, data)
        return new, DeltaUp(up.delta.mean(0, keepdim=True), None)


@dataclass(frozen=True)
class ChangesItsTypes(FedAvg):
    def client_update(self, task: Task, client: Client, down: ModelDown, data: Cohort) -> tuple[Client, DeltaUp]:
        new, up = super().client_update(task, client, down, data)
        return Client(new.theta.double(), new.seen), up


@dataclass(frozen=True)
class TrainsInPlace(FedAvg):
    def client_update(self, task: Task, client: Client, down: ModelDown, data: Cohort) -> tuple[Client, DeltaUp]:
        down.w = down.w.clone()
        client.seen.fill_(True)
        return super().client_update(task, client, down, data)


@dataclass
class LyingDown(ModelDown):
    @property
    def nbytes(self) -> int:
        return 0


@dataclass(frozen=True)
class HidesItsBytes(FedAvg):
    def download(self, server: Server, ids: Tensor) -> ModelDown:
        return LyingDown(server.w.expand(len(ids), -1))


@dataclass(frozen=True)
class SwallowsNaN(FedAvg):
    def train(self, task: Task, w: Tensor, data: Cohort) -> Tensor:
        return super().train(task, w, data).nan_to_num()


@dataclass(frozen=True)
class FavoursLowNumbers(FedAvg):
    def train(self, task: Task, w: Tensor, data: Cohort) -> Tensor:
        return super().train(task, w, data) / (1 + data.ids[:, None])


@dataclass(frozen=True)
class NeedsTwoExamples(FedAvg):
    def train(self, task: Task, w: Tensor, data: Cohort) -> Tensor:
        return w + (super().train(task, w, data) - w) * ((data.train.count - 1) / (data.train.count - 1))[:, None]


@dataclass(frozen=True)
class DividesByTheAbsent(FedAvg):
    def aggregate(self, server: Server, ids: Tensor, up: DeltaUp, round: RoundInfo) -> Server:
        new = super().aggregate(server, ids, up, round)
        return replace(new, w=new.w / (len(ids) > 1))


@dataclass(frozen=True)
class ReportsText(FedAvg):
    def figures(self, server: Server) -> dict[str, Any]:
        return {"state": "fine"}


@dataclass(frozen=True)
class ReportsOneFigureForAll(FedAvg):
    def client_figures(self, client: Client) -> dict[str, Tensor]:
        return {"norm": client.theta.norm(dim=1)[:1]}


@dataclass(frozen=True)
class SaysNothingOfItsMessages(FedAvg):
    def client_update(self, task, client, down, data):  # type: ignore[no-untyped-def]
        return super().client_update(task, client, down, data)


@dataclass(frozen=True)
class SortsWhatItCallsAveraged(FedAvg):
    def aggregate(self, server: Server, ids: Tensor, up: DeltaUp, round: RoundInfo) -> Server:
        return Server(server.w + up.delta.median(0).values, server.c)


@dataclass(frozen=True)
class TrainsTwiceInSecret(FedAvg):
    def train(self, task: Task, w: Tensor, data: Cohort) -> Tensor:
        return super().train(task, super().train(task, w, data), data)


@dataclass(frozen=True)
class SendsItsClasses(FedAvg):
    def client_update(self, task: Task, client: Client, down: ModelDown, data: Cohort) -> tuple[Client, DeltaUp]:
        new, up = super().client_update(task, client, down, data)
        ((_, batch),) = data.train.in_order()
        classes = (batch.y * (batch.weight > 0)).sum(1, keepdim=True)
        return new, DeltaUp(up.delta + classes, up.count)


@dataclass(frozen=True)
class DoesNotLearn(FedAvg):
    def train(self, task: Task, w: Tensor, data: Cohort) -> Tensor:
        return 2 * w - super().train(task, w, data)


@dataclass(frozen=True)
class ReadsTheStateItOnlyDeploys(MOON):
    traits = frozenset({"state to deploy"})


BROKEN: list[tuple[type[FedAvg], str, str]] = [
    (HasAnObjectAsOption, "settings_are_plain", "options"),
    (MixesItsRows, "chunks_do_not_matter", "chunks of 6 give what chunks of 2 give: server.w differs by up to"),
    (DependsOnTheGradientPath, "gradient_paths_agree", "rows"),
    (RemembersInItself, "resume_is_exact", "bit for bit: server.w differs"),
    (PlansInPlace, "evaluation_is_pure", "evaluation leaves every state as it was"),
    (PlansInPlace, "trees_keep_their_shape", "plan .* leaves its argument server alone"),
    (DrawsFromTorch, "global_generators_are_untouched", "generator of torch"),
    (DrawsFromNumpy, "global_generators_are_untouched", "generator of numpy"),
    (AdaptsOnTestData, "held_out_data_do_not_matter", "personal models differs"),
    (ExtrapolatesWholeRows, "running_statistics_stay_sound", "running variances of (personal|server) models"),
    (MeasuresWholeRows, "running_statistics_stay_sound", "without a look at running statistics"),
    (AveragesInPlace, "trees_keep_their_shape", "aggregate .* leaves its argument server alone"),
    (DownloadsTheCohort, "trees_keep_their_shape", "row by row"),
    (SendsOneRow, "trees_keep_their_shape", "Up message has one row per client"),
    (ChangesItsTypes, "trees_keep_their_shape", "float64"),
    (TrainsInPlace, "trees_keep_their_shape", "client_update .* leaves its argument (client|down) alone"),
    (HidesItsBytes, "bytes_are_counted", "'down': 0"),
    (SwallowsNaN, "poisoned_clients_are_rejected", r"rejected were \[\]"),
    (FavoursLowNumbers, "numbering_does_not_matter", "draws by client"),
    (NeedsTwoExamples, "odd_sizes_work", "not finite"),
    (DividesByTheAbsent, "losses_are_survived", "finite|rejected"),
    (ReportsText, "figures_can_be_written", "server figure state"),
    (ReportsOneFigureForAll, "figures_can_be_written", "client figure norm"),
    (DoesNotLearn, "it_learns", "personal accuracy reaches"),
    (SaysNothingOfItsMessages, "message_types_are_declared", "must declare the classes of its messages"),
    (SortsWhatItCallsAveraged, "averages_are_only_averaged", "through their mean only: w differs"),
    (TrainsTwiceInSecret, "gradients_are_declared", "more gradients in a round than its privacy profile says"),
    (ReadsTheStateItOnlyDeploys, "who_is_evaluated_does_not_matter", "a sample of evaluated clients"),
    (SendsItsClasses, "nothing_else_leaves", "updates do not depend on examples"),
]


@pytest.mark.parametrize(("method", "check", "message"), BROKEN, ids=[f"{m.__name__}-{c}" for m, c, _ in BROKEN])
def test_broken_promises_are_noticed(method: type[FedAvg], check: str, message: str) -> None:
    with pytest.raises(ContractError, match=f"(?s){method.__name__}, {check}: .*{message}"):
        CHECKS[check](Bench(method(training=WORK)))


@dataclass(frozen=True)
class SendsOutsideItsMask(HeteroFL):
    def client_update(self, task: Task, client: Client, down: MaskedDown, data: Cohort) -> tuple[Client, MaskedUp]:
        new, up = super().client_update(task, client, down, data)
        return new, replace(up, delta=up.delta + 1)


def test_numbers_that_would_not_be_counted_are_noticed() -> None:
    CHECKS["bytes_are_counted"](Bench("heterofl"))
    with pytest.raises(ContractError, match="nothing but zeros outside of bits"):
        CHECKS["bytes_are_counted"](Bench(SendsOutsideItsMask(training=WORK)))


def test_every_check_is_seen_to_fail() -> None:
    """Three checks concern the pool rather than the method; breaking the pool is what its own tests are for."""
    of_pools = {"workers_do_not_matter", "outsiders_are_left_alone", "never_called_clients_have_the_servers_model"}
    assert CHECKS.keys() - {check for _, check, _ in BROKEN} == of_pools


def test_a_pool_that_judges_methods_at_the_start_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_the_rule(*arguments: Any, **_: Any) -> dict[str, Tensor]:
        return deployed_models(*arguments)

    CHECKS["never_called_clients_have_the_servers_model"](Bench("ditto"))
    monkeypatch.setattr(local_pool, "deployed_models", without_the_rule)
    with pytest.raises(ContractError, match="took part in no round deploy the server's model"):
        CHECKS["never_called_clients_have_the_servers_model"](Bench("ditto"))


def test_a_method_of_ones_own_is_put_to_all_checks() -> None:
    with pytest.raises(ContractError, match="DoesNotLearn, it_learns"):
        check_algorithm(DoesNotLearn(training=WORK))


def test_a_method_may_bring_its_own_data_and_model() -> None:
    """Tokens, and a model that the tiny federation's examples would not fit."""
    draw = np.random.default_rng(0)
    labels = draw.integers(0, 2, 90)
    words = 5 * labels[:, None] + draw.integers(0, 5, (90, 3))  # every class has its own words
    data = Federation.from_arrays(words, labels, draw.integers(0, 4, 90), tokens=True)
    check_algorithm(FedAvg(training=LocalTraining(lr=0.5, batch=5, steps=5)), federation=data, model=BagOfWords)


class BagOfWords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 4)
        self.top = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.top(self.words(x).mean(-2))
        return z


def test_options_belong_to_a_name() -> None:
    assert Bench("ditto", options={"lam": 0.5}).algorithm.lam == 0.5
    with pytest.raises(ConfigError, match="as an object has them already"):
        Bench(FedAvg(), options={"weights": "equal"})


def test_the_tiny_federation_is_what_it_says() -> None:
    data = tiny_federation((1, 5, 3), test=2)
    assert data.train.count.tolist() == [1, 5, 3]
    assert data.test.count.tolist() == [2, 2, 2]
    assert sorted(torch.cat([data.train.rows, data.test.rows]).tolist()) == list(range(15))


def test_an_option_must_not_hide_a_method_of_the_contract() -> None:
    with pytest.raises(TypeError, match="must not hide the method step"):

        @dataclass(frozen=True)
        class Cautious(FedAvg):
            step: float = 0.5  # type: ignore[assignment]


def test_a_declaration_of_an_older_version_is_understood_or_said() -> None:
    with pytest.warns(DeprecationWarning, match="says in `single_updates` why"):

        @dataclass(frozen=True)
        class Old(Algorithm[Any, Any, Any, Any]):
            averages = "keeps every single model"

    assert Old().single_updates == "keeps every single model"
