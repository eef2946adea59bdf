"""A deployment in network namespaces: a server, three sites and a stranger, each with an address of its own.

    python benchmarks/network_bed.py [--only reach,plain,slow,partition,kills] [--keep]

Needs root (namespaces) and iproute2. Prints a table of what was tried and what came of it. `slow` puts a forwarder of
ours into every site, 100 ms each way and one piece in twenty late by 300 ms: many kernels come without netem.
`partition` takes a site's link down for a minute; `kills` sends SIGKILL to a supernode, the server's part of the run
and the superlink. Runs are compared with a simulation in which the same clients missed the same rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from flower_network import Network, network
from loopback import write_nodes

from kinfed.data.federations.federation import Federation
from kinfed.deploy.node.vault import Vault
from kinfed.deploy.operator.certs import make_certificates
from kinfed.deploy.settings import Deployment
from kinfed.runs.loop_factory import simulate
from kinfed.serving.pipeline import ModelPipeline
from kinfed.updates.stages import Updates

SITES = ["a", "b", "c"]
HOSTS = {name: f"10.77.0.{number}" for number, name in enumerate(["server", *SITES, "stranger"], 1)}
BRIDGE = "kinfed-bed"
SETTINGS: dict[str, Any] = {
    "method": "ditto", "model": "mlr", "classes": "3", "scaling": "none", "steps": 4, "batch": 5, "eval-every": 0,
    "rounds": 8, "clients": ",".join(SITES), "quorum": 2, "deadline": 40.0, "wait": 300.0,
}  # fmt: skip
FORWARDER = """
import asyncio, random, sys
host, port, own = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
async def pump(reader, writer):
    end = asyncio.get_event_loop().time()
    try:
        while piece := await reader.read(16384):
            due = asyncio.get_event_loop().time() + 0.1 + (0.3 if random.random() < 0.05 else 0.0)
            end = max(end + 1e-6, due)  # pieces stay in order, as in TCP; those of one moment would not
            asyncio.get_event_loop().call_at(end, writer.write, piece)
        await asyncio.sleep(max(end - asyncio.get_event_loop().time(), 0) + 0.01)
    except OSError:
        pass
    writer.close()
async def serve(reader, writer):
    try:
        there = await asyncio.open_connection(host, port)
    except OSError:
        return writer.close()
    await asyncio.gather(pump(reader, there[1]), pump(there[0], writer))
async def main():
    async with await asyncio.start_server(serve, "127.0.0.1", own) as server:
        await server.serve_forever()
asyncio.run(main())
"""


def sh(*command: str, check: bool = True) -> str:
    return subprocess.run(command, check=check, capture_output=True, text=True).stdout


def inside(name: str) -> list[str]:
    return ["ip", "netns", "exec", f"kinfed-{name}"]


@contextlib.contextmanager
def namespaces() -> Iterator[None]:
    """A namespace for every host, linked by a bridge."""
    remove()
    sh("ip", "link", "add", BRIDGE, "type", "bridge")
    sh("ip", "link", "set", BRIDGE, "up")
    for name, address in HOSTS.items():
        space = f"kinfed-{name}"
        sh("ip", "netns", "add", space)
        sh("ip", "link", "add", f"kf-{name}", "type", "veth", "peer", "name", "eth0", "netns", space)
        sh("ip", "link", "set", f"kf-{name}", "master", BRIDGE, "up")
        for command in (
            ["addr", "add", f"{address}/24", "dev", "eth0"],
            ["link", "set", "eth0", "up"],
            ["link", "set", "lo", "up"],
        ):
            sh("ip", "-n", space, *command)
    try:
        yield
    finally:
        remove()


def remove() -> None:
    for name in HOSTS:
        sh("ip", "netns", "del", f"kinfed-{name}", check=False)
        sh("ip", "link", "del", f"kf-{name}", check=False)
    sh("ip", "link", "del", BRIDGE, check=False)


def examples() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    numbers = np.random.default_rng(3)
    owner = np.repeat(np.arange(3), (40, 30, 20))
    y = numbers.integers(0, 3, len(owner))
    return (numbers.normal(size=(len(owner), 5)) + 2 * np.eye(3, 5)[y]).astype(np.float32), y, owner


class Bed:
    """A network of the tests whose processes run in namespaces."""

    def __init__(self, folder: Path, net: Network, nodes: dict[int, Any]) -> None:
        self.folder, self.net, self.nodes = folder, net, {config["client"]: config for config in nodes.values()}
        self.rows: list[tuple[str, str, str]] = []

    def add(self, what: str, held: bool, seen: str) -> None:
        self.rows.append((what, "held" if held else "FELL", seen))
        print(f"{what:60} {self.rows[-1][1]:5} {seen}", flush=True)

    def run(self, name: str, disturb: Callable[[Path], None] = lambda out: None) -> None:
        """One run, disturbed; then its rounds, and how far its models are from the simulation's."""
        number = len(self.rows)
        out = self.folder / f"run-{number}"
        start = time.monotonic()
        self.net.run(self.net.app(SETTINGS | {"out": str(out), "keys": str(self.net.certs)}, name=f"app-{number}"))
        disturb(out)
        self.net.wait_done(out, 600)
        seconds = time.monotonic() - start
        records = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
        missed = sum(record["dropped"] for record in records)
        far = self.distance(out, records)
        text = f"{len(records)} rounds in {seconds:.0f} s, {missed} updates missed, models within {far:.1e}"
        self.add(name, far < 1e-5, text)

    def distance(self, out: Path, records: list[dict[str, Any]]) -> float:
        """The largest difference to a simulation in which the same clients were missing, by the log of the run."""
        said = (out / "log.txt").read_text()
        absent = {
            number: {
                site for site in SITES if any(f"round {number}: without {site}" in line for line in said.splitlines())
            }
            for number in range(1, len(records) + 1)
        }
        x, y, owner = examples()
        federation = Federation.from_arrays(x, y, np.array(SITES)[owner], num_classes=3)
        loop = simulate(federation, "mlr", Deployment.parse(SETTINGS).algorithm)
        train = loop.pool.train

        def some(ids: torch.Tensor, download: Any, round: int, *rest: Any, **more: Any) -> Any:
            present = torch.tensor([k for k in ids.tolist() if SITES[k] not in absent[round]], dtype=torch.int64)
            if len(present) < SETTINGS["quorum"]:  # as the server does: nothing is changed
                return Updates(present[:0], None, 0)
            return train(present, download, round, *rest, **more)

        loop.pool.train = some  # type: ignore[method-assign]
        for _ in loop.rounds(SETTINGS["rounds"]):
            pass
        found = loop.evaluate(keep_models=True).models
        assert found is not None
        far = 0.0
        for number, site in enumerate(SITES):
            own = ModelPipeline.read(Vault(self.nodes[site]["vault"]).model_path()).module.state_dict()
            theirs = loop.task.module_of(found[number]).state_dict()  # type: ignore[attr-defined]
            far = max(far, *(float((own[name] - theirs[name]).abs().max()) for name in own))
        return far


def reach(bed: Bed) -> None:
    """What a stranger with ca.crt reaches."""
    net, address = bed.net, HOSTS["server"]
    probe = (
        "import http.client, ssl, sys\nc = http.client.HTTPSConnection(sys.argv[1], int(sys.argv[2]), timeout=5,"
        " context=ssl.create_default_context(cafile=sys.argv[3]))\n"
        "c.request('POST', sys.argv[4], b'', {'content-type': 'application/protobuf'}); print(c.getresponse().status)"
    )
    for port, path in (
        (net.port, "/v1/control/start-run"),
        (net.port, "/v1/runtime/pull-task-input"),
        (net.control_port, "/"),
    ):
        command = [
            *inside("stranger"),
            sys.executable,
            "-c",
            probe,
            address,
            str(port),
            str(net.certs / "ca.crt"),
            path,
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
        seen = done.stdout.strip() or done.stderr.strip().splitlines()[-1]
        where = "door" if port == net.port else "control port"
        bed.add(f"a stranger asks the {where} for {path}", seen == "404" or "refused" in seen, seen)
    home = bed.folder / "stranger"
    home.mkdir()
    config = f'[superlink]\ndefault = "x"\n\n[superlink.x]\naddress = "{address}:{net.port}"\n'
    (home / "config.toml").write_text(f'{config}root-certificates = "{net.certs / "ca.crt"}"\n')
    app, environment = net.app({}, name="strange"), net.environment("home") | {"FLWR_HOME": str(home)}
    command = [*inside("stranger"), str(Path(sys.executable).parent / "flwr"), "run", str(app), "x"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    bed.add("a stranger starts a run with flwr and ca.crt", done.returncode != 0, f"exit status {done.returncode}")


def partition(bed: Bed) -> None:
    def cut(out: Path) -> None:
        bed.net.wait_text(out, "round 1 of 8")
        sh("ip", "link", "set", "kf-b", "down")
        time.sleep(60)
        sh("ip", "link", "set", "kf-b", "up")

    bed.run("b is cut off for a minute", cut)


def kills(bed: Bed) -> None:
    def kill(out: Path) -> None:
        bed.net.wait_text(out, "round 1 of 8")
        bed.net.kill_program("node-c", "flower-supernode")
        bed.net.wait_text(out, "round 3 of 8")
        bed.net.kill_program("superlink", "kinfed deploy server")
        bed.net.wait_for(lambda: bed.net.text(out).count("resumed after round") == 1, 240, "the run to resume")
        bed.net.kill_program("superlink", "flower-superlink")
        bed.net.wait_for(lambda: bed.net.text(out).count("resumed after round") == 2, 240, "the run to resume again")

    bed.run("SIGKILL to a supernode, the server's part, the superlink", kill)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="reach,plain,slow,partition,kills")
    parser.add_argument("--keep", action="store_true")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="kinfed-bed-"))
    nodes = write_nodes(folder, *examples(), SITES)
    certs = folder / "certs"
    make_certificates(certs, [HOSTS["server"], "127.0.0.1"], SITES)
    wanted = arguments.only.split(",")
    with namespaces(), network(folder / "net", certs=certs, host=HOSTS["server"], inside=inside) as net:
        bed = Bed(folder, net, nodes)
        net.start_server()
        net.register(*SITES)
        for site, config in bed.nodes.items():
            address = ""
            if "slow" in wanted:
                (folder / "forwarder.py").write_text(FORWARDER)
                command = [str(folder / "forwarder.py"), HOSTS["server"], str(net.port), "8000"]
                net.start(f"forwarder-{site}", sys.executable, *command, home=f"home-{site}", at=site)
                address = "127.0.0.1:8000"
            net.start_node(site, config, address=address)
        if "reach" in wanted:
            reach(bed)
        if "plain" in wanted or "slow" in wanted:
            bed.run("100 ms each way, pieces late" if "slow" in wanted else "nothing in the way")
        if "partition" in wanted:
            partition(bed)
        if "kills" in wanted:
            kills(bed)
    print("\n| what | | seen |\n|---|---|---|")
    for row in bed.rows:
        print("| " + " | ".join(row) + " |")
    if arguments.keep:
        print(folder)
    sys.exit(any(row[1] != "held" for row in bed.rows))


if __name__ == "__main__":
    main()
