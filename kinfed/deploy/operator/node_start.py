"""Start a node from one file, and keep it running: a supernode of Flower, and a warm worker that answers for it.

    server = "fl.example.org:8000"        the superlink
    ca = "ca.crt"                         its certificate authority; no line: a server without TLS
    key = "hospital-a"                    the node's private key, for Flower and for kinfed

    [node]                                as in --node-config (kinfed.deploy.node.node_settings)
    client = "hospital-a"
    data = "/srv/patients.csv"
    vault = "vault"

Paths are relative to the file's folder. A supernode that ends is started again after a while: the superlink takes a
killed node for alive for about a minute, and refuses its key meanwhile.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kinfed.deploy.node.node_settings import NodeSettings
from kinfed.deploy.programs.processes import flower_program, free_port
from kinfed.deploy.programs.supervised import Service, run_service
from kinfed.deploy.programs.warm_worker import CLIENT_PROGRAM
from kinfed.errors import ConfigError, StorageError

RESTART_SECONDS = 15.0
_ENDED = (
    "If it says 'Failed to activate', its key is not registered (flwr supernode register), or the superlink still "
    "believes that the former node with this key is alive, which lasts about a minute"
)
_KEYS = ("server", "ca", "key", "node")


@dataclass(frozen=True)
class NodeFile:
    """What the file of a node says; paths are absolute."""

    server: str
    node: Mapping[str, str]  # --node-config
    folder: Path
    ca: Path | None = None
    key: Path | None = None

    @classmethod
    def read(cls, path: Path) -> NodeFile:
        try:
            table = tomllib.loads(path.read_text("utf-8"))
        except OSError as error:
            raise StorageError(f"cannot read the node's file {path}: {error.strerror or error}") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} is not valid TOML: {error}") from None
        if unknown := sorted(table.keys() - set(_KEYS)):
            raise ConfigError(f"{path}: a node's file may contain {', '.join(_KEYS)}, but not {unknown[0]!r}")
        if not isinstance(table.get("server"), str) or not isinstance(table.get("node"), dict):
            raise ConfigError(f'{path} needs server = "host:port" and a table [node] with client and data')
        folder = path.resolve().parent
        ca, key = (_existing(folder, table, name, path) for name in ("ca", "key"))
        if (ca is None) != (key is None):
            raise ConfigError(
                f"{path} names only one of ca and key; a node has both, or neither for a server without TLS"
            )
        return cls(table["server"], _node_config(table["node"], folder, key), folder, ca, key)

    def command(self, port: int) -> list[str]:
        """That starts the supernode; `port` is one of this machine, for its own use."""
        secure = ["--insecure"]
        if self.ca is not None:
            secure = ["--root-certificates", str(self.ca), "--auth-supernode-private-key", str(self.key)]
        config = " ".join(f'{name}="{value}"' for name, value in self.node.items())
        return [
            flower_program("flower-supernode"), *secure, "--superlink", self.server, "--port", str(port),
            "--node-config", config,
        ]  # fmt: skip


def run_node(
    file: NodeFile,
    say: Callable[[str], None],
    should_stop: Callable[[], bool],
    *,
    warm: bool = True,
    home: Path | None = None,
) -> None:
    """Run the node until it should stop. `home`: the folder of Flower's own files (default: beside the node's)."""
    service = Service("supernode", lambda: file.command(free_port()), CLIENT_PROGRAM, RESTART_SECONDS, _ENDED)
    say(f"node of {file.node['client']}: connects to {file.server}; Ctrl-C stops it")
    run_service(service, say, should_stop, warm=warm, home=home or file.folder / "flower")
    say(f"node of {file.node['client']}: stopped")


def _existing(folder: Path, table: Mapping[str, Any], name: str, path: Path) -> Path | None:
    if name not in table:
        return None
    file = folder / str(table[name])
    if not file.is_file():
        raise StorageError(f"{path} says {name} = {str(table[name])!r}, and {file} is no file")
    return file


def _node_config(table: Mapping[str, Any], folder: Path, key: Path | None) -> dict[str, str]:
    """As text, with absolute paths; what Flower cannot pass on is refused."""
    config = {name: str(value) for name, value in table.items()}
    for name in ("data", "vault", "peers"):
        if config.get(name):
            config[name] = str(folder / Path(config[name]).expanduser())
    if key is not None:
        config.setdefault("key", str(key))
    NodeSettings.parse_all(config)
    for name, value in config.items():
        if '"' in value or "\n" in value:
            raise ConfigError(f"{name} in [node] holds a quotation mark or a new line, which Flower does not pass on")
    return config
