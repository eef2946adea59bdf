"""User-level privacy at a real server: the clipped sum, noise and samples that nobody can repeat, what is counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loopback import Loopback, write_nodes
from torch import Tensor

from kinfed.algorithms.base import AveragingAlgorithm
from kinfed.algorithms.common.message_shape import update_template
from kinfed.data.federations.federation import Federation
from kinfed.deploy.node.node import asked_server_model
from kinfed.deploy.node.vault import Vault
from kinfed.deploy.server.deployment_server import serve
from kinfed.deploy.server.server_privacy import FILE, SecretSchedule
from kinfed.deploy.settings import Deployment
from kinfed.deploy.transport.exchange import Sent
from kinfed.deploy.transport.wire import EVALUATE, TRAIN
from kinfed.errors import CheckpointError, ConfigError, StorageError
from kinfed.privacy.noise import seeded_noise
from kinfed.records.checkpoint import Checkpoints
from kinfed.runs.loop_factory import simulate
from kinfed.server.schedule import Schedule
from kinfed.serving.pipeline import ModelPipeline
from kinfed.updates.promises import ClientSampling
from kinfed.updates.stages import Road
from kinfed.updates.user_level import SumLedger, UserLevel

pytest.importorskip("dp_accounting", reason="the extra dp is not installed")
pytest.importorskip("cryptography", reason="the extra flower is not installed")

NAMES = ["a", "b", "c"]
SETTINGS: dict[str, Any] = {
    "method": "fedavg", "model": "mlr", "rounds": 2, "clients": 3, "classes": "3", "scaling": "none", "steps": 2,
    "batch": 5, "eval-every": 0, "deadline": 20.0, "wait": 60.0, "user-noise": 0.0, "user-clip": 0.05,
}  # fmt: skip


def examples(features: int = 5) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    numbers = np.random.default_rng(3)
    owner = np.repeat(np.arange(3), (30, 17, 24))
    y = numbers.integers(0, 3, len(owner))
    return (numbers.normal(size=(len(owner), features)) + 2 * np.eye(3, features)[y]).astype(np.float32), y, owner


def make(folder: Path, features: int = 5, **settings: Any) -> Loopback:
    folder.mkdir(exist_ok=True)
    named = {key.replace("_", "-"): value for key, value in settings.items()}
    return Loopback(
        SETTINGS | {"out": str(folder / "run")} | named, write_nodes(folder, *examples(features), NAMES)
    )  # fmt: skip


def run(net: Loopback) -> Path:
    return serve(Deployment.parse(net.run_config), net, net.log.append, **net.time)


def models(net: Loopback) -> Tensor:
    modules = [ModelPipeline.read(Vault(config["vault"]).model_path()).module for config in net.nodes_.values()]
    return torch.stack([torch.cat([t.detach().reshape(-1) for t in m.state_dict().values()]) for m in modules])


def server_models(net: Loopback) -> dict[int, list[Tensor]]:
    """By round: the server's model of every evaluation, as it left the server for the first client."""
    sent: dict[int, list[Tensor]] = {}
    for one in net.messages:
        if one.kind == EVALUATE and one.packet.header["name"] == "a":
            model = asked_server_model(one.packet)
            assert model is not None
            sent.setdefault(one.packet.header["round"], []).append(model[0])
    return sent


def summary(folder: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((folder / "summary.json").read_text())["results"][0]["user_privacy"]
    return result


def simulated(net: Loopback) -> Tensor:
    """Personal models of the same method, clipping and clients in one process."""
    x, y, owner = examples()
    deployment = Deployment.parse(net.run_config)
    federation = Federation.from_arrays(x, y, np.array(NAMES)[owner], num_classes=3)
    loop = simulate(federation, "mlr", deployment.algorithm)
    privacy, algorithm = deployment.run.user_privacy, deployment.algorithm
    assert privacy is not None
    assert isinstance(algorithm, AveragingAlgorithm)
    template = update_template(deployment.algorithm, loop.task, federation, loop.server)
    sampling = loop.schedule.client_sampling(3)
    level = UserLevel(privacy, template, algorithm.fields, seeded_noise(0), sampling, 3.0, range(1, 3))
    loop.stages = Road([level])
    for _ in loop.rounds(deployment.run.rounds):
        pass
    rows = loop.evaluate(keep_models=True).models
    assert rows is not None
    states = [loop.task.module_of(row).state_dict() for row in rows]  # type: ignore[attr-defined]
    return torch.stack([torch.cat([t.reshape(-1) for t in state.values()]) for state in states])


@pytest.mark.parametrize(("method", "secure"), [("fedavg", False), ("ditto", True)], ids=["server clips", "nodes clip"])
def test_without_noise_the_models_are_those_of_a_simulation(tmp_path: Path, method: str, secure: bool) -> None:
    """Updates are longer than the norm, so that clipping shows; with secure sums nodes do it, and the sum is theirs."""
    net = make(tmp_path, method=method, secure_sum=secure, batch=50)  # small batches are the nodes' secret
    folder = run(net)
    torch.testing.assert_close(models(net), simulated(net), rtol=0, atol=1e-6)
    updates = [one.packet.group("down")["w"][0] for one in net.messages if one.kind == TRAIN and one.node == 100]
    assert float((updates[1] - updates[0]).norm()) == pytest.approx(0.05, abs=0.02)  # of three clipped updates
    assert summary(folder)["epsilon"] is None  # clipped, and not private
    assert any("there is no user-level privacy" in line for line in net.log)


@pytest.mark.parametrize("secure", [False, True], ids=["server clips", "nodes clip"])
def test_the_servers_model_has_the_noise_that_epsilon_is_computed_from(tmp_path: Path, secure: bool) -> None:
    """Steps of nearly nothing: what moves the model is noise of deviation z C / E, another one in every run."""
    moves = []
    for attempt in ("one", "other"):
        net = make(tmp_path / attempt, 400, lr=1e-12, rounds=1, user_noise=2.0, user_clip=0.5, secure_sum=secure)
        folder = run(net)
        start = next(one for one in net.messages if one.kind == TRAIN).packet.group("down")
        (before,) = start.values()
        moves.append(server_models(net)[1][0] - before[0])
    for move in moves:
        assert len(move) == 1203
        assert float(move.std()) == pytest.approx(2.0 * 0.5 / 3, rel=0.2)  # ten standard errors
    assert abs(float(torch.corrcoef(torch.stack(moves))[0, 1])) < 0.25  # nine
    assert summary(folder)["neighbours"] == "add or remove one client"
    assert 0.5 < summary(folder)["epsilon"] < 5


def test_who_is_called_is_not_the_seeds_to_say(tmp_path: Path) -> None:
    """By the seed, which every node has, they would be these; that chance calls the same ones is one in 3^16."""
    net = make(tmp_path, rounds=16, participation=0.34, steps=1)
    run(net)
    called: dict[int, set[str]] = {}
    for one in net.messages:
        if one.kind == TRAIN:
            called.setdefault(one.packet.header["round"], set()).add(one.packet.header["name"])
    assert [len(names) for names in called.values()] == [1] * 16
    schedule = Schedule(0.34)
    by_seed = [{NAMES[k] for k in schedule.active(0, round, 3).tolist()} for round in range(1, 17)]
    assert list(called.values()) != by_seed


def test_samples_are_drawn_anew_and_at_their_rate() -> None:
    poisson = SecretSchedule(0.3, sampling="poisson")
    one, other = poisson.active(0, 1, 4000), poisson.active(0, 1, 4000)
    assert not torch.equal(one, other)
    for ids in (one, other):
        assert torch.equal(ids, ids.unique())
        assert abs(len(ids) - 1200) < 200  # seven standard deviations
    fixed = SecretSchedule(0.25)
    assert len(fixed.active(0, 1, 100)) == 25
    assert not torch.equal(fixed.active(0, 1, 100), fixed.active(0, 1, 100))


def crash(net: Loopback, monkeypatch: pytest.MonkeyPatch, round: int) -> None:
    """The server dies after a round's model has left for evaluation, and before its checkpoint."""
    save = Checkpoints.save

    def dying(self: Checkpoints, label: str, number: int, *rest: Any) -> None:
        if number == round:
            raise KeyboardInterrupt
        save(self, label, number, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "save", dying)
        with pytest.raises(KeyboardInterrupt):
            run(net)


def test_a_round_that_a_crash_repeats_is_another_sum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The difference of the two models that left is noise of both, not what one client adds; both are counted."""
    net = make(tmp_path, 400, rounds=3, eval_every=1, user_noise=2.0, user_clip=0.5, lr=1e-12)
    crash(net, monkeypatch, 2)
    folder = run(net)
    first, second = server_models(net)[2]
    assert float((first - second).std()) == pytest.approx(2**0.5 * 2.0 * 0.5 / 3, rel=0.2)
    assert summary(folder)["rounds"] == 4
    assert SumLedger(folder / FILE, json.loads((folder / "deployment.json").read_text())["run"]).read() == 4
    assert summary(folder)["epsilon"] == ClientSampling("fixed", 1.0).epsilon(2.0, 4, 1e-5)


def test_a_promised_epsilon_holds_although_rounds_are_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net = make(tmp_path, rounds=3, eval_every=1, user_noise="", user_epsilon=4.0)
    crash(net, monkeypatch, 2)
    folder = run(net)
    assert summary(folder)["rounds"] == 3
    assert summary(folder)["epsilon"] <= 4.0
    assert len((folder / "rounds.jsonl").read_text().splitlines()) == 2
    assert any("the run has 2 rounds, so that no more than 3 sums are released" in line for line in net.log)


def test_without_its_books_a_run_does_not_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net = make(tmp_path, user_noise=1.0)
    crash(net, monkeypatch, 2)
    books = tmp_path / "run" / FILE
    text = books.read_text()
    books.write_text(text.replace('"sums": 2', '"sums": true'))
    with pytest.raises(StorageError, match="which alone says how much of epsilon is spent"):
        run(net)
    books.unlink()
    with pytest.raises(CheckpointError, match="0 noisy sums were let out, and the checkpoint 1"):
        run(net)


def test_a_round_without_answers_is_noised_like_any_other(tmp_path: Path) -> None:
    """One of three answers in round 1, which is no majority and counts all the same; none does in round 2."""
    net = make(tmp_path, 400, rounds=3, user_noise=2.0, user_clip=0.5, lr=1e-12, eval_every=1)

    def away(client: str, sent: Sent, answer: Any) -> Any:
        lost = {1: "bc", 2: "abc"}.get(sent.packet.header.get("round", 0), "")
        return None if sent.kind == TRAIN and client in lost else answer

    net.tamper = away
    folder = run(net)
    rounds = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    assert [record["dropped"] for record in rounds] == [2, 3, 0]
    sent = server_models(net)
    for before, after in ((1, 2), (2, 3)):
        assert float((sent[after][0] - sent[before][0]).std()) == pytest.approx(2.0 * 0.5 / 3, rel=0.2)
    assert summary(folder)["rounds"] == 3
    assert any("none of 3 updates; the model gets its noise nevertheless" in line for line in net.log)


def test_both_kinds_of_privacy_at_once(tmp_path: Path) -> None:
    """Noise at the nodes is planned for everybody in every round: who is called is a secret."""
    folder = run(make(tmp_path, user_noise=1.0, dp_epsilon=8.0, participation=0.6, sampling="poisson"))
    result = json.loads((folder / "summary.json").read_text())["results"][0]
    assert result["privacy"]["epsilon_max"] <= 8.0
    assert result["user_privacy"]["sampling"] == "poisson"


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"scaling": "standard"}, "does not cover the column statistics"),
        ({"quorum": 2}, "a round must use every answer"),
        ({"secure_sum": True, "user_quantile": 0.5}, "give user_clip alone"),
        ({"robust": "median"}, "which no robust rule guarantees"),
        ({"method": "fedfomo", "options": "models=2"}, "noise on the sum of updates would not hide a client"),
        ({"method": "selffl"}, "would not hide a client"),
    ],
)
def test_what_would_make_epsilon_untrue_is_refused(tmp_path: Path, settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        run(make(tmp_path, **settings))
