"""Findings about a node or a server: what is wrong or soon will be, and what to do. `kinfed deploy doctor` looks at all
of them once, health and alerts look at those that need no network again and again.
"""

from __future__ import annotations

import email.utils
import http.client
import json
import os
import shutil
import socket
import ssl
import sys
import time
import urllib.request
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from kinfed.version import __version__

OK, WARNING, WRONG = "ok", "warning", "wrong"
LEAST_FREE = 1 << 30  # bytes of a disk; vaults, databases and checkpoints are small, a full disk ends all
EXPIRY_DAYS = 30  # before which a certificate or a key is to be renewed
# Flower refuses a node's signature whose time lies this far ahead of the server's, or this far behind.
CLOCK_AHEAD, CLOCK_BEHIND = 5.0, 300.0
VERSION_HEADER = "kinfed-version"  # of what the server's door answers
NETWORK_SECONDS = 5.0


@dataclass(frozen=True)
class Condition:
    check: str
    level: str
    text: str
    advice: str = ""  # what to do


def disk(folder: Path) -> Condition:
    """Room on the disk of a folder, which need not exist yet, and whether files can be made there."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    try:
        free = shutil.disk_usage(there).free
    except OSError as error:
        return Condition("disk", WRONG, f"{there}: {error.strerror}", "give the node's user access to the folder")
    if not os.access(there, os.W_OK | os.X_OK):
        return Condition("disk", WRONG, f"{there} cannot be written by user {os.geteuid()}", f"chown or chmod {there}")
    if free < LEAST_FREE:
        advice = "free some room, or move the folder to another disk; answers that find no room are not given"
        return Condition("disk", WRONG, f"{there} has {free / 1e6:,.0f} MB left", advice)
    return Condition("disk", OK, f"{there} has {free / 1e9:,.1f} GB left")


def certificate(path: Path, renewal: str) -> Condition:
    """Days until a certificate expires. `renewal`: what to do then."""
    from kinfed.deploy.operator.certs import expiry

    try:
        end = expiry(path)
    except (OSError, ValueError) as error:
        return Condition("certificate", WRONG, f"{path} cannot be read as a certificate ({error})", renewal)
    left = (end - datetime.now(UTC)).total_seconds() / 86400
    day = end.date()
    if left <= 0:
        return Condition("certificate", WRONG, f"{path} has expired on {day}; no node can connect", renewal)
    level = WARNING if left < EXPIRY_DAYS else OK
    return Condition("certificate", level, f"{path} is valid until {day}", renewal if level != OK else "")


def private_key(path: Path, client: str) -> Condition:
    """Whether a node's key can be used, and is for its owner alone."""
    from kinfed.deploy.transport.client_keys import fingerprint, public_of
    from kinfed.errors import KinfedError

    folder = f"--folder {path.parent}"
    try:
        public = public_of(path.read_bytes(), path)
    except (OSError, KinfedError) as error:
        text = f"{path} cannot be used: {getattr(error, 'strerror', None) or error}"
        return Condition("key", WRONG, text, f"restore it, or make a new one: kinfed deploy key {client} {folder}")
    if path.stat().st_mode & 0o077:
        advice = f"chmod 600 {path}; if others may have read it: kinfed deploy key {client} {folder} --renew"
        return Condition("key", WRONG, f"{path} can be read by others on this machine", advice)
    return Condition("key", OK, f"{path}: {fingerprint(public)}")


def members(folder: Path) -> list[Condition]:
    """Keys of sites that have expired or soon will."""
    from kinfed.deploy.transport.client_keys import read_members

    known = read_members(folder)
    conditions = [
        Condition("keys of sites", WRONG if (key.days_left or 0) < 0 else WARNING, key.warning,
                f"at the site: kinfed deploy key {key.client} --renew; here: kinfed deploy enrol {folder} FILE")
        for key in known
        if key.warning
    ]  # fmt: skip
    return conditions or [Condition("keys of sites", OK, f"{folder} knows {len(known)}; none expires soon")]


@dataclass(frozen=True)
class Door:
    """What the server's door for nodes says, or why it says nothing."""

    trouble: str = ""
    advice: str = ""
    clock: float | None = None  # seconds by which this machine is ahead
    version: str = ""


def ask_door(server: str, ca: Path | None) -> Door:
    """Ask the server's door over TLS as a node does, through the proxy that HTTPS_PROXY names, if it names one."""
    host, _, port = server.rpartition(":")
    context = ssl.create_default_context(cafile=None if ca is None else str(ca))
    proxy = urllib.request.getproxies().get("https", "")
    proxy = "" if urllib.request.proxy_bypass(host) else proxy
    via = proxy.rpartition("://")[2].rpartition("@")[2].rstrip("/")
    first = via or server
    connection = http.client.HTTPSConnection(first, timeout=NETWORK_SECONDS, context=context)
    if via:
        connection.set_tunnel(host, int(port))
    begin = time.time()
    try:
        connection.request("GET", "/")
        answer = connection.getresponse()
    except ssl.SSLCertVerificationError as error:
        if "expired" in str(error) or "not yet valid" in str(error):
            what = "is it the server's, or this machine's clock? See kinfed deploy doctor at the server"
            return Door(f"the server's certificate is not valid now ({error.verify_message})", what)
        if "match" in str(error):
            return Door(
                f"the server's certificate is not for {host} ({error.verify_message})",
                f"at the server: kinfed deploy certs CERTS --host {host}, and start it again",
            )
        return Door(
            f"the server's certificate is not signed by {ca} ({error.verify_message})",
            "ask the operator for ca.crt; if a firewall opens TLS, have it leave this address alone",
        )
    except socket.gaierror:
        what = f"the name {first.rpartition(':')[0] or first} is not known here"
        return Door(
            what, "check server in node.toml, or this machine's DNS" + (f"; HTTPS_PROXY is {via}" if via else "")
        )
    except (OSError, http.client.HTTPException) as error:
        way = f"the way through the proxy {via}" if via else f"outbound TCP to port {port}"
        return Door(
            f"{server} does not answer ({error})",
            f"is the server running (kinfed deploy server), and does the firewall here allow {way}? Nothing has to be "
            "open inwards.",
        )
    finally:
        connection.close()
    try:
        date = email.utils.parsedate_to_datetime(answer.getheader("Date") or "").timestamp()
    except ValueError:
        return Door(version=answer.getheader(VERSION_HEADER) or "")
    ahead = begin - date
    return Door(clock=ahead if abs(ahead) > 1.5 else 0.0, version=answer.getheader(VERSION_HEADER) or "")


def clock(ahead: float | None) -> Condition:
    """Whether Flower bears the difference between this machine's clock and the server's."""
    if ahead is None:
        return Condition("clock", WARNING, "the server says no time, so the clock cannot be compared")
    if -CLOCK_BEHIND < ahead < CLOCK_AHEAD:
        return Condition("clock", OK, f"{abs(ahead):.0f} s from the server's")
    way = "ahead of" if ahead > 0 else "behind"
    return Condition(
        "clock", WRONG, f"the clock of this machine is {abs(ahead):.0f} s {way} the server's: Flower refuses "
        f"signatures more than {CLOCK_AHEAD:g} s ahead or {CLOCK_BEHIND:g} s behind",
        "Set it (by NTP, say: timedatectl set-ntp true); the key is not at fault",
    )  # fmt: skip


def minor(version: str) -> str:
    """The part of a version within which nodes and servers fit together."""
    return ".".join(version.split(".")[:2])


def version_advice(
    theirs: str, ours: str = __version__, *, of: str = "the server", here: str = "this node",
    theirs_is_node: bool = False,
) -> str:  # fmt: skip
    """A sentence if two versions do not fit together; "" if they do, or if the other one is not known."""
    if not theirs or minor(theirs) == minor(ours):
        return ""
    at_node = ours if theirs_is_node else theirs
    return (
        f"{of} has kinfed {theirs} and {here} {ours}, which do not fit together: install the same minor version on "
        f"both (at the node kinfed=={minor(at_node)}.* with the extra node), then start both again"
    )


def versions(server: str = "") -> list[Condition]:
    """Python, kinfed beside that of the server, and the packages that a deployment needs."""
    from packaging.requirements import Requirement

    conditions = []
    if problem := version_advice(server):
        conditions.append(Condition("versions", WRONG, problem.partition(":")[0], problem.partition(": ")[2]))
    missing = []
    for text in metadata.requires("kinfed") or []:
        requirement = Requirement(text)
        if requirement.marker is not None and requirement.marker.evaluate({"extra": "flower"}) and not (
            requirement.marker.evaluate({"extra": ""})
        ):  # fmt: skip
            try:
                here = metadata.version(requirement.name)
                if not requirement.specifier.contains(here, prereleases=True):
                    missing.append(f"{requirement.name} {here} does not fit {requirement.specifier}")
            except metadata.PackageNotFoundError:
                missing.append(f"{requirement.name}{requirement.specifier} is not installed")
    if missing:
        conditions.append(Condition("versions", WRONG, "; ".join(missing), "pip install 'kinfed[node]'"))
    beside = f", the server {server}" if server else ""
    known = f"kinfed {__version__}{beside}, Python {sys.version.split()[0]}"
    return conditions or [Condition("versions", OK, known)]


def port_is_free(host: str, port: int, what: str) -> Condition:
    """Whether a port can be listened on; one that is taken may be this very server, running."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
    except OSError as error:
        advice = f"stop the other process (ss -ltnp 'sport = :{port}'), or name another port"
        return Condition("ports", WRONG, f"{what} {host}:{port}: {error.strerror}", advice)
    return Condition("ports", OK, f"{what} {host}:{port} is free")


def service(path: Path, stale_seconds: float = 60.0) -> list[Condition]:
    """What the heartbeat of a running service says: that it lives, and that its programs do."""
    record = read_service(path)
    if record is None:
        return [Condition("service", WRONG, f"{path} is not there: the service has not begun", "start it")]
    age = time.time() - float(record.get("written", 0.0))
    if age > stale_seconds:
        return [
            Condition("service", WRONG, f"it has not been heard of for {age:.0f} s", "it hangs or has died; restart it")
        ]
    down = [name for name, program in record.get("programs", {}).items() if not program.get("runs")]
    advice = "the service starts it again by itself; its log says why it ended"
    conditions = [Condition("programs", WRONG, f"the {name} does not run", advice) for name in down]
    return conditions or [Condition("service", OK, "its programs run")]


def read_service(path: Path) -> dict[str, Any] | None:
    try:
        record = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) else None


def worst(conditions: Iterable[Condition]) -> str:
    levels = {condition.level for condition in conditions}
    return next((level for level in (WRONG, WARNING) if level in levels), OK)
