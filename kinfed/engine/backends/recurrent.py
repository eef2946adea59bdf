"""Recurrent networks for many clients at once: forward and backward through time by hand on [n, ...] tensors.

A network is LSTM or GRU layers, perhaps on the vectors of an embedding, the last output, and one dense layer: in
nn.Sequential, or in a module of a user's own whose `forward`, traced, is nothing else. Time is the outermost axis,
[T, n, B, ...]: one step of all clients is one contiguous piece. The factors of a step back do not depend on the steps
after it, so they are worked out for all steps at once, and the loop over time is left with a product and a few sums.

    LSTM   i, f, o = σ(z_i), σ(z_f), σ(z_o)   g = tanh(z_g)   z = W_ih x_t + W_hh h_{t−1} + b_ih + b_hh
           c_t = f c_{t−1} + i g              h_t = o tanh(c_t)
    GRU    r, z = σ(a_r + u_r), σ(a_z + u_z)  n = tanh(a_n + r u_n)   a = W_ih x_t + b_ih, u = W_hh h_{t−1} + b_hh
           h_t = (1 − z) n + z h_{t−1}
"""

from __future__ import annotations

import copy
import operator
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from kinfed.data import Batch
from kinfed.engine.contract.descent import Terms
from kinfed.engine.contract.feature_loss import FeatureLoss, top_deltas
from kinfed.engine.contract.linear import Dense, DenseStep, write_gradient
from kinfed.engine.contract.objective import CROSS_ENTROPY, Objective
from kinfed.engine.rows.module_checks import chain_of, owns_its_parameters
from kinfed.errors import ModelError

# Parameters of an LSTM of which several still fit in the cache together. Stacking 16 small ones (hidden 32) takes half
# the time of one after the other; at 100 units they are even, and torch's own LSTM is a few percent ahead at 256.
STACKS_UP_TO = 150_000
# Parameters up to which compiled loops (kinfed.engine.compiled.fused_recurrent) are ahead of torch's own LSTM.
# Processor time of a plain loop / fused, steps of 10: 2.6 at 43,050 parameters, 1.2 at 1,100,298, 1.0 at 3,773,450.
COMPILES_UP_TO = 2_500_000
# The same of GRUs, for which there are no compiled loops.
GRU_STACKS_UP_TO = 150_000


class LastOutput(nn.Module):
    """Output of a recurrent layer after the last step: [B, T, H] of its (output, state) to [B, H]."""

    def forward(self, result: tuple[Tensor, Any]) -> Tensor:
        return result[0][:, -1]


@dataclass
class Activations:
    """Values of one layer's forward pass that the backward pass needs."""

    x: Tensor  # [T, n, B, D]
    h: Tensor  # [T + 1, n, B, H]; the first is 0
    gates: Tensor  # [T, n, B, G, H] i, f, g, o of an LSTM; r, z, n of a GRU
    others: tuple[Tensor, ...]  # c [T + 1, n, B, H], of which the first is 0, and tanh c [T, n, B, H]; u_n [T, n, B, H]


@dataclass(frozen=True)
class RecurrentLayer(ABC):
    """One layer: `x` is applied to the input and `h` to the layer's own last output, each with a bias."""

    x: Dense
    h: Dense

    gates: ClassVar[int]

    @property
    def hidden(self) -> int:
        return self.h.inputs

    @abstractmethod
    def forward(self, theta: Tensor, x: Tensor) -> Activations:
        """x [T, n, B, D]."""

    @abstractmethod
    def backward(self, theta: Tensor, values: Activations, below: Tensor) -> tuple[Tensor, Tensor]:
        """[T, n, B, G H] deltas at what `x` and `h` give, from the delta at the outputs h, which is overwritten."""

    def products(self, theta: Tensor, x: Tensor, bias: Tensor) -> Tensor:
        """[T, n, B, G H] of the input alone, with a bias [n, G H]: the loop adds what the last output says."""
        z = torch.baddbmm(bias.unsqueeze(1), _by_client(x), self.x.weight_of(theta).transpose(1, 2))
        return _by_time(z, len(x))

    def biases(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        of_x, of_h = self.x.bias_of(theta), self.h.bias_of(theta)
        assert of_x is not None  # `from_module` takes no layer without biases
        assert of_h is not None
        return of_x, of_h


class LSTMLayer(RecurrentLayer):
    gates = 4

    def forward(self, theta: Tensor, x: Tensor) -> Activations:
        steps, n, batch, _ = x.shape
        hidden = self.hidden
        of_x, of_h = self.biases(theta)
        gates = self.products(theta, x, of_x + of_h)
        recurrent = self.h.weight_of(theta).transpose(1, 2).contiguous()  # used in every step: transposed once
        h = x.new_zeros(steps + 1, n, batch, hidden)
        c = torch.zeros_like(h)
        tanh_c = torch.empty_like(h[1:])
        parts = gates.view(steps, n, batch, 4, hidden)
        last_h, last_c = h[0], c[0]
        by_gate = (gate.unbind(0) for gate in parts.unbind(-2))
        walk = zip(gates.unbind(0), *by_gate, h.unbind(0)[1:], c.unbind(0)[1:], tanh_c.unbind(0), strict=True)
        for t, (now, i, f, g, o, next_h, next_c, tanh) in enumerate(walk):
            if t:  # h_0 = 0
                now.baddbmm_(last_h, recurrent)
            # tanh z = 2 σ(2 z) − 1: all four gates in one go over contiguous memory
            g.mul_(2)
            now.sigmoid_()
            g.mul_(2).sub_(1)
            torch.mul(f, last_c, out=next_c).addcmul_(i, g)
            torch.tanh(next_c, out=tanh)
            torch.mul(o, tanh, out=next_h)
            last_h, last_c = next_h, next_c
        return Activations(x, h, parts, (c, tanh_c))

    def backward(self, theta: Tensor, values: Activations, below: Tensor) -> tuple[Tensor, Tensor]:
        c, tanh_c = values.others
        i, f, g, o = values.gates.unbind(-2)
        slope = torch.addcmul(values.gates, values.gates, values.gates, value=-1)  # σ' = σ (1 − σ)
        to_i, to_f, to_g, to_o = slope.unbind(-2)
        torch.addcmul(i, i * g, g, value=-1, out=to_g)  # tanh' = 1 − tanh²
        # z_i, z_f and z_g act through c, each by its slope and by what it multiplies there; z_o through h.
        to_i.mul_(g)
        to_f.mul_(c[:-1])
        to_o.mul_(tanh_c)
        to_c = torch.addcmul(o, o * tanh_c, tanh_c, value=-1)  # ∂h/∂c = o (1 − tanh² c)
        recurrent = self.h.weight_of(theta)
        through_c = torch.zeros_like(to_c[0])
        delta = slope.flatten(-2)
        walk = zip(
            below.unbind(0), to_c.unbind(0), slope[..., :3, :].unbind(0), to_o.unbind(0), f.unbind(0), delta.unbind(0),
            strict=True,
        )  # fmt: skip
        after = None
        for dh, h_to_c, c_to_z, h_to_o, forget, now in reversed(list(walk)):
            if after is not None:
                dh.baddbmm_(after, recurrent)
            through_c.addcmul_(dh, h_to_c)
            c_to_z.mul_(through_c.unsqueeze(-2))
            h_to_o.mul_(dh)
            through_c.mul_(forget)
            after = now
        return delta, delta


class GRULayer(RecurrentLayer):
    gates = 3

    def forward(self, theta: Tensor, x: Tensor) -> Activations:
        steps, n, batch, _ = x.shape
        hidden = self.hidden
        of_x, of_h = self.biases(theta)
        gates = self.products(theta, x, of_x)
        recurrent, bias = self.h.weight_of(theta).transpose(1, 2).contiguous(), of_h.unsqueeze(1)
        h = x.new_zeros(steps + 1, n, batch, hidden)
        u = torch.empty_like(h[1:])
        last = h[0]
        for now, u_n, after in zip(gates.unbind(0), u.unbind(0), h.unbind(0)[1:], strict=True):
            again = torch.baddbmm(bias, last, recurrent)
            both, new = now[..., : 2 * hidden], now[..., 2 * hidden :]
            both.add_(again[..., : 2 * hidden]).sigmoid_()
            u_n.copy_(again[..., 2 * hidden :])
            new.addcmul_(both[..., :hidden], u_n).tanh_()
            torch.lerp(new, last, both[..., hidden:], out=after)
            last = after
        return Activations(x, h, gates.view(steps, n, batch, 3, hidden), (u,))

    def backward(self, theta: Tensor, values: Activations, below: Tensor) -> tuple[Tensor, Tensor]:
        (u,), (r, z, new) = values.others, values.gates.unbind(-2)
        to_new = (1 - z) * (1 - new.square())  # of a step of h: n, by its slope and by its share
        to_z = (values.h[:-1] - new) * z * (1 - z)
        to_r = u * r * (1 - r)  # of a step of a_n
        recurrent = self.h.weight_of(theta)
        at_h, at_new = torch.empty_like(values.gates), torch.empty_like(r)
        for t in range(len(below) - 1, -1, -1):
            dh, now, a = below[t], at_h[t], at_new[t]
            torch.mul(dh, to_new[t], out=a)
            torch.mul(a, to_r[t], out=now[..., 0, :])
            torch.mul(dh, to_z[t], out=now[..., 1, :])
            torch.mul(a, r[t], out=now[..., 2, :])
            if t:
                below[t - 1].addcmul_(dh, z[t]).baddbmm_(now.flatten(-2), recurrent)
        at_x = at_h.clone()
        at_x[..., 2, :] = at_new
        return at_x.flatten(-2), at_h.flatten(-2)


@dataclass(frozen=True)
class TokenTable:
    """An embedding: a row of vectors [n, V, D] for every token."""

    weight: int  # where it begins in a row of theta
    tokens: int  # V
    width: int  # D
    padding: int | None  # the token that does not learn

    def of(self, theta: Tensor) -> Tensor:
        return theta[:, self.weight : self.weight + self.tokens * self.width].view(len(theta), self.tokens, self.width)

    def places(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """(client, token) of tokens [..., n, B] or [n, m]."""
        shape = (-1, 1)
        return torch.arange(tokens.shape[-2], device=tokens.device).view(shape).expand(tokens.shape[-2:]), tokens

    def vectors(self, theta: Tensor, tokens: Tensor) -> Tensor:
        """[T, n, B, D] of tokens [T, n, B]."""
        known = tokens.device.type == "cpu"  # others say so themselves, and asking would wait for them
        if known and tokens.numel() and not (int(tokens.min()) >= 0 and int(tokens.max()) < self.tokens):
            span = f"{int(tokens.min())}..{int(tokens.max())}"
            raise ModelError(f"the model embeds tokens 0..{self.tokens - 1}; got {span}")
        return self.of(theta)[self.places(tokens)]

    def learnt(self, delta: Tensor, tokens: Tensor) -> Tensor:
        """The deltas [n, m, D] without those of padding."""
        return delta if self.padding is None else delta * (tokens != self.padding)[..., None]


_LAYERS: dict[type, type[RecurrentLayer]] = {nn.LSTM: LSTMLayer, nn.GRU: GRULayer}


# The gradient of a dense map: Σ over time and batch of outer products of a delta and an input, [n, T B, ...] each; of a
# table the sum of deltas at the rows of tokens.
OuterGradient = tuple[Dense | TokenTable, Tensor, Tensor]


@dataclass(frozen=True)
class RecurrentNet:
    """A network with the methods of kinfed.engine.backends.dense.FeedForwardNet."""

    layers: tuple[RecurrentLayer, ...]
    head: Dense
    objective: Objective = CROSS_ENTROPY
    table: TokenTable | None = None

    @property
    def compiles(self) -> bool:
        """Whether there are compiled loops for its layers."""
        return isinstance(self.layers[0], LSTMLayer) and self.table is None

    @property
    def stacks_up_to(self) -> int:
        """Parameters, to which a table adds: of its rows, few are read in a step."""
        most = STACKS_UP_TO if isinstance(self.layers[0], LSTMLayer) else GRU_STACKS_UP_TO
        return most if self.table is None else most + self.table.tokens * self.table.width

    @property
    def compiles_up_to(self) -> int:
        return COMPILES_UP_TO if self.compiles else 0

    @classmethod
    def from_module(cls, module: nn.Module, objective: Objective = CROSS_ENTROPY) -> RecurrentNet | None:
        chain = chain_of(module, (nn.Embedding, *_LAYERS, LastOutput, nn.Linear)) or _traced_chain(module)
        if chain is None or [type(layer) for layer in chain[-2:]] != [LastOutput, nn.Linear] or len(chain) > 4:
            return None
        *before, cell, _, last = chain
        words = before[0] if before else None
        if words is not None and (
            not isinstance(words, nn.Embedding) or words.max_norm or words.sparse or words.scale_grad_by_freq
        ):
            return None
        if not isinstance(cell, nn.RNNBase) or not isinstance(last, nn.Linear):
            return None
        if cell.bidirectional or cell.proj_size or not cell.bias or not cell.batch_first or cell.dropout:
            return None
        if not owns_its_parameters(module, chain):
            return None
        kind = _LAYERS[type(cell)]
        table = None
        if isinstance(words, nn.Embedding):
            table = TokenTable(0, words.num_embeddings, words.embedding_dim, words.padding_idx)
        start = 0 if table is None else table.tokens * table.width
        layers, position, inputs, hidden = [], start, cell.input_size, cell.hidden_size
        outputs = kind.gates * hidden
        for _ in range(cell.num_layers):  # torch's order: weight_ih, weight_hh, bias_ih, bias_hh
            w_h = position + outputs * inputs
            b_x = w_h + outputs * hidden
            own = Dense(hidden, outputs, w_h, b_x + outputs)
            layers.append(kind(Dense(inputs, outputs, position, b_x), own))
            position, inputs = b_x + 2 * outputs, hidden
        bias = None if last.bias is None else position + last.weight.numel()
        return cls(tuple(layers), Dense(last.in_features, last.out_features, position, bias), objective, table)

    @torch.no_grad()
    def logits(self, theta: Tensor, x: Tensor) -> Tensor:
        return self.features_and_logits(theta, x)[1]

    @torch.no_grad()
    def features_and_logits(self, theta: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        phi = self._forward_all(theta, x)[-1].h[-1]
        return phi, self.head.apply(theta, phi)

    def _forward_all(self, theta: Tensor, x: Tensor) -> list[Activations]:
        """Activations of every recurrent layer, from the first to the last."""
        wanted = self.layers[0].x.inputs
        if self.table is not None:
            if x.dim() != 3 or x.is_floating_point():
                raise ModelError(f"the model reads tokens, [length]; got {x.dtype} of shape {list(x.shape[2:])}")
            values = self.table.vectors(theta, x.permute(2, 0, 1))
            return self._activations_of(theta, values)
        if x.dim() != 4 or x.shape[3] != wanted or not x.is_floating_point():
            kind = "" if x.is_floating_point() else " tokens"
            raise ModelError(
                f"the model reads sequences of {wanted} numbers, [length, {wanted}]; "
                f"got examples of shape {list(x.shape[2:])}{kind}"
            )
        return self._activations_of(theta, x.permute(2, 0, 1, 3))

    def _activations_of(self, theta: Tensor, values: Tensor) -> list[Activations]:
        """Activations for inputs [T, n, B, D]."""
        activations = []
        for layer in self.layers:
            activations.append(layer.forward(theta, values))
            values = activations[-1].h[1:]
        return activations

    def _outer_gradients(
        self, theta: Tensor, batch: Batch, feature_loss: FeatureLoss | None, step: DenseStep | None = None
    ) -> Iterator[OuterGradient]:
        """The gradients of all dense maps, from the last layer to the first. The consumer may overwrite the parameters
        of the map it was handed: what lies below is already propagated."""
        activations = self._forward_all(theta, batch.x)
        top = activations[-1]
        phi = top.h[-1]
        z = self.head.apply(theta, phi)
        delta, at_features = top_deltas(self.objective, feature_loss, phi, z, batch, step)
        below = torch.zeros_like(top.h[1:])
        torch.bmm(delta, self.head.weight_of(theta), out=below[-1])
        if at_features is not None:
            below[-1] += at_features
        yield self.head, delta, phi
        for number in range(len(self.layers) - 1, -1, -1):
            layer, values = self.layers[number], activations[number]
            at_x, at_h = layer.backward(theta, values, below)
            delta = _by_client(at_x)
            again = delta if at_h is at_x else _by_client(at_h)
            at_inputs = torch.bmm(delta, layer.x.weight_of(theta)) if number or self.table is not None else delta
            if number:
                below = _by_time(at_inputs, len(top.x))
            yield layer.x, delta, _by_client(values.x)
            yield layer.h, again, _by_client(values.h[:-1])
            if not number and self.table is not None:
                tokens = batch.x.transpose(1, 2).flatten(1)
                yield self.table, self.table.learnt(at_inputs, tokens), tokens

    @torch.no_grad()
    def grad(self, theta: Tensor, batch: Batch, feature_loss: FeatureLoss | None = None) -> Tensor:
        out = torch.empty_like(theta, memory_format=torch.contiguous_format)
        for dense, delta, x in self._outer_gradients(theta, batch, feature_loss):
            if isinstance(dense, TokenTable):
                dense.of(out).zero_().index_put_(dense.places(x), delta, accumulate=True)
            else:
                write_gradient(dense.params_of(out), delta, x)
        return out

    @torch.no_grad()
    def take_step_(self, theta: Tensor, batch: Batch, lr: float | Tensor, terms: Terms) -> None:
        lam, center = terms.proximal or (None, None)
        step = DenseStep(lr, lam, theta.dtype)
        for dense, delta, x in self._outer_gradients(theta, batch, terms.feature_loss, step):
            if isinstance(dense, TokenTable):
                toward = None if center is None else dense.of(center)
                step.apply_to_table_(dense.of(theta), dense.places(x), delta, toward)
            else:
                step.apply_(dense.params_of(theta), delta, x, None if center is None else dense.params_of(center))


def _traced_chain(module: nn.Module) -> list[nn.Module] | None:
    """The layers of a user's own module: an embedding perhaps, one LSTM or GRU, its last output and a linear layer,
    if its `forward`, traced in training and in evaluation, calls these one after the other and does nothing else."""
    kinds = [type(child) for child in module.children()]
    if not any(kind in _LAYERS for kind in kinds) or chain_of(module, (type(module),)) is None:
        return None  # not worth a trace, or with hooks
    last, traced = LastOutput(), copy.deepcopy(module)  # a forward may keep what it is called with
    chains = [_layers_called(module, traced.train(mode), last) for mode in (True, False)]
    return chains[0] if chains[0] == chains[1] else None


def _layers_called(module: nn.Module, traced: nn.Module, last_output: LastOutput) -> list[nn.Module] | None:
    from torch import fx  # for modules of this kind alone

    class Tracer(fx.Tracer):
        """A graph does not say under which modes of torch a layer is called, such as `no_grad`."""

        as_usual = True

        def call_module(self, *arguments: Any) -> Any:
            self.as_usual &= torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")
            return super().call_module(*arguments)

    tracer = Tracer()
    try:
        with torch.enable_grad():
            graph = tracer.trace(traced)
    except Exception:  # the code of a stranger that cannot be traced
        return None
    if not tracer.as_usual:
        return None
    for node in reversed(list(graph.nodes)):  # such as the state, taken apart from the outputs
        if node.target is operator.getitem and not node.users:
            graph.erase_node(node)
    nodes = list(graph.nodes)
    (first, *inside), end = nodes[:-1], nodes[-1]
    chain: list[nn.Module] = []
    if first.op != "placeholder" or end.op != "output":
        return None
    last: object = first
    indices: list[Any] = []
    for node in inside:
        if node.args[:1] != (last,) or node.kwargs:
            return None
        last = node
        if node.op == "call_function" and node.target is operator.getitem:
            indices.append(node.args[1])
            continue
        if node.op != "call_module" or len(node.args) != 1:
            return None
        layer = module.get_submodule(node.target)
        if chain_of(layer, (nn.Embedding, *_LAYERS, nn.Linear)) != [layer]:
            return None
        if isinstance(layer, nn.Linear):
            if tuple(indices) not in _LAST_OUTPUT.get(type(chain[-1]) if chain else None, ()):
                return None
            chain.append(last_output)
            indices = []
        elif indices:
            return None
        chain.append(layer)
    return chain if end.args == (last,) and not indices else None


_EVERYTHING = slice(None)
_OF_OUTPUTS = ((0, (_EVERYTHING, -1)), (0, (_EVERYTHING, -1, _EVERYTHING)))
# What is read from a layer's answer (outputs, state), where this is the last output of the last layer.
_LAST_OUTPUT: dict[type | None, tuple[tuple[Any, ...], ...]] = {
    nn.LSTM: (*_OF_OUTPUTS, (1, 0, -1)),
    nn.GRU: (*_OF_OUTPUTS, (1, -1)),
}


def _by_client(x: Tensor) -> Tensor:
    """[T, n, B, F] to [n, T B, F]; a view for a single client."""
    return x.transpose(0, 1).flatten(1, 2)


def _by_time(x: Tensor, steps: int) -> Tensor:
    """[n, T B, F] to [T, n, B, F], contiguous."""
    return x.reshape(len(x), steps, -1, x.shape[2]).transpose(0, 1).contiguous()
