"""The key that a client is known by. It signs the client's greeting, and the server takes the name from no other key.
With secure aggregation it also signs what clients tell each other through the server.

The key is that of the node, if its configuration names one (key="/etc/kinfed/hospital-a", the file that Flower
authenticates the node with), else one that is made in the vault at the first use. Both are ECDSA keys on P-384, private
ones in OpenSSH's format, public ones in its one-line form.

The signature covers the greeting together with a number that the server has just drawn and the number under which
Flower knows the node: an old greeting proves nothing, nor does one that was made on another node.
"""

import base64
import datetime
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature, encode_dss_signature

from kinfed.core import storage
from kinfed.errors import ConfigError

_HASH = ec.ECDSA(hashes.SHA384())
REVOKED = "revoked"  # the folder of keys that are never believed again, beside those that are
WARNING_DAYS = 30  # before a key expires
_UNTIL = "until="  # before the last day of a key, in its comment
_NUMBER_BYTES = 48  # of each of the two numbers of a signature


def new_private_key() -> bytes:
    return private_text(ec.generate_private_key(ec.SECP384R1()))


def private_text(key: ec.EllipticCurvePrivateKey) -> bytes:
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    return key.private_bytes(pem, serialization.PrivateFormat.OpenSSH, plain)


def public_text(key: ec.EllipticCurvePrivateKey) -> str:
    openssh = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    return key.public_key().public_bytes(*openssh).decode()


def public_of(private: bytes, where: Path) -> str:
    """The public half of a private key, in OpenSSH's form."""
    return public_text(_private_key(private, where))


def sign_greeting(private: bytes, where: Path, greeting: Mapping[str, Any], nonce: str, node: int) -> dict[str, Any]:
    """The greeting with the public key and the signature. `where` says in errors what file the key is from."""
    key = _private_key(private, where)
    signature = key.sign(_text(greeting, nonce, node), _HASH)
    return {**greeting, "key": public_text(key), "signature": signature.hex()}


def is_signed(greeting: Mapping[str, Any], nonce: str, node: int) -> bool:
    """Say whether the sender of a greeting holds the key that it names."""
    content = {name: value for name, value in greeting.items() if name not in ("key", "signature")}
    try:
        signature = bytes.fromhex(str(greeting.get("signature")))
    except ValueError:
        return False
    return _verifies(str(greeting.get("key")), signature, _text(content, nonce, node))


def sign(private: bytes, where: Path, text: bytes) -> bytes:
    """A signature of 96 bytes."""
    numbers = decode_dss_signature(_private_key(private, where).sign(text, _HASH))
    return b"".join(number.to_bytes(_NUMBER_BYTES, "big") for number in numbers)


def has_signed(public: str, signature: bytes, text: bytes) -> bool:
    """Say whether the owner of the public key has signed the text."""
    r, s = (int.from_bytes(part, "big") for part in (signature[:_NUMBER_BYTES], signature[_NUMBER_BYTES:]))
    return _verifies(public, encode_dss_signature(r, s), text)


def _private_key(private: bytes, where: Path) -> ec.EllipticCurvePrivateKey:
    try:
        key = serialization.load_ssh_private_key(private, None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{where} is no private key in OpenSSH's format without a passphrase ({error})") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError(f"{where} is no elliptic-curve key; kinfed deploy key makes one")
    return key


def _public_key(text: str) -> ec.EllipticCurvePublicKey | None:
    try:
        key = serialization.load_ssh_public_key(text.encode())
    except (ValueError, UnsupportedAlgorithm):
        return None
    return key if isinstance(key, ec.EllipticCurvePublicKey) else None


def is_public_key(text: str) -> bool:
    """Say whether the text is the public half of a key as kinfed makes them."""
    key = _public_key(text)
    return key is not None and isinstance(key.curve, ec.SECP384R1)


def _verifies(public: str, signature: bytes, text: bytes) -> bool:
    key = _public_key(public)
    if key is None:
        return False
    try:
        key.verify(signature, text, _HASH)
    except InvalidSignature:
        return False
    return True


@dataclass(frozen=True)
class PublicKey:
    """The key that a client is known by, and the last day on which it is believed."""

    client: str
    text: str  # in OpenSSH's form, without a comment
    until: datetime.date | None = None  # None: the file names no day

    @property
    def line(self) -> str:
        """The key as a file holds it."""
        return f"{self.text} {self.client}" + ("" if self.until is None else f" {_UNTIL}{self.until}")

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.text)

    @property
    def days_left(self) -> int | None:
        today = datetime.datetime.now(datetime.UTC).date()
        return None if self.until is None else (self.until - today).days

    @property
    def warning(self) -> str:
        """A sentence where the key has expired or soon will; else ""."""
        if self.days_left is None or self.days_left > WARNING_DAYS:
            return ""
        if self.days_left < 0:
            return f"the key of {self.client} has expired on {self.until}: it is not believed"
        return f"the key of {self.client} expires on {self.until}; renew it: kinfed deploy key {self.client} --renew"


def read_members(folder: Path) -> list[PublicKey]:
    """Keys of a folder, sorted by file; none if it does not exist."""
    if not folder.is_dir():
        return []
    with storage.storage_errors("read the keys of clients in", folder):
        texts = {path: path.read_text("utf-8") for path in sorted(folder.glob("*.pub"))}
    members = []
    for path, text in texts.items():
        parts = text.split()
        day = next((part.removeprefix(_UNTIL) for part in parts[2:] if part.startswith(_UNTIL)), "")
        try:
            until = datetime.date.fromisoformat(day) if day else None
        except ValueError:
            raise ConfigError(f"{path}: {_UNTIL}{day} is no day such as 2028-11-17") from None
        members.append(PublicKey(path.stem, " ".join(parts[:2]), until))
    return members


def read_public_keys(folder: Path, say: Callable[[str], None] = lambda _: None) -> dict[str, str]:
    """Keys by client: <client>.pub of a folder of `kinfed deploy enrol`, without those that have expired. `say` is told
    of these, and of keys that soon will."""
    members = read_members(folder)
    for member in members:
        if member.warning:
            say(member.warning)
    if not members:
        raise ConfigError(f"keys: {folder} holds no file <client>.pub; name the folder of kinfed deploy enrol")
    return {member.client: member.text for member in members if (member.days_left or 0) >= 0}


def fingerprint(key: str) -> str:
    """What people compare: SHA256:..., as ssh-keygen prints it of the same key."""
    parts = key.split()
    try:
        blob = base64.b64decode(parts[1], validate=True)
    except (IndexError, ValueError):
        return "SHA256:?"
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


def _text(greeting: Mapping[str, Any], nonce: str, node: int) -> bytes:
    return json.dumps(["kinfed greeting", nonce, node, dict(greeting)], sort_keys=True).encode()
