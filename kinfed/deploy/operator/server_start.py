"""Start the server from its folder of certificates, and keep it running: Flower's superlink, and a warm worker that
does the server's part of a run.

Flower gives a program 30 s to report after it was started; on a busy machine one that imports PyTorch first may take
longer, and is started anew, again and again. A fork of the warm worker reports at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kinfed.core import storage
from kinfed.deploy.programs.processes import flower_program
from kinfed.deploy.programs.supervised import Service, run_service
from kinfed.deploy.programs.warm_worker import SERVER_PROGRAM
from kinfed.errors import StorageError

RESTART_SECONDS = 3.0
_ENDED = (
    "If it says that the address is in use, another process listens there. Current runs have ended: start them again"
)


@dataclass(frozen=True)
class ServerPlace:
    """Where the superlink listens, and its files."""

    certs: Path  # the folder of `kinfed deploy certs`
    host: str
    port: int
    folder: Path  # for its database and Flower's own files

    def command(self) -> list[str]:
        """That starts the superlink, with TLS and for registered nodes only."""
        return [
            flower_program("flower-superlink"), "--host", self.host, "--port", str(self.port),
            "--database", str(self.folder.resolve() / "superlink.db"), "--disable-runtime-dependency-installation",
            "--ssl-ca-certfile", str(self.certs / "ca.crt"), "--ssl-certfile", str(self.certs / "server.crt"),
            "--ssl-keyfile", str(self.certs / "server.key"), "--enable-supernode-auth",
        ]  # fmt: skip

    def check(self) -> None:
        for name in ("ca.crt", "server.crt", "server.key"):
            if not (self.certs / name).is_file():
                raise StorageError(
                    f"{self.certs / name} does not exist; make it with: kinfed deploy certs {self.certs} --host "
                    f"{self.host}"
                )


def run_server(
    place: ServerPlace, say: Callable[[str], None], should_stop: Callable[[], bool], *, warm: bool = True
) -> None:
    """Run the superlink until it should stop."""
    place.check()
    storage.make_folder(place.folder)
    service = Service("superlink", place.command, SERVER_PROGRAM, RESTART_SECONDS, _ENDED)
    say(f"superlink: listens on {place.host}:{place.port}, with TLS and node authentication; Ctrl-C stops it")
    run_service(service, say, should_stop, warm=warm, home=place.folder / "flower")
    say("superlink: stopped")
