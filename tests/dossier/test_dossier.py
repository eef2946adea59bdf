"""Dossiers: facts are those of the records, every sentence follows from facts, and a planted lie is found."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pytest
from command_line import kinfed as command
from loopback import Loopback

import kinfed
from kinfed.algorithms import ALGORITHMS
from kinfed.core import storage
from kinfed.deploy import Vault, message_types
from kinfed.deploy.server.deployment_server import serve
from kinfed.deploy.settings import Deployment
from kinfed.dossier import THREATS, collect_facts, verify_dossier, write_dossier
from kinfed.dossier.document import page
from kinfed.dossier.group_gaps import FEWEST, hide_few
from kinfed.dossier.threats import mode_of
from kinfed.errors import ConfigError, DataError, StorageError
from kinfed.records.run_files import sealed
from kinfed.tabular.fit_result import FitResult
from kinfed.tabular.fit_settings import FitSettings
from kinfed.tabular.fitting import SiteFit, load_sites
from kinfed.tabular.site_sentences import SENT

SITES = ("east", "north", "west")


def table() -> pa.Table:
    """Rows of three sites in which the outcome of women follows other rules than that of men."""
    draw = np.random.default_rng(3)
    site = np.repeat(SITES, (160, 120, 40))
    age, dose = draw.normal(50, 12, len(site)).round(1), draw.normal(size=len(site)).round(3)
    woman = draw.random(len(site)) < 0.4
    risk = np.where(woman, -0.5, 1.0) * dose + 0.03 * (age - 50) + 0.3 * draw.normal(size=len(site))
    columns = {"site": site.tolist(), "age": age, "dose": dose, "sex": np.where(woman, "woman", "man").tolist()}
    return pa.table({**columns, "sick": np.where(risk > 0, "yes", "no").tolist()})


@pytest.fixture(scope="module")
def csv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("table") / "visits.csv"
    pa_csv.write_csv(table(), path)
    return path


@pytest.fixture(scope="module")
def ran(csv: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "run"
    kinfed.run(
        dataset={"name": str(csv), "public_statistics": True, "ignore": "sex"}, client_column="site",
        label_column="sick", model="mlr", rounds=4, participation=0.5, algorithms="local,ditto", dp_noise=1.0,
        seeds=(0, 1), out=folder,
    )  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def fitted(csv: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fit") / "fit"
    kinfed.fit(
        csv, client_column="site", label_column="sick", models="mlr", algorithms="ditto", trials=1, folds=2, rounds=3,
        metric="accuracy", out=folder,
    )  # fmt: skip
    return folder


def deployed(folder: Path, **settings: Any) -> tuple[Path, Loopback]:
    nodes, rows = {}, table()
    for place, name in enumerate(SITES):
        own = rows.filter(pa.array([one == name for one in rows["site"].to_pylist()])).drop_columns(["site", "sex"])
        pa_csv.write_csv(own, folder / f"{name}.csv")
        nodes[100 + place] = {"client": name, "data": f"{folder}/{name}.csv", "vault": f"{folder}/vault-{name}"}
    common = {"clients": ",".join(SITES), "classes": "no,yes", "label-column": "sick", "rounds": 2, "steps": 3}
    net = Loopback({**common, "deadline": 60.0, "wait": 60.0, "out": str(folder / "run"), **settings}, nodes)
    return serve(Deployment.parse(net.run_config), net, net.log.append, **net.time), net


@pytest.fixture(scope="module")
def private(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Loopback]:
    settings = {"method": "ditto", "model": "mlr", "scaling": "none", "dp-noise": 1.0}
    return deployed(tmp_path_factory.mktemp("private"), **settings)


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    search = {"method": "fit", "portfolio": "ditto", "models": "mlr", "trials": 1, "search-folds": 2}
    return deployed(tmp_path_factory.mktemp("search"), **search)[0]


def vaults(run: Path) -> list[Path]:
    return sorted(path for path in run.parent.glob("vault-*") if path.is_dir())


@pytest.fixture
def dossier(fitted: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A folder of a fit and its dossier, to tamper with."""
    folder = shutil.copytree(fitted, tmp_path / "fit")
    return folder, write_dossier(collect_facts(folder), folder / "dossier.html")


# ---- facts ----


def test_messages_of_a_run_are_counted_and_declared(ran: Path) -> None:
    facts = collect_facts(ran)
    local, ditto = facts["methods"]
    parameters = storage.read_json(ran / "model.json")["parameters"]
    assert local["fields"] == []
    assert {field["name"]: field["bytes"] for field in ditto["fields"]} == {"delta": 4 * parameters, "count": 4}
    lines = [json.loads(line) for line in (ran / "rounds.jsonl").read_text().splitlines()]
    own = [line for line in lines if line["algorithm"] == "ditto"]
    assert ditto["answers"] == sum(line["active"] for line in own) == sum(ditto["calls"].values())
    assert ditto["bytes_up"] == sum(line["bytes_up"] for line in own)
    assert ditto["as_declared"] is True
    assert ditto["bytes_of_one"] == 4 * parameters + 4
    summary = storage.read_json(ran / "summary.json")["results"]
    spent = [one["privacy"]["epsilon"] for one in summary if one["algorithm"] == "ditto"]
    assert list(ditto["guarantee"]["examples"]["epsilon"].values()) == np.max(spent, 0).tolist()
    assert [site["train"] + site["test"] for site in facts["sites"]] == [160, 120, 40]


def test_messages_of_a_deployment_are_those_that_nodes_sent(private: tuple[Path, Loopback]) -> None:
    run, net = private
    facts = collect_facts(run, vaults=vaults(run))
    (ditto,) = facts["methods"]
    asked = [one for one in net.messages if one.kind == "train"]
    assert ditto["answers"] == len(asked) == sum(ditto["calls"].values())
    assert sum(field["bytes"] for field in ditto["fields"]) == ditto["bytes_of_one"]
    for name in SITES:
        answers = Vault(run.parent / f"vault-{name}").privacy_log(name).read().answers
        assert facts["ledgers"][name]["priced"] == len(answers)
        # The node's own books and the server's agree on what was spent.
        epsilon = ditto["guarantee"]["examples"]["epsilon"][name]
        assert facts["ledgers"][name]["epsilon"]["training rows"] == pytest.approx(epsilon)


def test_audit_logs_are_counted_compared_and_must_be_whole(private: tuple[Path, Loopback], tmp_path: Path) -> None:
    run, net = private
    transfers = collect_facts(run, vaults=vaults(run))["transfers"]
    for name in SITES:
        answered = [one.kind for one in net.messages if one.packet.header.get("name") == name]
        counts = {kind: one["messages"] for kind, one in transfers["sites"][name].items() if kind != "hello"}
        assert counts == {kind: answered.count(kind) for kind in set(answered)}
        assert transfers["nodes"][name]["lacks"] == 0
    other = shutil.copytree(run, tmp_path / "run")
    log = other / "transfers.jsonl"
    log.write_text(log.read_text("utf-8").replace('"train"', '"tra1n"', 1), "utf-8")
    with pytest.raises(StorageError, match="does not follow from the line before"):
        collect_facts(other)


def test_a_search_counts_all_of_its_runs(searched: Path) -> None:
    facts = collect_facts(searched)
    lines = [json.loads(line) for line in (searched / "rounds.jsonl").read_text().splitlines()]
    assert facts["search"]["bytes_up"] == sum(line["bytes_up"] for line in lines) > 0
    assert facts["search"]["runs"] == 3 * 3  # local, fedavg, ditto; two folds and all rows
    assert {method["guarantee"]["mode"] for method in facts["methods"]} == {"search"}


def test_gaps_are_differences_between_groups_of_test_rows(fitted: Path) -> None:
    facts, result = collect_facts(fitted, by="sex"), FitResult.read(fitted)
    (model,) = facts["gaps"]["models"]
    source, config = table(), storage.read_json(fitted / "config.json")["config"]
    options = {name: value for name, value in config["options"].items() if value is not None}
    split = SiteFit(load_sites(config["table"], options, None, 0), FitSettings(**result.settings)).data
    for k, site in enumerate(SITES):
        rows = source.take(split.test.lists()[k].tolist())
        women = np.array(rows["sex"].to_pylist()) == "woman"
        right = np.array(result.model(site).predict(rows)) == np.array(rows["sick"].to_pylist())
        entries = {one["group"]: one for one in model["sites"] if one["site"] == site}
        assert entries["sex = woman"]["rows"] in (int(women.sum()), None)
        for group, inside in (("sex = woman", women), ("sex = man", ~women)):
            expected = right[inside].mean() if inside.sum() >= FEWEST else None
            assert entries[group]["value"] == pytest.approx(expected)
        if min(women.sum(), (~women).sum()) >= FEWEST:
            assert entries["sex = man"]["gap"] is None  # one says all
            gap = entries["sex = woman"]["gap"]
            assert gap["value"] == pytest.approx(right[women].mean() - right[~women].mean())
            assert gap["low"] < gap["value"] < gap["high"]


def test_a_column_that_is_no_feature_divides_rows_too(ran: Path) -> None:
    facts = collect_facts(ran, by="sex")
    assert [model["label"] for model in facts["gaps"]["models"]] == ["local", "ditto"]
    assert sorted(facts["gaps"]["groups"]) == ["sex = man", "sex = woman"]
    halves = collect_facts(ran, by="age")["gaps"]["groups"]
    assert [name.rpartition(" ")[0] for name in halves] == ["age up to", "age above"]


def test_small_groups_are_neither_shown_nor_what_is_left() -> None:
    entries = [{"rows": 30}, {"rows": 4}]
    hide_few(entries)
    assert entries == [{"rows": None}, {"rows": None}]
    entries = [{"rows": 30}, {"rows": 4}, {"rows": 3}]
    hide_few(entries)
    assert [entry["rows"] for entry in entries] == [30, None, None]


# ---- documents ----


@pytest.mark.parametrize("by", [None, "sex"])
def test_a_document_verifies_wherever_its_folder_lies(ran: Path, tmp_path: Path, by: str | None) -> None:
    moved = shutil.copytree(ran, tmp_path / "elsewhere")
    document = write_dossier(collect_facts(ran, by), moved / "dossier.html")
    outcome = verify_dossier(document, moved)
    assert outcome.holds
    assert outcome.facts > 100
    assert "://" not in re.sub(r"xmlns=\S+", "", document.read_text("utf-8"))  # nothing from outside


def test_documents_of_deployments_verify(private: tuple[Path, Loopback], searched: Path, tmp_path: Path) -> None:
    for number, run in enumerate((private[0], searched)):
        document = write_dossier(collect_facts(run, vaults=vaults(run)), tmp_path / f"{number}.html")
        assert verify_dossier(document, run, vaults(run)).holds
        without = verify_dossier(document, run)
        assert not without.holds  # what a ledger says cannot be told without it
        assert all("ledger" in one or "document says" in one for one in without.differences)


def lie(document: Path, before: str, after: str) -> None:
    text = document.read_text("utf-8")
    assert before in text
    document.write_text(text.replace(before, after, 1), "utf-8")


def test_a_number_in_the_facts_is_found(dossier: tuple[Path, Path]) -> None:
    folder, document = dossier
    rows = collect_facts(folder)["sites"][0]["test"]
    lie(document, f'"test":{rows}', f'"test":{rows + 1}')
    outcome = verify_dossier(document, folder)
    assert not outcome.holds
    assert any("sites[0].test" in one and str(rows + 1) in one and str(rows) in one for one in outcome.differences)


def test_a_sentence_is_found(dossier: tuple[Path, Path]) -> None:
    folder, document = dossier
    lie(document, "protects no one", "protects everyone")
    (difference,) = verify_dossier(document, folder).differences
    assert "protects everyone" in difference
    assert "protects no one" in difference


def test_a_consistent_lie_is_found(dossier: tuple[Path, Path]) -> None:
    """Facts are changed, and sentences made of the changed facts."""
    folder, document = dossier
    facts = collect_facts(folder)
    facts["fit"]["sites"][0]["gain"]["value"] = 0.5
    write_dossier(facts, document)
    outcome = verify_dossier(document, folder)
    assert any("fit.sites[0].gain.value" in one for one in outcome.differences)
    assert any("50" in one and one.startswith("the document says") for one in outcome.differences)


def test_hidden_parts_are_compared_too(dossier: tuple[Path, Path]) -> None:
    folder, document = dossier
    lie(document, '<section id="gains">', '<section id="gains" hidden>')
    (difference,) = verify_dossier(document, folder).differences
    assert "layout" in difference


def test_an_edited_folder_is_refused_and_a_sealed_one_is_found(dossier: tuple[Path, Path]) -> None:
    folder, document = dossier
    record = storage.read_json(folder / "fit.json")
    record["sites"][0]["gain"]["value"] = 0.5
    storage.write_json(folder / "fit.json", record)
    with pytest.raises(StorageError, match=r"fit\.json in .* changed after the end"):
        verify_dossier(document, folder)
    envelope = storage.read_json(folder / "config.json")
    envelope["files"]["fit.json"] = hashlib.sha256((folder / "fit.json").read_bytes()).hexdigest()
    storage.write_json(folder / "config.json", sealed(envelope), sort_keys=False)
    outcome = verify_dossier(document, folder)
    assert any("identity.seal" in one for one in outcome.differences)
    assert any("gain" in one for one in outcome.differences)


def test_a_page_is_a_function_of_its_facts(fitted: Path) -> None:
    facts = collect_facts(fitted)
    assert page(facts) == page(json.loads(json.dumps(facts)))


def test_markup_in_names_stays_text(dossier: tuple[Path, Path]) -> None:
    facts = collect_facts(dossier[0])
    facts["sites"][0]["name"] = "</script><script>alert(1)</script>"
    assert "<script>alert" not in page(facts)


# ---- words, and what is refused ----


def test_every_field_of_a_message_has_words() -> None:
    names = {
        field.name for name in ALGORITHMS for field in dataclasses.fields(message_types(ALGORITHMS[name].target())[1])
    }
    assert names - SENT.keys() == set()


def test_guarantees_are_those_of_the_threat_model() -> None:
    text = (Path(__file__).parents[2] / "docs" / "threats.md").read_text("utf-8")
    plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text).replace("**", "").replace("`", "").replace("*", "")
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in plain.splitlines() if line.startswith("|")]
    rows = {cells[0]: cells[1:] for cells in lines}
    for threat in THREATS.values():
        assert rows[threat.mode] == [threat.learns, threat.trusts], threat.mode


@pytest.mark.parametrize(
    ("protections", "mode"),
    [
        ((False, False, False, False), "plain"), ((False, True, False, False), "private"),
        ((True, False, False, False), "secure"), ((True, True, False, False), "secure_private"),
        ((True, False, True, True), "at_nodes"), ((True, False, True, False), "user"),
        ((False, True, True, False), "user"),
    ],
)  # fmt: skip
def test_modes_follow_from_settings(protections: tuple[bool, ...], mode: str) -> None:
    names = ("secure", "private", "user", "at_nodes")
    assert mode_of(**dict(zip(names, protections, strict=True))) == mode


def test_refusals_say_what_to_do(ran: Path, private: tuple[Path, Loopback], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no finished run, fit or deployment"):
        collect_facts(tmp_path)
    with pytest.raises(ConfigError, match="--by weight: the data have no such column"):
        collect_facts(ran, by="weight")
    with pytest.raises(ConfigError, match="the rows are at the sites"):
        collect_facts(private[0], by="sex")
    unsealed = shutil.copytree(ran, tmp_path / "unsealed")
    envelope = storage.read_json(unsealed / "config.json")
    storage.write_json(unsealed / "config.json", {k: v for k, v in envelope.items() if k not in ("files", "seal")})
    with pytest.raises(StorageError, match="no seal over its files"):
        collect_facts(unsealed)
    (tmp_path / "page.html").write_text("<p>Nothing</p>")
    with pytest.raises(StorageError, match="holds no facts"):
        verify_dossier(tmp_path / "page.html", ran)


def test_another_table_gives_no_gaps(csv: Path, tmp_path: Path) -> None:
    own = shutil.copy(csv, tmp_path / "own.csv")
    kinfed.run(
        dataset=str(own), client_column="site", label_column="sick", model="mlr", rounds=1, algorithms="local",
        out=tmp_path / "run",
    )  # fmt: skip
    pa_csv.write_csv(table().slice(1), own)
    with pytest.raises(DataError, match="another one than"):
        collect_facts(tmp_path / "run", by="sex")


def test_the_command_writes_and_verifies(fitted: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(fitted, tmp_path / "fit")
    assert command("dossier", folder, "--by", "sex", cwd=tmp_path).returncode == 0
    done = command("dossier", "verify", folder / "dossier.html", cwd=tmp_path)
    assert (done.returncode, done.stdout.startswith("verified")) == (0, True)
    lie(folder / "dossier.html", "protects no one", "protects everyone")
    done = command("dossier", "verify", folder / "dossier.html", cwd=tmp_path)
    assert done.returncode == 1
    assert "protects everyone" in done.stdout
