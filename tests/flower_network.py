"""A superlink and supernodes as processes of their own, on this machine, for tests and measurements."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kinfed.deploy.operator.site_kit import node_toml
from kinfed.deploy.programs.app_folder import make_app
from kinfed.deploy.programs.processes import free_port

BIN = Path(sys.executable).parent
CONNECTION = "net"
_LIBC = ctypes.CDLL(None)  # loaded here, for between fork and exec nothing may wait for a lock of another thread


class Network:
    """A server and its nodes. `certs`: a folder of `kinfed deploy certs`; `inside` gives what comes before a command
    that runs at "server" or at a node; `host` is the server's address for nodes."""

    def __init__(
        self, folder: Path, *, certs: Path, host: str = "127.0.0.1", inside: Callable[[str], list[str]] = lambda _: []
    ) -> None:
        self.folder, self.certs, self.host, self.inside = folder, certs, host, inside
        self.port, self.control_port = free_port(), free_port()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.logs: dict[str, Path] = {}
        home = folder / "home"
        home.mkdir(parents=True)
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\n'
            f'address = "127.0.0.1:{self.control_port}"\nroot-certificates = "{certs / "ca.crt"}"\n'
        )

    def environment(self, home: str) -> dict[str, str]:
        return os.environ | {
            "FLWR_HOME": str(self.folder / home), "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1",
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        }  # fmt: skip

    def start(self, name: str, *command: str, home: str, at: str = "server") -> None:
        (self.folder / home).mkdir(exist_ok=True)
        log = self.folder / f"{name}.log"
        with log.open("ab") as file:
            self.processes[name] = subprocess.Popen(
                [*self.inside(at), _program(command[0]), *command[1:]], cwd=self.folder, stdout=file,
                stderr=subprocess.STDOUT,
                env=self.environment(home), start_new_session=True, preexec_fn=_die_with_the_tests,
            )  # fmt: skip
        self.logs[name] = log

    def start_server(self, *, faults: str = "") -> None:
        """`kinfed deploy server`, which starts its superlink again when that ends."""
        ports = ["--host", self.host, "--port", str(self.port), "--control-port", str(self.control_port)]
        place = [str(self.certs), *ports, "--folder", str(self.folder / "superlink")]
        self.start("superlink", *self._kinfed("server", faults), "deploy", "server", *place, home="home-server")
        self.wait_for(self._listening, 400, "the server to listen")

    def start_node(
        self, client: str, config: Mapping[str, Any], *, key: Path | None = None, faults: str = "", address: str = ""
    ) -> None:
        """`kinfed deploy node`, which starts its supernode again when that ends. `faults`: Python that the node's owner
        runs before it, in the same process; `address`: another than the server's."""
        path = self.folder / f"{client}.toml"
        keys = {"ca": str(self.certs / "ca.crt"), "key": str(key or self.certs / client)}
        node = {name: str(value) for name, value in config.items()}
        path.write_text(node_toml(address or f"{self.host}:{self.port}", node, **keys))
        home = f"home-{client}"
        command = ["deploy", "node", str(path), "--home", str(self.folder / home)]
        self.start(f"node-{client}", *self._kinfed(client, faults), *command, home=home, at=client)

    def _kinfed(self, name: str, faults: str) -> list[str]:
        if not faults:
            return [sys.executable, "-m", "kinfed"]
        path = self.folder / f"{name}.py"
        path.write_text(f"{faults}\nfrom kinfed.cli.app import main\n\nmain()\n")
        return [sys.executable, str(path)]

    def _listening(self) -> bool:
        assert self.processes["superlink"].poll() is None, self.log("superlink")
        code = "import socket, sys; [socket.create_connection((sys.argv[1], int(p)), 1) for p in sys.argv[2:]]"
        command = [*self.inside("server"), sys.executable, "-c", code]
        places = ([self.host, str(self.port)], ["127.0.0.1", str(self.control_port)])
        return all(subprocess.run([*command, *place], capture_output=True).returncode == 0 for place in places)

    def flwr(self, *arguments: str, check: bool = True) -> str:
        done = subprocess.run(
            [*self.inside("server"), str(BIN / "flwr"), *arguments], cwd=self.folder, env=self.environment("home"),
            capture_output=True,
            text=True, timeout=400, check=False,
        )  # fmt: skip
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    def register(self, *clients: str) -> None:
        for client in clients:
            self.flwr("supernode", "register", str(self.certs / f"{client}.pub"), CONNECTION)

    def app(self, settings: Mapping[str, Any], name: str = "app", shim: str | None = None) -> Path:
        """An app folder as `kinfed deploy init` writes it, with other settings."""
        folder = self.folder / name
        make_app(folder)
        path = folder / "pyproject.toml"
        text = path.read_text()
        for key, value in settings.items():
            text, count = re.subn(rf"(?m)^{key} = .*$", f"{key} = {json.dumps(value)}", text)
            assert count == 1, key
        path.write_text(text)
        if shim is not None:
            (folder / "kinfed_app.py").write_text(shim)
        return folder

    def run(self, app: Path, **settings: Any) -> str:
        config = " ".join(f"{key}={json.dumps(value)}" for key, value in settings.items())
        text = self.flwr("run", str(app), CONNECTION, "--format", "json", *(["--run-config", config] if config else []))
        found: dict[str, Any] = json.loads(text[text.index("{") : text.rindex("}") + 1])
        assert "run-id" in found, text
        return str(found["run-id"])

    def wait_text(self, out: Path, text: str, seconds: float = 420) -> str:
        """Until the log of a run says so (asking Flower takes a process each time); the log."""
        end = time.monotonic() + seconds
        while text not in (said := _read(out / "log.txt")):
            if time.monotonic() > end or "stopped: " in said:
                nodes = "".join(f"\n== {name}\n{self.log(name)[-3000:]}" for name in self.logs)
                raise AssertionError(f"waited {seconds:g} s for {text!r}; the run said:\n{said}{nodes}")
            time.sleep(0.2)
        return said

    def text(self, out: Path) -> str:
        """The log of a run."""
        return _read(out / "log.txt")

    def wait_done(self, out: Path, seconds: float = 420) -> str:
        return self.wait_text(out, " done; ", seconds)

    def log(self, name: str) -> str:
        return self.logs[name].read_text(errors="replace")

    def wait_for(self, happened: Any, seconds: float, what: str) -> None:
        end = time.monotonic() + seconds
        while not happened():
            assert time.monotonic() < end, f"waited {seconds:g} s for {what}"
            time.sleep(0.1)

    def kill(self, name: str, how: int = signal.SIGKILL) -> None:
        """The process and all that it started, in whatever groups."""
        process = self.processes.pop(name)
        family = _descendants(process.pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, how)
        for pid in family:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, how)
        process.wait(30)

    def kill_program(self, name: str, text: str) -> None:
        """Of all that a process has started, what has this text in its command line."""
        for pid in _descendants(self.processes[name].pid):
            with contextlib.suppress(OSError):  # it has ended meanwhile
                if text in Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode():
                    os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        """What has others to end, and files to remove, is asked first."""
        supervisors = [process for process in self.processes.values() if "deploy" in process.args]
        for process in supervisors:
            process.terminate()
        for process in supervisors:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
        for name in reversed(list(self.processes)):
            self.kill(name)


def _descendants(pid: int) -> list[int]:
    """On Linux; elsewhere a group is all that is known."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            parents[int(path.parent.name)] = int(path.read_text(errors="replace").rpartition(")")[2].split()[1])
    family = [pid]
    for member in family:
        family += [child for child, parent in parents.items() if parent == member]
    return family[1:]


def _program(name: str) -> str:
    return name if Path(name).is_absolute() else str(BIN / name)


def _die_with_the_tests() -> None:
    """A killed test process leaves nothing running: Linux ends its children with it (PR_SET_PDEATHSIG)."""
    if sys.platform == "linux":
        _LIBC.prctl(1, signal.SIGKILL)


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


@contextlib.contextmanager
def network(folder: Path, **options: Any) -> Iterator[Network]:
    made = Network(folder, **options)
    try:
        yield made
    finally:
        made.close()
