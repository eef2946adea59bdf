"""Several architectures in one federation: the same as each alone where nothing crosses, the same as one model where
all are that one, and refused by name where a method needs one; run folders, resume, export, predictions, newcomers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kinfed
from kinfed import simulate
from kinfed.errors import ConfigError
from kinfed.newcomers import adopt, newcomer_from_table
from kinfed.serving import ModelPipeline, export_model, model_of_run
from kinfed.testing import tiny_federation, tiny_model

CROSSES = ("local", "fedproto", "fedtgp", "fedgh", "fd", "fml", "fedkd", "fedgen", "fedmd", "ktpfl", "lgfedavg")
OPTIONS: dict[str, dict[str, Any]] = {"lgfedavg": {"shared_layers": 1}, "fedgen": {"share": "head"}}
RUN: dict[str, Any] = {
    "rounds": 3, "steps": 4, "batch": 5, "seeds": (0,), "participation": 0.67, "workers": 1, "validation": 0.0,
}  # fmt: skip


def phone() -> nn.Module:
    """A body of one layer, and a head like that of the tiny model."""
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def federation() -> kinfed.Federation:
    return tiny_federation().with_groups(lambda name: "phone" if name in ("client-1", "client-4") else "server")


def outcome(models: Any, method: str, rounds: int = 3) -> tuple[Tensor, dict[str, Tensor]]:
    data = federation()
    data = data.with_public(0.2, 0) if method in ("fedmd", "ktpfl") else data
    with simulate(data, models, method, seed=1, participation=0.67, workers=1, **OPTIONS.get(method, {})) as loop:
        for _ in loop.rounds(rounds):
            pass
        found = loop.evaluate(keep_models=True)
        assert found.models is not None
        return found.models, {"correct": found.personal.correct, "loss": found.personal.loss, **loop.server.named()}


@pytest.mark.parametrize("method", CROSSES)
def test_two_architectures_that_are_one_change_nothing(method: str) -> None:
    one, facts = outcome(tiny_model, method)
    two, same = outcome({"phone": tiny_model, "server": tiny_model}, method)
    torch.testing.assert_close(two[:, :-1], one, rtol=1e-4, atol=1e-5)  # which rows train together moves last bits
    assert two[:, -1].tolist() == [1, 0, 1, 1, 0, 1]
    for name, value in facts.items():
        torch.testing.assert_close(same[name], value, rtol=1e-4, atol=1e-5)


def test_clients_that_learn_alone_are_as_in_a_federation_of_their_own_model() -> None:
    mixed, _ = outcome({"phone": phone, "server": tiny_model}, "local")
    small, large = outcome(phone, "local")[0], outcome(tiny_model, "local")[0]
    torch.testing.assert_close(mixed[[1, 4], : small.shape[1]], small[[1, 4]], rtol=1e-4, atol=1e-5)
    assert not bool(mixed[[1, 4], small.shape[1] : -1].any())
    torch.testing.assert_close(mixed[[0, 2, 3, 5], :-1], large[[0, 2, 3, 5]], rtol=1e-4, atol=1e-5)


def test_lgfedavg_shares_the_head_across_bodies() -> None:
    """The head of every client that was in the last round is one and the same, and the mean of what they sent."""
    mixed, facts = outcome({"phone": phone, "server": tiny_model}, "lgfedavg")
    head = facts["shared"]
    for row in mixed:
        size = 51 if row[-1] == 0 else 115
        assert torch.equal(row[size - 21 : size], head)


@pytest.mark.parametrize("method", [method for method in CROSSES if method not in ("local", "lgfedavg")])
def test_bodies_of_several_architectures_learn(method: str) -> None:
    two = {"server": tiny_model, "phone": phone}
    start, end = outcome(two, method, rounds=0)[1], outcome(two, method, rounds=6)[1]
    assert float(end["correct"].sum()) > float(start["correct"].sum())


@pytest.mark.parametrize("method", ["fedavg", "ditto", "fedper", "apfl", "scaffold"])
def test_methods_that_need_one_architecture_say_so(method: str) -> None:
    with pytest.raises(ConfigError, match=r"architecture.*one model"):
        outcome({"phone": phone, "server": tiny_model}, method)


def test_features_of_other_widths_are_no_prototypes() -> None:
    def narrow() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))

    with pytest.raises(ConfigError, match=r"FedProto needs one architecture: prototypes of its server are \[3, 5\]"):
        outcome({"phone": narrow, "server": tiny_model}, "fedproto")
    outcome({"phone": narrow, "server": tiny_model}, "fedmd", rounds=1)  # predictions have the same shape


def test_groups_without_a_model_and_models_without_groups() -> None:
    with pytest.raises(ConfigError, match=r"the groups are phone, server, and models names phone, tablet"):
        outcome({"phone": phone, "tablet": tiny_model}, "local")
    data = tiny_federation()
    data.groups = None
    with simulate(data, {"a": phone, "b": tiny_model}, "local") as loop:
        assert loop.evaluate(keep_models=True).models[:, -1].tolist() == [0, 1, 0, 1, 0, 1]  # type: ignore[index]


MODELS = {"phone": "mlr", "server": "mlp"}


def folder_run(out: Path, **more: Any) -> Any:
    return kinfed.run(
        federation=federation(), models=MODELS, out=out, public=0.2,
        **{**RUN, "algorithms": "local,fedmd", "eval_every": 1, **more},
    )  # fmt: skip


def test_folders_hold_every_architecture(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="FedAvg averages parameters"):
        folder_run(tmp_path / "refused", algorithms="local,fedavg")
    assert not (tmp_path / "refused").exists()
    run = folder_run(tmp_path / "run")
    x = federation().features.raw[:5]
    for client, parameters in (("client-0", 1027), ("client-1", 15)):
        exported = export_model(tmp_path / "run", client, "fedmd", out=tmp_path / f"{client}.safetensors")
        pipeline = ModelPipeline.read(exported.path)
        assert pipeline.about["architecture"] == ("phone" if client == "client-1" else "server")
        assert f"{parameters} parameters" in exported.summary
        wanted = run.personal_model(client, "fedmd").predict_proba(x)
        assert (pipeline.predict_proba(x) == wanted).all()
        assert (model_of_run(tmp_path / "run", client, "fedmd").predict_proba(x) == wanted).all()
    assert "phone mlr, server mlp" in run.report(tmp_path / "page.html").read_text()


def test_a_run_resumes_and_grows_to_the_same_bits(tmp_path: Path) -> None:
    whole = folder_run(tmp_path / "whole", rounds=4)
    folder_run(tmp_path / "part", rounds=2)
    grown = kinfed.run(out=tmp_path / "part", extend=True, federation=federation(), rounds=4)
    for label in ("local", "fedmd"):
        one, two = (run.result(label).evaluation.models for run in (whole, grown))
        assert torch.equal(one, two)


def test_newcomers_get_the_architecture_of_their_group(tmp_path: Path) -> None:
    kinfed.run(
        federation=federation(), models={"phone": "mlp", "server": "mlp"}, algorithms="fedproto",
        out=tmp_path / "run", **RUN,
    )  # fmt: skip
    table = {f"x{i}": [0.1 * i, 1.0, 2.0, 5.0, 0.3, 4.0, 2.0, 1.0] for i in range(4)} | {"y": [0, 1, 2, 0, 1, 2, 0, 1]}
    newcomer = newcomer_from_table(tmp_path / "run", table, "y")
    with pytest.raises(ConfigError, match="say which group the newcomer is in: phone, server"):
        adopt(tmp_path / "run", newcomer)
    adoption = adopt(tmp_path / "run", newcomer, group="phone")
    adoption.save(tmp_path / "run", tmp_path / "new.safetensors")
    assert ModelPipeline.read(tmp_path / "new.safetensors").about["architecture"] == "phone"


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ({"warm_start": 1}, "one model"),
        ({"dp_noise": 1.0}, "one model"),
        ({"model": "cnn"}, "leave model out"),
        ({"pool": "ray"}, "local pool"),
        ({"models": {"phone": "mlp"}}, "several architectures"),
        ({"models": "phone,server=mlp"}, "a name and a model"),
    ],
)
def test_settings_of_one_model_are_refused(setting: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        kinfed.RunConfig(**{"models": "phone=mlr,server=mlp", **setting})


def test_models_are_the_same_as_text_table_and_record() -> None:
    config = kinfed.RunConfig(models="phone=mlr,server=mlp")
    assert config.model.name == "mlr"
    assert config.models == kinfed.RunConfig(models={"phone": "mlr", "server": {"name": "mlp"}}).models
    assert kinfed.RunConfig(**config.dump()).fingerprint() == config.fingerprint()
