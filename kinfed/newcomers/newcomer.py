"""A client that was not in a run, from its table: features scaled and classes numbered as the run wrote them down."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kinfed.core import make_options
from kinfed.data import Features, Federation, TablePreprocessing
from kinfed.data.sources import LabelledRows, TableOptions, load_like
from kinfed.errors import ConfigError, DataError
from kinfed.newcomers.finished import EndedRun, FinishedRun
from kinfed.serving import ModelInputs

NAME = "newcomer"


def newcomer_from_table(
    ended: EndedRun | Path | str,
    table: Any,
    label_column: str | None,
    *,
    test_fraction: float = 0.25,
    seed: int | None = None,
    **columns: Any,
) -> Federation:
    """The newcomer as a federation of one: features and classes as in the run, some examples held out. `table` is a
    file, a frame or a dictionary of columns; `columns` are options of a table (kinfed.data.sources.TableOptions). Of a
    run on texts, `text_column` and `tokenizer` are the run's unless they are given. Weights of rows are scaled to mean
    one over the newcomer's own."""
    run, inputs = opened(ended, seed), opened(ended, seed).inputs
    options = make_options(TableOptions, {"label_column": label_column, **columns}, "the newcomer's table")
    if (text := inputs.text) is not None:
        column, tokenizer = options.text_column or text.column, options.tokenizer or text.tokenizer
        options = replace(options, text_column=column, tokenizer=tokenizer, length=text.length)
    elif options.text_column or options.tokenizer:
        raise ConfigError(f"the models of {run.name} read no texts; leave out text_column and tokenizer")
    source = load_like(table, options, inputs.columns, run.description.problem)
    path = source.name
    raw, mean, std = _examples(source, inputs, path)
    if prod(raw.shape[1:]) != prod(run.shape):
        raise DataError(
            f"the models of {run.name} take {prod(run.shape)} features (examples of shape {list(run.shape)}); "
            f"{path} has {prod(raw.shape[1:])}"
        )
    if inputs.tokens:
        if bool((raw != raw.round()).any()):
            raise DataError(f"the models of {run.name} take token numbers; {path} has features that are not whole")
        raw = raw.to(torch.int64)
    return source.federation(
        NAME, run.description.problem, Features(raw.reshape(-1, *run.shape), mean, std), test_fraction, run.seed,
        preprocessing=inputs.preprocessing, keyed_by_name=False,
    )  # fmt: skip


def opened(ended: EndedRun | Path | str, seed: int | None = None) -> EndedRun:
    """A run in memory as it is, or that of a folder."""
    return ended if isinstance(ended, EndedRun) else FinishedRun.open(ended, seed)


def _examples(source: LabelledRows, inputs: ModelInputs, path: str) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The newcomer's examples, and how they are scaled."""
    learnt = inputs.preprocessing
    if source.features is not None:  # images
        return source.features.raw, inputs.mean, inputs.std
    assert source.read is not None
    if learnt is not None:
        return source.encode(learnt, path).raw, learnt.mean, learnt.std
    return source.encode(TablePreprocessing.plain(source.read.cells), path).raw, inputs.mean, inputs.std
