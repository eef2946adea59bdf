"""Files of adapters, which PEFT reads and writes: adapter_config.json and adapter_model.safetensors in a folder:

    save_adapter(model, folder)                      PeftModel.from_pretrained(base, folder) computes the same
    load_adapter(model, folder)                      a plain model gets the adapters, one with adapters their values

A tensor is called base_model.model.<layer>.lora_A.weight, ....lora_B.weight, and what is trained beside the adapters (a
head) base_model.model.<layer>.weight. Of a pair of adapters each has a folder of its own, as PEFT has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import safetensors.torch
import torch
from torch import Tensor, nn

from kinfed.core import storage
from kinfed.engine.zoo.lora import LoRALinear, adapt, adapted_layers
from kinfed.errors import ModelError, StorageError

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
    if any(layer.residual is not None and bool(layer.residual.any()) for layer in layers.values()):
        raise ModelError("an adapter's file has no place for residuals, which these layers have; save the whole model")
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
