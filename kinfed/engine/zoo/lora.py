"""Low-rank adapters: a large frozen model, and of every chosen linear layer a small trained correction.

    y = W x + b + (alpha / rank) B A x            W, b frozen;  A [rank, in] random, B [out, rank] zero at first

    model = kinfed.lora(model, targets="query,value", rank=8, train="head")

E. Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, ICLR 2022. Variants by configuration:

  freeze_a    A is a random constant and only B is trained: the mean of clients' B gives the mean of their corrections.
              Y. Sun et al., Improving LoRA in Privacy-preserving Federated Learning, ICLR 2024 (FFA-LoRA)
  pair        two adapters side by side, one to share and one to keep:  y = W x + b + s (B_s A_s + B_p A_p) x.
              Y. Yang et al., Dual-Personalizing Adapter for Federated Foundation Models, NeurIPS 2024 (FedDPA)
  residual    a correction R [out, in], zero at first, that no gradient moves:  y = W x + b + s (B A + R) x.  Servers
              put into it what averages of A and B miss of the average of their products (FedEx-LoRA, FLoRA)

Parameters are called `<layer>.lora_A` and `<layer>.lora_B`, those of the second adapter `personal_A` and `personal_B`:
"*.lora_*" and "*.personal_*" are patterns for what is shared and what stays with the clients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from kinfed.engine.contract.columns import matches, parse_patterns
from kinfed.engine.contract.linear import ClientLinear, stacked_linear
from kinfed.errors import ModelError

SHARED, PERSONAL = "lora", "personal"  # the adapters of a layer, as names of parameters begin

# Modules that read the weights of their linear layers instead of calling them: an adapter would be ignored.
_READ_WEIGHTS = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


class LoRALinear(ClientLinear):
    """A frozen linear layer and one or two trained adapters, which may be stacked, A [n, rank, in] and B [n, out,
    rank]: the frozen product is computed once for all clients (kinfed.engine.contract.linear)."""

    lora_A: Tensor
    lora_B: Tensor
    personal_A: Tensor
    personal_B: Tensor
    residual: Tensor | None

    rank: int
    alpha: float
    adapters: tuple[str, ...]

    @classmethod
    def adapting(
        cls, layer: nn.Linear, rank: int, alpha: float, *, pair: bool = False, residual: bool = False
    ) -> LoRALinear:
        """An adapted layer around the parameters of `layer`, which are frozen."""
        own = cls.from_linear(layer)
        own.rank, own.alpha, own.adapters = rank, alpha, (SHARED, PERSONAL) if pair else (SHARED,)
        own.requires_grad_(False)
        for adapter in own.adapters:
            a = torch.empty(rank, layer.in_features, device=layer.weight.device)
            nn.init.kaiming_uniform_(a, a=math.sqrt(5))
            b = torch.zeros(layer.out_features, rank, device=layer.weight.device)
            own.register_parameter(f"{adapter}_A", nn.Parameter(a))
            own.register_parameter(f"{adapter}_B", nn.Parameter(b))
        own.register_parameter("residual", nn.Parameter(torch.zeros_like(layer.weight)) if residual else None)
        return own

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        for adapter in self.adapters:
            a, b = getattr(self, f"{adapter}_A"), getattr(self, f"{adapter}_B")
            y = y.add(_product(_product(x, a), b), alpha=self.scaling)
        return y if self.residual is None else y.add(_product(x, self.residual.detach()), alpha=self.scaling)

    @property
    def scaling(self) -> float:
        return self.alpha / self.rank

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, rank={self.rank}, alpha={self.alpha:g}, adapters={','.join(self.adapters)}"


def _product(x: Tensor, matrix: Tensor) -> Tensor:
    """x times a matrix, one for all or one per client; either may be frozen while the other is stacked."""
    return linear(x, matrix) if matrix.dim() == 2 else stacked_linear(x, matrix)


def lora(
    model: nn.Module, targets: str | Sequence[str], *, rank: int = 8, alpha: float = 16.0,
    train: str | Sequence[str] = "head*", freeze_a: bool = False, pair: bool = False, residual: bool = False,
) -> nn.Module:  # fmt: skip
    """Freeze the model, give its linear layers that `targets` name adapters, and train these and what `train` names.
    The model is changed in place and returned.

    A target is the last part of a layer's name ("query": every layer called so), its whole name, or a glob over one of
    them ("encoder.layer.5.*"). `train` names layers or parameters, by globs too ("head", "*.LayerNorm"); with train=""
    adapters alone are trained. Texts are split at commas. Every pattern must match something.

    An adapter of a layer W [out, in] is W + (alpha / rank) B A, with A [rank, in] and B [out, rank], zero at first.
    `freeze_a` trains B alone (FFA-LoRA), `pair` gives every layer two, one to share and one to keep (FedDPA),
    `residual` a correction as large as W that only servers change (FedEx-LoRA, FLoRA).

    Example:

        >>> model = kinfed.lora(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)), "0", rank=2, train="1")
        >>> {name: list(p.shape) for name, p in model.named_parameters() if p.requires_grad}
        {'0.lora_A': [2, 8], '0.lora_B': [8, 2], '1.weight': [2, 8], '1.bias': [2]}
    """
    names = target_names(model, targets)
    return adapt(model, names, rank=rank, alpha=alpha, train=train, freeze_a=freeze_a, pair=pair, residual=residual)


def adapt(
    model: nn.Module, names: Sequence[str], *, rank: int, alpha: float, train: str | Sequence[str],
    freeze_a: bool = False, pair: bool = False, residual: bool = False,
) -> nn.Module:  # fmt: skip
    """`lora` for linear layers by their whole names."""
    if rank < 1:
        raise ModelError(f"adapters have a rank of at least 1; got {rank}")
    if not alpha > 0:
        raise ModelError(f"alpha, the strength of adapters, is above 0; got {alpha:g}")
    for name in names:
        _check_target(model, name)
    trained = _trained_parameters(model, _patterns(train))
    model.requires_grad_(False)
    layers: dict[int, nn.Module] = {}  # a layer that is used twice keeps one adapter
    for name in names:
        layer = model.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        if id(layer) not in layers:
            layers[id(layer)] = LoRALinear.adapting(layer, rank, alpha, pair=pair, residual=residual)
        _replace(model, name, layers[id(layer)])
    if freeze_a:
        _make_constant(model)
    for parameter in trained:
        parameter.requires_grad_(True)
    _make_stackable(model)
    return model


def freeze_but(model: nn.Module, train: str | Sequence[str]) -> nn.Module:
    """Freeze all that `train` does not name. The model is changed in place and returned."""
    trained = _trained_parameters(model, _patterns(train))
    model.requires_grad_(False)
    for parameter in trained:
        parameter.requires_grad_(True)
    return model


def _make_stackable(model: nn.Module) -> None:
    """Put ClientLinear in the place of plain linear layers that are trained, so that the model can run batched."""
    layers: dict[int, nn.Module] = {}
    for name, layer in _linear_layers(model):
        is_read = isinstance(_owner(model, name), _READ_WEIGHTS)  # and not called
        if type(layer) is nn.Linear and any(p.requires_grad for p in layer.parameters()) and not is_read:
            _replace(model, name, layers.setdefault(id(layer), ClientLinear.from_linear(layer)))


def target_names(model: nn.Module, targets: str | Sequence[str]) -> list[str]:
    """The names of the linear layers that these patterns mean, in the model's order."""
    known = [name for name, _ in _linear_layers(model)]
    names: set[str] = set()
    patterns = _patterns(targets)
    if not patterns:
        raise ModelError("adapters need targets: names of linear layers, such as query,value")
    for pattern in patterns:
        chosen = [name for name in known if fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")]
        if not chosen:
            listed = ", ".join(known[:12]) + (", ..." if len(known) > 12 else "")
            raise ModelError(f"no linear layer matches the target {pattern!r}; the model has {listed or 'none'}")
        names.update(chosen)
    return [name for name in known if name in names]


def _check_target(model: nn.Module, name: str) -> None:
    """Refuse layers whose adapter would be ignored, or would take the place of something else."""
    layer, parent = model.get_submodule(name), _owner(model, name)
    if isinstance(layer, LoRALinear):
        raise ModelError(f"{name} has an adapter already; call lora once, with pair=True for two adapters")
    if isinstance(parent, _READ_WEIGHTS):
        raise ModelError(
            f"{name} cannot have an adapter: its {type(parent).__name__} uses the layer's weights without calling the "
            "layer; build attention from nn.Linear layers, as kinfed's model transformer does"
        )
    if type(layer) not in (nn.Linear, ClientLinear):
        raise ModelError(
            f"{name} is a {type(layer).__name__}, not a plain nn.Linear, so that it cannot have an adapter"
        )


def adapted_layers(model: nn.Module) -> dict[str, LoRALinear]:
    """The layers with adapters by name."""
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, LoRALinear)}


def _patterns(text: str | Sequence[str]) -> tuple[str, ...]:
    return parse_patterns(text) if isinstance(text, str) else tuple(text)


def _linear_layers(model: nn.Module) -> list[tuple[str, nn.Linear]]:
    """All linear layers under all their names."""
    every = model.named_modules(remove_duplicate=False)
    return [(name, layer) for name, layer in every if isinstance(layer, nn.Linear) and name]


def _owner(model: nn.Module, name: str) -> nn.Module:
    return model.get_submodule(name.rpartition(".")[0])


def _replace(model: nn.Module, name: str, layer: nn.Module) -> None:
    setattr(_owner(model, name), name.rpartition(".")[2], layer)


def _trained_parameters(model: nn.Module, patterns: Sequence[str]) -> list[nn.Parameter]:
    parameters = dict(model.named_parameters(remove_duplicate=False))
    trained: dict[int, nn.Parameter] = {}
    for pattern in patterns:
        chosen = [parameter for name, parameter in parameters.items() if matches(name, pattern)]
        if not chosen:
            layers = list(dict.fromkeys(name.split(".")[0] for name in parameters))
            raise ModelError(
                f"train: no layer of the model matches {pattern!r}; it has {', '.join(layers)}. "
                'With train="" adapters alone are trained'
            )
        trained |= {id(parameter): parameter for parameter in chosen}
    return list(trained.values())


def _make_constant(model: nn.Module) -> None:
    """Freeze every A. A constant is no part of what is saved and sent, so it must be the same whenever the model is
    built: it is drawn from a generator of its own, by the order of the layers, and not from the seed of a run."""
    generator = torch.Generator().manual_seed(0)
    for layer in adapted_layers(model).values():
        for adapter in layer.adapters:
            a = getattr(layer, f"{adapter}_A")
            bound = 1 / math.sqrt(layer.in_features)
            a.requires_grad_(False).copy_(torch.empty(a.shape).uniform_(-bound, bound, generator=generator))
