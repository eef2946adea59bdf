"""Kit for a site that joins: one folder, or one .zip file, with one command to start the node.

    ca.crt        the server's certificate authority
    node.toml     the server's address, and where the data and the vault are: to be edited by the site
    peers/        the public keys of all clients, by which the node knows the others in a secure sum
    start.sh      starts the node
    README.txt    says all this

Nothing in it is secret. The site's private key was made by the site (`kinfed deploy key`) and has never left it.
"""

import io
import json
import os
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kinfed.core import storage
from kinfed.errors import ConfigError, StorageError
from kinfed.version import __version__

_NODE = """\
# The node of {client}. Start it with:  kinfed deploy node node.toml
# Paths are relative to this file's folder. All keys of [node]: docs/deployment.md, "Each node".

server = {server}
{keys}
[node]
{node}"""

_START = """\
#!/bin/sh
# Starts the node of {client}, and starts it again whenever it ends. Ctrl-C stops it.
exec kinfed deploy node "$(dirname "$0")/node.toml"
"""

_README = """\
The node of {client}
{line}

1. Install the version that the server has:  pip install 'kinfed[node]=={version}'
2. Put your private key, the file {client} of `kinfed deploy key {client}`, into this folder. The operator knows you by
       {fingerprint}
   and so should you: `kinfed deploy key {client} --show`. Compare it by telephone if you have not yet.
3. Edit node.toml: where your data are (data, label), and where the personal model is to be kept (vault).
   What this node will ever answer is yours to say there, too: min_noise, epsilon, methods, evaluate.
4. Start it:  sh start.sh        (Linux, macOS, or WSL)
   Under systemd:  ExecStart=kinfed deploy node /path/to/node.toml,  Restart=always,  User= one for it alone

SECRET: the file {client} is this site's private key. Anyone who has it can take part as {client}. It is readable for
its owner only (mode 600); no one else needs it, the operator least of all. If it may have leaked, tell the operator,
who revokes it, and make another. The vault, which the node makes, is personal and stays here; back it up.
Not secret: ca.crt, by which the node knows the server; node.toml; start.sh; peers.
This node runs the kinfed that you have installed, and no code that comes with a run.
{peers}
After an upgrade of kinfed, stop and start the node: a running one goes on with what it has imported.
To leave: stop the node, and tell the operator. Your personal model stays in the vault and needs no server.
"""

_PEERS = """\

peers holds the public keys of all clients. In a secure sum this node takes part with these clients only, and no server
can put others in their place. Where it counts, compare fingerprints with the other sites: kinfed deploy members peers
When a site joins, it sends its .pub: kinfed deploy enrol peers SITE.pub; when one leaves: kinfed deploy revoke.
Without `peers` in node.toml the keys that come first are believed. With it, updates can be sent in secure sums only:
add require_secure_aggregation = "yes" to node.toml.
"""


@dataclass(frozen=True)
class KitFile:
    name: str  # with / between folders
    data: bytes
    mode: int


def node_toml(server: str, node: Mapping[str, str], *, ca: str = "", key: str = "") -> str:
    """The file that `kinfed deploy node` starts from. A JSON string is a TOML string."""
    keys = "".join(f"{name} = {json.dumps(value)}\n" for name, value in (("ca", ca), ("key", key)) if value)
    lines = "".join(f"{name} = {json.dumps(value)}\n" for name, value in node.items())
    return _NODE.format(client=node["client"], server=json.dumps(server), keys=keys, node=lines)


def kit_files(certs: Path, client: str, server: str, node: Mapping[str, str], peers: bool = True) -> list[KitFile]:
    """Files of a kit. `certs`: the folder of `kinfed deploy certs`. `node`: keys of [node] that are known already.
    `peers`: with the public keys of all clients that the folder knows."""
    from kinfed.deploy.transport.client_keys import read_members

    host, colon, port = server.rpartition(":")
    if not (host and colon and port.isdigit()):
        raise ConfigError(f"--server is the superlink as the site reaches it, host:port; got {server!r}")
    check_key_name(client, "client")
    if not (certs / "ca.crt").is_file():
        raise StorageError(
            f"{certs / 'ca.crt'} does not exist; make it with: kinfed deploy certs {certs} --host {host}"
        )
    with storage.storage_errors("read the certificate in", certs):
        ca = (certs / "ca.crt").read_bytes()
    known = {key.client: key for key in read_members(certs)}
    if client not in known:
        raise ConfigError(
            f"{certs} does not know the key of {client}; the site makes one (kinfed deploy key {client}) and sends "
            f"{client}.pub, then: kinfed deploy enrol {certs} {client}.pub"
        )
    table = {"client": client, "data": "data.csv", "label": "", "vault": "vault"}
    table |= ({"peers": "peers"} if peers else {}) | dict(node)
    text = node_toml(server, {name: value for name, value in table.items() if value}, ca="ca.crt", key=client)
    about = {"client": client, "line": "=" * (12 + len(client)), "version": __version__}
    about |= {"peers": _PEERS if peers else "", "fingerprint": known[client].fingerprint}
    return [
        KitFile("ca.crt", ca, 0o644),
        KitFile("node.toml", text.encode(), 0o644),
        KitFile("start.sh", _START.format(**about).encode(), 0o755),
        KitFile("README.txt", _README.format(**about).encode(), 0o644),
        *(KitFile(f"peers/{name}.pub", f"{key.line}\n".encode(), 0o644) for name, key in known.items() if peers),
    ]


def check_key_name(name: str, what: str) -> None:
    if not can_name_a_key(name):
        raise ConfigError(f"{name!r} cannot be the name of a {what}'s key file; use letters, digits, - and _")


def can_name_a_key(name: str) -> bool:
    return storage.file_name(name) == name and name not in ("ca", "server")


def write_kit(out: Path, files: list[KitFile]) -> list[Path]:
    """Write a folder or, if the name ends in .zip, a file. An existing one is refused: a site may have edited it."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise StorageError(f"{out} exists already; choose another name with --out")
    if out.suffix == ".zip":
        storage.make_folder(out.parent)
        storage.write_atomically(out, _zip(out.stem, files))
        return [out]
    storage.make_folder(out)
    for file in files:
        storage.make_folder((out / file.name).parent)
        write_with_mode(out / file.name, file.data, file.mode)
    return [out / file.name for file in files]


def write_with_mode(path: Path, data: bytes, mode: int) -> None:
    with storage.storage_errors("write", path), storage.draft(path.parent, private=True) as new:
        new.write(data)
        os.chmod(new.path, mode)
        new.commit(path)


def _zip(folder: str, files: list[KitFile]) -> bytes:
    """Modes go with the files, where the program that unpacks them keeps modes."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in files:
            info = zipfile.ZipInfo(f"{folder}/{file.name}")
            info.external_attr = (0o100000 | file.mode) << 16
            archive.writestr(info, file.data)
    return buffer.getvalue()
