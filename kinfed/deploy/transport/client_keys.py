"""The key that a client is known by. It signs the client's greeting, and the server takes the name from no other key.
With secure aggregation it also signs what clients tell each other through the server.

The key is that of the node, if its configuration names one (key="/etc/kinfed/hospital-a", the file that Flower
authenticates the node with), else one that is made in the vault at the first use. Both are ECDSA keys on P-384, private
ones in OpenSSH's format, public ones in its one-line form.

The signature covers the greeting together with a number that the server has just drawn and the number under which
Flower knows the node: an old greeting proves nothing, nor does one that was made on another node.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature, encode_dss_signature

from kinfed.core import storage
from kinfed.errors import ConfigError

_HASH = ec.ECDSA(hashes.SHA384())
_NUMBER_BYTES = 48  # of each of the two numbers of a signature


def new_private_key() -> bytes:
    return private_text(ec.generate_private_key(ec.SECP384R1()))


def private_text(key: ec.EllipticCurvePrivateKey) -> bytes:
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    return key.private_bytes(pem, serialization.PrivateFormat.OpenSSH, plain)


def public_text(key: ec.EllipticCurvePrivateKey) -> str:
    openssh = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    return key.public_key().public_bytes(*openssh).decode()


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
        raise ConfigError(f"{where} is no elliptic-curve key; kinfed deploy certs makes the keys of nodes")
    return key


def _verifies(public: str, signature: bytes, text: bytes) -> bool:
    try:
        key = serialization.load_ssh_public_key(public.encode())
        if not isinstance(key, ec.EllipticCurvePublicKey):
            return False
        key.verify(signature, text, _HASH)
    except (ValueError, UnsupportedAlgorithm, InvalidSignature):
        return False
    return True


def read_public_keys(folder: Path) -> dict[str, str]:
    """Keys by client: <client>.pub of a folder, as `kinfed deploy certs` writes them."""
    keys = {}
    with storage.storage_errors("read the keys of clients in", folder):
        for path in sorted(folder.iterdir()):
            if path.suffix == ".pub":
                keys[path.stem] = " ".join(path.read_text("utf-8").split()[:2])  # without the comment
    if not keys:
        raise ConfigError(f"keys: {folder} holds no file <client>.pub; name the folder of kinfed deploy certs")
    return keys


def fingerprint(key: str) -> str:
    """Eight digits by which people can tell keys apart."""
    return hashlib.sha256(key.encode()).hexdigest()[:8]


def _text(greeting: Mapping[str, Any], nonce: str, node: int) -> bytes:
    return json.dumps(["kinfed greeting", nonce, node, dict(greeting)], sort_keys=True).encode()
