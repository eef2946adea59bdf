"""The registry of losses by name. Needs no torch: the formulas are imported when they are first used."""

from collections.abc import Callable
from typing import Any

from kinfed.core import Registry
from kinfed.data import Kind
from kinfed.errors import ConfigError

LOSSES: Registry[Callable[..., Any]] = Registry("loss")


def _add(name: str, place: str, summary: str, *kinds: Kind) -> None:
    LOSSES.register(name, f"kinfed.engine.contract.{place}", summary=summary, kinds=kinds)


# The first loss of a kind is its own, which `auto` takes.
_add("cross_entropy", "objective:CrossEntropy", "-log of the probability of the class", "binary", "multiclass")
_add("focal", "losses:Focal", "cross-entropy times (1 - p)^g, by which sure examples count less; focal:2 is g",
     "binary", "multiclass")  # fmt: skip
_add("squared", "objective:Squared", "half the squared error: the mean is learned", "regression")
_add("absolute", "objective:Absolute", "the absolute error: the median is learned", "regression")
_add("huber", "objective:Huber", "squared up to huber_delta, absolute beyond", "regression")
_add("quantile", "objective:Quantile", "pinball loss: the quantile of a level is learned, as in quantile:0.9",
     "regression")  # fmt: skip
_add("poisson", "losses:Poisson", "half the Poisson deviance, in units of the mean count", "counts")
_add("negative_binomial", "losses:NegativeBinomial",
     "half the deviance at a variance of m + a m^2; a from training rows, or negative_binomial:a",
     "counts")  # fmt: skip
_add("proportional_odds", "losses:ProportionalOdds", "-log probability of the class, by odds of lying above it",
     "ordinal")  # fmt: skip
_add("binary_labels", "losses:BinaryLabels", "mean cross-entropy over the labels that are known", "multilabel")
_add("discrete_time", "losses:DiscreteTime", "-log likelihood of outliving periods, and of the event's period",
     "survival")  # fmt: skip
_add(
    "partial_likelihood",
    "losses:CoxPartial",
    "Cox's partial likelihood inside a batch: order alone, no level",
    "survival",
)
_add("positions", "losses:Positions", "mean cross-entropy over the positions that have a class", "dense")


def fitting_losses(kind: Kind) -> list[str]:
    """Names of the losses of a kind of problem, its own first."""
    return [name for name, entry in LOSSES.items() if kind in entry.facts.get("kinds", (kind,))]


def loss_name(loss: Callable[..., Any]) -> str:
    """What a function or module is called."""
    name = getattr(loss, "__name__", type(loss).__name__)
    return "".join(letter if letter.isalnum() or letter in "_-" else "_" for letter in name)


def named_loss(loss: str | Callable[..., Any]) -> str:
    """The name of a loss in the registry, under which a function or module is put there in this process."""
    if isinstance(loss, str):
        return loss
    name = loss_name(loss)
    if name in LOSSES:
        entry = LOSSES[name]
        if entry.target is loss:
            return name
        if not entry.facts.get("passed"):
            raise ConfigError(f"a loss is called {name} already; give the function another name")
        LOSSES.unregister(name)
    LOSSES.register(name, loss, summary="a loss of the caller's own", passed=True)
    return name
