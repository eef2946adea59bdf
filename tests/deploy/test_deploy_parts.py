"""What surrounds a deployment: a node's own data, keys and certificates, the app folder, the commands."""

from __future__ import annotations

import csv
import functools
import re
import ssl
import stat
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from kinfed.algorithms import ALGORITHMS, make_algorithm, sample_update
from kinfed.cli.app import app
from kinfed.data.examples.batches import LocalTraining
from kinfed.data.examples.problem import Problem
from kinfed.deploy.node.node_data import Enrolment, load_client_data
from kinfed.deploy.node.node_settings import NodeSettings
from kinfed.deploy.node.vault import Vault
from kinfed.deploy.programs.app_folder import make_app
from kinfed.deploy.server.enrol import Roster
from kinfed.deploy.server.node_pool import made_up_cohort
from kinfed.deploy.settings import SETTINGS, Deployment, not_for_nodes
from kinfed.engine import make_objective
from kinfed.engine.task_factory import make_task
from kinfed.engine.zoo.lora import lora
from kinfed.engine.zoo.models import build_model
from kinfed.errors import ConfigError, DataError, StorageError

ROOT = Path(__file__).parents[2]
X = np.arange(40, dtype=np.float32).reshape(20, 2)
Y = np.array(["no", "yes"] * 10)
DEPLOYMENT = Deployment.parse({"classes": "no,yes", "label-column": "sick", "scaling": "none"})


ROSTER = Roster(["a", "b", "c"], torch.tensor([[6, 2, 2]] * 3), (5,), [])


def node(data: Path | str, **more: Any) -> NodeSettings:
    return NodeSettings.parse({"client": "a", "data": str(data), **more})


def write_csv(path: Path, label: str = "sick", split: bool = False) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["age", "dose", "name", label, *(["fold"] if split else [])])
        for row, (x, y) in enumerate(zip(X, Y, strict=True)):
            writer.writerow([*x, f"n{row}", y, *([["train", "val", "test"][row % 3]] if split else [])])
    return path


# ---- a node's own data ----


def test_every_kind_of_file_gives_the_same_examples(tmp_path: Path) -> None:
    table = write_csv(tmp_path / "a.csv")
    pq.write_table(pa.table({"age": X[:, 0], "dose": X[:, 1], "sick": Y}), tmp_path / "a.parquet")
    np.savez(tmp_path / "a.npz", x=X, y=Y)
    (tmp_path / "load.py").write_text(
        "import numpy as np\ndef load(node):\n    f = np.load(node['file'])\n    return f['x'], f['y']\n"
    )
    found = [
        load_client_data(node(table, ignore="name"), DEPLOYMENT),
        load_client_data(node(tmp_path / "a.parquet"), DEPLOYMENT),
        load_client_data(node(tmp_path / "a.npz"), DEPLOYMENT),
        load_client_data(node(f"{tmp_path / 'load.py'}:load", file=str(tmp_path / "a.npz")), DEPLOYMENT),
    ]
    assert [own.columns for own in found] == [["age", "dose"], ["age", "dose"], [], []]
    for own in found:
        assert torch.equal(own.encoded(Enrolment(0, 1, (0, 0, 0))).features.raw, torch.from_numpy(X))
        assert own.federation.labels.tolist() == [0, 1] * 10
        assert torch.equal(own.federation.test.rows, found[0].federation.test.rows)
    assert int(found[0].federation.test.count[0]) == 5


def test_a_node_may_name_its_splits_and_its_label(tmp_path: Path) -> None:
    table = write_csv(tmp_path / "a.csv", "krank", split=True)
    own = load_client_data(node(table, label="krank", split="fold", ignore="name"), DEPLOYMENT).federation
    assert [part.rows.tolist() for part in (own.train, own.val, own.test)] == [
        list(range(0, 20, 3)), list(range(1, 20, 3)), list(range(2, 20, 3)),
    ]  # fmt: skip
    mark = np.arange(20) % 3
    np.savez(tmp_path / "a.npz", x=X, y=Y, test=mark == 2, val=mark == 1)
    same = load_client_data(node(tmp_path / "a.npz"), DEPLOYMENT).federation
    assert torch.equal(same.train.rows, own.train.rows)
    assert torch.equal(same.val.rows, own.val.rows)


def test_the_order_of_columns_is_the_deployments(tmp_path: Path) -> None:
    turned = Deployment.parse({"classes": "no,yes", "label-column": "sick", "features": "dose,age"})
    own = load_client_data(node(write_csv(tmp_path / "a.csv")), turned)
    assert own.columns == ["dose", "age"]
    encoded = own.encoded(Enrolment(0, 1, (0, 0, 0)))
    assert torch.equal(encoded.features.raw, torch.from_numpy(X[:, ::-1].copy()))


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": X}, r"should hold x \(or tokens\), y"),
        ({"x": X, "y": Y, "z": Y}, r"should hold x \(or tokens\), y"),
        ({"x": X, "tokens": Y, "y": Y}, r"should hold x \(or tokens\), y"),
        ({"x": X, "y": Y[:5]}, "20 examples but 5 labels"),
        ({"x": X, "y": np.array(["maybe"] * 20)}, "holds the class 'maybe'"),
        ({"x": X, "y": np.linspace(0, 1, 20)}, "should hold classes; entry 1 is 0.05"),
        ({"x": X, "y": Y, "test": np.arange(20)}, "are 20 booleans"),
        ({"x": np.array([object()] * 20), "y": Y}, "cannot read"),
    ],
)
def test_bad_arrays_are_refused(tmp_path: Path, arrays: dict[str, Any], message: str) -> None:
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(DataError, match=message):
        load_client_data(node(tmp_path / "a.npz"), DEPLOYMENT)


def test_bad_node_configs_are_refused(tmp_path: Path) -> None:
    for given, message in (
        ({"data": "a.csv"}, "does not say its client"),
        ({"client": "a"}, "does not say its data"),
        ({"client": "a", "data": "a.csv", "vualt": "x"}, "did you mean vault"),
        ({"client": "a", "data": "a.csv", "threads": "0"}, "threads"),
        ({"client": "a", "data": "a.csv", "min_noise": "much"}, "min_noise"),
        ({"client": "a,b", "data": "a.csv"}, r"would all have the data 'a.csv'; write \{client\} in it"),
        ({"client": "a, a", "data": "{client}.csv"}, "different names"),
    ):
        with pytest.raises(ConfigError, match=message):
            NodeSettings.parse_all(given)
    (tmp_path / "a.txt").touch()
    for data, error, message in (
        (tmp_path / "a.txt", DataError, "or .npz file"),
        (tmp_path / "no.npz", StorageError, "no.npz does not exist, which a names as its data"),
        (f"{tmp_path}/no.py:load", DataError, "does not exist"),
    ):
        with pytest.raises(error, match=message):
            load_client_data(node(data), DEPLOYMENT)
    (tmp_path / "load.py").write_text("def load(node):\n    return 3\n")
    with pytest.raises(DataError, match=r"should return \(x, y\)"):
        load_client_data(node(f"{tmp_path / 'load.py'}:load"), DEPLOYMENT)
    with pytest.raises(DataError, match="no function 'other'"):
        load_client_data(node(f"{tmp_path / 'load.py'}:other"), DEPLOYMENT)


# ---- keys and certificates ----


def test_certificates_are_good_for_tls(tmp_path: Path) -> None:
    """A handshake in memory: the client trusts the CA and checks the name."""
    certs = pytest.importorskip("kinfed.deploy.operator.certs", reason="the extra flower is not installed")
    certs.make_certificates(tmp_path, ["fl.example.org", "10.0.0.7"], ["hospital-a"])
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(tmp_path / "server.crt", tmp_path / "server.key")
    client = ssl.create_default_context(cafile=str(tmp_path / "ca.crt"))

    def handshake(name: str) -> None:
        one, two = ssl.MemoryBIO(), ssl.MemoryBIO()
        ends = [client.wrap_bio(one, two, server_hostname=name), server.wrap_bio(two, one, server_side=True)]
        for _ in range(4):
            for end in ends:
                try:
                    end.do_handshake()
                except ssl.SSLWantReadError:
                    continue

    handshake("fl.example.org")
    handshake("10.0.0.7")
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake("elsewhere.example.org")
    for name in ("ca.key", "server.key", "hospital-a"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600
    assert (tmp_path / "hospital-a").read_text().startswith("-----BEGIN OPENSSH PRIVATE KEY")
    assert (tmp_path / "hospital-a.pub").read_text().startswith("ecdsa-sha2-nistp384 ")


def test_more_nodes_later_keep_the_authority_and_the_keys(tmp_path: Path) -> None:
    certs = pytest.importorskip("kinfed.deploy.operator.certs", reason="the extra flower is not installed")
    certs.make_certificates(tmp_path, ["localhost"], ["a"])
    before = {name: (tmp_path / name).read_bytes() for name in ("ca.crt", "ca.key", "a", "a.pub")}
    written = certs.make_certificates(tmp_path, ["localhost"], ["a", "b"])
    assert {path.name for path in written} == {"server.key", "server.crt", "b", "b.pub"}
    assert before == {name: (tmp_path / name).read_bytes() for name in before}
    for hosts, nodes, message in (([], ["a"], "host names"), (["h"], ["server"], "key file"), (["h"], ["a/b"], "key")):
        with pytest.raises(ConfigError, match=message):
            certs.make_certificates(tmp_path, hosts, nodes)
    for host in ("", "two words", "fl.example.org:8000", "münchen.example", "https://fl.example.org", "h" * 300):
        with pytest.raises(ConfigError, match="without port and in ASCII"):
            certs.make_certificates(tmp_path, [host], [])
    certs.make_certificates(tmp_path, ["h" * 100, "::1"], [])  # longer than a common name may be
    (tmp_path / "ca.key").write_text("-----BEGIN PRIVATE KEY-----\n")
    with pytest.raises(StorageError, match="cannot be read as key and certificate"):
        certs.make_certificates(tmp_path, ["localhost"], [])
    (tmp_path / "ca.key").unlink()
    with pytest.raises(StorageError, match="only one of"):
        certs.make_certificates(tmp_path, ["localhost"], [])


# ---- the app folder and the commands ----


def test_an_app_folder_holds_every_setting_and_runs_as_it_is(tmp_path: Path) -> None:
    make_app(tmp_path / "My study")
    project = tomllib.loads((tmp_path / "My study" / "pyproject.toml").read_text())
    assert project["project"]["name"] == "my-study"
    settings = project["tool"]["flwr"]["app"]["config"]
    assert {key.replace("-", "_") for key in settings} == set(SETTINGS)
    assert Deployment.parse(settings).method == "ditto"
    with pytest.raises(StorageError, match="holds files already"):
        make_app(tmp_path / "My study")


def test_the_example_loader_works(tmp_path: Path) -> None:
    make_app(tmp_path / "app")
    (tmp_path / "a.csv").write_text(
        "age,pressure,smoker,diagnosis,year\n61,140,yes,sick,2023\n35,120,no,well,2024\n50,130,no,well,2022\n"
    )
    deployment = Deployment.parse({"classes": "sick,well"})
    loader = f"{tmp_path}/app/node/load_data.py:load"
    own = load_client_data(node(loader, file=str(tmp_path / "a.csv")), deployment).federation
    assert own.features.raw.tolist() == [[61, 140, 1], [35, 120, 0], [50, 130, 0]]
    assert own.test.rows.tolist() == [1]


def test_the_vault_commands(tmp_path: Path) -> None:
    entry = Vault(tmp_path).entry("r1", "a")
    with entry.locked():
        entry.keep(7, {"v": torch.ones(1, 3)}, 0, "ditto")
        entry.keep_model({"w": torch.ones(2)}, {"client": "a"})
    run, folder = CliRunner(), str(tmp_path)
    shown = run.invoke(app, ["vault", "list", "--vault", folder], terminal_width=200)
    assert re.search(r"r1 +a +ditto +7 +1 ", shown.output), shown.output
    out = tmp_path / "copy.safetensors"
    assert run.invoke(app, ["vault", "export", str(out), "--vault", folder]).exit_code == 0
    assert out.read_bytes() == (entry.folder / "model.safetensors").read_bytes()
    assert run.invoke(app, ["vault", "clear", "r1", "--vault", folder], input="n\n").exit_code == 1
    assert Vault(tmp_path).entries()
    assert run.invoke(app, ["vault", "clear", "r1", "--vault", folder, "--yes"]).exit_code == 0
    assert "empty" in run.invoke(app, ["vault", "list", "--vault", folder]).output


# ---- what leaves a node ----


@functools.cache
def sends() -> dict[str, str]:
    """As the command lists it, for all methods at once."""
    lines = CliRunner().invoke(app, ["deploy", "messages"], terminal_width=200).output.splitlines()
    return dict(line.strip().split(maxsplit=1) for line in lines[1:])


TWO = Problem.of_classes(2)


ADAPTERS = ("fedsa_lora", "feddpa", "fedex_lora", "flora", "hetlora")


def adapted() -> nn.Module:
    """With the two adapters and the residuals that some methods look for."""
    net = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 2))
    return lora(net, targets="0", rank=1, train="1", pair=True, residual=True)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_updates_hold_nothing_but_what_the_list_says(name: str) -> None:
    options = {"own": "*.bias"} if name == "fedbn" else {}  # the model has no normalization layers
    algorithm, roster = make_algorithm(name, LocalTraining(), options), ROSTER
    if not_for_nodes(algorithm):
        assert sends()[name].startswith("refused")
        return
    model = "mlp" if name == "heterofl" else "mlr"  # it narrows hidden layers
    problem = Problem("survival", shape=(2,), periods=(1.0, 2.0), hazards=(0.1, 0.2)) if name == "cox" else TWO
    build = adapted if name in ADAPTERS else lambda: build_model(model, roster.shape, 2, {})
    task = make_task(build, objective=make_objective(problem))
    server = algorithm.init_server(task, roster.population(0, 1.0))
    cohort = made_up_cohort(roster, problem)
    update = sample_update(algorithm, task, server, cohort, roster.population(0, 1.0)).named()
    listed = [] if sends()[name] == "nothing" else sends()[name].split(", ")
    always = {field for field in listed if not field.startswith("(")}
    assert always <= {field.partition(".")[0] for field in update} <= {field.strip("()") for field in listed}


def test_the_page_shows_what_the_command_prints() -> None:
    text = (ROOT / "docs/deployment.md").read_text("utf-8")
    command, _, shown = text.partition("$ kinfed deploy messages ")[2].partition("```")[0].partition("\n")
    output = CliRunner().invoke(app, ["deploy", "messages", *command.split()], terminal_width=200).output
    assert [line.split() for line in shown.splitlines()] == [line.split() for line in output.splitlines()]
