"""What torch has no public name for computes what its public autograd does."""

from __future__ import annotations

import torch

from kinfed.engine.contract.aten_ops import pull_back


def test_pull_back_is_autograd_without_its_checks() -> None:
    """Several outputs with deltas of their own, an input that nothing depends on, one that one output reaches."""
    generator = torch.Generator().manual_seed(0)
    weight, bias, unused = (torch.randn(3, generator=generator).requires_grad_() for _ in range(3))
    x = torch.randn(5, 3, generator=generator)

    def outputs() -> list[torch.Tensor]:
        return [(x @ weight).exp(), torch.tanh(x * bias + weight)]

    deltas = [torch.randn(5, generator=generator), torch.randn(5, 3, generator=generator)]
    inputs = [weight, bias, unused]
    wanted = torch.autograd.grad(outputs(), inputs, deltas, allow_unused=True, materialize_grads=True)
    ours = pull_back(outputs(), deltas, inputs)
    assert all(torch.equal(*pair) for pair in zip(ours, wanted, strict=True))
    assert all(leaf.grad is None for leaf in inputs)
    assert torch.equal(pull_back(outputs()[:1], deltas[:1], [bias])[0], torch.zeros(3))
