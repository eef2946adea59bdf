"""Models of problems whose outputs a plain network does not give, from networks that do not know the problem."""

import torch
from torch import Tensor, nn


class Thresholds(nn.Module):
    """logit P(class > k) = η(x) - c_k for classes in an order: the proportional-odds model (McCullagh 1980).

    `score` is a network with one output η, whatever it is; the thresholds c_1 < c_2 < ... are parameters, the first and
    the softplus of gaps, and begin where outputs of 0 make all classes equally likely."""

    def __init__(self, score: nn.Module, classes: int) -> None:
        super().__init__()
        self.score = score
        start = torch.logit(torch.arange(1, classes) / classes)
        self.first = nn.Parameter(start[:1].clone())
        self.gaps = nn.Parameter(start.diff().expm1().log())

    def forward(self, x: Tensor) -> Tensor:
        gaps = torch.cat([torch.zeros_like(self.first), nn.functional.softplus(self.gaps)])
        return self.score(x) - (self.first + gaps.cumsum(0))  # type: ignore[no-any-return]
