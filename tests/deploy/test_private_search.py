"""A search under differential privacy: its price beforehand, every answer in the ledger, and nothing exact outside."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pytest
import torch
from loopback import Loopback

from kinfed.deploy.node.private_figures import ALONE, PrivateFigures
from kinfed.deploy.node.vault import Vault
from kinfed.deploy.server.deployment_server import serve
from kinfed.deploy.server.enrol import TooFewClients
from kinfed.deploy.settings import Deployment
from kinfed.deploy.transport.exchange import Sent
from kinfed.deploy.transport.wire import Packet, unbundled
from kinfed.errors import ConfigError
from kinfed.privacy import epsilon_over_noises
from kinfed.serving import ModelPipeline
from kinfed.tabular import FitResult

NAMES = ["east", "north", "west"]
SETTINGS: dict[str, Any] = {
    "method": "fit", "clients": ",".join(NAMES), "classes": "no,yes", "label-column": "sick", "portfolio": "fedavg",
    "models": "mlr", "deadline": 60.0, "wait": 60.0, "trials": 1, "search-folds": 2, "rounds": 1, "steps": 3,
    "batch": 8, "dp-noise": 4.0, "class-weights": "none",
}  # fmt: skip
RULES = {"epsilon": "50", "sums": "yes"}  # of the north; the others ask for noise
RUNS = 2 * 3  # local and fedavg, in two folds and on all rows


def make(folder: Path, rules: dict[str, str] = RULES, **settings: Any) -> Loopback:
    draw, nodes = np.random.default_rng(5), {}
    for place, (name, rows) in enumerate(zip(NAMES, (120, 90, 150), strict=True)):
        x = draw.normal(size=(rows, 2))
        sick = np.where(x @ np.array([1.5, -1.0]) + draw.normal(size=rows) > 0, "yes", "no")
        pa_csv.write_csv(pa.table({"a": x[:, 0], "b": x[:, 1], "sick": sick.tolist()}), folder / f"{name}.csv")
        nodes[100 + place] = {
            "client": name, "data": str(folder / f"{name}.csv"), "vault": str(folder / f"vault-{name}"),
            **(rules if name == "north" else {"min_noise": "1", "sums": "yes"}),
        }  # fmt: skip
    run_config = SETTINGS | {"out": str(folder / "run")} | {k.replace("_", "-"): v for k, v in settings.items()}
    return Loopback(run_config, nodes)


def run(net: Loopback) -> FitResult:
    return FitResult.read(serve(Deployment.parse(net.run_config), net, net.log.append, **net.time))


def ledger(net: Loopback, place: int = 1) -> Any:
    config = net.nodes_[100 + place]
    return Vault(config["vault"]).privacy_log(config["client"]).read()


def price(net: Loopback) -> str:
    (sentence,) = [line for line in net.log if line.startswith("price of this search")]
    return sentence


def test_the_price_is_said_before_the_first_round_and_is_what_ledgers_hold_at_the_end(tmp_path: Path) -> None:
    net = make(tmp_path)
    answers: list[tuple[str, Packet]] = []

    def keep(client: str, sent: Sent, answer: Packet) -> Packet:
        answers.append((sent.kind, answer))
        return answer

    net.tamper = keep
    result = run(net)
    places = [next(k for k, line in enumerate(net.log) if text in line) for text in ("price of", "round 1 of")]
    assert places[0] < places[1]
    assert f"{RUNS} runs of 1 try with noise 4" in price(net)
    spent = [epsilon_over_noises(ledger(net, place).spent(), 1e-5) for place in range(3)]
    assert f"{max(spent):.3g} with figures" in price(net)
    kinds = [one.kind for one in ledger(net).answers]
    assert (kinds.count("train"), kinds.count("counts")) == (RUNS, 2)
    # Nothing exact of rows: what leaves beside updates are sums with noise, and no figure of test rows.
    judged = next(unbundled(answer)[-1] for kind, answer in reversed(answers) if kind == "together")
    assert len(judged.header["figures"]) == 3
    settled = next(answer for kind, answer in answers if kind == "settle")
    assert settled.header["test_gain"] == [None, None]
    assert set(settled.header["gain"].values()) == {None}
    assert [site.gain.value for site in result.sites] == [None] * 3
    assert {one.name for one in result.contenders} == {"alone", "one_model", "fine_tuned"}
    pages = [tmp_path / "run" / "fit.html", *tmp_path.rglob("vault-*/**/fit.html")]
    assert len(pages) == 4
    for node in net.nodes_.values():
        model = ModelPipeline.read(Vault(node["vault"]).model_path())
        assert len(model.predict({"a": [0.1], "b": [0.2]})) == 1
    assert all("Searched under differential privacy" in page.read_text("utf-8") for page in pages)


def test_statistics_are_of_all_training_rows_whatever_the_fold(tmp_path: Path) -> None:
    net, sums = make(tmp_path), list[Packet]()

    def keep(client: str, sent: Sent, answer: Packet) -> Packet:
        sums.extend([answer] if sent.kind == "sums" else [])
        return answer

    net.tamper = keep
    run(net)
    for answer in sums:
        first, *others = [part["statistics"] for part in answer.header["parts"]]
        assert all(one == first for one in others)


def test_fewer_tries_fit_a_smaller_budget(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    whole = make(tmp_path / "whole", trials=3)
    run(whole)
    epsilon = float(price(whole).partition("epsilon ")[2].split()[0])
    assert "18 runs of 3 tries with" in price(whole)
    # The same vaults, whose secrets draw the rows that train: their numbers decide the price.
    less = make(tmp_path / "whole", trials=3, dp_budget=0.9 * epsilon, out=str(tmp_path / "less"))
    result = run(less)
    assert "12 runs of 2 tries (3 tries would cost more than dp_budget)" in price(less)
    assert result.trials == 2
    (tmp_path / "none").mkdir()
    with pytest.raises(ConfigError, match="one try of every method costs epsilon"):
        run(make(tmp_path / "none", dp_budget=0.01))


def test_noise_is_found_for_an_epsilon_of_the_whole_search(tmp_path: Path) -> None:
    net = make(tmp_path, dp_noise="", dp_epsilon=6.0)
    run(net)
    assert float(price(net).partition("epsilon ")[2].split()[0]) == pytest.approx(6.0, abs=0.1)
    trained = ({one.noise: one.events for one in ledger(net, k).answers if one.kind == "train"} for k in range(3))
    assert all(len(one) == 1 for one in trained)


def test_an_owner_whose_epsilon_the_search_would_exceed_spends_nothing(tmp_path: Path) -> None:
    net = make(tmp_path, rules={"epsilon": "1", "sums": "yes"})
    with pytest.raises(TooFewClients, match=r"allows no more than epsilon 1 .* this search would take it to"):
        run(net)
    assert not ledger(net).answers


def test_a_server_that_leaves_the_first_round_out_spends_nothing_either(tmp_path: Path) -> None:
    """Plans were held in messages of round 1 alone; from round 2 on, updates left until epsilon was used up."""
    net = make(tmp_path, rules={"epsilon": "1", "sums": "yes"}, rounds=2)
    send = net.send

    def later(messages: Sequence[Sent]) -> list[str]:
        for one in messages:
            for record, _ in one.packet.header.get("parts", []) if one.packet.header.get("name") == "north" else []:
                one.packet.header["values"].append(2)
                record["round"] = len(one.packet.header["values"]) - 1
        return send(messages)

    net.send = later  # type: ignore[method-assign]
    with pytest.raises(TooFewClients, match=r"allows no more than epsilon 1 .* this search would take it to"):
        run(net)
    assert not ledger(net).answers


@pytest.mark.parametrize(("rules", "text"), [
    ({"epsilon": "50"}, "exact sums"), ({**RULES, "evaluation_noise": "0"}, "evaluation_noise = 0"),
    ({**RULES, "min_noise": "9"}, "noise of at least 9"),
])  # fmt: skip
def test_what_an_owner_does_not_give_is_said(tmp_path: Path, rules: dict[str, str], text: str) -> None:
    with pytest.raises(TooFewClients, match=text):
        run(make(tmp_path, rules=rules))


def test_a_private_search_that_was_stopped_pays_for_no_round_twice(tmp_path: Path) -> None:
    net, lost = make(tmp_path, rounds=2), False

    def fails(client: str, sent: Sent, answer: Packet) -> Packet | None:
        nonlocal lost
        if client == "north" and sent.kind == "together" and not lost:
            lost = True
            return None
        return answer

    net.tamper = fails
    with pytest.raises(TooFewClients, match="north"):
        run(net)
    run(net)
    for place in range(3):
        assert [one.kind for one in ledger(net, place).answers].count("train") == 2 * RUNS


def test_methods_that_cannot_be_private_are_left_out_with_the_reason(tmp_path: Path) -> None:
    result = run(make(tmp_path, portfolio="kin,fedfomo"))
    assert set(result.left_out) == {"kin", "fedfomo"}
    assert any("validation rows" in reason for reason in result.left_out.values())


@pytest.mark.parametrize(("settings", "text"), [
    ({"classes": "2", "target": "number"}, "errors of numbers"), ({"deploy": "certified"}, "test rows may not decide"),
    ({"user-noise": 1.0, "dp-noise": ""}, "user_noise"), ({"class-weights": "yes=3,no=1"}, "classes without weights"),
])  # fmt: skip
def test_searches_that_no_noise_protects_are_refused(tmp_path: Path, settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Deployment.parse({**SETTINGS, "out": str(tmp_path / "run"), **settings})


def test_a_row_adds_to_sums_no_more_than_their_noise_is_for() -> None:
    """A row with the largest losses and leads, there and not there."""
    draw = torch.Generator().manual_seed(1)
    losses = {name: torch.rand(20, generator=draw).double() for name in (ALONE, "a", "b")}
    for k, one in enumerate(losses.values()):
        one[7] = k % 2
    seen: list[torch.Tensor] = []

    def none(sums: torch.Tensor) -> torch.Tensor:
        seen.append(sums.clone())
        return torch.zeros_like(sums)

    plain, moved = (
        PrivateFigures({(name, 0): row for name, row in losses.items()}).figures(lambda sums, by=by: by + 0 * sums)
        for by in (0.0, 2.0)
    )
    assert [one[2] - other[2] for one, other in zip(moved, plain, strict=True)] == pytest.approx([10.0] * 3)
    others = torch.arange(20) != 7
    for some in (losses, {name: one[others] for name, one in losses.items()}):
        figures = PrivateFigures({(name, 0): row for name, row in some.items()}).figures(none)
        said = PrivateFigures(some).advantages(none, 5.0)
        assert len(figures) == 3
        assert bool((said["covariance"].diagonal() > (5.0 / len(some[ALONE])) ** 2 * 4).all())
    before, of_leads, after, of_others = seen
    assert float((after - before).abs().max()) <= 1
    assert float((of_others - of_leads).abs().max()) <= 1
