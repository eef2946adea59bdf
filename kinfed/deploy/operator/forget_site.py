"""Forgetting a site in a deployment: the run again without it, exactly, and a record of what the new one is made of.

A run mixes what its sites send, round by round; what is made without a site holds no trace of it. So the others learn
anew, in a folder of its own, from the same start with the same seed: their models are those of a run in which the site
never was, columns and all. Methods by sums (lmm) need one message for it, searches as many as before.

    <out>/forgotten.json
        forgotten, before       the site, and the run that knew it, by its own name, which vaults and ledgers use, too
        run, clients            the new run; its sites, each with the fingerprint of its key and its numbers of rows
        settings, columns       digests of what decides results, and of what columns became
        server                  digests of all that the server has learnt, tensor by tensor

Who doubts the record runs the same settings with the same sites again, or their rows in a simulation: `server` is then
the same, digit for digit. The former run is not undone: its folder, and its models in the vaults of the others, are
theirs to delete.
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kinfed.core import storage
from kinfed.deploy.server.fit_server import CHECKPOINT
from kinfed.deploy.settings import Deployment
from kinfed.errors import ConfigError
from kinfed.records import RunFiles

RECORD = "forgotten.json"
_SERVER = "server."


def app_settings(app: Path) -> dict[str, Any]:
    """The settings of a deployment's app folder, by name."""
    path = app / "pyproject.toml"
    with storage.storage_errors("read", path):
        table = tomllib.loads(path.read_text("utf-8"))
    try:
        values = table["tool"]["flwr"]["app"]["config"]
    except KeyError:
        raise ConfigError(f"{path} is no app folder of kinfed deploy init") from None
    return {name.replace("-", "_"): value for name, value in values.items()}


def without_site(settings: Mapping[str, Any], site: str, out: str = "") -> dict[str, Any]:
    """Settings of a run in which the site never was."""
    deployment = Deployment.parse(settings)
    path = deployment.folder / "deployment.json"
    if not path.exists():
        raise ConfigError(f"{deployment.folder} holds no deployment that has begun; there is nothing to forget")
    names = storage.read_json(path, "the clients of a deployment")["names"]
    if site not in names:
        raise ConfigError(f"{site} is not in the run of {deployment.folder}; its sites are {', '.join(names)}")
    left = [name for name in names if name != site and name not in deployment.left_names]
    if len(left) < 2:
        raise ConfigError(f"without {site} fewer than two sites are left, so there is no other to learn with")
    folder = out or f"{settings['out']}-without-{site}"
    return {**settings, "clients": ",".join(left), "joined": "", "left": "", "out": folder}


def write_record(site: str, before: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The record of a finished run without the site; it is written into the run's folder."""
    from kinfed.deploy.transport.client_keys import fingerprint

    deployment = Deployment.parse(settings)
    roster = storage.read_json(deployment.folder / "deployment.json", "the clients of a deployment")
    counts = zip(roster["names"], roster["keys"], roster["counts"], strict=True)
    columns = deployment.folder / "columns.json"  # of a search; else they are the roster's
    learnt = columns.read_bytes() if columns.exists() else storage.to_json(roster["preprocessing"]).encode()
    former = storage.read_json(before / "deployment.json", "the clients of a deployment")
    record = {
        "forgotten": site, "before": {"run": former["run"], "sites": former["names"]}, "run": roster["run"],
        "clients": {name: {"key": fingerprint(key), "rows": rows} for name, key, rows in counts},
        "settings": deployment.fingerprint(), "columns": hashlib.sha256(learnt).hexdigest(),
        "server": server_digests(deployment),
    }  # fmt: skip
    storage.write_json(deployment.folder / RECORD, record)
    return record


def server_digests(deployment: Deployment) -> dict[str, str]:
    """Digests of all that the server of a finished run has learnt; of a search, of all its runs."""
    label = CHECKPOINT if deployment.search is not None else f"{deployment.method}-{deployment.seed}"
    tensors = RunFiles(deployment.folder).final_state(label, 0)
    return {name: storage.checksum({name: t}) for name, t in sorted(tensors.items()) if _SERVER in f".{name}"}
