"""Models of several inputs, by name or in a tuple, in whole runs: each against a loop of plain torch, to 1e-6."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import kinfed
from kinfed.data import Federation, Packing
from kinfed.deploy.operator.trial import write_sites
from kinfed.errors import ConfigError, DataError, ModelError
from kinfed.newcomers import adopt
from kinfed.serving import ModelPipeline, model_of_run
from kinfed.serving.onnx_export import write_onnx
from kinfed.serving.predict import predict

EXAMPLES, CLIENTS, STEPS, RATE = 36, 3, 4, 0.3
_numbers = np.random.default_rng(3)
CLIENT = np.arange(EXAMPLES) % CLIENTS
TESTED = np.arange(EXAMPLES) >= EXAMPLES - 6
Y = _numbers.integers(0, 3, EXAMPLES)
WORDS = {
    "input_ids": _numbers.integers(1, 20, (EXAMPLES, 7)),
    "attention_mask": (np.arange(7) < _numbers.integers(1, 8, EXAMPLES)[:, None]).astype(int),
    "token_type_ids": _numbers.integers(0, 2, (EXAMPLES, 7)),
}
MIXED = (
    _numbers.normal(5, 3, (EXAMPLES, 3, 4)).astype("float32"),
    _numbers.integers(0, 9, EXAMPLES),
    _numbers.random(EXAMPLES) < 0.5,
)


class SpeaksAsTransformers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(pad_token_id=0)
        self.words, self.kinds, self.out = nn.Embedding(20, 6), nn.Embedding(2, 6), nn.Linear(6, 3)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        token_type_ids: Tensor,
        labels: Tensor | None = None,
        use_cache: bool = True,
    ) -> dict[str, Any]:
        assert labels is None
        h = (self.words(input_ids) + self.kinds(token_type_ids)) * attention_mask[..., None]
        mean = h.sum(-2) / attention_mask.sum(-1, keepdim=True)
        return {"logits": self.out(torch.tanh(mean)), "past": use_cache}


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image, self.code, self.head = nn.Linear(12, 6), nn.Embedding(9, 6), nn.Linear(6, 3)

    def forward(self, image: Tensor, code: Tensor, seen: Tensor) -> Tensor:
        assert image.shape[1:] == (3, 4)
        assert code.dtype == torch.int64
        assert seen.dtype == torch.bool
        z: Tensor = self.head(torch.tanh(self.image(image.flatten(1)) + self.code(code) * seen[:, None]))
        return z


CASES: dict[str, tuple[Any, type[nn.Module], list[str]]] = {
    "by name": (WORDS, SpeaksAsTransformers, ["rows", "vmap"]),
    "in a tuple": (MIXED, Pair, ["rows", "vmap"]),
}


def taken(x: Any, rows: Any) -> Any:
    """Some examples of several inputs, as tensors."""
    if isinstance(x, dict):
        return {name: torch.from_numpy(np.asarray(one)[rows]) for name, one in x.items()}
    return tuple(torch.from_numpy(one[rows]) for one in x)


def called(module: nn.Module, inputs: Any) -> Tensor:
    z = module(**inputs) if isinstance(inputs, dict) else module(*inputs)
    return z["logits"] if isinstance(z, dict) else z


def federation(name: str, **options: Any) -> Federation:
    return Federation.from_arrays(CASES[name][0], Y, CLIENT, test_rows=TESTED, **options)


def run(name: str, backend: str = "auto", **settings: Any) -> kinfed.RunResult:
    usual: dict[str, Any] = {"algorithms": "local,fedavg", "rounds": 1, "steps": STEPS, "batch": 100, "lr": RATE}
    settings = {"federation": federation(name), **usual, "participation": 1.0, "seeds": (0,), **settings}
    return kinfed.run(model=CASES[name][1], backend=backend, **settings)


@pytest.mark.parametrize("name", CASES)
def test_a_run_trains_as_plain_torch(name: str, tmp_path: Path) -> None:
    x, make, backends = CASES[name]
    start = run(name, rounds=1, lr=1e-12).personal_model(1, "local").module.state_dict()
    plain = make().train()
    plain.load_state_dict(start)
    optimizer = torch.optim.SGD(plain.parameters(), RATE)
    rows = np.flatnonzero((CLIENT == 1) & ~TESTED)
    for _ in range(STEPS):
        optimizer.zero_grad()
        F.cross_entropy(called(plain, taken(x, rows)), torch.from_numpy(Y[rows])).backward()
        optimizer.step()
    for backend in backends:
        model = run(name, backend).personal_model(1, "local")
        for parameter, value in plain.state_dict().items():
            torch.testing.assert_close(model.module.state_dict()[parameter], value, rtol=1e-6, atol=1e-6)
        wanted = torch.softmax(called(plain.eval(), taken(x, TESTED)), 1).detach().numpy()
        given = {k: v[TESTED] for k, v in x.items()} if isinstance(x, dict) else tuple(one[TESTED] for one in x)
        np.testing.assert_allclose(model.predict_proba(given), wanted, rtol=1e-5, atol=1e-6)
        z = called(model.module, taken(x, TESTED))  # its own inputs, as whoever has the module alone calls it
        np.testing.assert_allclose(torch.softmax(z, 1).detach().numpy(), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_files_of_a_run_know_the_inputs(name: str, tmp_path: Path) -> None:
    """What is resumed, exported, predicted from files, adopted and written as ONNX is the same model."""
    x, make, _ = CASES[name]
    whole = run(name, rounds=4, out=tmp_path / "whole")
    model = whole.personal_model(2, "fedavg")
    wanted = model.predict_proba(x)
    run(name, rounds=2, out=tmp_path / "parts")
    grown = run(name, rounds=4, out=tmp_path / "parts", extend=True)
    np.testing.assert_array_equal(grown.personal_model(2, "fedavg").predict_proba(x), wanted)
    np.testing.assert_array_equal(model_of_run(tmp_path / "whole", "2", "fedavg", build=make).predict_proba(x), wanted)
    model.save(tmp_path / "model.safetensors")
    np.savez(tmp_path / "new.npz", **x if isinstance(x, dict) else {f"arr_{k}": one for k, one in enumerate(x)})
    read = ModelPipeline.read(tmp_path / "model.safetensors", make)
    np.testing.assert_array_equal(predict(read, tmp_path / "new.npz").probabilities.numpy(), wanted)
    write_onnx(read, tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    fed = x if isinstance(x, dict) else {f"input {number}": one for number, one in enumerate(x)}
    np.testing.assert_allclose(session.run(None, fed)[0], wanted, rtol=1e-5, atol=1e-6)
    federation(name).save(tmp_path / "federation")
    again = Federation.load(tmp_path / "federation")
    assert again.digest() == federation(name).digest()
    joined = adopt(tmp_path / "whole", again.take(torch.tensor([0])), "fedavg", model=make)
    assert joined.n_train == 10
    flat = again.features.raw.numpy() if name == "by name" else again.features.raw[:, :12].numpy()
    other = Federation.from_arrays(flat, Y, ["new"] * EXAMPLES, tokens=name == "by name")
    with pytest.raises(ConfigError, match=r"take examples of (input_ids|0)"):
        adopt(tmp_path / "whole", other, "fedavg", model=make)


def test_floats_are_standardized_and_whole_numbers_are_not() -> None:
    data = federation("in a tuple", standardize=True)
    image, code, seen = data.features.packing.unpack(data.features.gather(data.train.rows))  # type: ignore[union-attr]
    assert abs(float(image.mean())) < 1e-5
    assert torch.equal(code, torch.from_numpy(MIXED[1])[data.train.rows])
    assert torch.equal(seen, torch.from_numpy(MIXED[2])[data.train.rows])


def test_what_cannot_take_several_inputs_is_refused_by_name() -> None:
    data = federation("by name")
    with pytest.raises(ConfigError, match=r"model mlp takes one input, .* input_ids \[7\], attention_mask \[7\]"):
        kinfed.run(federation=data, model="mlp", algorithms="local", rounds=1)
    with pytest.raises(ConfigError, match="trees split columns of numbers, and the data have several inputs"):
        run("by name", algorithms="trees")
    for backend in ("stacked", "fused", "batched"):
        with pytest.raises(ModelError, match="path takes"):
            run("by name", backend)
    with pytest.raises(ConfigError, match="nodes of a deployment have examples of one array"):
        write_sites(Path("unused"), data, ["a", "b", "c"])
    with pytest.raises(ModelError, match=r"fails on examples of 0 \[7\], 1 \[7\]"):
        kinfed.run(
            federation=Federation.from_arrays((WORDS["input_ids"],) * 2, Y, CLIENT), model=Pair, algorithms="local"
        )
    with pytest.raises(ModelError, match="a model is given as a function that makes it"):
        kinfed.run(federation=data, model=SpeaksAsTransformers(), algorithms="local")
    model = run("by name").personal_model(0, "local")
    for rows, message in (
        ((WORDS["input_ids"],), "takes inputs by name, input_ids, attention_mask, token_type_ids; .* a tuple"),
        ({"input_ids": WORDS["input_ids"]}, r"has \['input_ids'\]"),
        ({**WORDS, "token_type_ids": np.zeros((EXAMPLES, 3), int)}, r"whole numbers of shape \[3\] in the place"),
        ({**WORDS, "token_type_ids": np.zeros((EXAMPLES, 7))}, "float numbers"),
    ):
        with pytest.raises(DataError, match=message):
            model.predict(rows)


def test_a_function_is_told_the_shapes() -> None:
    told = []

    def make(shapes: Any, classes: int) -> nn.Module:
        told.append((shapes, classes))
        return Pair()

    kinfed.run(federation=federation("in a tuple"), model=make, algorithms="local", rounds=1, steps=1)
    assert told[0] == (((3, 4), (), ()), 3)


def test_what_was_packed_comes_back() -> None:
    packing, raw = Packing.of(WORDS, "x")
    assert raw.dtype == torch.int64
    for name, value in packing.unpack(raw).items():  # type: ignore[union-attr]
        assert torch.equal(value, torch.from_numpy(WORDS[name]))
    packing, raw = Packing.of(MIXED, "x")
    assert raw.dtype == torch.float32
    for value, wanted in zip(packing.unpack(raw), MIXED, strict=True):
        assert torch.equal(value, torch.from_numpy(wanted))
    assert Packing.from_json(packing.to_json()) == packing


@pytest.mark.parametrize(
    ("x", "message"),
    [
        ({"a": np.zeros((4, 2)), "b": np.zeros(3)}, "one entry per example; got a: 4, b: 3"),
        ({"a": [[1], [1, 2]]}, "unequal shapes; pad them"),
        ({"a": ["x"] * 4}, r"x\['a'\] should hold numbers"),
        ({}, "arrays by name"),
        (({"a": 1},), r"x\[0\] should hold numbers"),
        ((np.zeros(4), np.full(4, 2**24 + 1)), "beyond 16,777,216"),
        ({"a": np.zeros(4), "labels": np.zeros(4)}, "give them as y"),
    ],
)
def test_what_is_no_set_of_inputs(x: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        Federation.from_arrays(x, [0, 1, 0, 1], [0] * 4)
