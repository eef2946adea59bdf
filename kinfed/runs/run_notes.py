"""Notes on a run's data, sample of clients and privacy, for a reader of its results."""

from __future__ import annotations

from dataclasses import replace

from kinfed.data import Description, describe
from kinfed.engine import METRICS, would_compile
from kinfed.runs.build import local_examples
from kinfed.runs.run_inputs import RunInputs

FEW_CALLS = 5  # calls of a client in a run on average, below which a note says so
MAJORITY_SHARE = 0.8  # of training examples in one class, from which on accuracy tells little

MISSING_NUMBA = (
    "numba is not installed: this long run of a dense network trains by torch (backend stacked) in place of compiled "
    "loops (fused), which takes longer; pip install 'kinfed[fast]'"
)

COMPILING = "compiling the fused backend for this machine, once; about 10 seconds"


def run_notes(inputs: RunInputs) -> list[str]:
    """Notes on the first seed; the others say the same in other numbers."""
    config, seed = inputs.config, inputs.config.seeds[0]
    data, privacy, user_privacy = inputs.federation(seed), config.privacy, config.user_privacy
    notes = [
        *left_out_notes(inputs),
        *([] if config.preset is None else config.preset.notes()),
        *data.notes,
        _note_on_rare_classes(inputs, seed),
        _note_on_calls(inputs, data.num_clients),
        _note_on_sample(inputs, seed),
    ]
    if config.backend == "auto" and would_compile(inputs.task(), local_examples(config, data)):
        notes.append(MISSING_NUMBA)
    if privacy is not None:
        for label, algorithm in inputs.algorithms.items():
            notes += privacy.notes(label, algorithm, data.train.count)
    if user_privacy is not None:
        sampling = config.schedule.client_sampling(data.num_clients)
        for label, algorithm in inputs.algorithms.items():
            notes += user_privacy.notes(label, algorithm, data.num_clients, sampling)
    return [note for note in notes if note]


def left_out_notes(inputs: RunInputs) -> list[str]:
    return [f"{label} is left out: {reason}" for label, reason in inputs.left_out.items()]


def description(inputs: RunInputs, seed: int) -> Description:
    """Description of the evaluated clients; a note where these are not all."""
    data, ids = inputs.federation(seed), inputs.evaluated(seed)
    description = describe(data, ids)
    return description if ids is None else replace(description, notes=[*data.notes, _note_on_sample(inputs, seed)])


def _note_on_sample(inputs: RunInputs, seed: int) -> str:
    ids, clients = inputs.evaluated(seed), inputs.federation(seed).num_clients
    if ids is None:
        return ""
    return (
        f"figures, clients.csv and saved models cover a fixed sample of {len(ids):,} of {clients:,} clients, the same "
        "for all methods; it is drawn from the clients that the rounds call (and from others if these are too few)"
    )


def _note_on_rare_classes(inputs: RunInputs, seed: int) -> str:
    """Note where accuracy is the metric, and hardly more than the share of one class."""
    data = inputs.federation(seed)
    if data.problem.is_regression or METRICS.headline(data.problem, inputs.config.metric).name != "accuracy":
        return ""
    counts = data.class_counts().sum(0)
    share = float(counts.max() / counts.sum())
    if share < MAJORITY_SHARE:
        return ""
    name = data.problem.class_labels[int(counts.argmax())]
    return (
        f"{100 * share:.3g} % of training examples are of class {name}, and always predicting it has about that "
        "accuracy; --metric auroc or balanced_accuracy shows more of how well the others are recognized"
    )


def _note_on_calls(inputs: RunInputs, num_clients: int) -> str:
    """Note where clients are called seldom."""
    config, size = inputs.config, inputs.config.schedule.size(num_clients)
    calls = size / num_clients * config.rounds * (1 - config.dropout)
    if calls >= FEW_CALLS:
        return ""
    never = num_clients * (1 - size / num_clients * (1 - config.dropout)) ** config.rounds
    outside = f", and about {never:.0f} of {num_clients} never" if never >= 0.5 else ""
    return (
        f"participation {config.participation:g} in {config.rounds} rounds calls a client {calls:.1f} times on "
        f"average{outside}; figures cover only the clients that took part. With more rounds or a larger "
        "participation, each client trains more often"
    )
