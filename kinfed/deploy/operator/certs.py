"""Certificates for a deployment of one's own: a CA and the server's certificate. Sites make their own keys
(`kinfed.deploy.operator.members`); only for a trial on one machine are those made here, too.

    ca.crt, ca.key            the authority; ca.key signs and stays with the operator, ca.crt goes everywhere
    server.crt, server.key    of the superlink, valid for the names and addresses it is reached under
    <client>.pub              keys of sites that were enrolled (ECDSA P-384, OpenSSH format)

All are elliptic-curve keys (P-384). Private files are for their owner only (mode 600).
"""

import datetime
import ipaddress
import re
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from kinfed.core import storage
from kinfed.deploy.operator.members import enrol, make_key
from kinfed.deploy.operator.site_kit import check_key_name, write_with_mode
from kinfed.errors import ConfigError, StorageError

Key = ec.EllipticCurvePrivateKey
CA_YEARS, SERVER_DAYS = 10, 825  # clients of TLS refuse server certificates that are valid for longer
_HOST = re.compile(r"[A-Za-z0-9._-]{1,253}|[0-9A-Fa-f:.]{2,45}")  # a name, or an address of IPv4 or IPv6


def make_certificates(folder: Path, hosts: Sequence[str], nodes: Sequence[str] = ()) -> list[Path]:
    """Make the missing files, and return their paths: an existing CA goes on signing, existing keys stay. `hosts`:
    names and addresses of the server; `nodes`: clients of a trial, whose keys are made here and enrolled."""
    if not hosts:
        raise ConfigError("name the host names or addresses under which nodes reach the server, e.g. --host localhost")
    for host in hosts:
        if not _HOST.fullmatch(host):
            raise ConfigError(
                "--host is a name or an address under which nodes reach the server, such as fl.example.org or "
                f"10.0.0.7, without port and in ASCII; got {host!r}"
            )
    for name in nodes:
        check_key_name(name, "node")
    storage.make_folder(folder)
    paths: list[Path] = []
    ca_key, ca = _authority(folder, paths)
    _server(folder, hosts, ca_key, ca, paths)
    for name in nodes:
        if (folder / name).exists():
            continue
        make_key(folder, name)
        enrol(folder, folder / f"{name}.pub")
        paths += [folder / name, folder / f"{name}.pub"]
    return paths


def expiry(path: Path) -> datetime.datetime:
    """When the certificate in a file ends; OSError or ValueError if it cannot be read."""
    return x509.load_pem_x509_certificate(path.read_bytes()).not_valid_after_utc


def _authority(folder: Path, paths: list[Path]) -> tuple[Key, x509.Certificate]:
    key_path, path = folder / "ca.key", folder / "ca.crt"
    if key_path.exists() != path.exists():
        raise StorageError(f"{folder} holds only one of ca.key and ca.crt; restore the other, or use a new folder")
    if path.exists():
        with storage.storage_errors("read", path):
            key_text, text = key_path.read_bytes(), path.read_bytes()
        try:
            authority = serialization.load_pem_private_key(key_text, None)
            certificate = x509.load_pem_x509_certificate(text)
        except (ValueError, TypeError) as error:  # a key with a password is a TypeError
            raise StorageError(
                f"{key_path} and {path} cannot be read as key and certificate ({error}); restore them from a copy, or "
                "use a new folder"
            ) from None
        if not isinstance(authority, ec.EllipticCurvePrivateKey):
            raise StorageError(f"{key_path} is not an elliptic-curve key; use a new folder")
        return authority, certificate
    key = ec.generate_private_key(ec.SECP384R1())
    name = _named("kinfed deployment CA")
    # It signs certificates, nothing else.
    usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
    certificate = (
        _builder(name, name, key, 365 * CA_YEARS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA384())
    )
    _write_pair(folder / "ca", key, certificate, paths)
    return key, certificate


def _server(folder: Path, hosts: Sequence[str], ca_key: Key, ca: x509.Certificate, paths: list[Path]) -> None:
    """A new certificate each time: hosts may have changed, and it is the one that runs out first."""
    key = ec.generate_private_key(ec.SECP384R1())
    name = _named(hosts[0][:64])  # the longest; names are in the SAN
    names = dict.fromkeys([*hosts, "127.0.0.1"])  # by which the operator's programs reach it on its own machine
    certificate = (
        _builder(name, ca.subject, key, SERVER_DAYS)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([_subject_alt_name(host) for host in names]), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
        .sign(ca_key, hashes.SHA384())
    )
    _write_pair(folder / "server", key, certificate, paths)


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _builder(subject: x509.Name, issuer: x509.Name, key: Key, days: int) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))  # clocks of nodes may be a little behind
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _subject_alt_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _write_pair(path: Path, key: Key, certificate: x509.Certificate, paths: list[Path]) -> None:
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain)
    _write(path.with_suffix(".key"), private, paths, secret=True)
    _write(path.with_suffix(".crt"), certificate.public_bytes(pem), paths)


def _write(path: Path, data: bytes, paths: list[Path], secret: bool = False) -> None:
    write_with_mode(path, data, 0o600 if secret else 0o644)
    paths.append(path)
