"""Where all algorithms of a seed begin: the model's own start, pre-trained where that is asked for, then warmed up."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from kinfed.algorithms import make_algorithm
from kinfed.pools import LocalPool
from kinfed.privacy import Ledger
from kinfed.records import Checkpoints
from kinfed.runs.loop_factory import CommonStart, LoopFactory
from kinfed.runs.method_run import Interrupted
from kinfed.runs.observer import Observer
from kinfed.server import Loop, Schedule


class StartMaker:
    """Makes the common start of each seed; finished ones are taken from the checkpoints."""

    def __init__(self, loops: LoopFactory, observer: Observer, should_stop: Callable[[], bool]) -> None:
        self._loops = loops
        self._inputs = loops.inputs
        self._observer = observer
        self._should_stop = should_stop

    def make(self, seed: int, checkpoints: Checkpoints | None) -> CommonStart:
        """Pre-trained where that is asked for, then warmed up."""
        start = CommonStart()
        if self._inputs.config.pretrain:
            start = self._pretrained(seed, checkpoints)
        if self._inputs.config.warm_start:
            start = self._warm_start(seed, start, checkpoints)
        return start

    def _pretrained(self, seed: int, checkpoints: Checkpoints | None) -> CommonStart:
        """After some rounds on the training data of all clients in one place."""
        task, label, rounds = (
            self._inputs.task(),
            f"pretrained-{seed}{self._inputs.fold_mark}",
            self._inputs.config.pretrain,
        )
        snapshot = checkpoints.latest(label) if checkpoints is not None else None
        if snapshot is not None:
            return CommonStart(snapshot.tensors["w"].to(task.device))
        algorithm = make_algorithm("fedavg", self._inputs.config.training, {})
        task, data = self._inputs.training_parts(seed, algorithm)
        pooled = data.pooled()
        pool = LocalPool(algorithm, task, pooled, seed, workers=self._inputs.config.workers)
        with Loop(algorithm, task, pool, pooled.population(seed), Schedule(1.0)) as loop:
            w = self._server_model_after(rounds, loop, "pre-training")
        if checkpoints is not None:
            checkpoints.save(label, rounds, {"w": w}, {})
        return CommonStart(w)

    def _warm_start(self, seed: int, start: CommonStart, checkpoints: Checkpoints | None) -> CommonStart:
        """After some rounds of FedAvg, with what they cost."""
        label, rounds, privacy = (
            f"warm-start-{seed}{self._inputs.fold_mark}",
            self._inputs.config.warm_start,
            self._inputs.config.privacy,
        )
        snapshot = checkpoints.latest(label) if checkpoints is not None else None
        if snapshot is not None:
            ledger = Ledger() if privacy is None else Ledger.load(snapshot.tensors)
            return CommonStart(snapshot.tensors["w"].to(self._inputs.task().device), ledger)
        strict = privacy is not None and privacy.strict
        algorithm = make_algorithm("fedavg", self._inputs.config.training, {"weights": "equal"} if strict else {})
        with self._loops.make(algorithm, seed, range(1, rounds + 1), start) as loop:
            w = self._server_model_after(rounds, loop, "warm start")
            ledger = Ledger() if loop.privacy is None else loop.privacy.ledger
        if checkpoints is not None:
            checkpoints.save(label, rounds, {"w": w} | ledger.named(), {})
        return CommonStart(w, ledger)

    def _server_model_after(self, rounds: int, loop: Loop, label: str) -> Tensor:
        """[P]"""
        seed = loop.population.seed
        self._observer.started(label, seed, 0, rounds)
        for report in loop.rounds(rounds):
            self._observer.round(label, seed, report, None, None)
            if self._should_stop():
                raise Interrupted("stopped as asked; the last finished round is saved")
        models = loop.algorithm.server_models(loop.server)
        assert models is not None  # of FedAvg
        return models.models[0]
