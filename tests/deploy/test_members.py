"""Keys of sites: made there, enrolled by others, renewed, revoked, expired."""

from __future__ import annotations

import datetime
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("cryptography", reason="the extra flower is not installed: pip install 'kinfed[flower]'")

from command_line import kinfed

from kinfed.deploy.operator.certs import make_certificates
from kinfed.deploy.operator.members import enrol, make_key, renew_key, revoke, show_key, switch_key
from kinfed.deploy.operator.site_kit import kit_files
from kinfed.deploy.transport.client_keys import PublicKey, read_members, read_public_keys
from kinfed.errors import ConfigError, StorageError


def test_from_two_sites_to_kits_nothing_secret_changes_hands(tmp_path: Path) -> None:
    """As the documents say it, with commands; the operator's folder never holds a site's private key."""
    assert kinfed("deploy", "certs", "certs", "--host", "localhost", cwd=tmp_path).returncode == 0
    for site in ("a", "b"):
        made = kinfed("deploy", "key", site, "--folder", f"site-{site}", cwd=tmp_path)
        assert made.returncode == 0, made.stderr
        taken = kinfed("deploy", "enrol", "certs", f"site-{site}/{site}.pub", cwd=tmp_path)
        assert taken.returncode == 0, taken.stderr
        mine = show_key(tmp_path / f"site-{site}", site)
        assert mine in made.stdout
        assert mine in taken.stdout
        assert stat.S_IMODE((tmp_path / f"site-{site}" / site).stat().st_mode) == 0o600
    private = [(tmp_path / f"site-{site}" / site).read_bytes() for site in ("a", "b")]
    own = [path.read_bytes() for path in (tmp_path / "certs").rglob("*") if path.is_file()]
    sent = [file.data for file in kit_files(tmp_path / "certs", "a", "localhost:8000", {})]
    assert not any(key in data for key in private for data in own + sent)
    listed = kinfed("deploy", "members", "certs", cwd=tmp_path)
    assert show_key(tmp_path / "site-a", "a") in listed.stdout


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="ssh-keygen is not installed")
def test_fingerprints_are_those_of_ssh_keygen(tmp_path: Path) -> None:
    fingerprint = make_key(tmp_path, "a")
    shown = subprocess.run(["ssh-keygen", "-lf", tmp_path / "a.pub"], capture_output=True, text=True, check=True)
    assert shown.stdout.split()[1] == fingerprint


def test_a_renewed_key_is_believed_because_the_former_one_signed_it(tmp_path: Path) -> None:
    site, certs = tmp_path / "site", tmp_path / "certs"
    make_key(site, "a")
    enrol(certs, site / "a.pub")
    fingerprint = renew_key(site, "a")
    assert enrol(certs, site / "a.next.pub").fingerprint == fingerprint
    switch_key(site, "a")
    assert show_key(site, "a") == fingerprint
    assert sorted(path.name for path in site.iterdir()) == ["a", "a.pub"]


def test_another_key_for_a_name_that_is_taken(tmp_path: Path) -> None:
    """Not a stranger's, not one whose signature is of another key or name; only if somebody says so."""
    certs = tmp_path / "certs"
    for site in ("real", "false"):
        make_key(tmp_path / site, "a")
    first = enrol(certs, tmp_path / "real" / "a.pub")
    renew_key(tmp_path / "false", "a")
    for file in ("a.pub", "a.next.pub"):
        with pytest.raises(ConfigError, match="did not sign"):
            enrol(certs, tmp_path / "false" / file)
    renew_key(tmp_path / "real", "a")
    forged = (tmp_path / "false" / "a.pub").read_text().split()
    signature = (tmp_path / "real" / "a.next.pub").read_text().split()[3]
    (tmp_path / "forged.pub").write_text(" ".join([*forged, signature]))
    with pytest.raises(ConfigError, match="did not sign"):
        enrol(certs, tmp_path / "forged.pub")
    assert read_members(certs) == [first]
    assert enrol(certs, tmp_path / "false" / "a.pub", replace=True).text == " ".join(forged[:2])


def test_a_site_with_several_clients_may_have_one_key(tmp_path: Path) -> None:
    """Secure sums count keys, not names."""
    make_key(tmp_path, "a")
    (tmp_path / "b.pub").write_text((tmp_path / "a.pub").read_text().replace(" a", " b"))
    keys = {enrol(tmp_path / "certs", tmp_path / file).fingerprint for file in ("a.pub", "b.pub")}
    assert len(keys) == 1
    assert list(read_public_keys(tmp_path / "certs")) == ["a", "b"]


def test_a_revoked_key_never_comes_back(tmp_path: Path) -> None:
    certs = tmp_path / "certs"
    for site in ("a", "b"):
        make_key(tmp_path, site)
        enrol(certs, tmp_path / f"{site}.pub")
    revoke(certs, "a")
    assert list(read_public_keys(certs)) == ["b"]
    for replace in (False, True):
        with pytest.raises(ConfigError, match="was revoked"):
            enrol(certs, tmp_path / "a.pub", replace=replace)
    with pytest.raises(ConfigError, match="has no key of a; it knows b"):
        revoke(certs, "a")


def test_an_expired_key_is_not_believed_and_one_that_soon_will_is_named(tmp_path: Path) -> None:
    today = datetime.datetime.now(datetime.UTC).date()
    days = {"a": -1, "b": 0, "c": 20, "d": 400}
    make_key(tmp_path, "a")
    text = " ".join((tmp_path / "a.pub").read_text().split()[:2])
    (tmp_path / "certs").mkdir()
    for name, left in days.items():
        key = PublicKey(name, text, today + datetime.timedelta(days=left))
        (tmp_path / "certs" / f"{name}.pub").write_text(key.line)
    said: list[str] = []
    assert list(read_public_keys(tmp_path / "certs", said.append)) == ["b", "c", "d"]
    assert [("expired" in text, "renew" in text) for text in said] == [(True, False), (False, True), (False, True)]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("-----BEGIN OPENSSH PRIVATE KEY-----\nx", "it stays at the site"),
        ("ssh-rsa nonsense a", "no public key"),
        ("", "no public key"),
        ("{key}", "the client's name"),
        ("{key} ../a", "cannot be the name"),
        ("{key} a renews=xyz", "cannot be read"),
    ],
)
def test_files_that_are_no_key_of_a_site(tmp_path: Path, content: str, said: str) -> None:
    make_key(tmp_path, "a")
    key = " ".join((tmp_path / "a.pub").read_text().split()[:2])
    (tmp_path / "sent.pub").write_text(content.replace("{key}", key))
    with pytest.raises(ConfigError, match=said):
        enrol(tmp_path / "certs", tmp_path / "sent.pub")
    assert read_members(tmp_path / "certs") == []


def test_a_key_is_not_overwritten(tmp_path: Path) -> None:
    make_key(tmp_path, "a")
    with pytest.raises(StorageError, match="exists already"):
        make_key(tmp_path, "a")
    with pytest.raises(StorageError, match="--renew"):
        switch_key(tmp_path, "a")


def test_keys_of_a_trial_are_called_that(tmp_path: Path) -> None:
    done = kinfed("deploy", "certs", "certs", "--host", "localhost", "--node", "a", cwd=tmp_path)
    assert "TRIAL    the private keys of a were made here" in done.stdout
    make_certificates(tmp_path / "certs", ["localhost"], ["a"])  # what exists stays
    assert list(read_public_keys(tmp_path / "certs")) == ["a"]
