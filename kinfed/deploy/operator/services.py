"""A node and a server, started from their files and kept running: a program of Flower that is started again whenever it
ends, beside a warm worker that does its tasks. The file of a node:

    server = "fl.example.org:8000"        the superlink
    ca = "ca.crt"                         its certificate authority; no line: a server without TLS
    key = "hospital-a"                    the node's private key, for Flower and for kinfed
    trusted_entities = "trusted.yaml"     keys of which one has to have signed a run's app, as Flower's supernode reads
                                          them; no line: any run of kinfed's own app

    [node]                                as in --node-config (kinfed.deploy.node.node_settings)
    client = "hospital-a"
    data = "/srv/patients.csv"
    vault = "vault"

Paths are relative to the file's folder.
"""

from __future__ import annotations

import email.utils
import http.client
import os
import ssl
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kinfed.core import storage
from kinfed.deploy.node.node_data import audit_sentences
from kinfed.deploy.node.node_settings import NodeSettings
from kinfed.deploy.programs.processes import end_group, flower_environment, flower_program, free_port, start_group
from kinfed.deploy.programs.task_programs import CLIENT_PROGRAM, SERVER_PROGRAM, UNFINISHED
from kinfed.deploy.programs.unfinished_runs import Resumer
from kinfed.deploy.programs.warm_worker import WarmWorker, load_task, reason_against
from kinfed.errors import ConfigError, StorageError

Say = Callable[[str], None]
ShouldStop = Callable[[], bool]
LOOPBACK = "127.0.0.1"
_KEYS = ("server", "ca", "key", "trusted_entities", "node")
# The superlink takes a killed node for alive for about a minute, and refuses its key meanwhile.
NODE_RESTART_SECONDS, SERVER_RESTART_SECONDS = 15.0, 3.0
# Flower refuses a node's signature whose time lies this far ahead of the server's, or this far behind.
CLOCK_AHEAD, CLOCK_BEHIND = 5.0, 300.0
_NODE_ENDED = (
    "If it says 'Failed to activate', its key is not registered (flwr supernode register), or the superlink still "
    "believes that the former node with this key is alive, which lasts about a minute"
)
_SERVER_ENDED = (
    "If it says that the address is in use, another process listens there. Runs are started again when it listens"
)
_GATE_ENDED = "If it says that the address is in use, another process listens there; nodes wait meanwhile"


@dataclass(frozen=True)
class Supervised:
    name: str  # for people
    command: Callable[[], list[str]]  # asked for at every start
    restart_seconds: float  # between an end and the next start
    advice: Callable[[], str]  # what its end may mean


def run_service(
    programs: Sequence[Supervised], task: str, say: Say, should_stop: ShouldStop, *, warm: bool, home: Path,
    also: Callable[[], None] = lambda: None,
) -> None:  # fmt: skip
    """Keep programs running until it should stop, and do the tasks that Flower starts as the program `task`. `home`:
    the folder of Flower's own files; `also` is called several times a second."""
    os.environ.update(flower_environment(home))
    if reason := reason_against():
        raise ConfigError(f"{reason}, by which tasks are held to the installed kinfed; use Linux, macOS or WSL")
    if os.geteuid() == 0:
        say("runs as root: give it a user of its own, who can read its data and nothing else")
    worker = WarmWorker(task, say, cold=not warm)
    processes = [_Process(program, worker.programs, say) for program in programs]

    def watch() -> bool:
        for process in processes:
            process.watch()
        also()
        return should_stop()

    try:
        watch()
        worker.serve(load_task(task) if warm else None, watch)
    finally:
        for process in reversed(processes):
            process.stop()
        worker.close()


class _Process:
    def __init__(self, program: Supervised, programs: Path, say: Say) -> None:
        self._program, self._programs, self._say = program, programs, say
        self._process: subprocess.Popen[bytes] | None = None
        self._start_at = 0.0

    def watch(self) -> None:
        """Start it when it has not begun, and again when it has ended and the time has come."""
        if self._process is None:
            if time.monotonic() >= self._start_at:
                path = os.pathsep.join([str(self._programs), os.environ["PATH"]])
                sys.stdout.flush()
                self._process = start_group(self._program.command(), os.environ | {"PATH": path})
        elif (status := self._process.poll()) is not None:
            end_group(self._process, 0.0)
            pause = self._program.restart_seconds
            self._process, self._start_at = None, time.monotonic() + pause
            self._say(
                f"the {self._program.name} has ended with status {status}; the next try is in {pause:g} s. "
                f"{self._program.advice()}"
            )

    def stop(self) -> None:
        if self._process is not None:
            end_group(self._process)


@dataclass(frozen=True)
class NodeFile:
    """Content of a node's file; paths are absolute."""

    server: str
    node: Mapping[str, str]  # --node-config
    folder: Path
    ca: Path | None = None
    key: Path | None = None
    trusted_entities: Path | None = None

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
        ca, key, trusted = (_existing(folder, table, name, path) for name in ("ca", "key", "trusted_entities"))
        if (ca is None) != (key is None):
            raise ConfigError(
                f"{path} names only one of ca and key; a node has both, or neither for a server without TLS"
            )
        return cls(table["server"], _node_config(table["node"], folder, key), folder, ca, key, trusted)

    def command(self, port: int) -> list[str]:
        """Command that starts the supernode; `port` is one of this machine, for its own use."""
        secure = ["--insecure"]
        if self.ca is not None:
            secure = ["--root-certificates", str(self.ca), "--auth-supernode-private-key", str(self.key)]
        if self.trusted_entities is not None:
            secure += ["--trusted-entities", str(self.trusted_entities)]
        config = " ".join(f'{name}="{value}"' for name, value in self.node.items())
        place = ["--superlink", self.server, "--port", str(port)]
        return [flower_program("flower-supernode"), *secure, *place, "--node-config", config]


def run_node(file: NodeFile, say: Say, should_stop: ShouldStop, *, warm: bool = True, home: Path | None = None) -> None:
    """Run the node until it should stop. `home`: the folder of Flower's own files (default: beside the node's)."""

    def advice() -> str:
        return clock_fault(file) or _NODE_ENDED

    program = Supervised("supernode", lambda: file.command(free_port()), NODE_RESTART_SECONDS, advice)
    say(f"node of {file.node['client']}: connects to {file.server}; Ctrl-C stops it")
    if fault := clock_fault(file):
        say(fault)
    say("runs the installed kinfed for every message, and no code that a run brings")
    for settings in NodeSettings.parse_all(file.node):
        for sentence in audit_sentences(settings):
            say(f"data of {settings.client}: {sentence}")
    run_service([program], CLIENT_PROGRAM, say, should_stop, warm=warm, home=home or file.folder / "flower")
    say(f"node of {file.node['client']}: stopped")


def clock_fault(file: NodeFile) -> str:
    """A sentence where this machine's clock differs from the server's by more than Flower bears; "" if it does not,
    or the server says no time. Flower's own answer would be that the node's key is not valid."""
    if file.ca is None:
        return ""
    context = ssl.create_default_context(cafile=str(file.ca))
    connection = http.client.HTTPSConnection(file.server, timeout=3, context=context)
    try:
        connection.request("GET", "/")
        date = connection.getresponse().getheader("Date")
        difference = time.time() - email.utils.parsedate_to_datetime(date or "").timestamp()
    except (OSError, ValueError, http.client.HTTPException):
        return ""
    finally:
        connection.close()
    if -CLOCK_BEHIND < difference < CLOCK_AHEAD:
        return ""
    way = "ahead of" if difference > 0 else "behind"
    return (
        f"the clock of this machine is {abs(difference):.0f} s {way} the server's: Flower refuses signatures more than "
        f"{CLOCK_AHEAD:g} s ahead or {CLOCK_BEHIND:g} s behind. Set it (by NTP, say); the key is not at fault"
    )


def _existing(folder: Path, table: Mapping[str, Any], name: str, path: Path) -> Path | None:
    if name not in table:
        return None
    file = folder / str(table[name])
    if not file.is_file():
        advice = f"; make it with: kinfed deploy key {file.name} --folder {file.parent}" if name == "key" else ""
        raise StorageError(f"{path} says {name} = {str(table[name])!r}, and {file} is no file{advice}")
    return file


def _node_config(table: Mapping[str, Any], folder: Path, key: Path | None) -> dict[str, str]:
    """The table as text, with absolute paths; values that Flower cannot pass on are refused."""
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


@dataclass(frozen=True)
class ServerPlace:
    """The server's addresses and files. Nodes reach `host`:`port`, behind which is Flower's Fleet API and nothing else;
    the operator's `flwr` reaches the superlink itself, on this machine at `control_port`."""

    certs: Path  # the folder of `kinfed deploy certs`
    host: str
    port: int
    control_port: int
    folder: Path  # for its database and Flower's own files

    def superlink(self) -> list[str]:
        """Command that starts the superlink, with TLS and for registered nodes only."""
        return [
            flower_program("flower-superlink"), "--host", LOOPBACK, "--port", str(self.control_port),
            "--database", str(self.folder.resolve() / "superlink.db"), "--disable-runtime-dependency-installation",
            "--ssl-ca-certfile", str(self.certs / "ca.crt"), "--ssl-certfile", str(self.certs / "server.crt"),
            "--ssl-keyfile", str(self.certs / "server.key"), "--enable-supernode-auth",
        ]  # fmt: skip

    def gate(self) -> list[str]:
        """Command that starts the door for nodes."""
        ports = [self.host, str(self.port), str(self.control_port)]
        return [sys.executable, "-m", "kinfed.deploy.programs.fleet_gate", *ports, str(self.certs.resolve())]

    def check(self) -> None:
        if self.port == self.control_port:
            raise ConfigError(f"nodes and the operator need two ports; got {self.port} for both")
        for name in ("ca.crt", "server.crt", "server.key"):
            if not (self.certs / name).is_file():
                command = f"kinfed deploy certs {self.certs} --host {self.host}"
                raise StorageError(f"{self.certs / name} does not exist; make it with: {command}")


def run_server(place: ServerPlace, say: Say, should_stop: ShouldStop, *, warm: bool = True) -> None:
    """Run the superlink, and the door for nodes, until it should stop."""
    place.check()
    storage.make_folder(place.folder)
    programs = [
        Supervised("superlink", place.superlink, SERVER_RESTART_SECONDS, lambda: _SERVER_ENDED),
        Supervised("door for nodes", place.gate, SERVER_RESTART_SECONDS, lambda: _GATE_ENDED),
    ]
    who = "this machine" if place.host in (LOOPBACK, "localhost", "::1") else "every machine that reaches this address"
    say(
        f"nodes    {place.host}:{place.port}: {who}, over TLS and with a registered key; nothing but Flower's Fleet API"
    )
    say(
        f"operator {LOOPBACK}:{place.control_port}: whoever has an account on this machine can start and stop runs of "
        "the installed kinfed and register nodes, without a key"
    )
    say("Ctrl-C stops it")
    home, unfinished = place.folder.resolve() / "flower", place.folder.resolve() / "unfinished"
    os.environ[UNFINISHED] = str(unfinished)
    resumer = Resumer(unfinished, home, place.control_port, place.certs / "ca.crt", say)
    run_service(programs, SERVER_PROGRAM, say, should_stop, warm=warm, home=home, also=resumer.watch)
    say("server: stopped")
