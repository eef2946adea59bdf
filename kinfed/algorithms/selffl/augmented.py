"""Augmented Self-FL: beside its personal model, each client trains one to convergence and is judged by that.

Chen et al., Self-Aware Personalized Federated Learning, https://arxiv.org/abs/2204.08069, Algorithm 2 (Appendix D).

Algorithm 1 takes the early-stopped θ_m^t for the client's own optimum. Here training goes on from θ_m^t to a local
optimum θ_{m,t}, which replaces it in the variances (23), (25), the starting point (24) and the average (26). The
personal model is θ_m^t.

Cost: training to convergence at every client in every round, and both models travel up, although the server uses
θ_{m,t} only: the algorithm says so, and the doubled bytes are what the paper counts.

"Until convergence" is not defined in the paper. Here: epoch by epoch, until the client's training loss changes by
less than `tol` of itself over an epoch, or after `max_extra` epochs.

With full batches every θ_{m,t} is the same point, its variance over rounds is 0, and (19) asks for a single step: the
method needs mini-batch noise, or known variances.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kinfed.algorithms.selffl.selffl import Client, SelfFL
from kinfed.author import Cohort, ConfigError, PrivacyProfile, Task, option, sgd


@dataclass(frozen=True)
class SelfFLAugmented(SelfFL):
    tol: float = option(
        1e-4, "trained to convergence when an epoch changes the training loss by less than this share of it", ge=0
    )
    max_extra: int = option(10, "most epochs after the early stop", ge=1)

    single_updates = "estimates the variance between clients from their models and is sent two models by each of them"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reduction == "sum":
            raise ConfigError(
                "selffl_augmented trains to convergence in epochs, which end with a smaller batch; reduction = sum "
                "needs batches of one size: use selffl, or reduction = mean"
            )

    def init_client(self, task: Task, data: Cohort) -> Client:
        client = super().init_client(task, data)
        return replace(client, optimum=client.theta)

    def find_optimum(self, task: Task, theta: Tensor, data: Cohort) -> Tensor:
        """θ after further epochs, each client until its training loss settles. Each epoch has an order of its own and
        a new optimizer: how many epochs there are differs from round to round."""
        x = theta.clone()
        epoch = replace(self.training, steps=None, epochs=1, optimizer_state="reset")
        left = torch.arange(len(data))
        before = task.mean_loss(x, data.train)
        for number in range(self.max_extra):
            part = data.train.take(left)
            x[left] = sgd(task, x[left], part.batches(epoch, stream=f"converge-{number}"))
            after = task.mean_loss(x[left], part)
            moving = (after - before).abs() > self.tol * before.abs()  # false for NaN: a diverged client stops
            left, before = left[moving], after[moving]
            if not len(left):
                break
        return x

    def privacy(self, count: Tensor) -> PrivacyProfile:
        return PrivacyProfile(None, impossible="models trained until the loss on training examples settles")
