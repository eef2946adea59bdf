"""Searches over sites under secure sums: single methods are left out, and no update of a site is seen."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import test_fit_deployment as searches
import torch
from loopback import Loopback
from test_fit_deployment import NAMES, kept, model_row, run

from kinfed.deploy.node.fit_client import FitClient
from kinfed.deploy.node.node import Node
from kinfed.deploy.node.node_settings import NodeSettings
from kinfed.deploy.server.enrol import TooFewClients
from kinfed.deploy.settings import Deployment
from kinfed.deploy.transport.exchange import Sent
from kinfed.deploy.transport.wire import MASK, TOGETHER, Packet, unbundled
from kinfed.errors import ConfigError

# Steps see all rows of a site, so that batches, which nodes draw from secrets, are the same in every search.
SMALL: dict[str, Any] = {"portfolio": "ditto,kin", "trials": 1, "rounds": 1, "batch": 1000}


def summed(folder: Path, **settings: Any) -> Loopback:
    folder.mkdir(exist_ok=True)
    return searches.make(folder, **{**SMALL, "secure-sum": True, **settings})


def parts_of(sent: Sent, packet: Packet) -> list[Packet]:
    return unbundled(packet) if sent.kind == TOGETHER else [packet]


def test_methods_that_need_single_updates_are_left_out_and_the_others_find_what_they_find_without_sums(
    tmp_path: Path,
) -> None:
    answers: list[Packet] = []

    def keep(client: str, sent: Sent, answer: Packet) -> Packet:
        answers.extend(parts_of(sent, answer))
        return answer

    net, plain = summed(tmp_path / "summed"), summed(tmp_path / "plain", **{"secure-sum": False, "portfolio": "ditto"})
    net.tamper = keep
    result, other = run(net), run(plain)
    assert result.left_out.keys() == {"kin"}
    assert "needs single updates, which secure_sum hides" in result.left_out["kin"]
    first = next(place for place, line in enumerate(net.log) if line.startswith("round 1"))
    assert any(line.startswith("kin, try 1, is left out") for line in net.log[:first])
    assert any("secure sums of all of them" in line for line in net.log[:first])
    page = (Path(net.run_config["out"]) / "fit.html").read_text("utf-8")
    assert "needs single updates" in page
    assert "secure sums of all of them" in page
    sums = [answer for answer in answers if "sum" in answer.groups]
    assert len(sums) == 2 * 3 * len(NAMES)  # fedavg and ditto, in two folds and on all rows
    assert not any(answer.group("up") for answer in answers)
    assert [site.chosen for site in result.sites] == [site.chosen for site in other.sites]
    for one, wanted in zip(result.contenders, other.contenders, strict=True):
        assert (one.name, one.options) == (wanted.name, wanted.options)
        assert one.validation == pytest.approx(wanted.validation, abs=1e-6)
    for name in NAMES:
        torch.testing.assert_close(model_row(kept(net, name)), model_row(kept(plain, name)), rtol=0, atol=1e-5)


def test_a_mixed_model_learns_from_totals(tmp_path: Path) -> None:
    net = summed(tmp_path, number=True, portfolio="lmm")
    deployment = Deployment.parse(net.run_config)
    chosen = deployment.make_try(0, "lmm", 3)
    assert chosen.options == {"totals": True}
    assert not deployment.of_try(chosen, None).algorithm.single_updates
    assert deployment.make_try(0, "fedavg", 3).options == {}


def test_a_search_that_is_stopped_within_a_sum_goes_on_to_the_same_result(tmp_path: Path) -> None:
    """Sites answer as before to the server that begins the round again: nobody masks one round's update twice."""
    net, whole = summed(tmp_path / "stopped", portfolio="fedavg"), summed(tmp_path / "whole", portfolio="fedavg")
    count = 0

    def fails(client: str, sent: Sent, answer: Packet) -> Packet | None:
        nonlocal count
        groups = {name for part in parts_of(sent, answer) for name in part.groups}
        counts = client == "north" and bool(groups & {"shares", "sum"})
        count += counts
        return None if counts and count in (1, 3) else answer  # shares, then masked updates

    net.tamper = fails
    for _ in range(2):
        with pytest.raises(TooFewClients, match="north"):
            run(net)
    again, wanted = run(net), run(whole)
    assert not again.left_out
    for one, other in zip(again.contenders, wanted.contenders, strict=True):
        assert one.validation == pytest.approx(other.validation, abs=1e-6)
    for name in NAMES:
        torch.testing.assert_close(model_row(kept(net, name)), model_row(kept(whole, name)), rtol=0, atol=1e-5)


def test_a_model_that_another_search_has_summed_stays_refused(tmp_path: Path) -> None:
    """Also when the order comes again: the state that it led to was kept before it was refused."""
    net = summed(tmp_path, portfolio="fedavg")
    run(net)
    net.run_config["out"] = str(tmp_path / "another")
    for _ in range(3):
        with pytest.raises(TooFewClients, match="for a secure sum of run"):
            run(net)


def test_all_sites_are_in_every_sum(tmp_path: Path) -> None:
    net = summed(tmp_path, clients=",".join((*NAMES, "south")))
    client = FitClient(NodeSettings.parse(net.nodes_[100]), Deployment.parse(net.run_config))
    order = Packet({"kind": MASK, "try": 0, "method": "fedavg", "part": 0, "num_clients": 4, "run": "r"})
    assert client.run_of(order)._least_in_sum() == 4


def test_an_order_that_comes_alone_is_answered_as_among_others(tmp_path: Path) -> None:
    """Once all runs but one have all they need, its requests travel by themselves."""
    net = searches.make(tmp_path, portfolio="ditto", trials=1, rounds=1)
    other = copy.deepcopy(net.nodes_[100]) | {"vault": str(tmp_path / "another")}
    answers: list[tuple[Sent, Packet]] = []

    def keep(client: str, sent: Sent, answer: Packet) -> Packet:
        answers.append((sent, answer))
        return answer

    net.tamper = keep
    run(net)
    sent, answer = next((sent, answer) for sent, answer in answers if sent.kind == TOGETHER and sent.node == 100)
    parts = zip(unbundled(sent.packet), unbundled(answer), strict=True)
    order, wanted = next((one, two) for one, two in parts if one.header["method"] == "ditto")
    alone = Node.of(other, net.run_config, 100).answer("train", order)
    torch.testing.assert_close(alone.group("up"), wanted.group("up"), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"clients": "a,b"}, "3 updates at least"), ({"dp-noise": 1.0}, "new in each"),
        ({"user-noise": 1.0}, "user_noise"), ({"robust": "median"}, "secure_sum"),
    ],
)  # fmt: skip
def test_what_sums_in_a_search_cannot_hide_is_refused(tmp_path: Path, settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Deployment.parse({**searches.SETTINGS, "out": str(tmp_path / "run"), "secure-sum": True, **settings})
