"""Update programs: local training that changes several models with every batch, stated as a list of instructions.

    Mix("mixed", "w", "v", "alpha")                             mixed ← w + α (v − w)
    GradientStep("v", eta, at="mixed", number="alpha")          v ← v − η α ∇f(mixed)
    GradientStep("theta", eta, proximal=(lam, "w"), times=5)    θ ← θ − η (∇f(θ) + λ (θ − w)), five times
    Gradient("v", at="w")                                       v ← ∇f(w)
    Norm("length", "v")                                         length ← ‖v‖
    Add("ahead", "w", "v", 0.1, "length")                       ahead ← w + 0.1 length v
    Collect("means", "theta", "begin", "width")                 means of θ over windows of steps

A method says what one batch does, and kinfed.engine.training.sgd does it with every batch of every client.
Models are rows [n, P] by name; names that only instructions know stand for models that last for one batch. Numbers are
one per client, [n] float64, by name; those that only instructions know last for one batch, too.

Running statistics (of BatchNorm, say) are measured, not mixed: a mixture has those of the model it goes toward, a sum
those of what is added, and a gradient, or a model that descends along the gradient at another, takes over that one's.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mix:
    """result ← base + share · (toward − base): exactly `base` at share 0, and exactly `toward` at 1."""

    result: str
    base: str
    toward: str
    share: float | str  # or the name of a number


@dataclass(frozen=True)
class Learn:
    """number ← number − rate · ⟨g, toward − base⟩ in [0, 1]: along the loss of a `Mix` whose gradient g is."""

    number: str
    base: str
    toward: str
    rate: float
    first_only: bool = False  # with the first batch of a round alone


@dataclass(frozen=True)
class GradientStep:
    """model ← model − rate · number · g,   g = ∇f(at) + decay · at + lam · (model − center),  with proximal = (lam,
    center)

    `at` is the model itself unless named; a proximal term needs that. What `learn` changes is changed with the same g,
    and both begin where the batch found them."""

    model: str
    rate: float
    at: str | None = None
    number: str | None = None
    decay: float = 0.0
    proximal: tuple[float, str] | None = None
    times: int = 1  # on the same batch
    stream: int = 0  # which of several sequences of batches
    learn: Learn | None = None
    measures: bool = True  # False: running statistics stay as they are, those of `at` and those of the model

    def __post_init__(self) -> None:
        apart = self.at is not None and self.at != self.model
        if apart and (self.proximal is not None or self.times != 1):
            raise ValueError(
                "a model that descends along the gradient at another has no proximal term, and does so once"
            )
        if not apart and (self.number is not None or self.learn is not None):
            raise ValueError("a number takes part where the gradient is taken at another model: name it with `at`")
        if not apart and not self.measures:
            raise ValueError("a model that descends along its own gradient moves its running statistics")


@dataclass(frozen=True)
class Gradient:
    """result ← ∇f(at) + decay · at"""

    result: str
    at: str
    decay: float = 0.0
    stream: int = 0


@dataclass(frozen=True)
class Add:
    """result ← base + scale · number · direction"""

    result: str
    base: str
    direction: str
    scale: float = 1.0
    number: str | None = None


@dataclass(frozen=True)
class Norm:
    """number ← scale · max(‖model‖, least) ^ power"""

    number: str
    model: str
    scale: float = 1.0
    power: float = 1.0
    least: float = 0.0


@dataclass(frozen=True)
class Collect:
    """result[j] ← result[j] + model / width,   j = ⌊(step − begin) / width⌋,   in steps from `begin` on

    `result` is one of the models that are kept, [n, windows · T] of the trainable columns; `begin` and `width` are
    numbers: a client's first step inside a window, and how many steps a window has."""

    result: str
    model: str
    begin: str
    width: str


Instruction = Mix | GradientStep | Gradient | Add | Norm | Collect


def changes(step: Instruction) -> set[str]:
    """The models and numbers that an instruction changes."""
    if isinstance(step, GradientStep):
        return {step.model} if step.learn is None else {step.model, step.learn.number}
    return {step.number if isinstance(step, Norm) else step.result}
