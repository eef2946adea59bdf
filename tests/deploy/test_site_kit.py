"""What a site gets, and how a node's file is read."""

from __future__ import annotations

import stat
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("cryptography", reason="the extra flower is not installed: pip install 'kinfed[flower]'")

from command_line import kinfed

from kinfed.deploy.operator.certs import make_certificates
from kinfed.deploy.operator.members import make_key
from kinfed.deploy.operator.services import NodeFile
from kinfed.deploy.operator.site_kit import kit_files, node_toml, write_kit
from kinfed.deploy.transport.client_keys import read_public_keys
from kinfed.errors import ConfigError, KinfedError, StorageError


@pytest.fixture
def certs(tmp_path: Path) -> Path:
    make_certificates(tmp_path / "certs", ["fl.example.org"], ["a", "b"])
    return tmp_path / "certs"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_kit_holds_what_its_site_needs_and_no_secret(tmp_path: Path, certs: Path) -> None:
    done = kinfed("deploy", "kit", "--client", "a", "--server", "fl.example.org:8000", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    kit = tmp_path / "kit-a"
    assert {path.name for path in kit.iterdir()} == {"ca.crt", "node.toml", "start.sh", "README.txt", "peers"}
    assert mode(kit / "start.sh") == 0o755
    secrets = [(certs / name).read_bytes() for name in ("ca.key", "server.key", "a", "b")]
    files = [path for path in kit.rglob("*") if path.is_file()]
    assert not any(secret in path.read_bytes() for secret in secrets for path in files)
    assert "SECRET: the file a" in (kit / "README.txt").read_text()


def test_a_kit_starts_with_the_key_that_the_site_has_made(tmp_path: Path, certs: Path) -> None:
    write_kit(tmp_path / "kit", kit_files(certs, "a", "fl.example.org:8000", {"data": "mine.csv", "label": "y"}))
    with pytest.raises(StorageError, match="kinfed deploy key a"):
        NodeFile.read(tmp_path / "kit" / "node.toml")
    make_key(tmp_path / "kit", "a")
    file = NodeFile.read(tmp_path / "kit" / "node.toml")
    kit = (tmp_path / "kit").resolve()
    assert file.server == "fl.example.org:8000"
    assert file.ca == kit / "ca.crt"
    assert dict(file.node) == {
        "client": "a", "data": str(kit / "mine.csv"), "label": "y", "vault": str(kit / "vault"), "key": str(kit / "a"),
        "peers": str(kit / "peers"),
    }  # fmt: skip


def test_a_kit_knows_the_other_clients_by_their_keys(tmp_path: Path, certs: Path) -> None:
    """Not those of a server that lies; a site that trusts whoever comes first has a kit without them."""
    write_kit(tmp_path / "kit", kit_files(certs, "a", "host:8000", {}))
    assert read_public_keys(tmp_path / "kit" / "peers") == read_public_keys(certs)
    assert "compare fingerprints with the other sites" in (tmp_path / "kit" / "README.txt").read_text()
    done = kinfed("deploy", "kit", "--client", "b", "--server", "host:8000", "--no-peers", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    make_key(tmp_path / "kit-b", "b")
    assert "peers" not in NodeFile.read(tmp_path / "kit-b" / "node.toml").node
    assert "peers holds" not in (tmp_path / "kit-b" / "README.txt").read_text()


def test_a_kit_as_one_file_keeps_modes(tmp_path: Path, certs: Path) -> None:
    (path,) = write_kit(tmp_path / "site.zip", kit_files(certs, "a", "host:8000", {}))
    with zipfile.ZipFile(path) as archive:
        modes = {info.filename: info.external_attr >> 16 & 0o777 for info in archive.infolist()}
    assert modes["site/start.sh"] == 0o755


def test_what_a_site_may_have_edited_is_not_overwritten(tmp_path: Path, certs: Path) -> None:
    files = kit_files(certs, "a", "host:8000", {})
    write_kit(tmp_path / "kit", files)
    with pytest.raises(StorageError, match="exists already"):
        write_kit(tmp_path / "kit", files)


@pytest.mark.parametrize(
    ("client", "server", "said"),
    [
        ("a", "host", "host:port"),
        ("a", ":8000", "host:port"),
        ("ca", "host:8000", "cannot be the name"),
        ("../a", "host:8000", "cannot be the name"),
        ("c", "host:8000", "kinfed deploy enrol .* c.pub"),
    ],
)
def test_a_kit_that_cannot_be_made(certs: Path, client: str, server: str, said: str) -> None:
    with pytest.raises(KinfedError, match=said):
        kit_files(certs, client, server, {})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("server = ", "not valid TOML"),
        ("[node]\nclient = 'a'\ndata = 'x.csv'", "needs server"),
        ("server = 'h:1'", "needs server"),
        ("server = 'h:1'\nport = 3\n[node]\nclient = 'a'\ndata = 'x.csv'", "but not 'port'"),
        ("server = 'h:1'\nca = 'no.crt'\n[node]\nclient = 'a'\ndata = 'x.csv'", "is no file"),
        ("server = 'h:1'\nca = 'node.toml'\n[node]\nclient = 'a'\ndata = 'x.csv'", "only one of ca and key"),
        ("server = 'h:1'\n[node]\nclient = 'a'", "does not say its data"),
        ("server = 'h:1'\n[node]\nclient = 'a'\ndata = 'x.csv'\nlabl = 'y'", "labl"),
        ("server = 'h:1'\n[node]\nclient = 'a'\ndata = 'x\"y.csv'", "quotation mark"),
    ],
)
def test_a_nodes_file_that_cannot_be(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "node.toml"
    path.write_text(text)
    with pytest.raises((ConfigError, StorageError), match=said):
        NodeFile.read(path)


def test_names_with_any_characters_survive_the_file(tmp_path: Path) -> None:
    data = str(tmp_path / "my 'data' é\\x.csv")
    path = tmp_path / "node.toml"
    path.write_text(node_toml("h:1", {"client": "a", "data": data}), "utf-8")
    assert NodeFile.read(path).node["data"] == data
