"""The price of a search under differential privacy, before it is paid.

Every run of a search trains on the same rows, so that epsilon is of all of them together: tries x methods x (folds and
all rows), each with its rounds, as methods declare their gradients. With dp_noise the price follows, and dp_budget says
how many tries there may be; with dp_epsilon the noise is found for which all tries cost as much. Beside training every
site answers twice with figures, each a sum of bounded numbers of its rows with the noise that its owner sets
(evaluation_noise): of all tries, and of the chosen ones.

Rows are counted as if all folds trained on all of them, at the rate of samples of the part with the fewest rows, as
nodes count them in their ledgers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kinfed.deploy.node.gate import at_rate
from kinfed.deploy.node.private_figures import FIGURES
from kinfed.deploy.settings import Deployment
from kinfed.errors import ConfigError
from kinfed.privacy import Events, merge, planned_costs
from kinfed.tabular import FitSettings, is_tried

USUAL_NOISE = 5.0  # evaluation_noise of an owner who says nothing


@dataclass(frozen=True)
class SearchPrice:
    noise: float  # of gradients
    trials: int
    runs: int  # that train
    epsilon: float  # of training, at the site that pays most
    with_figures: float  # and of figures, at the usual noise
    site: str

    def sentence(self, wanted: int, delta: float) -> str:
        fewer = "" if self.trials == wanted else f" ({wanted} tries would cost more than dp_budget)"
        return (
            f"price of this search: {self.runs} runs of {self.trials} {'try' if self.trials == 1 else 'tries'}{fewer} "
            f"with noise {self.noise:.4g}: epsilon {self.epsilon:.3g} (delta {delta:g}) at {self.site}, the most; "
            f"{self.with_figures:.3g} with figures, if the owner's evaluation_noise is {USUAL_NOISE:g}"
        )


def price_of(
    deployment: Deployment, settings: FitSettings, methods: Sequence[str], counts: Sequence[Tensor],
    names: Sequence[str],
) -> SearchPrice:  # fmt: skip
    """The price of a search, with as many tries as a budget allows; `counts` [K, 3] are the rows of every part."""
    from kinfed.privacy import epsilon_over_noises, noise_for  # an optional package

    privacy = deployment.run.privacy
    assert privacy is not None
    for trials in range(settings.trials, 0, -1):
        events, runs = _planned(deployment, settings, methods, counts, trials)
        noise = privacy.noise or noise_for(privacy.epsilon or 0.0, events, privacy.delta)
        each = [epsilon_over_noises(((noise, one),), privacy.delta) for one in events]
        most = max(range(len(each)), key=lambda k: each[k])
        if privacy.budget is None or each[most] <= privacy.budget:
            both = epsilon_over_noises(tuple(sorted(_by_noise(noise, events[most]).items())), privacy.delta)
            return SearchPrice(noise, trials, runs, each[most], both, names[most])
    raise ConfigError(
        f"one try of every method costs epsilon {each[most]:.3g} at {names[most]}, and dp_budget is "
        f"{privacy.budget:g}; take more noise (dp_noise), or fewer rounds, steps, folds or methods (portfolio)"
    )


def _by_noise(noise: float, events: Events) -> dict[float, Events]:
    return {USUAL_NOISE: merge(FIGURES, events)} if noise == USUAL_NOISE else {USUAL_NOISE: FIGURES, noise: events}


def _planned(
    deployment: Deployment, settings: FitSettings, methods: Sequence[str], counts: Sequence[Tensor], trials: int
) -> tuple[list[Events], int]:
    """Events of every site in all runs, and how many runs there are; methods that cannot be private have none."""
    total: list[Events] = [()] * len(counts[0])
    fewest = torch.stack([part[:, 0] for part in counts]).min(0).values
    privacy, runs = deployment.run.privacy, 0
    assert privacy is not None
    for number in range(trials):
        for method in methods:
            if not is_tried(number, method):
                continue
            algorithm = deployment.of_try(deployment.make_try(number, method, len(total)), None).algorithm
            for part in counts:
                try:
                    privacy.check_method(method, algorithm, part[:, 0])
                    each, after = planned_costs(algorithm, part[:, 0])
                except ConfigError:  # it is left out
                    continue
                if each is None:
                    continue
                rounds, runs = algorithm.rounds_in(settings.rounds), runs + 1
                for k in range(len(total)):
                    rate = min(algorithm.training.batch / max(int(fewest[k]), 1), 1.0)
                    whole = merge(merge((), each[k], rounds), after[k])
                    total[k] = merge(total[k], at_rate(whole, rate))
    return total, runs
