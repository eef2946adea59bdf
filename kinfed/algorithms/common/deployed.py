"""Models that clients deploy: those of their method, after fine-tuning or with nearest neighbours beside them."""

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from kinfed.algorithms.base import AnyAlgorithm
from kinfed.algorithms.common.averaging import own_or_server
from kinfed.algorithms.common.neighbours import with_neighbours
from kinfed.core import Tree
from kinfed.data import Cohort
from kinfed.engine import Task, sgd, task_for, trained_columns
from kinfed.errors import ConfigError

WITHOUT_FINETUNING = "without_finetuning"  # the name of a fine-tuned algorithm's model before the extra steps
WITHOUT_NEIGHBOURS = "without_neighbours"  # and of one without its client's nearest examples beside it


def deployed_models(
    algorithm: AnyAlgorithm, task: Task, client: Tree, down: Tree, data: Cohort, *, trained: Tensor | None = None,
    server_model: Tensor | None = None,
) -> dict[str, Tensor]:  # fmt: skip
    """Personal models [n, P] by name, the first of which is deployed; after fine-tuning where that is asked for.

    Clients that have not `trained` [n] yet (None: all have) deploy the `server_model` [n, P], where the server has
    models: its own state is where every client begins, and a method must not be judged by that. An algorithm without
    client states needs no such rule: its models come from the message, for all clients alike.

    Fine-tuning takes `finetune` SGD steps from the algorithm's personal model, on batches of their own of the round
    just completed; training is untouched and nothing is sent. The steps of a mixture follow the gradient of the
    mixture's loss and leave its proportions as they are. Nearest neighbours are those under the model after such
    steps."""
    models = algorithm.personalize(task, client, down, data)
    by_name = dict(models) if isinstance(models, Mapping) else {"personal": models}
    name, theta = next(iter(by_name.items()))
    if trained is not None and server_model is not None and client.named() and server_model.shape == theta.shape:
        theta = by_name[name] = own_or_server(trained, theta, server_model.to(theta.device))
    by_name = _fine_tuned(algorithm, task, by_name, data)
    return _with_neighbours(algorithm, task, by_name, data)


def _fine_tuned(algorithm: AnyAlgorithm, task: Task, by_name: dict[str, Tensor], data: Cohort) -> dict[str, Tensor]:
    if not algorithm.finetune:
        return by_name
    name, theta = next(iter(by_name.items()))
    model = task_for(task, theta)
    training = algorithm.training.with_steps(algorithm.finetune)
    if algorithm.finetune_lr is not None:
        training = replace(training, lr=algorithm.finetune_lr, lr_decay=1.0, lr_floor=0.0)
    batches = data.train.batches(training, stream="finetune")
    tuned = sgd(model, theta, batches, mask=trained_columns(model, training))
    return {**by_name, name: tuned, WITHOUT_FINETUNING: theta}


def _with_neighbours(
    algorithm: AnyAlgorithm, task: Task, by_name: dict[str, Tensor], data: Cohort
) -> dict[str, Tensor]:
    if not algorithm.knn:
        return by_name
    name, theta = next(iter(by_name.items()))
    if theta.shape[1] != task.num_params:
        raise ConfigError(
            "knn: nearest neighbours can only be combined with one plain model per client, and "
            f"{type(algorithm).__name__} has more than that; set knn to 0 for this method"
        )
    rows = with_neighbours(task, theta, data, algorithm.knn, share=algorithm.knn_share, capacity=algorithm.knn_capacity)
    return {**by_name, name: rows, WITHOUT_NEIGHBOURS: theta}


def deploys_state(algorithm: AnyAlgorithm) -> bool:
    """True where the class of the algorithm itself, not one it is derived from, has the trait "state to deploy"."""
    return "traits" in vars(type(algorithm)) and "state to deploy" in algorithm.traits
