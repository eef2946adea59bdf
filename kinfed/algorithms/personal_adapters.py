"""Adapters of which a part stays with the client: FedSA-LoRA and FedDPA.

    W_m = W0 + (α / r) B A        W0 frozen and common;  kinfed.lora, or a model with adapters such as minilm

`fedsa_lora`: P. Guo, S. Zeng, Y. Wang, H. Fan, F. Wang, L. Qu: Selective Aggregation for Low-Rank Adaptation in
Federated Learning, ICLR 2025 (FedSA-LoRA). Clients train A and B; the server averages A, every client keeps its B.

`feddpa`: Y. Yang, G. Long, T. Shen, J. Jiang, M. Blumenstein: Dual-Personalizing Adapter for Federated Foundation
Models, NeurIPS 2024 (FedDPA). Layers have two adapters, W0 + (α / r) (B_s A_s + B_p A_p): the server averages the
first, every client keeps the second. Deviation: both are trained together and count fully for every input. The paper
trains them in turns and weighs the second by how near an input is to those the client has trained on.

Whatever else is trained, a head for one, is shared, unless `own` names it too ("*.lora_B,head"). With an empty `own`
the server's model is FedAvg's.
"""

from __future__ import annotations

from dataclasses import dataclass

from kinfed.algorithms.facade import ColumnSplit, ConfigError, Task, option, parse_patterns
from kinfed.algorithms.partial import PartlyShared
from kinfed.engine.columns import matches


@dataclass(frozen=True)
class PersonalAdapters(PartlyShared):
    own: str = option("*.lora_B", "parameters that stay with the client, by name or pattern, separated by commas")

    def split(self, task: Task) -> ColumnSplit:
        own = parse_patterns(self.own)
        for pattern in own:
            if not any(matches(slot.name, pattern) for slot in task.slots):
                raise ConfigError(
                    f"clients keep {pattern!r} of their adapters, but the model trains no such parameter; it trains "
                    f"{', '.join(slot.name for slot in task.slots[:8])}{', ...' if len(task.slots) > 8 else ''}. "
                    + _advice(pattern)
                )
        return ColumnSplit.owning(task.slots, own)


def _advice(pattern: str) -> str:
    if "personal" in pattern:
        return "Give its layers two adapters: kinfed.lora(model, targets, pair=True), or --set model.lora_pair=true"
    return "Give its layers adapters: kinfed.lora(model, targets), or --model minilm with lora_rank above 0"
