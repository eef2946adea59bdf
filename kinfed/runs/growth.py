"""Runs that grow: more rounds, seeds or methods on a folder that holds a run, to the same bits as asked for at once.

A method and seed of a run depends on nothing that may grow here but on how many rounds it has: every draw is a hash of
seed, purpose, round and client. So existing results stay as they are, and go on where they end. Refused is a
growth that would have changed them from the start:

* any other setting, data or code (the difference is named);
* a method that needs validation or public examples, where the others were trained on those rows;
* more rounds under example-level privacy, or with a user-level epsilon: noise and budgets are planned for all rounds;
* more rounds with another sample of evaluated clients (eval_clients), drawn from the clients that the rounds call;
* a run so much longer that gradients would be computed by another backend (`auto` looks at the whole run's work).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kinfed.config import METHOD, RunConfig, make_config, parse_algorithms, read_toml
from kinfed.core import convert
from kinfed.errors import ConfigError
from kinfed.records import RunFiles
from kinfed.runs.run_inputs import RunInputs


def grown_config(
    folder: Path, file: Path | None = None, settings: Mapping[str, Any] | None = None, sets: tuple[str, ...] = ()
) -> RunConfig:
    """The configuration of the run in the folder, with more rounds (in all), seeds and methods (beside those it has).
    Whatever else is given must be as it is there, which `refuse_changes` sees to."""
    values = (read_toml(file) if file is not None else {}) | dict(settings or {})
    named = convert(RunConfig, "plugins", values.get("plugins") or ())  # they are run, and so known to the folder
    before = RunFiles(folder).config
    merged = before.dump_for_pool(values.get("pool"))
    for name, value in values.items():
        if value is None:
            continue
        if name == "plugins":
            merged[name] = list(dict.fromkeys([*before.plugins, *(file.resolve() for file in named)]))
        elif name == "seeds":
            merged[name] = list(dict.fromkeys([*before.seeds, *convert(RunConfig, "seeds", value)]))
        elif name == "algorithms":
            merged[name] = _with_methods(before.algorithms, value)
        elif name == "preset" and before.preset is not None:
            merged[name] = before.preset.joined(value)  # new methods get their settings of it
        else:
            merged[name] = value
    return make_config(None, merged, sets)


def _with_methods(before: Mapping[str, Mapping[str, Any]], value: Any) -> dict[str, Any]:
    """A method that is there may be named again, without options."""
    try:
        more = parse_algorithms(value)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    named_again = {label for label in more.keys() & before.keys() if more[label] == {METHOD: before[label][METHOD]}}
    return dict(before) | {label: choice for label, choice in more.items() if label not in named_again}


def refuse_changes(before: RunConfig, digests: Mapping[str, str], now: RunInputs, contents: Mapping[str, str]) -> None:
    """Refuse a growth that would have changed existing results; `digests` of data and code are those of the folder,
    `contents` those of now."""
    config = now.config
    if any(digests[name] != contents[name] for name in digests.keys() & contents.keys() if name.startswith("data of")):
        _refuse_other_shares(RunInputs(before), now)
    if config.rounds <= before.rounds:
        return
    if config.privacy is not None or config.user_epsilon is not None:
        raise ConfigError(
            f"noise and budgets of privacy were planned for {before.rounds} rounds, so that a run under differential "
            "privacy cannot have more of them afterwards; choose another folder with --out"
        )
    for seed in before.seeds:
        clients = now.federation(seed).num_clients
        if not torch.equal(_evaluated(before, seed, clients), _evaluated(config, seed, clients)):
            raise ConfigError(
                "eval_clients: the sample of evaluated clients is drawn from the clients that the rounds call, and it "
                f"is not the same with {config.rounds} rounds as with {before.rounds}; choose another folder with --out"
            )


def _refuse_other_shares(then: RunInputs, now: RunInputs) -> None:
    for name in ("validation", "public"):
        was, becomes = (getattr(inputs, f"{name}_share")() for inputs in (then, now))
        if was != becomes:
            raise ConfigError(
                f"the new methods need {name} examples, a share of {becomes:g} of the training rows instead of "
                f"{was:g}: the methods in the folder were trained on other rows. Run all methods in a new folder"
            )


def _evaluated(config: RunConfig, seed: int, num_clients: int) -> Tensor:
    return config.schedule.evaluated(seed, config.round_numbers, num_clients, config.eval_clients or num_clients)
