"""Adapters of which a part stays with the client: FedSA-LoRA and FedDPA.

    W_m = W0 + (α / r) B A        W0 frozen and common;  kinfed.lora, or a model with adapters such as minilm

`fedsa_lora`: P. Guo, S. Zeng, Y. Wang, H. Fan, F. Wang, L. Qu: Selective Aggregation for Low-Rank Adaptation in
Federated Learning, ICLR 2025 (FedSA-LoRA). Clients train A and B; the server averages A, every client keeps its B.

`feddpa`: Y. Yang, G. Long, T. Shen, J. Jiang, M. Blumenstein: Dual-Personalizing Adapter for Federated Foundation
Models, NeurIPS 2024 (FedDPA). Layers have two adapters, W0 + (α / r) (B_s A_s + B_p A_p): the server averages the
first, every client keeps the second. They are trained in turns (`turns`), as in the released code: first the own ones
upon the received shared ones, which stay; then the shared ones as if there were no others. Trained together, own
adapters explain a client's few examples before the shared ones have learnt what all clients have in common, and these
get nothing left to learn from: on planted data that is no better than every client alone. Deviation: own adapters
count fully for every input; the paper weighs them by how near an input is to those the client has trained on.

Whatever else is trained, a head for one, is shared, unless `own` names it too ("*.lora_B,head"). With an empty `own`
the server's model is FedAvg's.
"""

from dataclasses import dataclass

from torch import Tensor

from kinfed.algorithms.common.partial import PartlyShared
from kinfed.author import Cohort, ColumnSplit, ConfigError, PrivacyProfile, Task, gradient_steps, option, parse_patterns
from kinfed.engine import matches, sgd


@dataclass(frozen=True)
class PersonalAdapters(PartlyShared):
    own: str = option("*.lora_B", "parameters that stay with the client, by name or pattern, separated by commas")
    turns: bool = option(False, "train what is own first, then what is shared as if nothing were; off: both together")

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

    def train(self, task: Task, theta: Tensor, split: ColumnSplit, data: Cohort) -> Tensor:
        if not self.turns or not split.own:
            return super().train(task, theta, split, data)
        own = split.own_mask.to(theta.device)
        personal = sgd(task, theta, data.train.batches(self.training, stream="own"), mask=own)
        start = split.take_own(task.init(data.seed)).to(theta).expand(len(theta), -1)  # where adapters correct nothing
        alone = split.join(start, split.take_shared(theta))
        sent = sgd(task, alone, data.train.batches(self.training, loop=1), mask=~own)
        return split.join(split.take_own(personal), split.take_shared(sent))

    def privacy(self, count: Tensor) -> PrivacyProfile:
        steps = self.training.num_steps(count)
        return gradient_steps(2 * steps if self.turns and self.own else steps, weights=self.weights)


def _advice(pattern: str) -> str:
    if "personal" in pattern:
        return "Give its layers two adapters: kinfed.lora(model, targets, pair=True), or --set model.lora_pair=true"
    return "Give its layers adapters: kinfed.lora(model, targets), or --model minilm with lora_rank above 0"
