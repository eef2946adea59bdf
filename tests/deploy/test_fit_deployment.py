"""A search over sites that share no rows: the choices and models of a fit of the table with all of them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pytest
import torch
from loopback import Loopback

import kinfed
from kinfed.data import Problem
from kinfed.deploy.node.fit_client import FitClient
from kinfed.deploy.node.node import Node
from kinfed.deploy.node.node_settings import NodeSettings, Refused
from kinfed.deploy.node.vault import Vault
from kinfed.deploy.server.deployment_server import serve
from kinfed.deploy.server.enrol import TooFewClients
from kinfed.deploy.settings import Deployment
from kinfed.deploy.transport.exchange import Sent
from kinfed.deploy.transport.wire import Packet, bundled, unbundled
from kinfed.errors import ConfigError
from kinfed.serving.pipeline import ModelPipeline
from kinfed.tabular.fit_result import FitResult

NAMES = ["east", "north", "west"]
SEARCH: dict[str, Any] = {"trials": 2, "folds": 2, "rounds": 2, "steps": 3}
SETTINGS: dict[str, Any] = {
    "method": "fit", "clients": ",".join(NAMES), "classes": "no,yes", "label-column": "sick", "portfolio": "ditto,kin",
    "models": "mlr", "deadline": 60.0, "wait": 60.0,
    "trials": SEARCH["trials"], "search-folds": SEARCH["folds"], "rounds": SEARCH["rounds"], "steps": SEARCH["steps"],
}  # fmt: skip


def table(number: bool = False) -> pa.Table:
    """Rows of three sites that differ, with a gap here and there and a column that one of them does not have."""
    draw = np.random.default_rng(5)
    site = np.repeat(NAMES, (34, 25, 41))
    age, dose = draw.normal(50, 12, len(site)), draw.normal(size=len(site))
    slope = {"east": 1.0, "north": 1.4, "west": -0.6}
    risk = 0.05 * (age - 50) + np.array([slope[one] for one in site]) * dose + draw.normal(size=len(site))
    gaps = pa.array([None if site[k] == "north" or k % 9 == 0 else float(one) for k, one in enumerate(dose)])
    label = pa.array(risk + 40) if number else pa.array(np.where(risk > 0, "yes", "no").tolist())
    ward = pa.array([("a", "b", "c")[k % 3] for k in range(len(site))])
    return pa.table({"site": site.tolist(), "age": age, "dose": gaps, "ward": ward, "sick": label})


def make(folder: Path, number: bool = False, rules: dict[str, Any] | None = None, **settings: Any) -> Loopback:
    nodes = {}
    rows = table(number)
    for place, name in enumerate(NAMES):
        own = rows.filter(pa.array([one == name for one in rows["site"].to_pylist()])).drop_columns(["site"])
        if name == "north":
            own = own.drop_columns(["dose"])
        pa_csv.write_csv(own, folder / f"{name}.csv")
        nodes[100 + place] = {
            "client": name, "data": str(folder / f"{name}.csv"), "vault": str(folder / f"vault-{name}"),
            **(rules if rules and name == "west" else {}),
        }  # fmt: skip
    target = {"target": "number", "classes": "2"} if number else {}
    return Loopback({**SETTINGS, **target, "out": str(folder / "run"), **settings}, nodes)


def run(net: Loopback) -> FitResult:
    return FitResult.read(serve(Deployment.parse(net.run_config), net, net.log.append, **net.time))


def model_row(pipeline: ModelPipeline) -> torch.Tensor:
    return torch.cat([tensor.reshape(-1).double() for tensor in pipeline.module.state_dict().values()])


def kept(net: Loopback, name: str) -> ModelPipeline:
    config = next(config for config in net.nodes_.values() if config["client"] == name)
    return ModelPipeline.read(Vault(config["vault"]).model_path())


def site_page(net: Loopback, name: str) -> str:
    config = next(config for config in net.nodes_.values() if config["client"] == name)
    return next(Path(config["vault"]).rglob("fit.html")).read_text("utf-8")


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Loopback, FitResult]:
    net = make(tmp_path_factory.mktemp("search"))
    return net, run(net)


@pytest.mark.parametrize("number", [False, True])
def test_sites_choose_what_a_fit_of_all_rows_chooses(
    tmp_path: Path, number: bool, searched: tuple[Loopback, FitResult]
) -> None:
    net = make(tmp_path, True, portfolio="ditto", trials=1) if number else searched[0]
    apart = run(net) if number else searched[1]
    search = {**SEARCH, "trials": 1} if number else SEARCH
    pooled = kinfed.fit(
        table(number), client_column="site", label_column="sick", models="mlr", deploy="chosen",
        algorithms="ditto" if number else "ditto,kin", **search,
    )  # fmt: skip
    assert [site.site for site in apart.sites] == [site.site for site in pooled.sites]
    for ours, theirs in zip(apart.sites, pooled.sites, strict=True):
        for name in ("train_rows", "validated_rows", "test_rows", "chosen", "together"):
            assert getattr(ours, name) == getattr(theirs, name), name
        assert ours.expected == pytest.approx(theirs.expected, abs=1e-6)
        for name in ("gain", "gain_chosen", "expected_gain"):
            mine, other = getattr(ours, name), getattr(theirs, name)
            assert mine.value == pytest.approx(other.value, abs=1e-5)
            if mine.low is not None:  # not cut where AUROC ends, as that would tell what the site has alone
                assert (mine.low, -mine.high) <= (other.low + 1e-5, -other.high + 1e-5)
            if number:
                assert dataclasses.astuple(mine) == pytest.approx(dataclasses.astuple(other), abs=1e-5)
        torch.testing.assert_close(
            model_row(kept(net, ours.site)), model_row(pooled.model(ours.site)), rtol=0, atol=1e-5
        )
    for one, wanted in zip(apart.contenders, pooled.contenders, strict=True):
        assert (one.name, one.network, one.options) == (wanted.name, wanted.network, wanted.options)
        assert (one.validation, one.mean, one.spread) == pytest.approx(
            (wanted.validation, wanted.mean, wanted.spread), abs=1e-6
        )
    assert apart.overall.value == pytest.approx(pooled.overall.value, abs=1e-5)
    assert apart.drift == pytest.approx(pooled.drift, abs=1e-6)


def test_a_model_that_diverged_at_a_site_is_judged_as_far_off_as_a_prediction_can_be_meant_to_be(
    tmp_path: Path,
) -> None:
    """Its finite error would else be all that is known of a contender."""
    net = make(tmp_path, True, portfolio="ditto", trials=1)
    client = FitClient(NodeSettings.parse(net.nodes_[100]), Deployment.parse(net.run_config))
    target = Problem.of_numbers().of_sums(100, 40.0, 400.0)  # a deviation of 2: no farther off than 80
    order = Packet({"kind": "judge", "run": "r", "round": 1, "name": "east", "folds": 2, "part": 2,
                    "number": 0, "problem": target.to_json()})  # fmt: skip
    rows = [int((client.home(order).fold_of == fold).sum()) for fold in range(2)]
    client.results = {f"fold/alone/0/{fold}": torch.full((count, 1), 1e20).double() for fold, count in enumerate(rows)}
    ((_, _, error, count),) = client.judge(order).header["figures"]
    assert 35**2 < error / count < 45**2


def test_a_search_takes_the_rounds_of_one_run_and_five_more(searched: tuple[Loopback, FitResult]) -> None:
    net, _ = searched
    per_node = {number: [one.kind for one in net.messages if one.node == number] for number in net.nodes_}
    expected = ["hello", "sums", "together", "together", "together", "weigh", "settle"]
    assert all(kinds == expected for kinds in per_node.values())
    assert len(expected) == SEARCH["rounds"] + 5
    assert any(f"{SEARCH['rounds'] + 5} round trips" in line for line in net.log)
    lines = [json.loads(line) for line in (Path(net.run_config["out"]) / "rounds.jsonl").read_text().splitlines()]
    runs = 5 * 2 * 3 - 2 * 3  # local, fedavg, ditto and kin: two tries in two folds and on all rows
    assert len(lines) == SEARCH["rounds"] * runs
    assert all(line["dropped"] == 0 and line["bytes_down"] >= 0 for line in lines)


def test_a_run_that_has_all_it_needs_is_not_asked_again(tmp_path: Path) -> None:
    """A mixed model is done after some rounds, and its state waits at the sites until models are judged."""
    net = make(tmp_path, portfolio="glmm", trials=1, rounds=12)
    result = run(net)
    assert not result.left_out
    lines = [json.loads(line) for line in (Path(net.run_config["out"]) / "rounds.jsonl").read_text().splitlines()]
    asked = [line["active"] for line in lines if line["algorithm"] == "glmm" and line["fold"] == 2]
    assert 1 < len(asked) < 12
    assert set(asked) == {len(NAMES)}
    pooled = kinfed.fit(
        table(), client_column="site", label_column="sick", models="mlr", deploy="chosen", algorithms="glmm", trials=1,
        folds=2, rounds=12, steps=3,
    )  # fmt: skip
    assert [site.chosen for site in result.sites] == [site.chosen for site in pooled.sites]
    assert result.contender("glmm").validation == pytest.approx(pooled.contender("glmm").validation, abs=1e-6)


def test_methods_with_more_rounds_than_the_search_are_left_out(tmp_path: Path) -> None:
    search: dict[str, Any] = {"trials": 1, "rounds": 1, "steps": 1, "models": "mlr"}
    net = make(tmp_path, portfolio="auto", **search)
    result = run(net)
    assert "rounds of its own" in result.left_out["trees"]
    assert not any("trees" in line for line in (Path(net.run_config["out"]) / "rounds.jsonl").read_text().splitlines())


def test_two_numbers_per_try_and_site_leave_and_no_figure_of_a_page(tmp_path: Path) -> None:
    answers: list[tuple[str, Packet]] = []

    def keep(client: str, sent: Sent, answer: Packet) -> Packet:
        answers.append((sent.kind, answer))
        return answer

    net = make(tmp_path, portfolio="ditto", trials=1)
    net.tamper = keep
    result = run(net)
    judged = next(unbundled(answer) for kind, answer in reversed(answers) if kind == "together")
    assert all(not part.groups for part in judged)
    assert {key for part in judged for key in part.header} <= {
        "run", "round", "number", "kind", "name", "lost", "figures"
    }  # fmt: skip
    figures = judged[-1].header["figures"]
    assert {(name, number) for name, number, _, _ in figures} == {
        (name, 0) for name in ("alone", "one_model", "fine_tuned", "ditto")
    }
    weighed = next(answer for kind, answer in answers if kind == "weigh")
    assert {name: tuple(one.shape) for name, one in weighed.group("advantages").items()} == {
        "seen": (3,), "covariance": (3, 3)
    }  # fmt: skip
    settled = next(answer for kind, answer in answers if kind == "settle")
    assert not settled.groups
    assert settled.header.keys() == {
        "run", "round", "number", "kind", "name", "taken", "rows", "gain", "gain_chosen", "test_gain",
        "own_columns",
    }  # fmt: skip
    assert settled.header["own_columns"] == []
    assert all(site.alone.value is None and site.deployed.value is None for site in result.sites)
    page = (Path(net.run_config["out"]) / "fit.html").read_text("utf-8")
    for name in NAMES:
        assert f"<strong>{name}</strong>" in page
        own = site_page(net, name)
        assert f"The model of {name}" in own
        assert not any(other in own for other in NAMES if other != name)


def test_a_search_that_is_stopped_goes_on_to_the_same_result(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    small: dict[str, Any] = {"portfolio": "fedavg", "trials": 1}
    net, other = make(tmp_path, **small), make(tmp_path / "whole", **small)
    count = 0

    def fails(client: str, sent: Sent, answer: Packet) -> Packet | None:
        """The answer of a node to the second round is lost, and then that with its figures."""
        nonlocal count
        count += sent.kind == "together" and client == "north"
        return None if client == "north" and sent.kind == "together" and count in (2, 4) else answer

    net.tamper = fails
    for _ in range(2):
        with pytest.raises(TooFewClients, match="north"):
            run(net)
    again, whole = run(net), run(other)
    assert dataclasses.replace(again, folder=None) == dataclasses.replace(whole, folder=None)
    for name in NAMES:
        assert torch.equal(model_row(kept(net, name)), model_row(kept(other, name)))


def test_methods_that_an_owner_does_not_allow_are_left_out(tmp_path: Path) -> None:
    net = make(tmp_path, rules={"methods": "local,fedavg"}, portfolio="ditto", trials=1)
    result = run(net)
    assert result.left_out.keys() == {"ditto"}
    assert "west takes part in local, fedavg only" in result.left_out["ditto"]
    assert {one.name for one in result.contenders} == {"alone", "one_model", "fine_tuned"}


@pytest.mark.parametrize(("rules", "text"), [({"min_noise": 1.0}, "west"), ({"evaluate": "val"}, "west")])
def test_owners_who_keep_their_figures_stop_a_search(tmp_path: Path, rules: dict[str, Any], text: str) -> None:
    with pytest.raises(TooFewClients, match=text):
        run(make(tmp_path, rules=rules, portfolio="ditto", trials=1))


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"dp-noise": 1.0, "target": "number", "classes": "2"}, "dp_noise"),
        ({"scaling": "none"}, "scaling"),
        ({"options": "lam=1"}, "options"), ({"participation": 0.5}, "participation"),
        ({"method": "ditto"}, "portfolio is of a search"),
    ],
)  # fmt: skip
def test_what_no_search_does_is_refused(tmp_path: Path, settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Deployment.parse({**SETTINGS, "out": str(tmp_path / "run"), **settings})


@pytest.mark.parametrize(("key", "value"), [("try", 5), ("method", "scaffold"), ("part", 7), ("folds", 1)])
def test_a_server_names_runs_and_defines_none(tmp_path: Path, key: str, value: Any) -> None:
    """Orders for runs that the settings do not have, or of other parts, are refused one by one."""
    net = make(tmp_path, portfolio="ditto", trials=1)
    send = net.send

    def forged(messages: Sequence[Sent]) -> list[str]:
        for one in messages:
            for record, _ in one.packet.header.get("parts", []):
                one.packet.header["values"].append(value)
                record[key] = len(one.packet.header["values"]) - 1
        return send(messages)

    net.send = forged  # type: ignore[method-assign]
    with pytest.raises(TooFewClients, match="MessageError"):
        run(net)


@pytest.mark.parametrize(
    ("kind", "change", "text"),
    [
        ("judge", {"figures": [["alone", 0, float("inf"), 3]]}, "finite"), ("judge", {"figures": [[1]]}, "two numbers"),
        ("settle", {"gain": {"value": "x"}}, "gain"), ("settle", {"rows": [1]}, "rows"),
        ("settle", {"test_gain": None}, "test_gain"),
        ("settle", {"own_columns": [["dose", True, "much", 0]]}, "what each buys"),
    ],
)  # fmt: skip
def test_what_a_site_cannot_say_is_refused(tmp_path: Path, kind: str, change: dict[str, Any], text: str) -> None:
    def lie(client: str, sent: Sent, answer: Packet) -> Packet:
        if client != "west":
            return answer
        if sent.kind == kind:
            return Packet(answer.header | change, answer.groups)
        if sent.kind == "together" and kind == "judge" and "figures" in (parts := unbundled(answer))[-1].header:
            return bundled([*parts[:-1], Packet(parts[-1].header | change)])
        return answer

    net = make(tmp_path, portfolio="fedavg", trials=1, rounds=1)
    net.tamper = lie
    with pytest.raises(TooFewClients, match=rf"west.*{text}"):
        run(net)


@pytest.mark.parametrize(
    "rules", [{"min_noise": "5", "sums": "yes"}, {"require_secure_aggregation": "yes"}, {"user_epsilon": "2"}], ids=str
)
def test_an_owner_who_protects_anything_answers_no_request_of_a_search(tmp_path: Path, rules: dict[str, str]) -> None:
    """Statistics of all rows but one fold are rows, given folds enough; figures of training rows under a model of the
    server's are too, in a part that learns alone and so sends nothing."""
    net = make(tmp_path, rules={**rules, "peers": str(tmp_path)}, portfolio="ditto", trials=1)
    config = next(config for config in net.nodes_.values() if config["client"] == "west")
    header = {
        "run": "r1", "round": 1, "number": 2, "name": "west", "accepted": 0, "num_clients": 3, "longest": [50, 50, 50],
        "group": -1, "frozen": "", "noise": 0.0, "try": 0, "method": "local", "folds": 30, "problem": None,
        "preprocessing": None, "split": "test",
    }  # fmt: skip
    model = {"down": {}, "inputs": {}, "server_model": {"model": torch.ones(1, 6)}}
    parts = [Packet({**header, "kind": "evaluate", "part": part}, model) for part in range(30)]
    parts.append(Packet({**header, "kind": "judge", "part": 30}))
    answers = unbundled(Node.of(config, net.run_config).answer("together", bundled(parts, name="west")))
    assert {one.header.get("error", "")[:7] for one in answers} == {"Refused"}
    with pytest.raises(Refused, match="no exact figures of its rows"):
        Node.of(config, net.run_config).answer("sums", Packet({"kind": "sums", "name": "west", "folds": 30}))


# ---- columns that not every site has ----


def own_table(number: bool) -> pa.Table:
    """Rows of which `dose` is of east alone, with gaps, and has an effect there."""
    draw = np.random.default_rng(6)
    site = np.repeat(NAMES, (84, 75, 91))
    age, dose = draw.normal(50, 12, len(site)), draw.normal(size=len(site))
    risk = 0.05 * (age - 50) + 2 * dose * (site == "east") + draw.normal(size=len(site))
    cells = pa.array([float(one) if site[k] == "east" and k % 9 else None for k, one in enumerate(dose)])
    label = pa.array(risk + 40) if number else pa.array(np.where(risk > 0, "yes", "no").tolist())
    return pa.table({"site": site.tolist(), "age": age, "dose": cells, "sick": label})


@pytest.mark.parametrize("number", [False, True])
def test_a_site_learns_what_its_own_columns_add_at_home(tmp_path: Path, number: bool) -> None:
    rows = own_table(number)
    net = make(tmp_path, number, portfolio="ditto", trials=1)
    for name in NAMES:
        own = rows.filter(pa.array([one == name for one in rows["site"].to_pylist()])).drop_columns(["site"])
        pa_csv.write_csv(own if name == "east" else own.drop_columns(["dose"]), tmp_path / f"{name}.csv")
    result = run(net)
    search = {**SEARCH, "trials": 1, "algorithms": "ditto", "models": "mlr"}
    pooled = kinfed.fit(
        rows, client_column="site", label_column="sick", deploy="chosen", references=False, accept="all", **search
    )
    for site in NAMES:
        ours, theirs = kept(net, site), pooled.model(site)
        torch.testing.assert_close(model_row(ours), model_row(theirs), rtol=1e-5, atol=1e-5)
        own = rows.slice(NAMES.index(site) * 80, 40).drop_columns(["site", "sick"])
        assert ours.inputs.preprocessing is not None
        assert [one.here is None for one in ours.inputs.preprocessing.own] == [site != "east"]
        np.testing.assert_allclose(ours.predictions(own).outputs, theirs.predictions(own).outputs, atol=1e-5)
    worth = {one.site: one for one in result.own_columns}
    assert [(one.column, one.site) for one in result.own_columns] == [("dose", name) for name in NAMES]
    assert worth["east"].gain == pytest.approx(pooled.own_columns[0].gain, abs=1e-9)
    assert worth["north"].gain is None
    page = (tmp_path / "run" / "fit.html").read_text()
    assert "Columns that not every site has" in page
    assert "north, west lack it" in page
    own_page = Vault(str(tmp_path / "vault-north")).model_path().parent / "fit.html"
    assert "The site lacks it" in own_page.read_text()


def test_sites_choose_for_survival_what_a_fit_of_all_rows_chooses(tmp_path: Path) -> None:
    """Periods and hazards are known to everybody: those that the fit has learnt."""
    rows = table()
    draw = np.random.default_rng(9)
    age = rows["age"].to_numpy()
    time = draw.exponential(np.exp(-0.05 * (age - 50)))
    rows = rows.drop_columns(["sick", "dose"]).append_column("time", pa.array(np.minimum(time, 1.5)))
    rows = rows.append_column("event", pa.array((time < 1.5).astype(int)))
    columns = {"time_column": "time", "event_column": "event"}
    search = {**SEARCH, "trials": 1}
    pooled = kinfed.fit(
        rows,
        client_column="site",
        models="mlr",
        deploy="chosen",
        algorithms="cox",
        references=False,
        **columns,
        **search,
    )
    record = {"target": json.dumps(pooled.problem.to_json()), "classes": "2", "label-column": "label"}
    net = make(
        tmp_path, portfolio="cox", trials=1, **record, **{name.replace("_", "-"): columns[name] for name in columns}
    )
    for name in NAMES:
        own = rows.filter(pa.array([one == name for one in rows["site"].to_pylist()])).drop_columns(["site"])
        pa_csv.write_csv(own, tmp_path / f"{name}.csv")
    apart = run(net)
    assert [site.chosen for site in apart.sites] == [site.chosen for site in pooled.sites]
    assert [site.test_rows for site in apart.sites] == [site.test_rows for site in pooled.sites]
    for one, wanted in zip(apart.contenders, pooled.contenders, strict=True):
        assert (one.validation, one.mean) == pytest.approx((wanted.validation, wanted.mean), abs=1e-6)
    for site in pooled.sites:
        torch.testing.assert_close(
            model_row(kept(net, site.site)), model_row(pooled.model(site.site)), rtol=0, atol=1e-5
        )
