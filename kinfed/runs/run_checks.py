"""Before the first round: settings that algorithms, model, data or machine do not admit are refused, and a reader gets
notes on data, sample of clients and privacy."""

from dataclasses import replace
from typing import Any

import torch

from kinfed.algorithms import check_algorithm_settings, check_architectures, prepare_data
from kinfed.config import METHOD, OPTIONAL, published_notes, split_choice
from kinfed.data import Description, augmentation, describe, findings
from kinfed.engine import METRICS, Architectures, would_compile
from kinfed.errors import ConfigError, KinfedError
from kinfed.pools import physical_memory
from kinfed.privacy import check_public, check_statistics
from kinfed.runs.loop_factory import StageFactory
from kinfed.runs.run_inputs import RunInputs, local_examples

OUTPUT_COPIES = 5  # of all outputs: what judging them holds at once (measured: 4.5 with 20,000 classes)


def check_run(inputs: RunInputs) -> None:
    """Refuse data that cannot be meant, and the last method's settings, before the first one runs."""
    for seed in inputs.config.seeds:
        findings.refuse(inputs.federation(seed).findings, inputs.config.accept)
    _check_shapes_agree(inputs)
    _check_stopping(inputs)
    for label in inputs.algorithms:
        check_algorithm(inputs, label)
    _check_models_fit(inputs)
    _check_outputs_fit(inputs)


def _check_stopping(inputs: RunInputs) -> None:
    config = inputs.config
    if config.stopped_models and not (config.early_stopping and config.save_models):
        raise ConfigError(
            "stopped_models are those of rounds that early_stopping finds and save_models keeps; set "
            f"{'save_models' if config.early_stopping else 'early_stopping, to 5 evaluations for instance'}"
        )
    if not config.early_stopping:
        return
    if not config.eval_every:
        raise ConfigError("early_stopping counts evaluations, and eval_every = 0 leaves the last alone; set eval_every")
    for seed in config.seeds:
        if not int(inputs.federation(seed).val.count.sum()):
            raise ConfigError(
                f"early_stopping goes by validation rows, and with seed {seed} there are none; set validation, to 0.2 "
                "for instance"
            )


def _check_shapes_agree(inputs: RunInputs) -> None:
    """One model serves all seeds, and what a table's columns become is learnt from the training rows of each."""
    first, *others = inputs.config.seeds
    shape = inputs.federation(first).features.shape
    for seed in others:
        other = inputs.federation(seed).features.shape
        if other != shape:
            raise ConfigError(
                f"examples have the shape {list(shape)} with seed {first} and {list(other)} with seed {seed}: training "
                "rows differ, and with them the categories that are frequent enough to count. Run the seeds apart, or "
                "declare what such columns are (--columns zip=text; kinfed describe shows them)"
            )


def leave_out_what_cannot_run(inputs: RunInputs) -> None:
    """Go on without what "all" names and this model, these data or settings do not admit."""
    config = inputs.config
    optional = [label for label, choice in config.algorithms.items() if choice.get(OPTIONAL)]
    if not optional:
        return
    inputs.task()  # what is wrong with data and model is no algorithm's fault
    for label in optional:
        if label in inputs.algorithms:
            try:
                check_algorithm(inputs, label)
            except KinfedError as error:
                inputs.left_out[label] = str(error)
    choices = {}
    for label in config.algorithms:
        if label not in inputs.left_out:
            name, options, _ = split_choice(config.algorithms[label])
            choices[label] = {METHOD: name, **options}
    if not choices:
        first, reason = next(iter(inputs.left_out.items()))
        raise ConfigError(f"no algorithm can run with these settings; {first}: {reason}")
    preset = None if config.preset is None else config.preset.limited_to(choices)
    inputs.narrow(replace(config, algorithms=choices, preset=preset))


def check_algorithm(inputs: RunInputs, label: str) -> None:
    """Refuse one method's settings on the model and data of any seed."""
    algorithm, config, task = inputs.algorithms[label], inputs.config, inputs.task()
    for seed in config.seeds:
        data = inputs.federation(seed)
        clients = data.population(seed, config.participation)
        check_algorithm_settings(algorithm, task, clients)
        if isinstance(models := inputs.models(), Architectures):
            models.of_federation(data)  # refuses groups without a model
            check_architectures(algorithm, models, data, clients)
        if algorithm.training.augment is not None:
            augmentation(algorithm.training.augment, data.features.shape)
        if config.staleness_rule is not None:  # which looks at updates from the data that the method trains on
            data, clients = prepare_data(algorithm, data, clients)
        stages = StageFactory(config, label, algorithm, task, data, clients)
        for stage in (stages.robust(), stages.staleness(None), stages.secure_sum()):
            if stage is not None:
                stage.check(algorithm, config.schedule.size(clients.num_clients))
    check_privacy(inputs, label)


def check_privacy(inputs: RunInputs, label: str) -> None:
    """Refuse a method that the privacy asked for does not admit."""
    privacy, user_privacy = inputs.config.privacy, inputs.config.user_privacy
    if privacy is None and user_privacy is None:
        return
    from kinfed.privacy import epsilon  # noqa: F401  (says what to install where it is missing)

    algorithm = inputs.algorithms[label]
    for seed in inputs.config.seeds:
        check_statistics(inputs.federation(seed))
        if inputs.config.public != "auto" or "needs public data" in algorithm.traits:
            check_public(inputs.federation(seed), label)
    if user_privacy is not None:
        user_privacy.check(label, algorithm, inputs.task())
    if privacy is not None:
        for seed in inputs.config.seeds:
            privacy.check(label, algorithm, inputs.federation(seed))


def _check_models_fit(inputs: RunInputs) -> None:
    """Personal models of all evaluated clients are in memory at once when they are saved."""
    ids, memory = inputs.evaluated(inputs.config.seeds[0]), physical_memory()
    clients = inputs.federation(inputs.config.seeds[0]).num_clients if ids is None else len(ids)
    size = 4 * clients * inputs.models().num_params
    if inputs.config.save_models and memory is not None and size > memory:
        raise ConfigError(
            f"personal models of {clients:,} clients take {size / 1e9:.0f} GB and this machine has "
            f"{memory / 1e9:.0f}; give --eval-clients N, a sample whose models are kept, or --no-save-models"
        )


def _check_outputs_fit(inputs: RunInputs) -> None:
    """Outputs for all test rows are in memory at once when they are judged, with probabilities and intermediate
    results, each a float64 for every class."""
    seed, memory = inputs.config.seeds[0], physical_memory()
    data = inputs.federation(seed)
    rows, classes = int(data.test.take(inputs.evaluated_ids(seed)).count.sum()), data.problem.num_classes
    size = OUTPUT_COPIES * 8 * rows * classes
    if memory is not None and 2 * size > memory:
        raise ConfigError(
            f"outputs for {classes:,} classes on {rows:,} test rows take {size / 1e9:.0f} GB, more than half of "
            f"this machine's {memory / 1e9:.0f}. Is the label a number (--task regression) or a name that no "
            "two rows share (another --label-column)? If these are classes, give --eval-clients N, a sample whose "
            "test rows fit"
        )


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
        *left_out_notes(inputs), *([] if config.preset is None else config.preset.notes()),
        *(published_notes(config.algorithms) if config.as_published else ()), *data.notes,
        _note_on_rare_classes(inputs, seed), _note_on_calls(inputs, data.num_clients), _note_on_sample(inputs, seed),
        _note_on_architectures(inputs, seed),
    ]  # fmt: skip
    if config.backend == "auto" and would_compile(inputs.task(), local_examples(config, data)):
        notes.append(MISSING_NUMBA)
    if privacy is not None:
        for label, algorithm in inputs.algorithms.items():
            notes += privacy.notes(label, algorithm, data.train.count)
    if user_privacy is not None:
        sampling = config.schedule.client_sampling(data.num_clients)
        for label, algorithm in inputs.algorithms.items():
            noise = user_privacy.noise_over(sampling, algorithm.rounds_in(config.rounds))
            notes += user_privacy.notes(label, algorithm, data.num_clients, sampling, inputs.task(), noise)
    return [note for note in notes if note]


def audit_record(inputs: RunInputs) -> dict[str, Any]:
    """The content of audit.json: findings in the data of every seed, and what the audit looks for."""
    accept, seeds = inputs.config.accept, inputs.config.seeds
    by_seed = {str(seed): findings.to_record(inputs.federation(seed).findings, accept)["findings"] for seed in seeds}
    return {**findings.to_record([], accept), "findings": by_seed}


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


def _note_on_architectures(inputs: RunInputs, seed: int) -> str:
    """Note how many clients have which model."""
    models = inputs.models()
    if not isinstance(models, Architectures):
        return ""
    data = inputs.federation(seed)
    count = torch.bincount(models.of_federation(data), minlength=len(models.names)).tolist()
    parts = [
        f"{number} {name} ({model.name}, {task.num_params:,} parameters)"
        for number, (name, model), task in zip(count, inputs.config.architectures.items(), models.tasks, strict=True)
    ]
    return f"clients by architecture, {'in turn' if data.groups is None else 'by group'}: {', '.join(parts)}"


def _note_on_rare_classes(inputs: RunInputs, seed: int) -> str:
    """Note where accuracy is the metric, and hardly more than the share of one class."""
    data = inputs.federation(seed)
    if not data.problem.classifies or METRICS.headline(data.problem, inputs.config.metric).name != "accuracy":
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
    config = inputs.config
    rate = config.schedule.client_sampling(num_clients).rate * (1 - config.dropout)
    calls = rate * config.rounds
    if calls >= FEW_CALLS:
        return ""
    never = num_clients * (1 - rate) ** config.rounds
    outside = f", and about {never:.0f} of {num_clients} never" if never >= 0.5 else ""
    return (
        f"participation {config.participation:g} in {config.rounds} rounds calls a client {calls:.2g} times on "
        f"average{outside}; figures cover only the clients that took part. With more rounds or a larger "
        "participation, each client trains more often"
    )
