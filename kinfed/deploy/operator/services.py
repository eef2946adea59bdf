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

import contextlib
import json
import os
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kinfed.core import storage
from kinfed.deploy.node.node import SERVER_NAME
from kinfed.deploy.node.node_data import audit_sentences
from kinfed.deploy.node.node_settings import NodeSettings
from kinfed.deploy.node.vault import Vault
from kinfed.deploy.operations import checks
from kinfed.deploy.operations.alerts import check_hook
from kinfed.deploy.operations.log_lines import JSON, VARIABLE, rewritten, say_json
from kinfed.deploy.programs.health_page import ALERT, parse_listen
from kinfed.deploy.programs.processes import end_group, flower_environment, flower_program, free_port, start_group
from kinfed.deploy.programs.task_programs import CLIENT_PROGRAM, SERVER_PROGRAM, UNFINISHED
from kinfed.deploy.programs.unfinished_runs import Resumer
from kinfed.deploy.programs.warm_worker import WarmWorker, load_task, reason_against
from kinfed.errors import ConfigError, StorageError, unknown_name
from kinfed.version import __version__

Say = Callable[[str], None]
ShouldStop = Callable[[], bool]
LOOPBACK = "127.0.0.1"
_KEYS = ("server", "ca", "key", "trusted_entities", "node")
# The superlink takes a killed node for alive for about a minute, and refuses its key meanwhile.
NODE_RESTART_SECONDS, SERVER_RESTART_SECONDS = 15.0, 3.0
HEARTBEAT, HEARTBEAT_SECONDS = "service.json", 5.0  # the file in the folder of Flower's own files; between two writings
_NODE_ENDED = (
    "If it says 'Failed to activate', its key is not registered (flwr supernode register), or the superlink still "
    "believes that the former node with this key is alive, which lasts about a minute"
)
_SERVER_ENDED = (
    "If it says that the address is in use, another process listens there. Runs are started again when it listens"
)
_HEALTH_ENDED = "If it says that the address is in use, name another port (--health)"
_GATE_ENDED = "If it says that the address is in use, another process listens there; nodes wait meanwhile"


@dataclass(frozen=True)
class Supervised:
    name: str  # for people
    command: Callable[[], list[str]]  # asked for at every start
    restart_seconds: float  # between an end and the next start
    advice: Callable[[], str]  # what its end may mean


@dataclass(frozen=True)
class Watching:
    """How a service is watched: where health and metrics are, who is told of troubles, and how logs are written."""

    health: str = ""  # "": nowhere; a port of this machine, or host:port
    alert: str = ""  # "": none; a command or an address
    log: str = "text"  # or json

    def __post_init__(self) -> None:
        if self.health:
            parse_listen(self.health)
        if self.alert:
            check_hook(self.alert)
        if self.log not in ("text", JSON):
            raise unknown_name("log", self.log, ("text", JSON))

    def program(self, **about: Any) -> list[Supervised]:
        """The program that answers and tells, where one is asked for. `about`: as its module says."""
        if not self.health and not self.alert:
            return []
        os.environ[ALERT] = (
            self.alert
        )  # not an argument: an address may hold a secret, and everybody can list arguments
        argument = json.dumps({**about, "listen": self.health}, default=str)
        command = [sys.executable, "-m", "kinfed.deploy.programs.health_page", argument]
        return [Supervised("health page", lambda: command, SERVER_RESTART_SECONDS, lambda: _HEALTH_ENDED)]


def run_service(
    programs: Sequence[Supervised], task: str, say: Say, should_stop: ShouldStop, *, warm: bool, home: Path,
    json_lines: bool = False, also: Callable[[], None] = lambda: None,
) -> None:  # fmt: skip
    """Keep programs running until it should stop, and do the tasks that Flower starts as the program `task`. `home`:
    the folder of Flower's own files and of the heartbeat; `also` is called several times a second."""
    os.environ.update(flower_environment(home))
    storage.make_folder(home)
    if reason := reason_against():
        raise ConfigError(f"{reason}, by which tasks are held to the installed kinfed; use Linux, macOS or WSL")
    if os.geteuid() == 0:
        say("runs as root: give it a user of its own, who can read its data and nothing else")
    worker = WarmWorker(task, say, cold=not warm)
    processes = [_Process(program, worker.programs, say, json_lines) for program in programs]
    next_heartbeat = 0.0

    def watch() -> bool:
        nonlocal next_heartbeat
        for process in processes:
            process.watch()
        also()
        if time.monotonic() >= next_heartbeat:
            next_heartbeat = time.monotonic() + HEARTBEAT_SECONDS
            state = {process.name: {"runs": process.runs, "starts": process.starts} for process in processes}
            beat = {"written": time.time(), "version": __version__, "programs": state, "tasks": worker.num_tasks}
            storage.write_json(home / HEARTBEAT, beat)
        return should_stop()

    try:
        watch()
        worker.serve(load_task(task) if warm else None, watch)
    finally:
        for process in reversed(processes):
            process.stop()
        worker.close()


class _Process:
    def __init__(self, program: Supervised, programs: Path, say: Say, json_lines: bool) -> None:
        self._program, self._programs, self._say = program, programs, say
        self._process: subprocess.Popen[bytes] | None = None
        self._start_at = 0.0
        self._output = _Output(program.name) if json_lines else None
        self.name, self.starts = program.name, 0

    @property
    def runs(self) -> bool:
        return self._process is not None

    def watch(self) -> None:
        """Start it when it has not begun, and again when it has ended and the time has come."""
        if self._output is not None:
            self._output.pass_on()
        if self._process is None:
            if time.monotonic() >= self._start_at:
                path = os.pathsep.join([str(self._programs), os.environ["PATH"]])
                sys.stdout.flush()
                output = None if self._output is None else self._output.write_end
                self._process = start_group(self._program.command(), os.environ | {"PATH": path}, output)
                self.starts += 1
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
        if self._output is not None:
            self._output.pass_on()


class _Output:
    """What a program prints, as lines of JSON."""

    def __init__(self, source: str) -> None:
        self._source, self._rest = source, b""
        self._read_end, self.write_end = os.pipe()
        os.set_blocking(self._read_end, False)

    def pass_on(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while piece := os.read(self._read_end, 1 << 16):
                *lines, self._rest = (self._rest + piece).split(b"\n")
                for line in lines:
                    print(rewritten(line.decode("utf-8", "replace"), self._source), flush=True)


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


def run_node(
    file: NodeFile, say: Say, should_stop: ShouldStop, *, warm: bool = True, home: Path | None = None,
    watching: Watching | None = None,
) -> None:  # fmt: skip
    """Run the node until it should stop. `home`: the folder of Flower's own files (default: beside the node's)."""
    watching, home = watching or Watching(), home or file.folder / "flower"
    clients = NodeSettings.parse_all(file.node)
    say = _logged(watching, say, "node")
    os.environ[SERVER_NAME] = file.server

    def advice() -> str:
        return clock_fault(file) or _NODE_ENDED

    program = Supervised("supernode", lambda: file.command(free_port()), NODE_RESTART_SECONDS, advice)
    say(f"node of {file.node['client']}: connects to {file.server}; Ctrl-C stops it")
    if fault := clock_fault(file):
        say(fault)
    say("runs the installed kinfed for every message, and no code that a run brings")
    for settings in clients:
        for sentence in audit_sentences(settings):
            say(f"data of {settings.client}: {sentence}")
    vaults = {settings.client: Vault(settings.vault) for settings in clients}
    health = watching.program(
        side="node", name=file.node["client"], heartbeat=home / HEARTBEAT, folder=next(iter(vaults.values())).folder,
        certificates={} if file.ca is None else {str(file.ca): "ask the operator for a new ca.crt"},
        logs={client: vault.audit_log(client).path for client, vault in vaults.items()},
    )  # fmt: skip
    run_service(
        [program, *health], CLIENT_PROGRAM, say, should_stop, warm=warm, home=home, json_lines=watching.log == JSON
    )
    say(f"node of {file.node['client']}: stopped")


def _logged(watching: Watching, say: Say, source: str) -> Say:
    """`say`, or lines of JSON here and in all that is started from here."""
    os.environ[VARIABLE] = watching.log
    return say_json(source) if watching.log == JSON else say


def clock_fault(file: NodeFile) -> str:
    """A sentence where this machine's clock differs from the server's by more than Flower bears; "" if it does not,
    or the server says no time. Flower's own answer would be that the node's key is not valid."""
    if file.ca is None:
        return ""
    ahead = checks.ask_door(file.server, file.ca).clock
    clock = None if ahead is None else checks.clock(ahead)
    return "" if clock is None or clock.level == checks.OK else f"{clock.text}. {clock.advice}"


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


def run_server(
    place: ServerPlace, say: Say, should_stop: ShouldStop, *, warm: bool = True, watching: Watching | None = None
) -> None:
    """Run the superlink, and the door for nodes, until it should stop."""
    watching = watching or Watching()
    place.check()
    storage.make_folder(place.folder)
    say = _logged(watching, say, "server")
    programs = [
        Supervised("superlink", place.superlink, SERVER_RESTART_SECONDS, lambda: _SERVER_ENDED),
        Supervised("door for nodes", place.gate, SERVER_RESTART_SECONDS, lambda: _GATE_ENDED),
    ]
    who = "this machine" if place.host in (LOOPBACK, "localhost", "::1") else "every machine that reaches this address"
    say(
        f"nodes    {place.host}:{place.port}: {who}, over TLS and with a registered key; nothing but Flower's Fleet API"
    )
    say(
        f"operator {LOOPBACK}:{place.control_port}: anyone with an account on this machine can start and stop runs of "
        "the installed kinfed and register nodes, without a key"
    )
    say("Ctrl-C stops it")
    home, unfinished = place.folder.resolve() / "flower", place.folder.resolve() / "unfinished"
    os.environ[UNFINISHED] = str(unfinished)
    resumer = Resumer(unfinished, home, place.control_port, place.certs / "ca.crt", say)
    renewal = f"kinfed deploy certs {place.certs} --host NAME, then start the server again"
    programs += watching.program(
        side="server", name=f"{place.host}:{place.port}", heartbeat=home / HEARTBEAT, folder=place.folder.resolve(),
        certificates={str(place.certs.resolve() / name): renewal for name in ("ca.crt", "server.crt")},
        notes=unfinished, members=place.certs.resolve(),
    )  # fmt: skip
    run_service(
        programs, SERVER_PROGRAM, say, should_stop, warm=warm, home=home, json_lines=watching.log == JSON,
        also=resumer.watch,
    )  # fmt: skip
    say("server: stopped")
