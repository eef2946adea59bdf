"""Rounds of fedjax: its own FedAvg, FedProx and APFL on networks of haiku.

On several cores XLA spreads single operations over threads. fedjax can also deal clients among devices (pmap), but that
fails with the versions of jax that its other parts need and haiku allows."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import fedjax
import haiku as hk
import jax
import numpy as np
from fedjax.algorithms import apfl
from work import APFL_ALPHA, FEDPROX_MU, LSTM_UNITS, Images, Side, Work, versions_of


class FedjaxSide(Side):
    def __init__(self, work: Work, images: Images, method: str, cores: int) -> None:
        self._work, self._images = work, images
        train, self._test = images.standardized()
        if len(work.shape) == 3:  # channels come last in haiku
            train, self._test = np.moveaxis(train, 1, -1), np.moveaxis(self._test, 1, -1)
        offsets = images.offsets
        clients = {
            str(k): {"x": train[offsets[k] : offsets[k + 1]], "y": images.y[offsets[k] : offsets[k + 1]]}
            for k in range(work.clients)
        }
        self._data = fedjax.InMemoryFederatedData(clients)
        self._model = fedjax.create_model_from_haiku(
            hk.transform(lambda batch: _network(work)(batch["x"])),
            sample_batch={"x": train[: work.batch], "y": images.y[: work.batch]},
            train_loss=lambda batch, z: fedjax.metrics.unreduced_cross_entropy_loss(batch["y"], z),
            eval_metrics={"accuracy": fedjax.metrics.Accuracy()},
        )
        self._algorithm = self._make(method)
        self._state = self._algorithm.init(self._model.init(jax.random.PRNGKey(0)))
        self._sampler = fedjax.client_samplers.UniformGetClientSampler(self._data, work.active, seed=0)
        self._round = 0

    def _make(self, method: str) -> Any:
        work = self._work
        batches = fedjax.ShuffleRepeatBatchHParams(
            batch_size=work.batch, num_epochs=work.epochs, drop_remainder=False, seed=0
        )
        client, server = fedjax.optimizers.sgd(work.lr), fedjax.optimizers.sgd(1.0)
        if method == "fedprox":
            loss = fedjax.model_per_example_loss(self._model)
            return fedjax.algorithms.fed_prox.fed_prox(loss, client, server, batches, FEDPROX_MU)
        gradient = fedjax.model_grad(self._model)
        if method == "apfl":
            return apfl.adaptive_personalized_federated_learning(gradient, client, server, batches, APFL_ALPHA)
        return fedjax.algorithms.fed_avg.federated_averaging(gradient, client, server, batches)

    def rounds(self, count: int) -> None:
        for _ in range(count):
            self._sampler.set_round_num(self._round)
            self._state, _ = self._algorithm.apply(self._state, self._sampler.sample())
            self._round += 1
        jax.block_until_ready(self._state.params)

    def accuracy(self) -> float:
        batches = fedjax.ClientDataset({"x": self._test, "y": self._images.test_y}).padded_batch(batch_size=1000)
        return float(fedjax.evaluate_model(self._model, self._state.params, batches)["accuracy"])

    def versions(self) -> dict[str, Any]:
        return versions_of("fedjax", "jax")


def _lstm(work: Work) -> Callable[[jax.Array], jax.Array]:
    def outputs(x: jax.Array) -> jax.Array:
        core = hk.LSTM(LSTM_UNITS)
        h, _ = hk.dynamic_unroll(core, x, core.initial_state(len(x)), time_major=False)
        return hk.Linear(work.classes)(h[:, -1])

    return outputs


def _network(work: Work) -> Callable[[jax.Array], jax.Array]:
    if work.model == "lstm":
        return _lstm(work)

    def flatten(x: jax.Array) -> jax.Array:
        return x.reshape(len(x), prod(x.shape[1:]))

    start = hk.initializers.VarianceScaling(1 / 3, "fan_in", "uniform")  # torch's own
    pool = hk.MaxPool((2, 2, 1), (2, 2, 1), "VALID")
    hidden = {"mlr": (), "mlp": (128,), "dense": (200, 200), "cnn": (512,)}[work.model]
    layers: list[Any] = []
    if work.model == "cnn":
        for channels in (32, 64):
            layers += [hk.Conv2D(channels, 5, padding="VALID", w_init=start), jax.nn.relu, pool]
    layers.append(flatten)
    for width in hidden:
        layers += [hk.Linear(width, w_init=start), jax.nn.relu]
    return hk.Sequential([*layers, hk.Linear(work.classes, w_init=start)])
