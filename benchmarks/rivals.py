"""kinfed beside other libraries for simulations, in one run: the same rounds, taken in turns, on the same cores.

    python benchmarks/rivals.py                                        all workloads on one core and on two
    python benchmarks/rivals.py W1 LR_MNIST --cores 1 --repeats 9
    python benchmarks/rivals.py --page docs/speed.md                   puts the tables between the page's marks
    python benchmarks/rivals.py W2 --json b.json --with a.json         with what an earlier run measured
    python benchmarks/rivals.py W1 --also my_side.py:MySide --also-python ~/other/bin/python

The first run makes environments for the rivals (fedjax, pfl, flwr; from the package registry, in a cache folder:
2.3 GB, a few minutes); kinfed and the plain PyTorch loop run in the present one. Everything takes about 45 minutes on
a quiet machine, which is an estimate; the tables say how long they took.

Every contestant is a process that loads the data, computes one turn to warm up, and then computes a turn whenever it
is asked, while all others wait. The least time of all turns counts: of the processor on one core, of the clock on
several. No row takes much longer than --seconds: of slow rounds there are fewer turns, but at least LEAST_TURNS. Each
contestant tests its server's model at the end, so that one sees that all have done the same work. The limit of the
machine is measured right after the turns: the products of a round at the rate of its largest product, and one pass
over the batches.

A contestant of your own is a class like contestants/work.py's Side.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import math
import os
import re
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent / "contestants"
sys.path.insert(0, str(HERE))

from contestant import entry_of  # noqa: E402
from work import WORKS, Work, make_images  # noqa: E402

from kinfed.core import storage  # noqa: E402
from kinfed.core.cache import cache_folder  # noqa: E402
from kinfed_papers.bench import run_benchmarks  # noqa: E402
from kinfed_papers.bench.machine import describe_machine  # noqa: E402

# fedjax 0.0.17 calls jax.tree_map, which later versions of jax do not have.
JAX = ("fedjax==0.0.17", "jax==0.5.3", "jaxlib==0.5.3")
TORCH = ("pfl==0.6.0", "flwr[simulation]==1.41.0", f"torch=={version('torch').partition('+')[0]}")
REQUIREMENTS = {"fedjax": JAX, "pfl": TORCH, "flower": TORCH}  # the others run in this environment
STEPS = ("lstm", "lstm-small", "resnet18", "transformer")  # of `kinfed bench`, beside the loop
LEAST_TURNS = 3  # of each contestant
PATIENCE = 300.0  # seconds for an answer: of a start, or of one turn
JOB_TURNS = 3  # of whole jobs: the one with the least time of the processor counts
BEGIN, END = "<!-- benchmarks/rivals.py -->", "<!-- end -->"


@dataclass
class Times:
    """Seconds per round of every turn."""

    cpu: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)
    accuracy: float = float("nan")

    def best(self, cores: int) -> float:
        return min(self.cpu if cores == 1 else self.wall)

    def median(self, cores: int) -> float:
        return statistics.median(self.cpu if cores == 1 else self.wall)


@dataclass
class Contest:
    work: str
    method: str
    cores: int
    times: dict[str, Times]
    limit: float  # seconds of one core


@dataclass
class Job:
    """All rounds of a work in a process of its own, from its start to its end, with a test of the model."""

    work: str
    cores: int
    contestant: str
    wall: float
    cpu: float
    accuracy: float


@dataclass
class Steps:
    """Local steps of a model beside the loop: milliseconds per client and step, and the median ratio of all turns."""

    model: str
    what: str
    cores: int
    loop: float
    kinfed: float
    ratio: float


@dataclass
class Results:
    contests: list[Contest] = field(default_factory=list)
    steps: list[Steps] = field(default_factory=list)
    jobs: list[Job] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)  # of rivals
    load: list[float] = field(default_factory=list)  # of the machine, before and after everything
    minutes: float = 0.0  # that measuring took

    def add_file(self, path: Path) -> None:
        """What another run has written with --json."""
        figures = json.loads(path.read_text(encoding="utf-8"))
        for contest in figures["contests"]:
            times = {name: Times(**each) for name, each in contest.pop("times").items()}
            self.contests.append(Contest(times=times, **contest))
        self.steps += [Steps(**each) for each in figures["steps"]]
        self.jobs += [Job(**each) for each in figures["jobs"]]
        self.versions |= figures["versions"]
        self.failures += figures["failures"]
        self.load += figures["load"]
        self.minutes += figures["minutes"]


class ContestantError(Exception):
    """A contestant ended without an answer."""

    def __init__(self, name: str, log: str) -> None:
        lines = [line.strip() for line in log.splitlines() if line.strip()]
        # Of chained errors the first: those after it only say that something failed.
        reason = next(
            (line for line in lines if re.match(r"(\w+\.)*(\w*Error|Exception)\b", line)), (lines or [""])[-1]
        )
        super().__init__(f"{name} ended without an answer: {reason[:300]}")
        self.name, self.log = name, log


class Contestant:
    """A process that computes rounds when asked."""

    def __init__(self, name: str, python: Path, work: Work, method: str, images: Path, cores: int) -> None:
        self.name = name
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (as long as the process)
        command = [
            str(python),
            str(HERE / "contestant.py"),
            name,
            work.name,
            method,
            str(images),
            "--cores",
            str(cores),
        ]
        self._process = subprocess.Popen(
            command, text=True, bufsize=1, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log,
            env=environment(cores), preexec_fn=lambda: use_cores(cores), start_new_session=True,
        )  # fmt: skip
        self.versions: dict[str, str] = self._answer()["versions"]

    def ask(self, question: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(question + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        in_time, _, _ = select.select([self._process.stdout], [], [], PATIENCE)
        line = self._process.stdout.readline() if in_time else ""
        if not line:
            end_session(self._process)
            self._log.seek(0)
            late = "" if in_time else f"TimeoutError: none in {PATIENCE:.0f} seconds\n"
            log = late + self._log.read()
            self._release()
            raise ContestantError(self.name, log)
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            end_session(self._process)
        self._release()

    def _release(self) -> None:
        for file in (self._process.stdin, self._process.stdout, self._log):
            assert file is not None
            with suppress(OSError):  # a process that has ended takes nothing more
                file.close()


def end_session(process: subprocess.Popen[str]) -> None:
    """End a process and all that it started, such as Ray's."""
    with suppress(ProcessLookupError):  # none is left
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def use_cores(count: int) -> None:
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:count])


def environment(cores: int) -> dict[str, str]:
    """Of a contestant's process: as many threads as cores, nobody's telemetry, and modules that are compiled once:
    those of a package that runs from its source folder, too, as installed ones are."""
    return os.environ | {
        "PYTHONDONTWRITEBYTECODE": "",
        "OMP_NUM_THREADS": str(cores), "JAX_PLATFORMS": "cpu", "FLWR_TELEMETRY_ENABLED": "0",
        "RAY_USAGE_STATS_ENABLED": "0", "PFL_PYTORCH_DEVICE": "cpu",
    }  # fmt: skip


def python_of(name: str, folder: Path, other: Path | None) -> Path:
    """The interpreter of a contestant; its environment is made where it is not there yet."""
    if ":" in name:
        return other or Path(sys.executable)
    if name not in REQUIREMENTS:
        return Path(sys.executable)
    wanted = REQUIREMENTS[name]
    place = folder / hashlib.sha256(" ".join(wanted).encode()).hexdigest()[:12]
    python, ready = place / "bin" / "python", place / "ready"
    if not ready.exists():
        print(f"installing {', '.join(wanted)} in {place}", file=sys.stderr)
        venv.create(place, with_pip=True, clear=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *wanted], check=True, stdout=sys.stderr)
        ready.write_text("\n".join(wanted))
    return python


def compete(
    work: Work,
    method: str,
    cores: int,
    names: Sequence[str],
    pythons: dict[str, Path],
    images: Path,
    repeats: int,
    seconds: float,
) -> tuple[Contest, dict[str, str]]:
    """All contestants that have the method, in turns, for so many seconds or a little longer. ContestantError where one
    of them fails."""
    present = [name for name in names if method in entry_of(name).methods and work.name in entry_of(name).works]
    sides: list[Contestant] = []
    try:
        for name in present:
            sides.append(Contestant(name, pythons[name], work, method, images, cores))
        times = {side.name: Times() for side in sides}
        began = time.monotonic()
        for repeat in range(repeats + 1):
            if repeat > LEAST_TURNS and time.monotonic() - began > seconds:
                break
            for place in range(len(sides)):
                side = sides[(place + repeat) % len(sides)]  # who follows whom must not matter
                answer = side.ask(f"rounds {work.turn}")
                if repeat:  # the first turn compiles
                    times[side.name].cpu.append(answer["cpu"] / work.turn)
                    times[side.name].wall.append(answer["wall"] / work.turn)
        limit = next(side.ask("limit")["limit"] for side in sides if side.name == "kinfed")
        for side in sides:
            times[side.name].accuracy = side.ask("accuracy")["accuracy"]
        versions = {package: number for side in sides for package, number in side.versions.items()}
    finally:
        for side in sides:
            side.close()
    return Contest(work.name, method, cores, times, limit), versions


def do_job(name: str, python: Path, work: Work, images: Path, cores: int) -> Job:
    command = [str(python), str(HERE / "contestant.py"), name, work.name, "fedavg", str(images), "--job"]
    began = time.perf_counter()
    process = subprocess.Popen(
        [*command, "--cores", str(cores)], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=environment(cores), preexec_fn=lambda: use_cores(cores), start_new_session=True,
    )  # fmt: skip
    try:
        out, log = process.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        end_session(process)
        raise ContestantError(name, f"TimeoutError: not done in {PATIENCE:.0f} seconds") from None
    wall = time.perf_counter() - began
    if process.returncode or not out:
        raise ContestantError(name, log)
    answer = json.loads(out.splitlines()[-1])
    return Job(work.name, cores, name, wall, answer["cpu"], answer["accuracy"])


def milliseconds(seconds: float) -> str:
    value = 1000 * seconds
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def contest_row(contest: Contest, names: Sequence[str]) -> list[str]:
    ours, cores = contest.times["kinfed"], contest.cores
    rivals = {name: times for name, times in contest.times.items() if name not in ("kinfed", "loop")}
    cells = [contest.work, contest.method, str(cores)]
    for name in names:
        times = contest.times.get(name)
        cells.append("" if times is None else milliseconds(times.best(cores)))
    loop = contest.times.get("loop")
    ratio = "" if loop is None else f"{loop.best(cores) / ours.best(cores):.1f}"
    if rivals:
        fastest = min(rivals, key=lambda name: rivals[name].best(cores))
        best = rivals[fastest].best(cores) / ours.best(cores)
        median = rivals[fastest].median(cores) / ours.median(cores)
        cells += [ratio, f"{best:.1f} ({median:.1f}) {fastest}"]
    else:
        cells += [ratio, "no rival has it"]
    spent = statistics.median(ours.cpu)
    accuracies = [times.accuracy for times in contest.times.values() if not math.isnan(times.accuracy)]
    return [*cells, f"{milliseconds(contest.limit)} ({spent / contest.limit:.1f})",
            f"{100 * min(accuracies):.0f}-{100 * max(accuracies):.0f} %"]  # fmt: skip


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], texts: int) -> str:
    lines = [f"| {' | '.join(headings)} |", "|" + "---|" * texts + "---:|" * (len(headings) - texts)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def markdown(results: Results, names: Sequence[str]) -> str:
    machine, load = describe_machine(), results.load
    packages = ", ".join(f"{name} {number}" for name, number in sorted(results.versions.items()))
    parts = [
        f"{machine['processor']}, {machine['cores']} cores, Python {machine['python']}, {packages}; "
        f"{datetime.date.today()}, load {min(load):.1f} to {max(load):.1f}, {results.minutes:.0f} minutes."
    ]
    if results.contests:
        headings = ["work", "method", "cores", *names, "to the loop", "to the fastest rival", "limit", "accuracy"]
        rows = [contest_row(contest, names) for contest in results.contests]
        parts.append(table(headings, rows, 2))
        parts.append("\n".join(f"* {work.name}: {work.title}" for work in WORKS.values()))
    if results.steps:
        rows = [
            [each.model, each.what, str(each.cores), f"{each.loop:.3g}", f"{each.kinfed:.3g}", f"{each.ratio:.2f}"]
            for each in results.steps
        ]  # fmt: skip
        parts.append(
            "Models that none of the rivals comes with, beside the loop: milliseconds per client and local step."
        )
        parts.append(table(["model", "what", "cores", "loop", "kinfed", "to the loop"], rows, 2))
    if results.failures:
        parts.append("\n".join(f"* Not in the tables: {failure}" for failure in results.failures))
    if results.jobs:
        rows = [
            [job.work, job.contestant, str(job.cores), f"{job.wall:.1f} s", f"{job.cpu:.1f} s",
             f"{100 * job.accuracy:.0f} %"] for job in results.jobs
        ]  # fmt: skip
        parts.append(table(["whole job", "contestant", "cores", "clock", "processor", "accuracy"], rows, 2))
    return "\n\n".join(parts)


def put_into(page: Path, text: str) -> None:
    before, begin, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{page} should hold the marks {BEGIN} and {END}, between which the tables go")
    storage.write_atomically(page, f"{before}{BEGIN}\n{text}\n{END}{after}".encode())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "works", nargs="*", default=[*WORKS, *STEPS, "job"], help="all where absent; none: only what --with adds"
    )
    parser.add_argument("--methods", default="", help="of W2, separated by commas; all where absent")
    parser.add_argument("--cores", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=7, help="turns of each contestant")
    parser.add_argument("--seconds", type=float, default=60.0, help="of the turns of a row, where they are slow")
    parser.add_argument("--rivals", default="fedjax,pfl,flower", help="separated by commas")
    parser.add_argument("--also", action="append", default=[], metavar="FILE:CLASS", help="contestants of your own")
    parser.add_argument("--also-python", type=Path, help="their interpreter; this one where absent")
    parser.add_argument("--cache", type=Path, default=cache_folder() / "rivals", help="folder of the environments")
    parser.add_argument("--json", type=Path, help="file for all figures, of every turn")
    parser.add_argument("--with", type=Path, nargs="*", default=[], dest="others", help="files of --json to add")
    parser.add_argument("--page", type=Path, help="Markdown page to put the tables into")
    arguments = parser.parse_args()
    names = ["loop", *filter(None, arguments.rivals.split(",")), *arguments.also, "kinfed"]
    for name in arguments.works:
        if name not in (*WORKS, *STEPS, "job", "none"):
            parser.error(f"{name} is none of {', '.join((*WORKS, *STEPS, 'job', 'none'))}")
    results = Results()
    for path in arguments.others:
        results.add_file(path)
    if arguments.works != ["none"]:
        take_measurements(arguments, results, names)
    text = markdown(results, names)
    if arguments.page is not None:
        put_into(arguments.page, text)
    print(text)


def take_measurements(arguments: argparse.Namespace, results: Results, names: Sequence[str]) -> None:
    pythons = {name: python_of(name, arguments.cache, arguments.also_python) for name in names}
    results.load.append(os.getloadavg()[0])
    before, began = results.minutes, time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        for part in measured(arguments, results, names, pythons, Path(place)):
            results.load.append(os.getloadavg()[0])
            results.minutes = before + (time.monotonic() - began) / 60
            print(part, file=sys.stderr, flush=True)
            if arguments.json is not None:  # after each: what was measured stays if this is stopped
                storage.write_atomically(arguments.json, json.dumps(asdict(results), indent=1).encode())


def measured(
    arguments: argparse.Namespace, results: Results, names: Sequence[str], pythons: dict[str, Path], folder: Path
) -> Iterator[str]:
    """Fill the results; a line about each of them."""
    chosen = set(filter(None, arguments.methods.split(",")))
    for work in (WORKS[name] for name in arguments.works if name in WORKS):
        images = folder / f"{work.name}.npz"
        make_images(work).save(images)
        for method in [method for method in work.methods if not chosen or method in chosen]:
            for cores in arguments.cores:
                able = list(names)
                while True:
                    try:
                        contest, versions = compete(
                            work, method, cores, able, pythons, images, arguments.repeats, arguments.seconds
                        )
                        break
                    except ContestantError as error:  # the others begin once more without it
                        yield leave_out(error, results, f"{work.name} {method}, {cores} core(s)")
                        able.remove(error.name)
                results.contests.append(contest)
                results.versions |= versions
                yield " ".join(contest_row(contest, names))
        if "job" in arguments.works and work.rounds:
            for cores in arguments.cores:
                jobs: dict[str, list[Job]] = {name: [] for name in names}
                for _ in range(JOB_TURNS):
                    for name in list(jobs):
                        try:
                            jobs[name].append(do_job(name, pythons[name], work, images, cores))
                        except ContestantError as error:
                            yield leave_out(error, results, f"the whole job of {work.name}, {cores} core(s)")
                            del jobs[name]
                results.jobs += [min(turns, key=lambda job: job.cpu) for turns in jobs.values()]
                yield f"jobs of {work.name} on {cores} core(s): {', '.join(jobs)}"
        images.unlink()
    if steps := [name for name in arguments.works if name in STEPS]:
        results.steps += [
            Steps(
                each.workload, each.title, each.cores, each.milliseconds(each.loop), each.milliseconds(each.ours),
                each.ratio,
            )
            for each in run_benchmarks(steps, arguments.repeats, arguments.cores).steps
        ]  # fmt: skip
        yield f"{len(steps)} models beside the loop"


def leave_out(error: ContestantError, results: Results, where: str) -> str:
    """A rival that fails is named below the tables, and what is measured goes on; without kinfed or the loop there is
    nothing to compare."""
    if error.name in ("kinfed", "loop"):
        raise SystemExit(f"{error}\n{error.log[-3000:]}")
    results.failures.append(f"{where}: {error}")
    return results.failures[-1]


if __name__ == "__main__":
    main()
