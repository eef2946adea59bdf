"""kill -9 again and again: does what is taken up afterwards end with the same bits, and is anything left running?

    python benchmarks/kills.py run --kills 20          (run, tune, reproduce, ray, deployment)

First an undisturbed run. Then the same command is started again and again and killed after a random part of its time
(with `ray` a worker instead of the driver every second time, while the run goes on), until there were so many kills; a
run that ends before is compared, and another one is begun. Prints one line per kill, and at the end how many results
were equal and how many processes are left. `deployment` is benchmarks/deployment_kills.py."""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import deployment_kills

from kinfed.records.compare import same_results

MARK = "KINFED_KILLS"  # a variable that all descendants of a command inherit
KINFED = [sys.executable, "-m", "kinfed"]
SMALL = ["--clients", "10", "--seeds", "0,1", "--model", "mlr", "--checkpoint-every", "5"]
COMMANDS: dict[str, Callable[[Path], list[str]]] = {
    "run": lambda out: [*KINFED, "run", *SMALL, "--algorithms", "fedavg,ditto", "--rounds", "60", "--out", str(out)],
    "ray": lambda out: [
        *KINFED, "run", *SMALL, "--algorithms", "fedavg,ditto", "--rounds", "30", "--pool", "ray", "--workers", "2",
        "--out", str(out),
    ],
    "tune": lambda out: [
        *KINFED, "tune", "--clients", "10", "--model", "mlr", "--algorithms", "fedavg", "--trials", "8", "--rounds",
        "10", "--out", str(out),
    ],
    "reproduce": lambda out: [*KINFED, "reproduce", "fedfomo-validation", "--scale", "smoke", "--out", str(out)],
}  # fmt: skip
RESUMES = {"run": "--resume", "ray": "--resume", "tune": "--resume"}  # reproductions are taken up without a word
BUSY = ("Ray could not be started on this machine", "Ray workers started within")  # said by a command that has to wait
LEFTOVER_SECONDS = 90.0  # for the descendants of a killed process to notice and end


@dataclass
class Victim:
    """One command, its folder, and what it has in common with its descendants."""

    kind: str
    folder: Path
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def log(self) -> Path:
        return self.folder.parent / f"{self.folder.name}.log"

    def start(self) -> subprocess.Popen[bytes]:
        resume = [RESUMES[self.kind]] if self.kind in RESUMES and self.folder.exists() else []
        environment = os.environ | {MARK: self.mark, "OMP_NUM_THREADS": "1"}
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [*COMMANDS[self.kind](self.folder), *resume], stdout=log, stderr=log, env=environment
            )

    def finish(self, process: subprocess.Popen[bytes]) -> int:
        """Wait for its end; the status. What too much other work has kept from starting is started again."""
        while (status := process.wait()) not in (0, -signal.SIGKILL):
            text = self.log.read_text()[-2000:]
            if not any(sentence in text for sentence in BUSY):
                raise SystemExit(f"a command ended with {status}:\n{text}")
            print(f"{self.kind}: the machine is too busy for Ray to start; once more", flush=True)
            process = self.start()
        return status

    def family(self, word: str = "") -> list[int]:
        """Processes with the mark, whose command line holds the word."""
        members = []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                marked = f"{MARK}={self.mark}".encode() in (path / "environ").read_bytes()
                command = (path / "cmdline").read_bytes()
            except OSError:
                continue  # it has ended, or is another user's
            if marked and command and word.encode() in command:
                members.append(int(path.name))
        return members


def run_folders(folder: Path) -> list[Path]:
    return sorted(path.parent for path in folder.rglob("summary.json"))


def differences(kind: str, one: Path, other: Path) -> list[str]:
    if kind == "tune":
        same = (one / "best.toml").read_bytes() == (other / "best.toml").read_bytes()
        return [] if same else ["best.toml"]
    ours, theirs = run_folders(one), run_folders(other)
    if not ours or [path.relative_to(one) for path in ours] != [path.relative_to(other) for path in theirs]:
        return ["other runs"]
    return [line for a, b in zip(ours, theirs, strict=True) for line in same_results(a, b)]


def strike(victim: Victim, process: subprocess.Popen[bytes], number: int) -> str:
    """Kill somebody; whom."""
    targets = victim.family("ray::WorkerProcess") if victim.kind == "ray" else []
    if number % 2 and targets:
        pid = random.choice(targets)
        os.kill(pid, signal.SIGKILL)
        return f"descendant {pid}"
    process.kill()
    process.wait()
    return "the command itself"


def kills(kind: str, count: int, folder: Path, seed: int) -> bool:
    random.seed(seed)
    began = time.monotonic()
    folder.mkdir()
    whole = Victim(kind, folder / "whole")
    whole.finish(whole.start())
    seconds = time.monotonic() - began
    print(f"{kind}: undisturbed {seconds:.1f} s", flush=True)
    done, equal, compared, victims = 0, 0, 0, []
    while done < count or compared == 0:
        victim = Victim(kind, folder / f"victim-{compared}")
        victims.append(victim)
        status = None
        while status != 0:
            process = victim.start()
            if done < count:
                try:
                    status = process.wait(random.uniform(0.15, 0.9) * seconds)
                except subprocess.TimeoutExpired:
                    while process.poll() is None and done < count:
                        whom = strike(victim, process, done)
                        done += 1
                        print(f"{kind}: kill {done} of {count}: {whom}", flush=True)
                        if process.poll() is None:  # it goes on: strike again later
                            time.sleep(random.uniform(0.05, 0.3) * seconds)
            status = victim.finish(process)
        compared += 1
        apart = differences(kind, whole.folder, victim.folder)
        equal += not apart
        print(f"{kind}: finished after {done} kills; {apart[:3] or 'equal'}", flush=True)
    end = time.monotonic() + LEFTOVER_SECONDS
    while (left := [pid for one in victims for pid in one.family()]) and time.monotonic() < end:
        time.sleep(1)
    print(
        f"{kind}: {done} kills, {equal} of {compared} results equal bit for bit, {len(left)} processes left", flush=True
    )
    return equal == compared and not left


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="+", choices=[*COMMANDS, "deployment"])
    parser.add_argument("--kills", type=int, default=20, help="of each kind")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kills-") as folder:
        good = [
            deployment_kills.kills(options.kills, Path(folder) / kind, options.seed)
            if kind == "deployment"
            else kills(kind, options.kills, Path(folder) / kind, options.seed)
            for kind in options.kinds
        ]
    sys.exit(0 if all(good) else 1)


if __name__ == "__main__":
    main()
