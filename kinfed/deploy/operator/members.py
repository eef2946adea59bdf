"""Keys of sites. A site makes its key and keeps the private half; the operator enrols the public one.

    at the site        kinfed deploy key hospital-a                   hospital-a, which stays, and hospital-a.pub
    at the operator    kinfed deploy enrol certs hospital-a.pub       the folder that `keys` of the app names
    at other sites     kinfed deploy enrol peers hospital-a.pub       the folder that `peers` of their nodes name

Both sides print the key's fingerprint, as `ssh-keygen -l -E sha256` does, and people compare it over a channel that the
file did not take: a fingerprint that came with the file proves nothing.

A folder of members holds a file <client>.pub each, whose comment ends with the last day of its validity, and `revoked/`
with keys that are never enrolled again. A renewed key is signed by the one before it, so that no one has to compare
fingerprints anew; any other key for a name that is taken needs `--replace`.
"""

import datetime
from pathlib import Path

from kinfed.core import storage
from kinfed.deploy.operator.site_kit import check_key_name, write_with_mode
from kinfed.deploy.transport import client_keys
from kinfed.deploy.transport.client_keys import REVOKED, PublicKey, fingerprint
from kinfed.deploy.transport.client_keys import read_members as read_members
from kinfed.errors import ConfigError, StorageError

KEY_DAYS = 730  # that a key is valid for, unless the enrolment says otherwise
_NEXT = ".next"  # behind the name of a key that is to replace the present one
_RENEWS = "renews="  # before the former key's signature, in the comment of a renewed key


def make_key(folder: Path, client: str) -> str:
    """Make <client> and <client>.pub in a folder of the site; the fingerprint."""
    check_key_name(client, "client")
    if (folder / client).exists():
        raise StorageError(f"{folder / client} exists already; a new key in its place: kinfed deploy key --renew")
    return _write_pair(folder, client, client)


def renew_key(folder: Path, client: str) -> str:
    """Make <client>.next and <client>.next.pub, signed by the present key, which stays in use; the fingerprint."""
    with storage.storage_errors("read the present key", folder / client):
        present = (folder / client).read_bytes()
    return _write_pair(folder, client + _NEXT, client, present)


def show_key(folder: Path, client: str) -> str:
    """The fingerprint of a site's own key."""
    with storage.storage_errors("read the key", folder / client):
        return fingerprint(client_keys.public_of((folder / client).read_bytes(), folder / client))


def switch_key(folder: Path, client: str) -> None:
    """Put <client>.next in the place of the present key, which is deleted."""
    new = folder / (client + _NEXT)
    if not new.exists():
        raise StorageError(f"{new} does not exist; make it with: kinfed deploy key {client} --renew")
    with storage.storage_errors("replace", folder / client):
        Path(f"{new}.pub").replace(folder / f"{client}.pub")
        new.replace(folder / client)


def _write_pair(folder: Path, name: str, client: str, former: bytes = b"") -> str:
    private = client_keys.new_private_key()
    public = client_keys.public_of(private, folder / name)
    comment = client
    if former:
        signature = client_keys.sign(former, folder / client, _renewal(client, public))
        comment = f"{client} {_RENEWS}{signature.hex()}"
    storage.make_folder(folder)
    write_with_mode(folder / name, private, 0o600)
    write_with_mode(folder / f"{name}.pub", f"{public} {comment}\n".encode(), 0o644)
    return fingerprint(public)


def _renewal(client: str, public: str) -> bytes:
    return f"kinfed renewal\n{client}\n{public}".encode()


def enrol(folder: Path, file: Path, days: int = KEY_DAYS, *, replace: bool = False) -> PublicKey:
    """Take a site's public key into a folder of members. `replace`: also in the place of another key that did not sign
    it."""
    client, public, signature = _read(file)
    if fingerprint(public) in {key.fingerprint for key in read_members(folder / REVOKED)}:
        raise ConfigError(f"this key of {client} was revoked ({fingerprint(public)}); the site has to make another")
    known = {key.client: key for key in read_members(folder)}
    former = known.get(client)
    is_signed = former is not None and client_keys.has_signed(former.text, signature, _renewal(client, public))
    if former is not None and former.text != public and not (is_signed or replace):
        raise ConfigError(
            f"{client} is known by the key {former.fingerprint}, which did not sign {fingerprint(public)}; ask the "
            "site to renew it (kinfed deploy key --renew), or compare the new fingerprint and use --replace"
        )
    until = datetime.datetime.now(datetime.UTC).date() + datetime.timedelta(days=days)
    member = PublicKey(client, public, until)
    storage.make_folder(folder)
    write_with_mode(folder / f"{client}.pub", f"{member.line}\n".encode(), 0o644)
    return member


def revoke(folder: Path, client: str) -> PublicKey:
    """Take a client's key out of a folder of members, for good."""
    member = next((key for key in read_members(folder) if key.client == client), None)
    if member is None:
        raise ConfigError(f"{folder} has no key of {client}; it knows {_names(folder)}")
    storage.make_folder(folder / REVOKED)
    with storage.storage_errors("move", folder / f"{client}.pub"):
        short = member.fingerprint.rpartition(":")[2][:16].replace("/", "_").replace("+", "-")
        (folder / f"{client}.pub").replace(folder / REVOKED / f"{client}.{short}.pub")
    return member


def _names(folder: Path) -> str:
    return ", ".join(key.client for key in read_members(folder)) or "none"


def _read(file: Path) -> tuple[str, str, bytes]:
    """Client, key and the former key's signature (or nothing) of a file that a site has sent."""
    with storage.storage_errors("read the key", file):
        content = file.read_bytes()
    if b"PRIVATE KEY" in content:
        raise ConfigError(
            f"{file} is a private key: it stays at the site, and a copy is no longer one's own. Ask for .pub"
        )
    parts = content.decode("utf-8", "replace").split()
    if len(parts) < 3 or not client_keys.is_public_key(" ".join(parts[:2])):
        raise ConfigError(f"{file} holds no public key of kinfed deploy key: one line, ECDSA P-384, the client's name")
    check_key_name(parts[2], "client")
    signature = next((part.removeprefix(_RENEWS) for part in parts[3:] if part.startswith(_RENEWS)), "")
    try:
        return parts[2], " ".join(parts[:2]), bytes.fromhex(signature)
    except ValueError:
        raise ConfigError(f"{file}: the signature of the former key cannot be read") from None
