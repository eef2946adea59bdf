"""Sites that come into a run, leave it or are forgotten: simulations in which they are absent, equal for the others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loopback import Loopback, write_nodes
from torch import Tensor

from kinfed.core import storage
from kinfed.data.federations.federation import Federation
from kinfed.deploy.node.vault import Vault
from kinfed.deploy.operator.forget_site import app_settings, without_site, write_record
from kinfed.deploy.programs.app_folder import make_app
from kinfed.deploy.server.deployment_server import serve
from kinfed.deploy.server.enrol import TooFewClients
from kinfed.deploy.settings import Deployment
from kinfed.errors import ConfigError, DataError
from kinfed.privacy import epsilon, merge
from kinfed.runs.loop_factory import simulate
from kinfed.server.loop import Loop
from kinfed.serving.pipeline import ModelPipeline

NAMES = ["a", "b", "c", "d"]
SETTINGS: dict[str, Any] = {
    "method": "ditto", "model": "mlr", "rounds": 2, "clients": "a,b,c", "classes": "3", "scaling": "none", "steps": 4,
    "batch": 5, "eval-every": 0, "deadline": 60.0, "wait": 60.0,
}  # fmt: skip
# Rounds, settings of the deployment, and the numbers of those who take part in these rounds.
HISTORY = (
    (2, {}, [0, 1, 2]), (4, {"joined": "d"}, [0, 1, 2, 3]), (5, {"joined": "d", "left": "b"}, [0, 2, 3]),
    (6, {"joined": "d"}, [0, 1, 2, 3]),
)  # fmt: skip


def examples() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    numbers = np.random.default_rng(3)
    owner = np.repeat(np.arange(4), (30, 17, 24, 40))
    y = numbers.integers(0, 3, len(owner))
    return (numbers.normal(size=(len(owner), 5)) + 2 * np.eye(3, 5)[y]).astype(np.float32), y, owner


def make(folder: Path, **settings: Any) -> Loopback:
    run_config = SETTINGS | {"out": str(folder / "run")} | {k.replace("_", "-"): v for k, v in settings.items()}
    return Loopback(run_config, write_nodes(folder, *examples(), NAMES))


def go_on(net: Loopback, **settings: Any) -> Path:
    net.run_config = net.run_config | settings
    return serve(Deployment.parse(net.run_config), net, net.log.append, **net.time)


def simulated(method: str) -> Loop:
    x, y, owner = examples()
    federation = Federation.from_arrays(x, y, np.array(NAMES)[owner], num_classes=3)
    loop = simulate(federation, "mlr", Deployment.parse(SETTINGS | {"method": method}).algorithm)
    for last, _, members in HISTORY:
        object.__setattr__(loop.schedule, "members", torch.tensor(members))
        while loop.completed < last:
            loop.round()
    return loop


def kept(net: Loopback) -> Tensor:
    rows = []
    for node in net.nodes_.values():
        pipeline = ModelPipeline.read(Vault(node["vault"]).model_path())
        rows.append(torch.cat([tensor.reshape(-1) for tensor in pipeline.module.state_dict().values()]))
    return torch.stack(rows)


@pytest.mark.parametrize("method", ["fedavg", "ditto", "apfl"])
def test_sites_that_come_and_go_were_absent_for_the_others(tmp_path: Path, method: str) -> None:
    net = make(tmp_path, method=method)
    for rounds, settings, members in HISTORY:
        net.offline = {100 + k for k in range(4) if k not in members}
        sent = len(net.messages)
        folder = go_on(net, **{"joined": "", "left": "", "rounds": rounds, **settings})
        asked = {one.node for one in net.messages[sent:] if one.kind == "train"}
        assert asked == {100 + k for k in members}
    loop = simulated(method)
    wanted = loop.evaluate(keep_models=True).models
    assert wanted is not None
    torch.testing.assert_close(kept(net), wanted, rtol=0, atol=1e-7)
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    assert [line["active"] for line in lines] == [3, 3, 4, 4, 3, 4]
    assert [line["dropped"] for line in lines] == [0] * 6
    assert json.loads((folder / "members.json").read_text()) == {"joined": {"d": 2}, "left": {}}
    told = [line for line in net.log if "after round" in line and not line.startswith("resumed")]
    assert told == ["d has joined after round 2", "b has left after round 4", "b is back after round 5"]


def test_a_crash_after_somebody_joined_goes_on_with_the_newcomer(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    net, plain = make(tmp_path / "one"), make(tmp_path / "two")
    for one in (net, plain):
        one.offline = {103}
        go_on(one)
        one.offline = set()
    stopped = False

    def stop(client: str, sent: Any, answer: Any) -> Any:
        nonlocal stopped
        if sent.kind == "train" and not stopped:
            stopped = True
            raise KeyboardInterrupt
        return answer

    net.tamper = stop
    with pytest.raises(KeyboardInterrupt):
        go_on(net, joined="d", rounds=4)
    go_on(net, joined="d", rounds=4)
    go_on(plain, joined="d", rounds=4)
    assert torch.equal(kept(net), kept(plain))


def test_the_ledger_of_a_private_run_counts_each_site_from_its_own_beginning(tmp_path: Path) -> None:
    net = make(tmp_path, method="fedavg", dp_noise=2.0)
    net.offline = {103}
    go_on(net)
    net.offline = set()
    folder = go_on(net, joined="d", rounds=4)
    privacy = json.loads((folder / "summary.json").read_text())["results"][0]["privacy"]
    ledgers = [Vault(node["vault"]).privacy_log(node["client"]).read() for node in net.nodes_.values()]
    assert [len([one for one in page.answers if one.kind == "train"]) for page in ledgers] == [4, 4, 4, 2]
    for epsilon_of_server, page in zip(privacy["epsilon"], ledgers, strict=True):
        events: Any = ()
        for one in page.answers:
            events = merge(events, one.events) if one.kind == "train" else events
        assert epsilon_of_server == pytest.approx(epsilon(events, 2.0, 1e-5), rel=1e-9)


@pytest.mark.parametrize(("settings", "what"), [
    ({"method": "scaffold", "joined": "d"}, "begin a new run"),
    ({"dp-epsilon": 8.0, "method": "fedavg", "joined": "d"}, "planned"),
    ({"user-noise": 1.0, "method": "fedavg", "left": "b"}, "hides who takes part"),
    ({"joined": "a"}, "name it once"),
    ({"method": "fit", "scaling": "standard", "joined": "d"}, "asks those in clients"),
])  # fmt: skip
def test_runs_that_were_planned_for_their_sites_refuse_others(settings: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        Deployment.parse(SETTINGS | settings)


def test_who_joins_must_appear_and_fit_in(tmp_path: Path) -> None:
    net = make(tmp_path)
    with pytest.raises(ConfigError, match="this one begins"):
        go_on(net, joined="d")
    go_on(net, joined="")
    net.offline = {103}
    with pytest.raises(TooFewClients, match="d did not appear"):
        go_on(net, joined="d", rounds=4, wait=5.0)
    net.offline = set()
    np.savez(tmp_path / "d.npz", x=np.zeros((9, 4), np.float32), y=np.arange(9) % 3)
    with pytest.raises(DataError, match="other feature columns"):
        go_on(net, joined="d", rounds=4)
    with pytest.raises(ConfigError, match="not in this run"):
        go_on(net, joined="", left="x", rounds=4)
    with pytest.raises(ConfigError, match="all sites have left"):
        go_on(net, left="a,b,c", rounds=4)


def app_of(folder: Path, net: Loopback) -> dict[str, Any]:
    """Settings as they are read from an app folder."""
    make_app(folder / "app", {name.replace("-", "_"): value for name, value in net.run_config.items()})
    return app_settings(folder / "app")


@pytest.mark.parametrize("method", ["fedavg", "scaffold"])
def test_what_is_learnt_without_a_site_is_what_a_simulation_without_it_learns(tmp_path: Path, method: str) -> None:
    net = make(tmp_path, clients="a,b,c,d", method=method)
    before = go_on(net)
    settings = without_site(app_of(tmp_path, net), "b")
    net.run_config, net.offline = settings, {101}
    after = go_on(net)
    record = write_record("b", before, settings)
    assert after == Path(f"{before}-without-b")
    assert json.loads((after / "forgotten.json").read_text()) == record
    assert list(record["clients"]) == ["a", "c", "d"]
    assert record["before"]["sites"] == NAMES
    x, y, owner = examples()
    others = owner != 1
    federation = Federation.from_arrays(x[others], y[others], np.array(NAMES)[owner[others]], num_classes=3)
    loop = simulate(federation, "mlr", Deployment.parse(settings).algorithm)
    for _ in loop.rounds(2):
        pass
    state = {name: tensor for name, tensor in loop.state().items() if name.startswith("server.")}
    assert record["server"] == {name: storage.checksum({name: tensor}) for name, tensor in state.items()}


def test_what_cannot_be_forgotten_is_named(tmp_path: Path) -> None:
    net = make(tmp_path)
    with pytest.raises(ConfigError, match="nothing to forget"):
        without_site(net.run_config, "b")
    net.offline = {103}
    go_on(net)
    with pytest.raises(ConfigError, match="its sites are a, b, c"):
        without_site(net.run_config, "x")
    with pytest.raises(ConfigError, match="fewer than two"):
        without_site({**net.run_config, "left": "a"}, "b")
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "pyproject.toml").write_text("[project]\n")
    with pytest.raises(ConfigError, match="no app folder"):
        app_settings(tmp_path / "app")
