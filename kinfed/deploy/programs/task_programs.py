"""Flower's task programs, with the installed kinfed in place of whatever app a run names.

Flower's own `flwr-clientapp` installs the app that a run brings and executes it, with the rights of the node: anyone
who may start a run could read tables and keys, and the owner's rules would be void, for they are enforced by the code
that the app replaces. The programs here take a run's configuration and its messages, and nothing else. An app is looked
at only to refuse what is not kinfed's: its file `kinfed_app.py` is known by its digest, and no other component is
named. Not even an app that is accepted is unpacked at a node.

They replace three names in Flower's two modules that run apps. Flower is pinned to a minor version; should a name be
missing, no task is done.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import sys
import tomllib
import zipfile
from collections.abc import Callable
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from kinfed.deploy.node.node_settings import Refused
from kinfed.deploy.operations.log_lines import json_lines
from kinfed.deploy.programs.app_folder import COMPONENTS, SHIM, SHIM_FILE
from kinfed.deploy.programs.unfinished_runs import unfinished
from kinfed.errors import ConfigError, PoolError

CLIENT_PROGRAM = "flwr-clientapp"  # answers one message at a node
SERVER_PROGRAM = "flwr-serverapp"  # the server's part of one run
UNFINISHED = "KINFED_UNFINISHED_RUNS"  # the variable with the folder of their notes
_LARGEST_FILE = 1 << 20  # bytes of a file of an app that is read


def check_app(content: bytes) -> None:
    """Refused where an app (a FAB, as bytes) is another than what `kinfed deploy init` writes."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            shim, project = (_read(archive, name) for name in (SHIM_FILE, "pyproject.toml"))
        app = tomllib.loads(project.decode())["tool"]["flwr"]["app"]
        components = app["components"]
    except (KeyError, TypeError, ValueError, zipfile.BadZipFile) as error:
        raise Refused(f"the run's app cannot be read ({type(error).__name__}); {_ONLY}") from None
    if components != COMPONENTS:
        raise Refused(f"the run's app names {_shown(components)}; {_ONLY}")
    if hashlib.sha256(shim).digest() != hashlib.sha256(SHIM.encode()).digest():
        raise Refused(f"the run's app has another {SHIM_FILE} than kinfed deploy init writes; {_ONLY}")


_ONLY = "only the kinfed that is installed here is run, so start runs from a folder of: kinfed deploy init"


def write_programs(folder: Path, name: str, start: str) -> None:
    """Write the folder that comes first in the PATH of Flower's programs: the one of this name runs `start`, a line for
    the shell, and all others that do tasks (agents, simulations, models) refuse."""
    for other in metadata.entry_points(group="console_scripts"):
        if other.name.startswith("flwr-"):
            (folder / other.name).write_text(_REFUSING.format(name=other.name), "utf-8")
            (folder / other.name).chmod(0o700)
    (folder / name).write_text(f"#!/bin/sh\n{start}\n", "utf-8")
    (folder / name).chmod(0o700)


_REFUSING = """\
#!/bin/sh
echo "kinfed: {name} was asked for and is not run: only the installed kinfed is" >&2
exit 1
"""


def _read(archive: zipfile.ZipFile, name: str) -> bytes:
    with archive.open(name) as file:
        return file.read(_LARGEST_FILE)


def _shown(components: object) -> str:
    return repr(components)[:200]


def client_task() -> None:
    """Do what `flwr-clientapp` does with sys.argv: answer one message, by kinfed."""
    from kinfed.deploy.programs.flower import client_app

    module = import_module("flwr.supernode.runtime.run_clientapp")
    _replace(module, "install_from_fab", lambda content, **_: check_app(content))
    _replace(module, "get_load_client_app_fn", lambda **_: lambda *_app: client_app)
    with json_lines("node", "flwr"):
        _flower_program(CLIENT_PROGRAM)


def server_task() -> None:
    """Do what `flwr-serverapp` does with sys.argv: the server's part of one run, by kinfed."""
    from kinfed.deploy.programs.flower import server_app

    module = import_module("flwr.superlink.runtime.run_serverapp")
    install = module.install_from_fab

    def install_checked(content: bytes, **options: Any) -> Any:
        check_app(content)
        return install(content, **options)

    def run(*, grid: Any, context: Any, **_app: Any) -> Any:
        with unfinished(Path(os.environ[UNFINISHED]), context.run_id, context.run_config):
            server_app(grid, context)
        return context

    _replace(module, "install_from_fab", install_checked)
    _replace(module, "run_", run)
    with json_lines("server", "flwr"):
        _flower_program(SERVER_PROGRAM)


TASKS: dict[str, Callable[[], None]] = {CLIENT_PROGRAM: client_task, SERVER_PROGRAM: server_task}


def _replace(module: Any, name: str, value: Any) -> None:
    if not hasattr(module, name):
        raise PoolError(
            f"the installed Flower {metadata.version('flwr')} has no {module.__name__}.{name}, so its tasks cannot be "
            "held to the installed kinfed; nothing is run. Install the version that kinfed[flower] asks for"
        )
    setattr(module, name, value)


def _flower_program(name: str) -> None:
    """Call Flower's program; nothing that an app asks for is installed, and no memory is written to a disk. If memory
    runs out, the system ends this process and no other of the machine: a run may name a model that no memory holds."""
    import resource  # not on Windows, where no node runs

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):  # only Linux has the file
        Path("/proc/self/oom_score_adj").write_text("1000", "ascii")
    sys.argv = [argument for argument in sys.argv if argument != "--allow-runtime-dependency-installation"]
    (entry,) = metadata.entry_points(group="console_scripts", name=name)
    entry.load()()


def main() -> None:
    """`python -m kinfed.deploy.programs.task_programs NAME ...`: the program of that name."""
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in TASKS:
        raise ConfigError(f"this does the work of {', '.join(TASKS)}; got {name!r}")
    sys.argv = sys.argv[1:]
    TASKS[name]()


if __name__ == "__main__":
    main()
