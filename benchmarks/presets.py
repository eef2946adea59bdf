"""Tuned settings of every method by model family: what `kinfed run --preset tuned` takes.

    python benchmarks/presets.py mlp mlr cnn --data DIR       search; goes on where it was stopped
    python benchmarks/presets.py mlp --methods ditto,apfl     some methods only
    python benchmarks/presets.py                              only write the files again from the log

Every method gets the same number of trials on the same federations, scored like those of `kinfed tune`: personal models
on validation examples, one vote per client, averaged over the federations of the family. Test examples are never
scored; of MNIST, Fashion-MNIST and CIFAR-10 the official test images are not even seen. Seeds are other ones than those
of the tables that use the presets.

A trial changes one option at a time, because four to six trials are few: first the learning rate, doubled (or, where
that does not help, halved) as long as it helps, then the method's own options in turn, each from the best setting so
far; what is left goes to a closer look at the learning rate (all trials of methods that use validation examples
themselves: their own options keep their defaults). A setting replaces the best so far only where it is better by
MARGIN: what makes no difference stays at its default.

    benchmarks/presets/FAMILY.jsonl      the log: settings of the search, then a line per method with all its trials
    kinfed/runs/tuned/FAMILY.toml        the presets, written from the log after every method
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import tomli_w
import torch

from kinfed.algorithms import ALGORITHMS, make_algorithm, tuning_space
from kinfed.config.config import RunConfig
from kinfed.config.config_reading import make_config
from kinfed.config.preset_files import PRESETS
from kinfed.core import storage
from kinfed.core.options import Range
from kinfed.data.federations.federation import Federation
from kinfed.errors import ConfigError, ModelError, unknown_name
from kinfed.runs.run_inputs import build_federation
from kinfed.tuning.tuning_job import TuningJob

LOGS = Path(__file__).with_suffix("")
MARGIN = 0.003  # by which a setting must be better than the best so far to take its place
OTHERS = (0.2, 0.8, 0.5)  # where in the ranges of other options than the learning rate to look

Settings = dict[str, Any]
Score = tuple[float, ...]  # by federation


@dataclass(frozen=True)
class Trial:
    settings: Settings  # options that are not at their defaults
    scores: Score | None  # None: the method refuses these settings

    @property
    def mean(self) -> float:
        return -math.inf if self.scores is None else sum(self.scores) / len(self.scores)


@dataclass(frozen=True)
class Family:
    """What one family of models is tuned on: by title, the settings of each federation's run."""

    federations: Mapping[str, Settings]
    common: Mapping[str, Any]
    trials: int = 6
    methods: tuple[str, ...] = ()  # none: all

    def run_settings(self, title: str) -> Settings:
        return {**self.common, **self.federations[title]}

    def header(self, name: str) -> Settings:
        return {
            "family": name, "trials": self.trials, "margin": MARGIN, "common": dict(self.common),
            "federations": dict(self.federations), "command": f"python benchmarks/presets.py {name}",
        }  # fmt: skip


def _images(name: str, examples: int, partition: Settings, seed: int, **more: Any) -> Settings:
    return {"dataset": {"name": name, "examples": examples}, "partition": partition, "seeds": [seed], **more}


def _dirichlet(alpha: float) -> Settings:
    return {"name": "dirichlet", "alpha": alpha}


TWO_CLASSES: Settings = {"name": "pathological", "shards": 2}
COMMON: Settings = {
    "clients": 10, "rounds": 16, "participation": 0.5, "steps": 20, "batch": 20, "validation": 0.25, "eval_every": 0,
}  # fmt: skip


def _dense(model: str) -> Family:
    return Family(
        {
            "digits, Dirichlet 0.3": {"dataset": "digits", "partition": _dirichlet(0.3), "seeds": [101]},
            "MNIST, two classes": _images("mnist", 2000, TWO_CLASSES, 102),
            "Fashion-MNIST, Dirichlet 0.3": _images("fashion_mnist", 2000, _dirichlet(0.3), 103),
        },
        {**COMMON, "model": model},
    )


FAMILIES = {
    "mlp": _dense("mlp"),
    "mlr": _dense("mlr"),
    "cnn": Family(
        {
            "CIFAR-10, Dirichlet 0.3": _images("cifar10", 3000, _dirichlet(0.3), 104),
            "CIFAR-10, two classes": _images("cifar10", 3000, TWO_CLASSES, 105),
        },
        {**COMMON, "model": "cnn_tutorial", "rounds": 10, "steps": 10},
        trials=4,
    ),
    "resnet": Family(
        {"CIFAR-10, Dirichlet 0.3": _images("cifar10", 2000, _dirichlet(0.3), 106)},
        {**COMMON, "model": {"name": "resnet18", "width": 8}, "rounds": 10, "steps": 6, "batch": 16},
        trials=4,
        methods=(
            "local", "fedavg", "ditto", "fedper", "fedrep", "apfl", "fedbn", "fedprox", "kin", "scaffold", "perfedavg",
            "fedbabu", "lgfedavg", "fedrod", "fedproto", "moon", "selffl", "fedfomo", "fedamp", "ifca",
        ),  # those that most comparisons have, without those whose rounds take several times as long as FedAvg's
    ),
}  # fmt: skip
# First those that most comparisons have, so that a search that is stopped early has them.
FIRST = ("local", "fedavg", "ditto", "selffl", "fedfomo", "cgpfl", "ifca", "apfl", "fedrep", "kin", "fedper", "fedprox")


def search(
    space: Mapping[str, Range], defaults: Mapping[str, Any], trials: int, score: Callable[[Settings], Score | None]
) -> Iterator[Trial]:
    """Trials one after the other, the first with the defaults, which are options by name (None: it follows another
    one). Ends early only where no value is left to try."""
    done: list[Trial] = []
    while len(done) < trials and (settings := _next(space, defaults, done)) is not None:
        done.append(Trial(settings, score(settings)))
        yield done[-1]


def best_trial(trials: Sequence[Trial]) -> Trial:
    """The last that was better than the best before it by MARGIN."""
    best = trials[0]
    for trial in trials[1:]:
        if trial.mean > best.mean + MARGIN:
            best = trial
    return best


def chosen_trial(method: str, trials: Sequence[Trial]) -> Trial:
    """The best of a method's trials. One that uses validation examples itself would do best with the options by which
    it fits them most, so that only its learning rate is chosen by them."""
    uses_validation = "needs validation" in ALGORITHMS[method].target.traits
    return best_trial([trial for trial in trials if not uses_validation or trial.settings.keys() <= {"lr"}])


def _next(space: Mapping[str, Range], defaults: Mapping[str, Any], done: Sequence[Trial]) -> Settings | None:
    """The first change of the best setting so far to a value that its option has not had yet."""
    if not done:
        return {}
    best = best_trial(done).settings
    tried = {name: {defaults[name], *(t.settings[name] for t in done if name in t.settings)} for name in space}
    for name, value in _changes(space, defaults, {**defaults, **best}, tried):
        if value not in tried[name]:
            return {**best, name: value}
    return None


def _changes(
    space: Mapping[str, Range], defaults: Mapping[str, Any], best: Settings, tried: Mapping[str, set[float]]
) -> Iterator[tuple[str, float]]:
    """Options and values in the order in which they are tried."""
    if "lr" in space:
        for value in (_rounded(space["lr"], 2 * best["lr"]), _rounded(space["lr"], best["lr"] / 2)):
            if value in space["lr"]:
                yield "lr", value
    others = {name: _far_first(range_, defaults[name]) for name, range_ in space.items() if name != "lr"}
    for place in range(len(OTHERS)):
        yield from ((name, values[place]) for name, values in others.items())
    for name, range_ in space.items():
        if best[name] is not None:
            yield from ((name, value) for value in _closer(range_, best[name], tried[name]))


def _far_first(range_: Range, default: float | None) -> list[float]:
    """Values of an option, far from the default first."""
    low, high = _scaled(range_, range_.low), _scaled(range_, range_.high)
    values = [_unscaled(range_, low + place * (high - low)) for place in OTHERS]
    return values if default is None else sorted(values, key=lambda value: -_distance(range_, value, default))


def _closer(range_: Range, best: float, tried: set[float]) -> list[float]:
    """Halfway from the best value to its neighbours, to the farther one first."""
    values = sorted({range_.low, range_.high, *(value for value in tried if value is not None)})
    here = values.index(best)
    neighbours = [values[place] for place in (here - 1, here + 1) if 0 <= place < len(values)]
    neighbours.sort(key=lambda value: -_distance(range_, value, best))
    return [_unscaled(range_, (_scaled(range_, best) + _scaled(range_, other)) / 2) for other in neighbours]


def _unscaled(range_: Range, scaled: float) -> float:
    return _rounded(range_, math.exp(scaled) if range_.log else scaled)


def _rounded(range_: Range, value: float) -> float:
    """Two digits say all that a tuned number can say."""
    return round(value) if range_.whole else float(f"{value:.2g}")


def _scaled(range_: Range, value: float) -> float:
    return math.log(max(value, 1e-12)) if range_.log else float(value)


def _distance(range_: Range, a: float, b: float) -> float:
    return abs(_scaled(range_, a) - _scaled(range_, b))


class Bench:
    """The federations of a family, made once and shared by all methods."""

    def __init__(self, family: Family, data: Path | None) -> None:
        self.family, self.data = family, data
        self._federations: dict[str, Federation] = {}

    def config(self, title: str, method: str) -> RunConfig:
        settings = {**self.family.run_settings(title), "algorithms": method, "workers": 1}
        return make_config(None, settings if self.data is None else settings | {"data": self.data})

    def job(self, title: str, method: str) -> TuningJob:
        config = self.config(title, method)
        if title not in self._federations:
            self._federations[title] = build_federation(config, config.seeds[0])
        return TuningJob(config, self._federations[title], None, lambda: False)

    def tune(self, method: str, note: Callable[[str], None]) -> Settings:
        """The line of the log about a method; with the reason where it does not go with the family's models."""
        began, line = time.process_time(), {"method": method, "date": date.today().isoformat()}
        try:
            jobs = [self.job(title, method) for title in self.family.federations]
        except (ConfigError, ModelError) as error:
            return line | {"refused": str(error)}
        space, training = tuning_space(method), jobs[0].config.training
        configured = jobs[0].experiment.inputs.algorithms[method]
        if "needs validation" in configured.traits:
            space = {name: range_ for name, range_ in space.items() if name == "lr"}  # see chosen_trial
        defaults = {name: training.lr if name == "lr" else getattr(configured, name) for name in space}

        def score(settings: Settings) -> Score | None:
            try:
                algorithm = make_algorithm(method, training, settings)
                return tuple(round(job.score(algorithm), 4) for job in jobs)
            except ConfigError:
                return None  # a combination that the method refuses

        trials = []
        for trial in search(space, defaults, self.family.trials, score):
            trials.append(trial)
            note(f"{method} {trial.settings} {trial.scores}")
        for job in jobs:
            job.experiment.close()
        best = chosen_trial(method, trials)
        chosen = {name: best.settings.get(name, default) for name, default in defaults.items()}
        return line | {
            "seconds": round(time.process_time() - began, 1), "default": round(trials[0].mean, 4),
            "best": round(best.mean, 4), "chosen": {name: value for name, value in chosen.items() if value is not None},
            "trials": [[trial.settings, trial.scores] for trial in trials],
        }  # fmt: skip


def read_log(name: str) -> list[Settings]:
    """The lines about methods; refused where the search had other settings than it would have now."""
    file = LOGS / f"{name}.jsonl"
    if not file.exists():
        return []
    header, *lines = (json.loads(line) for line in file.read_text("utf-8").splitlines())
    if header != json.loads(json.dumps(FAMILIES[name].header(name))):
        raise ConfigError(f"{file} was made with other settings than {Path(__file__).name} has now; remove one of them")
    return lines


def write(name: str, lines: Sequence[Settings]) -> None:
    """The log, and the presets that follow from it."""
    header = FAMILIES[name].header(name)
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in (header, *lines))
    storage.make_folder(LOGS)
    storage.write_atomically(LOGS / f"{name}.jsonl", text.encode())
    storage.write_atomically(PRESETS["tuned"].target / f"{name}.toml", preset_toml(name, lines).encode())


def preset_toml(name: str, lines: Sequence[Settings]) -> str:
    """The file of a family: what every method has chosen, in the order of the registry."""
    family, chosen = FAMILIES[name], {line["method"]: line for line in lines if "chosen" in line}
    heading = (
        f"Settings for models of the family {name}: {family.trials} trials per method on validation data of "
        f"{'; '.join(family.federations)}.",
        f"Written by benchmarks/presets.py from benchmarks/presets/{name}.jsonl, which has every trial; do not edit.",
    )
    text = "".join(f"# {line}\n" for line in heading)
    for method in (method for method in ALGORITHMS if method in chosen):
        line = chosen[method]
        text += f"\n# {100 * line['best']:.1f} % on validation data, {100 * line['default']:.1f} % with the defaults\n"
        text += tomli_w.dumps({"methods": {method: line["chosen"]}})
    return text if chosen else text + "\n[methods]\n"


def main() -> None:
    parser = argparse.ArgumentParser("presets.py")
    parser.add_argument("families", nargs="*", help=f"of {', '.join(FAMILIES)}; none: only write the files again")
    parser.add_argument("--methods", default="", help="names separated by commas; all where none is named")
    parser.add_argument("--data", type=Path, default=os.environ.get("KINFED_DATA"), help="folder with data sets")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name in arguments.families:
        if name not in FAMILIES:
            raise unknown_name("family", name, FAMILIES)
        bench = Bench(FAMILIES[name], None if arguments.data is None else Path(arguments.data))
        asked = [method for method in arguments.methods.split(",") if method]
        for method in asked or FAMILIES[name].methods or dict.fromkeys((*FIRST, *ALGORITHMS)):
            if all(line["method"] != method for line in read_log(name)):
                line = bench.tune(method, lambda text: print(text, flush=True))
                write(name, [*read_log(name), line])  # read again: another process may search other methods
    for name in FAMILIES if not arguments.families else ():
        if lines := read_log(name):
            write(name, lines)


if __name__ == "__main__":
    main()
