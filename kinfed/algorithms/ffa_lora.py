"""FFA-LoRA: FedAvg on adapters whose first matrix is a constant.

Y. Sun, Z. Li, Y. Li, B. Ding: Improving LoRA in Privacy-preserving Federated Learning, ICLR 2024.

    W = W0 + (α / r) B A        W0 and A frozen and common, B trained and averaged

The correction is linear in B: the mean of clients' B gives the mean of their corrections, which the means of A and B
together do not, and half as much is sent. It is FedAvg, bit for bit; that A is frozen is the model's part
(kinfed.lora(..., freeze_a=True)), and that it is so is checked. What else is trained, a head for one, is averaged too.
"""

from dataclasses import dataclass

from kinfed.algorithms.fedavg import FedAvg
from kinfed.author import ConfigError, Population, Task
from kinfed.engine import matches


@dataclass(frozen=True)
class FFALoRA(FedAvg):
    traits = frozenset({"state to deploy"})

    def check(self, task: Task, population: Population) -> None:
        names = [slot.name for slot in task.slots]
        advice = "kinfed.lora(model, targets, freeze_a=True), or --model minilm --set model.lora_freeze_a=true"
        if not any(matches(name, "*.lora_B") for name in names):
            listed = f"{', '.join(names[:8])}{', ...' if len(names) > 8 else ''}"
            raise ConfigError(
                f"FFA-LoRA averages adapters, but the model trains none; it trains {listed}. Use {advice}"
            )
        if trained := [name for name in names if matches(name, "*.lora_A")]:
            raise ConfigError(
                f"FFA-LoRA keeps A of every adapter constant, but the model trains {trained[0]}; use {advice}"
            )
        super().check(task, population)
