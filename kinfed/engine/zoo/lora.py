"""Low-rank adapters: a large frozen model, and of every chosen linear layer a small trained correction.

    y = W x + b + (alpha / rank) B A x            W, b frozen;  A [rank, in] random, B [out, rank] zero at first

    model = kinfed.lora(model, targets="query,value", rank=8, train="head")

E. Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, ICLR 2022. Variants by configuration:

  freeze_a    A is a random constant and only B is trained: the mean of clients' B gives the mean of their corrections.
              Y. Sun et al., Improving LoRA in Privacy-preserving Federated Learning, ICLR 2024 (FFA-LoRA)
  pair        two adapters side by side, one to share and one to keep:  y = W x + b + s (B_s A_s + B_p A_p) x.
              Y. Yang et al., Dual-Personalizing Adapter for Federated Foundation Models, NeurIPS 2024 (FedDPA)

Parameters are called `<layer>.lora_A` and `<layer>.lora_B`, those of the second adapter `personal_A` and `personal_B`:
"*.lora_*" and "*.personal_*" are patterns for what is shared and what stays with the clients.

PEFT reads and writes the files of adapters, adapter_config.json and adapter_model.safetensors in a folder:

    save_adapter(model, folder)                      PeftModel.from_pretrained(base, folder) computes the same
    load_adapter(model, folder)                      a plain model gets the adapters, one with adapters their values

A tensor is called base_model.model.<layer>.lora_A.weight, ....lora_B.weight, and what is trained beside the adapters (a
head) base_model.model.<layer>.weight. Of a pair of adapters each has a folder of its own, as PEFT has it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from kinfed.core import storage
from kinfed.engine.contract.columns import matches, parse_patterns
from kinfed.engine.contract.linear import ClientLinear, stacked_linear
from kinfed.errors import ModelError, StorageError

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

    rank: int
    alpha: float
    adapters: tuple[str, ...]

    @classmethod
    def adapting(cls, layer: nn.Linear, rank: int, alpha: float, *, pair: bool = False) -> LoRALinear:
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
        return own

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        for adapter in self.adapters:
            a, b = getattr(self, f"{adapter}_A"), getattr(self, f"{adapter}_B")
            y = y.add(_product(_product(x, a), b), alpha=self.scaling)
        return y

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
    train: str | Sequence[str] = "head*", freeze_a: bool = False, pair: bool = False,
) -> nn.Module:  # fmt: skip
    """Freeze the model, give its linear layers that `targets` name adapters, and train these and what `train` names.
    The model is changed in place and returned.

    A target is the last part of a layer's name ("query": every layer called so), its whole name, or a glob over one of
    them ("encoder.layer.5.*"). `train` names layers or parameters, by globs too ("head", "*.LayerNorm"); with train=""
    adapters alone are trained. Texts are split at commas. Every pattern must match something.

    An adapter of a layer W [out, in] is W + (alpha / rank) B A, with A [rank, in] and B [out, rank], zero at first.
    `freeze_a` trains B alone (FFA-LoRA), `pair` gives every layer two, one to share and one to keep (FedDPA).

    Example:

        >>> model = kinfed.lora(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)), "0", rank=2, train="1")
        >>> {name: list(p.shape) for name, p in model.named_parameters() if p.requires_grad}
        {'0.lora_A': [2, 8], '0.lora_B': [8, 2], '1.weight': [2, 8], '1.bias': [2]}
    """
    names = target_names(model, targets)
    return adapt(model, names, rank=rank, alpha=alpha, train=train, freeze_a=freeze_a, pair=pair)


def adapt(
    model: nn.Module, names: Sequence[str], *, rank: int, alpha: float, train: str | Sequence[str],
    freeze_a: bool = False, pair: bool = False,
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
            layers[id(layer)] = LoRALinear.adapting(layer, rank, alpha, pair=pair)
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


CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
# What these settings of PEFT change is no part of a LoRALinear; each with the value that changes nothing.
_PLAIN: dict[str, Any] = {
    "bias": "none", "use_dora": False, "use_rslora": False, "use_qalora": False, "lora_bias": False,
    "fan_in_fan_out": False, "rank_pattern": {}, "alpha_pattern": {}, "layer_replication": None,
    "target_parameters": None, "trainable_token_indices": None,
}  # fmt: skip


def save_adapter(model: nn.Module, folder: Path | str, adapter: Literal["lora", "personal"] = "lora") -> None:
    """Write one adapter of every adapted layer, and all layers that are trained beside them."""
    layers = {name: layer for name, layer in adapted_layers(model).items() if adapter in layer.adapters}
    if not layers:
        raise ModelError(f"the model has no adapter {adapter!r} to save; kinfed.lora gives it adapters")
    (rank, alpha), *others = {(layer.rank, layer.alpha) for layer in layers.values()}
    if others:
        raise ModelError("an adapter is saved where all layers have one rank and one alpha; these differ")
    tensors: dict[str, Tensor] = {}
    for name, layer in layers.items():
        for part in ("A", "B"):
            tensors[f"{_PREFIX}{name}.lora_{part}.weight"] = getattr(layer, f"{adapter}_{part}")
    beside = _trained_beside(model)
    for name in beside:
        own = model.get_submodule(name).named_parameters(recurse=False)
        tensors |= {f"{_PREFIX}{name}.{parameter}": value for parameter, value in own}
    folder = Path(folder)
    storage.make_folder(folder)
    storage.write_tensors(folder / TENSORS, {name: value.detach() for name, value in tensors.items()}, {"format": "pt"})
    storage.write_json(
        folder / CONFIG,
        {
            "peft_type": "LORA", "task_type": None, "base_model_name_or_path": None, "inference_mode": True,
            "r": rank, "lora_alpha": alpha, "lora_dropout": 0.0, "init_lora_weights": True,
            "target_modules": sorted(layers), "modules_to_save": beside or None, **_PLAIN,
        },
    )  # fmt: skip


def load_adapter(model: nn.Module, folder: Path | str) -> nn.Module:
    """Read an adapter into the model, which is changed in place and returned.

    A model without adapters gets those of the folder; of a model with adapters the first one of each layer is set, and
    layers, ranks and strength must be those of the folder."""
    folder = Path(folder)
    config = storage.read_json(folder / CONFIG, "the configuration of an adapter, as save_adapter and PEFT write it")
    _check_config(config, folder)
    pairs, beside = _sorted_tensors(_read(folder / TENSORS), folder)
    if not adapted_layers(model):
        rank, alpha = int(config["r"]), float(config["lora_alpha"])
        adapt(model, _known_layers(model, pairs, folder), rank=rank, alpha=alpha, train=tuple(beside))
    layers = adapted_layers(model)
    if layers.keys() != pairs.keys():
        odd = sorted(layers.keys() ^ pairs.keys())
        raise ModelError(f"{folder} and the model have adapters in different layers: {', '.join(odd[:3])}")
    for name, layer in layers.items():
        if (layer.rank, layer.alpha) != (config["r"], config["lora_alpha"]):
            raise ModelError(
                f"{folder} has rank {config['r']} and alpha {config['lora_alpha']:g}; layer {name} of the model has "
                f"rank {layer.rank} and alpha {layer.alpha:g}"
            )
    values = {f"{name}.lora_{part}": tensor for name, pair in pairs.items() for part, tensor in pair.items()} | beside
    parameters = dict(model.named_parameters())
    for name, value in values.items():
        if name not in parameters or parameters[name].shape != value.shape:
            wanted = list(parameters[name].shape) if name in parameters else "no such parameter"
            raise ModelError(f"{folder} holds {name} of shape {list(value.shape)}; the model has {wanted}")
    with torch.no_grad():
        for name, value in values.items():
            parameters[name].copy_(value)
    return model


def _trained_beside(model: nn.Module) -> list[str]:
    """Names of the layers that have trained parameters but no adapter."""
    others = ((name, layer) for name, layer in model.named_modules() if not isinstance(layer, LoRALinear))
    return [name for name, layer in others if any(p.requires_grad for p in layer.parameters(recurse=False))]


def _read(path: Path) -> dict[str, Tensor]:
    try:
        with storage.storage_errors("read", path):
            return safetensors.torch.load_file(path)
    except safetensors.SafetensorError as error:
        raise StorageError(f"{path} is damaged: not a complete safetensors file ({error})") from None


def _check_config(config: Mapping[str, Any], folder: Path) -> None:
    if config.get("peft_type") != "LORA" or "r" not in config or "lora_alpha" not in config:
        raise ModelError(
            f"{folder / CONFIG} should describe a LoRA adapter with r and lora_alpha; "
            f"it describes {config.get('peft_type')!r}"
        )
    for name, plain in _PLAIN.items():
        if config.get(name) not in (plain, None):
            raise ModelError(f"{folder} was made with {name} = {config[name]!r}, which kinfed's adapters do not have")


def _sorted_tensors(
    tensors: Mapping[str, Tensor], folder: Path
) -> tuple[dict[str, dict[str, Tensor]], dict[str, Tensor]]:
    """A and B of every adapted layer by its name, and other parameters by theirs."""
    pairs: dict[str, dict[str, Tensor]] = {}
    beside: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        if not key.startswith(_PREFIX):
            raise ModelError(f"{folder / TENSORS} holds {key}; names in an adapter begin with {_PREFIX}")
        name = key.removeprefix(_PREFIX)
        layer, mark, part = name.removesuffix(".weight").rpartition(".lora_")
        if mark and part in ("A", "B"):
            pairs.setdefault(layer, {})[part] = tensor
        else:
            beside[name] = tensor
    if lacking := [name for name, pair in pairs.items() if len(pair) < 2]:
        raise ModelError(f"{folder / TENSORS} holds half of the adapter of {lacking[0]}; save it again")
    if not pairs:
        raise ModelError(f"{folder / TENSORS} holds no adapter")
    return pairs, beside


def _known_layers(model: nn.Module, pairs: Mapping[str, Any], folder: Path) -> list[str]:
    known = {name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    if unknown := [name for name in pairs if name not in known]:
        raise ModelError(
            f"{folder} has an adapter for {unknown[0]}, which is no linear layer of the model; is it of another model?"
        )
    return list(pairs)
