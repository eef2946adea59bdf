"""A trial's clients are those of a simulation with the same settings, and so are its results."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import kinfed
from loopback import Loopback
from opinions import write_opinions
from tiny_bert import write_bert

from kinfed.config.config import RunConfig
from kinfed.config.config_reading import make_config
from kinfed.data.federations.federation import Federation
from kinfed.deploy.operator.trial import DEFAULTS, class_names, deployment_settings, site_names, write_sites
from kinfed.deploy.server.deployment_server import serve
from kinfed.deploy.settings import Deployment
from kinfed.errors import ConfigError
from kinfed.runs import experiment
from kinfed.runs.run_inputs import build_federation


def config(sets: tuple[str, ...] = (), **values: Any) -> RunConfig:
    return make_config(None, DEFAULTS | {"clients": 3, "model": "mlr", "rounds": 2, "steps": 2} | values, sets)


def write_table(path: Path) -> None:
    numbers = np.random.default_rng(0)
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["age", "dose", "ward", "outcome"])
        for k in range(90):
            rows.writerow([*numbers.normal(size=2).round(3), ["north", "south", "west"][k % 3], ["ill", "well"][k % 2]])


def trial_in_process(run: RunConfig, folder: Path) -> list[dict[str, str]]:
    """clients.csv of the trial's settings and files, with nodes in this process."""
    federation = build_federation(run, run.seeds[0])
    names = site_names(federation)
    sites = write_sites(folder / "sites", federation, names)
    weights = {"weights": str(run.model.options["weights"])} if "weights" in run.model.options else {}
    nodes = {
        k: {"client": site.client, "data": str(site.folder / f"{site.client}.npz"), "vault": str(site.vault), **weights}
        for k, site in enumerate(sites)
    }
    net = Loopback(deployment_settings(run, federation, names) | {"out": str(folder / "run")}, nodes)
    return clients(serve(Deployment.parse(net.run_config), net, net.log.append, **net.time))


def clients(folder: Path) -> list[dict[str, str]]:
    with (folder / "clients.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(
    "values",
    [
        {"dataset": "digits"},
        {"dataset": "digits", "algorithms": "fedavg", "participation": 0.5, "optimizer": "adam", "betas": "0.8,0.9"},
        {"dataset": "table", "label_column": "outcome", "client_column": "ward", "validation": 0.2},
    ],
    ids=["digits", "other settings", "a table with clients"],
)
def test_results_are_those_of_a_simulation(tmp_path: Path, values: dict[str, Any]) -> None:
    if values["dataset"] == "table":
        write_table(tmp_path / "table.csv")
        values = values | {"dataset": str(tmp_path / "table.csv")}
    compare_with_simulation(config(("ditto.lam=0.3",) if "algorithms" not in values else (), **values), tmp_path)


def test_texts_and_adapters_are_those_of_a_simulation(tmp_path: Path) -> None:
    """Sites are given the tokens; the frozen weights are on the machine."""
    bert = write_bert(tmp_path / "bert")
    table = write_opinions(tmp_path / "all.csv", ["a", "b", "c"])
    texts = {"name": str(table), "text_column": "body", "tokenizer": str(bert), "length": 8}
    columns = {"client_column": "who", "label_column": "opinion", "split_column": "fold"}
    adapters = {"name": "minilm", "weights": str(bert), "lora_rank": 2}
    run = config(algorithms="fedsa_lora", dataset=texts, model=adapters, batch=4, clients=None, **columns)
    compare_with_simulation(run, tmp_path)


def compare_with_simulation(run: RunConfig, tmp_path: Path) -> None:
    trial = trial_in_process(run, tmp_path)
    experiment.run(run, out=tmp_path / "simulation")
    simulation = clients(tmp_path / "simulation")
    columns = ("n_train", "n_test", "personal_accuracy")
    assert [[row[c] for c in columns] for row in trial] == [[row[c] for c in columns] for row in simulation]
    for ours, theirs in zip(trial, simulation, strict=True):
        assert float(ours["personal_loss"]) == pytest.approx(float(theirs["personal_loss"]), rel=1e-6)


def test_names_of_sites_are_the_clients_where_files_can_have_them() -> None:
    def named(names: list[str]) -> list[str]:
        x, y = np.zeros((4, 2), np.float32), np.array([0, 1, 0, 1])
        return site_names(Federation.from_arrays(x, y, np.repeat(names, 2), num_classes=2))

    assert named(["north", "south"]) == ["north", "south"]
    assert named(["1", "2"]) == ["client-0", "client-1"]  # "1" alone would be a number of clients
    assert named(["a,b", "c"]) == ["client-0", "client-1"]
    assert named(["ca", "server"]) == ["client-0", "client-1"]


def test_classes_that_a_list_cannot_hold_go_by_their_numbers() -> None:
    x, y = np.zeros((4, 2), np.float32), np.array(["ill, badly", "well"] * 2)
    federation = Federation.from_arrays(x, y, ["a", "a", "b", "b"])
    assert class_names(federation) is None
    federation = Federation.from_arrays(x, np.array(["ill", "well"] * 2), ["a", "a", "b", "b"])
    assert class_names(federation) == ["ill", "well"]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"algorithms": "fedavg,ditto"}, "one method"),
        ({"seeds": "0,1"}, "one seed"),
        ({"pretrain": 2}, "pretrain is no setting of a deployment"),
        ({"dropout": 0.2}, "dropout is no setting of a deployment"),
    ],
)
def test_what_a_deployment_cannot_do_is_refused(values: dict[str, Any], said: str) -> None:
    run = config(dataset="digits", **values)
    federation = build_federation(run, 0)
    with pytest.raises(ConfigError, match=said):
        deployment_settings(run, federation, site_names(federation))


def test_a_folder_with_files_is_left_alone(tmp_path: Path) -> None:
    pytest.importorskip("flwr", reason="the extra flower is not installed: pip install 'kinfed[flower]'")
    (tmp_path / "trial").mkdir()
    (tmp_path / "trial" / "thesis.txt").write_text("mine")
    done = kinfed("deploy", "up", "--local", "2", cwd=tmp_path)
    assert done.returncode == 2
    assert "holds files already" in done.stderr
    assert [path.name for path in (tmp_path / "trial").iterdir()] == ["thesis.txt"]
