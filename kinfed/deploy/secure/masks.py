"""The cryptography of secure aggregation: primitives of `cryptography` and `pycryptodome`, composed and nothing more.

    secrets        32 random bytes: private X25519 keys, and the seed of a client's own mask
    agreement      X25519, then HKDF-SHA256 whose info names what the key is for: no key serves two purposes
    masks          the key stream of AES-256-CTR, as whole numbers modulo 2^64; every key makes one stream, once
    sealing        AES-256-GCM with a random nonce; sender, receiver and sum are authenticated with the text
    sharing        Shamir's scheme over GF(2^128) by pycryptodome, a half of a secret at a time

Flower has a secure aggregation of its own (SecAgg+), which does not fit: its masks come from a generator with a seed of
32 bits that anyone can try out, public keys are not signed, so that the server may put its own in their place, and a
client gives both kinds of shares of one client if the server names it twice. It also lives in Flower's workflows and in
a context that does not outlast a restart. Of what it uses, the scheme of pycryptodome is used here, too.
"""

import hashlib
import secrets
from collections.abc import Mapping

import numpy as np
from Crypto.Protocol.SecretSharing import Shamir
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from kinfed.deploy.transport.wire import MessageError

SECRET_BYTES = 32
_NONCE_BYTES = 12
_HALF = 16  # bytes that pycryptodome shares at once

Ring = np.ndarray[tuple[int], np.dtype[np.uint64]]  # whole numbers modulo 2^64


def new_secret() -> bytes:
    return secrets.token_bytes(SECRET_BYTES)


def public_key(private: bytes) -> bytes:
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def commitment(secret: bytes) -> bytes:
    """Digest by which a secret of 32 random bytes is known again; it tells nothing of it."""
    return hashlib.sha256(b"kinfed commitment" + secret).digest()


def agreed_key(private: bytes, public: bytes, purpose: str) -> bytes:
    """The key that the owners of two key pairs both compute, and no one else can."""
    try:
        shared = X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:
        raise MessageError("a public key that is none") from None
    return HKDF(hashes.SHA256(), SECRET_BYTES, salt=None, info=purpose.encode()).derive(shared)


def mask(key: bytes, length: int) -> Ring:
    """[length] numbers that cannot be told from random ones without the key."""
    stream = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor().update(bytes(8 * length))
    return np.frombuffer(stream, dtype="<u8").astype(np.uint64)


def seal(key: bytes, text: bytes, about: str) -> bytes:
    nonce = secrets.token_bytes(_NONCE_BYTES)
    return nonce + AESGCM(key).encrypt(nonce, text, about.encode())


def unseal(key: bytes, sealed: bytes, about: str) -> bytes:
    """Open a sealed text; MessageError if it was changed on the way, or is for another."""
    try:
        return AESGCM(key).decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], about.encode())
    except (InvalidTag, ValueError):
        raise MessageError("shares that cannot be opened: they were changed on the way") from None


def split_secret(secret: bytes, threshold: int, count: int) -> list[bytes]:
    """Shares of 32 bytes, `count` of them; any `threshold` give the secret, fewer tell nothing of it."""
    halves = [Shamir.split(threshold, count, secret[half : half + _HALF], ssss=False) for half in (0, _HALF)]
    by_number = [dict(half) for half in halves]
    return [b"".join(half[number + 1] for half in by_number) for number in range(count)]


def join_secret(shares: Mapping[int, bytes], threshold: int) -> bytes:
    """The secret, from shares by their places in the list that `split_secret` made."""
    if len(shares) < threshold:
        raise MessageError(f"{len(shares)} shares of a secret, and {threshold} are needed")
    chosen = sorted(shares.items())[:threshold]
    return b"".join(
        Shamir.combine([(number + 1, share[half : half + _HALF]) for number, share in chosen], ssss=False)
        for half in (0, _HALF)
    )
