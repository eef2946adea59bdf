"""A server that asks cleverly: what a node answers under privacy is never worth more than its books say.

The questions here were once answered with noise that cancelled, or without end."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from kinfed.cli.app import app
from kinfed.data.examples.batches import Batch
from kinfed.deploy.node.node import Node, Withheld
from kinfed.deploy.node.node_data import Enrolment, load_client_data
from kinfed.deploy.node.node_settings import NodeRules, NodeSettings, Refused
from kinfed.deploy.node.privacy_log import PrivacyLog
from kinfed.deploy.node.vault import Vault
from kinfed.deploy.settings import Deployment
from kinfed.deploy.transport.wire import MessageError, Packet
from kinfed.errors import ConfigError, StorageError
from kinfed.privacy.dpsgd import PrivateTask
from kinfed.privacy.ledger import Event

FEATURES, ROWS, BATCH, LR = 200, 40, 5, 0.5
PARAMETERS = 3 * (FEATURES + 1)
RUN: dict[str, Any] = {
    "method": "fedavg", "options": "weights=equal", "model": "mlr", "clients": 1, "classes": "3", "scaling": "none",
    "steps": 1, "batch": BATCH, "lr": LR, "dp-noise": 5.0, "test-fraction": 0.25,
}  # fmt: skip
TRAINED = 30  # three quarters of the rows


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    numbers = np.random.default_rng(0)
    x = numbers.normal(size=(ROWS, FEATURES)).astype(np.float32)
    np.savez(tmp_path / "a.npz", x=x, y=np.arange(ROWS) % 3)
    return {"client": "a", "data": str(tmp_path / "a.npz"), "vault": str(tmp_path / "vault")}


def ask(
    config: dict[str, Any],
    kind: str = "train",
    settings: dict[str, Any] | None = None,
    inputs: dict[str, Tensor] | None = None,
    model: float = 0.0,
    **header: Any,
) -> Packet:
    """What a server may send, with anything in it changed, to a node that is started for it."""
    return question(Node.of(config, RUN | (settings or {})), kind, inputs, model, **header)


def question(
    node: Node, kind: str = "train", inputs: dict[str, Tensor] | None = None, model: float = 0.0, **header: Any
) -> Packet:
    order = {
        "kind": kind, "run": "r1", "round": 1, "number": 0, "name": "a", "accepted": 0, "num_clients": 1,
        "longest": [TRAINED, 0, 10], "group": -1, "noise": 5.0, "effort": 1.0, "frozen": "",
    }  # fmt: skip
    if kind == "evaluate":
        del order["effort"]
        order["split"] = "test"
    groups = {"down": {"w": torch.full((1, PARAMETERS), model)}, "inputs": inputs or {}}
    return node.answer(kind, Packet(order | header, groups))


def name_rows(config: dict[str, Any]) -> None:
    """The owner says which rows are for the test: those that the run's seed would have left out come last."""
    data = dict(np.load(config["data"]))
    np.savez(config["data"], **data, test=np.arange(ROWS) >= TRAINED)


def delta(answer: Packet, batch: int = BATCH) -> Tensor:
    """The update in units of what noise 1 does to it."""
    return answer.group("up")["delta"][0] * batch / LR


def deviation(difference: Tensor) -> float:
    return float(difference.double().square().mean().sqrt())


# ---- noise does not cancel ----


def test_twice_the_noise_does_not_cancel(config: dict[str, Any]) -> None:
    """With one noise for both, 2A - B were the clipped gradient."""
    a = delta(ask(config))
    b = delta(ask(config, settings={"dp-noise": 10.0}, noise=10.0))
    assert deviation(2 * a - b) == pytest.approx(math.sqrt(200), rel=0.15)
    assert deviation(a) == pytest.approx(5, rel=0.15)


CHANGES: dict[str, dict[str, Any]] = {
    "batch": {"settings": {"batch": BATCH + 1}},
    "clip": {"settings": {"dp-clip": 1.01}},
    "learning rate": {"settings": {"lr": LR * 1.001}},
    "weight decay": {"settings": {"weight-decay": 1e-9}},
    "std": {"inputs": {"std": torch.full((FEATURES,), 1.01)}},
    "mean": {"inputs": {"mean": torch.full((FEATURES,), 0.01)}},
    "model": {"model": 1e-7},
    "round": {"round": 2},
    "run": {"run": "r2"},
    "longest": {"longest": [TRAINED, 0, 11]},
}


@pytest.mark.parametrize("change", CHANGES)
def test_two_questions_never_share_noise(config: dict[str, Any], change: str) -> None:
    """A server forces one local step by `effort`, and changes one thing. The difference has the noise of both."""
    steps = {"steps": 4}
    one = delta(ask(config, settings=steps, effort=0.25))
    changes = dict(CHANGES[change])
    settings = steps | changes.pop("settings", {})
    two = delta(ask(config, settings=settings, effort=0.25, **changes), settings.get("batch", BATCH))
    assert deviation(one - two) == pytest.approx(math.sqrt(50), rel=0.15)  # five standard errors


def test_changed_data_have_other_noise(config: dict[str, Any]) -> None:
    """One row is replaced between two equal questions: their difference does not show it."""
    one = delta(ask(config))
    data = dict(np.load(config["data"]))
    data["x"][0] += 1
    np.savez(config["data"], **data)
    assert deviation(one - delta(ask(config))) == pytest.approx(math.sqrt(50), rel=0.15)


def test_every_answer_has_samples_of_its_own(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Epsilon counts on nobody knowing which examples were drawn; the run's seed, which all know, must not tell."""
    samples: list[tuple[Any, ...]] = []
    clipped = PrivateTask._clipped

    def spy(task: PrivateTask, theta: Tensor, batch: Batch, *others: Any) -> Tensor:
        samples.append(tuple(batch.x[0, batch.weight[0] > 0, 0].tolist()))
        return clipped(task, theta, batch, *others)

    monkeypatch.setattr(PrivateTask, "_clipped", spy)
    ask(config, settings={"steps": 4})
    ask(config, settings={"steps": 4}, run="r2")
    deployment = Deployment.parse(RUN)
    own = load_client_data(NodeSettings.parse(config), deployment).federation
    known = (
        Enrolment(0, 1, (TRAINED, 0, 10)).cohort(own, 0, 1).train.batches(deployment.algorithm.training.with_steps(4))
    )
    public = [tuple(batch.x[0, batch.weight[0] > 0, 0].tolist()) for _, batch in known]
    assert samples[:4] != samples[4:]
    assert public not in (samples[:4], samples[4:])


def test_the_same_question_gets_the_same_answer_and_costs_nothing(config: dict[str, Any]) -> None:
    first, again = ask(config), ask(config)
    assert again.header == first.header
    assert torch.equal(delta(first), delta(again))
    assert len(books(config).read().answers) == 1
    ask(config, model=0.1)
    with pytest.raises(Refused, match="has answered this question before and no longer has the answer"):
        ask(config)
    assert len(books(config).read().answers) == 2


def test_another_state_makes_another_question(config: dict[str, Any]) -> None:
    """A client that has lost its personal model answers the same order anew, with other noise, and is charged."""
    ditto = {"method": "ditto"}
    ask(config, settings=ditto)
    one = ask(config, settings=ditto, round=2, accepted=1)
    Vault(config["vault"]).clear("r1")
    two = ask(config, settings=ditto, round=2, accepted=1)
    assert (one.header["lost"], two.header["lost"]) == (False, True)
    assert deviation(delta(one) - delta(two)) == pytest.approx(math.sqrt(50), rel=0.15)
    assert len(books(config).read().answers) == 3


# ---- errors ----


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("hello", {"label-column": "name", "classes": "x,y"}),
        ("train", {"label-column": "name", "classes": "x,y"}),
        ("evaluate", {"label-column": "name", "target": "0,1"}),
        ("train", {"label-column": "ill", "classes": "2", "features": "name"}),
    ],
)
def test_errors_quote_no_examples(
    tmp_path: Path, kind: str, settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """A server that names a column as the label was told the first value that is none of its classes: by and by all."""
    rows = "".join(f"Patient-{number},{20 + number},{number % 2}\n" for number in range(ROWS))
    (tmp_path / "a.csv").write_text("name,age,ill\n" + rows)
    config = {"client": "a", "data": str(tmp_path / "a.csv"), "vault": str(tmp_path / "vault")}
    with pytest.raises(Withheld, match="DataError at a; its text may quote examples") as error:
        ask(config, kind, settings=settings, nonce="00")
    assert "Patient-" not in str(error.value)
    assert "Patient-" in caplog.text  # the node's own log has all of it


def test_a_programs_error_stays_at_the_node(config: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "load.py").write_text("def load(config):\n    raise KeyError('Patient-7')\n")
    with pytest.raises(Withheld, match=r"^KeyError at a; its text may quote examples and is in the node's own log$"):
        ask(config | {"data": f"{tmp_path / 'load.py'}:load"})


# ---- books ----


def books(config: dict[str, Any]) -> PrivacyLog:
    return Vault(config["vault"]).privacy_log("a")


def test_a_hundred_questions_stop_at_the_budget(config: dict[str, Any]) -> None:
    """All for one round, with models 1e-7 apart, of two runs and under two noises."""
    accounting = pytest.importorskip("kinfed.privacy.accountant", reason="the extra dp is not installed")
    name_rows(config)
    config["epsilon"], config["delta"] = "0.5", "1e-6"
    nodes = {noise: Node.of(config, RUN | {"dp-noise": noise}) for noise in (4.0, 5.0)}
    answered, refusals = 0, set()
    for number in range(100):
        noise = 5.0 if number % 2 else 4.0
        try:
            question(nodes[noise], noise=noise, model=number * 1e-7, run=f"r{number % 3}")
            answered += 1
        except Refused as error:
            refusals.add(str(error))
    page = books(config).read()
    assert len(page.answers) == answered
    assert 2 <= answered < 50
    assert len(refusals) <= 2
    assert all("the owner of a allows no more than epsilon 0.5 (delta 1e-06)" in text for text in refusals)
    event = Event(BATCH / TRAINED, 1, 1)
    assert page.spent() == tuple(
        (noise, (Event(event.q, 1, sum(a.noise == noise for a in page.answers)),)) for noise in (4.0, 5.0)
    )
    spent = accounting.epsilon_over_noises(page.spent(), 1e-6)
    assert spent <= 0.5 < accounting.epsilon_over_noises(((4.0, (Event(event.q, 1, answered + 1),)),), 1e-6)


def test_what_a_run_promises_is_held_without_any_word_of_the_owner(config: dict[str, Any]) -> None:
    pytest.importorskip("dp_accounting", reason="the extra dp is not installed")
    node, answered = Node.of(config, RUN | {"dp-budget": 0.4}), 0
    with pytest.raises(Refused, match=r"the run promises a no more than epsilon 0\.4"):  # noqa: PT012
        for answered in range(400):
            question(node, model=answered * 1e-7)
    assert 1 <= len(books(config).read().answers) == answered < 50


def test_the_promise_reserves_the_personal_model(config: dict[str, Any]) -> None:
    """Fine-tuning takes gradients once more at the end; fewer rounds fit."""
    pytest.importorskip("dp_accounting", reason="the extra dp is not installed")

    def rounds(options: str) -> int:
        node, number = Node.of(config, RUN | {"dp-budget": 0.5, "options": options}), 0
        with pytest.raises(Refused):  # noqa: PT012
            for number in range(400):
                question(node, round=number + 1, run=options)
        return number

    assert rounds("weights=equal finetune=3") == rounds("weights=equal") - 3


def test_evaluations_that_take_gradients_are_counted(config: dict[str, Any]) -> None:
    tuned = {"options": "weights=equal finetune=2"}
    first = ask(config, "evaluate", settings=tuned)
    assert torch.equal(
        first.group("personal")["loss"], ask(config, "evaluate", settings=tuned).group("personal")["loss"]
    )
    (entry,) = books(config).read().answers
    assert (entry.kind, entry.events) == ("evaluate", (Event(BATCH / TRAINED, 1, 2),))
    ask(config, "evaluate")  # takes none
    assert len(books(config).read().answers) == 1


_KILLED = """
import os, sys
from kinfed.deploy.node.vault_entry import VaultEntry
VaultEntry.keep = lambda *_: os._exit(9)  # the machine fails before the new state is kept
sys.path.insert(0, sys.argv[1])
import json, test_attacks
test_attacks.ask(json.loads(sys.argv[2]))
"""


def test_the_books_are_written_before_anything_else(config: dict[str, Any]) -> None:
    done = subprocess.run([sys.executable, "-c", _KILLED, str(Path(__file__).parent), json.dumps(config)], check=False)
    assert done.returncode == 9
    assert len(books(config).read().answers) == 1
    with pytest.raises(Refused, match="answered this question before"):
        ask(config)


def test_lost_or_altered_books_stop_all_answers(config: dict[str, Any]) -> None:
    ask(config)
    path = books(config).path
    text = path.read_text()
    for damaged in (text.replace('"r1"', '"r2"'), text[:-20]):
        path.write_text(damaged)
        with pytest.raises(StorageError, match="damaged"):
            ask(config, round=2)
    path.unlink()
    with pytest.raises(StorageError, match="is gone"):
        ask(config, round=2)
    path.write_text(text)
    ask(config, round=2)


# ---- what is not answered at all ----


def test_no_evaluation_on_rows_that_training_uses(config: dict[str, Any]) -> None:
    config["evaluate"] = "test,val,train"
    with pytest.raises(Refused, match="evaluates no model on examples that training uses"):
        ask(config, "evaluate", split="train")
    fedfomo = {"method": "fedfomo", "options": "models=1", "validation": 0.2}
    with pytest.raises(Refused, match="evaluates no model on examples that training uses"):
        ask(config, "evaluate", settings=fedfomo, split="val")
    ask(config, "evaluate", settings={"dp-noise": ""}, split="train")  # nothing is private, and the owner allows it
    del config["evaluate"]
    with pytest.raises(Refused, match="on test examples only, not on train"):
        ask(config, "evaluate", settings={"dp-noise": ""}, split="train")
    with pytest.raises(Refused, match="a split is one of"):
        ask(config, "evaluate", split="everything")


def test_another_seed_does_not_turn_training_rows_into_test_rows(config: dict[str, Any]) -> None:
    ask(config)
    for change in ({"seed": 1}, {"test-fraction": 0.5}, {"validation": 0.2}):
        with pytest.raises(Refused, match="another division of its rows"):
            ask(config, "evaluate", settings=change)
    name_rows(config)
    ask(config, "evaluate", settings={"seed": 1})  # the node names the rows itself


def test_no_sums_under_privacy_unless_the_owner_allows_it(config: dict[str, Any]) -> None:
    standard = {"scaling": "standard"}
    with pytest.raises(Refused, match="no exact sums of its features"):
        ask(config, "sums", settings=standard)
    with pytest.raises(Refused, match="does not declare a common scaling"):
        ask(config, "sums", settings={"dp-noise": ""})
    ask(config, "sums", settings=standard | {"dp-noise": ""})
    config["epsilon"] = "8"
    with pytest.raises(Refused, match="no exact sums of its features"):
        ask(config, "sums", settings=standard | {"dp-noise": ""})
    config["sums"] = "yes"
    ask(config, "sums", settings=standard)


@pytest.mark.parametrize("noise", [0.0, 4.9, float("nan"), float("inf"), -5.0])
def test_less_noise_than_the_run_says_is_refused(config: dict[str, Any], noise: float) -> None:
    with pytest.raises(Refused, match="noise of at least 5 only"):
        ask(config, noise=noise)


@pytest.mark.parametrize(
    ("rules", "run", "message"),
    [
        ({"min_noise": "6"}, {}, "noise of at least 6 only, and the server asks for 5"),
        ({"methods": "ditto"}, {}, "takes part in ditto only, and the run is of fedavg"),
        ({"epsilon": "8"}, {"dp-noise": ""}, "with differential privacy only"),
        ({"min_noise": "1"}, {"dp-noise": ""}, "noise of at least 1 only"),
        ({"strict": "yes"}, {"options": ""}, "epsilon does not cover"),
        ({}, {"method": "ifca", "options": ""}, "cannot be private"),
    ],
)
def test_the_owner_decides_what_is_answered(
    config: dict[str, Any], rules: dict[str, str], run: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        ask(config | rules, settings=run)
    assert not list(Path(config["vault"]).glob("*/*/state.safetensors"))


@pytest.mark.parametrize(
    "table",
    [
        {"min_noise": "much"}, {"min_noise": "-1"}, {"min_noise": "nan"}, {"epsilon": "0"}, {"epsilon": "nan"},
        {"delta": "1"}, {"evaluate": "all"}, {"sums": "true"}, {"strict": "1"},
    ],
)  # fmt: skip
def test_rules_that_say_nothing_are_refused(table: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=next(iter(table))):
        NodeRules(**table)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "header", [{"effort": float("nan")}, {"effort": 0.0}, {"longest": [1, 2]}, {"longest": [0] * 9}]
)
def test_orders_that_make_no_sense_are_refused(config: dict[str, Any], header: dict[str, Any]) -> None:
    with pytest.raises(MessageError, match=next(iter(header))):
        ask(config, **header)


# ---- what people see of it ----


def test_the_command_shows_budget_and_rules(config: dict[str, Any]) -> None:
    epsilon = pytest.importorskip("kinfed.privacy.accountant", reason="the extra dp is not installed")

    def show() -> str:
        return CliRunner().invoke(app, ["vault", "budget", "--vault", config["vault"]], terminal_width=200).output

    assert "not answered any private request" in show()
    config |= {"epsilon": "1", "methods": "fedavg"}
    ask(config)
    ask(config, round=2)
    page = books(config).read()
    spent = epsilon.epsilon_over_noises(page.spent(), 1e-5)
    shown = show()
    assert re.search(rf"a +r1 +2 +{spent:g}\b", shown), shown
    assert f"a: epsilon {spent:g} of 1 (delta 1e-05)" in shown
    assert "methods fedavg" in shown
