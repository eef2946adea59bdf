"""Recurrent networks for many clients at once: forward and backward through time by hand on [n, ...] tensors.

A network is LSTM layers, the last output, and one dense layer. Time is the outermost axis inside, [T, n, B, ...]: one
step of all clients is one contiguous piece. What a step back multiplies with does not depend on the steps after it, so
it is worked out for all steps at once, and the loop over time is left with a product and a few sums.

    i, f, o = σ(z_i), σ(z_f), σ(z_o)   g = tanh(z_g)   z = W_ih x_t + W_hh h_{t−1} + b_ih + b_hh
    c_t = f c_{t−1} + i g              h_t = o tanh(c_t)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kinfed.engine.dense import Dense, chain_of, output_delta
from kinfed.errors import ModelError


class LastOutput(nn.Module):
    """What a recurrent layer says after the last step: [B, T, H] of its (output, state) to [B, H]."""

    def forward(self, result: tuple[Tensor, Any]) -> Tensor:
        return result[0][:, -1]


@dataclass(frozen=True)
class Cell:
    """One LSTM layer: `x` is applied to the input and `h` to the layer's own last output, each with a bias."""

    x: Dense
    h: Dense

    @property
    def hidden(self) -> int:
        return self.h.inputs


@dataclass
class Trace:
    """What one layer keeps of its way forward."""

    x: Tensor  # [T, n, B, D]
    h: Tensor  # [T + 1, n, B, H]; the first is 0
    c: Tensor  # [T + 1, n, B, H]; the first is 0
    gates: Tensor  # [T, n, B, 4, H] i, f, g, o
    tanh_c: Tensor  # [T, n, B, H]


@dataclass(frozen=True)
class Share:
    """The gradient of a dense map: Σ over time and batch of outer products of `delta` and `x`, [T, n, B, ...] each."""

    dense: Dense
    delta: Tensor
    x: Tensor


@dataclass(frozen=True)
class RecurrentNet:
    cells: tuple[Cell, ...]
    head: Dense

    @classmethod
    def compile(cls, module: nn.Module) -> RecurrentNet | None:
        """The network as LSTM layers and a dense one, or None where it is anything else."""
        chain = chain_of(module, (nn.LSTM, LastOutput, nn.Linear))
        if chain is None or [type(layer) for layer in chain] != [nn.LSTM, LastOutput, nn.Linear]:
            return None
        lstm, _, last = chain
        assert isinstance(lstm, nn.LSTM)
        assert isinstance(last, nn.Linear)
        if lstm.bidirectional or lstm.proj_size or not lstm.bias or not lstm.batch_first or lstm.dropout:
            return None
        expected = [p for layer in lstm.all_weights for p in layer] + [last.weight]
        expected += [] if last.bias is None else [last.bias]
        found = list(module.parameters())
        if len(found) != len(expected) or any(a is not b for a, b in zip(found, expected, strict=True)):
            return None  # tied or reparametrized
        cells, position, inputs, hidden = [], 0, lstm.input_size, lstm.hidden_size
        for _ in range(lstm.num_layers):  # torch's order: weight_ih, weight_hh, bias_ih, bias_hh
            w_h = position + 4 * hidden * inputs
            b_x = w_h + 4 * hidden * hidden
            cells.append(
                Cell(Dense(inputs, 4 * hidden, position, b_x), Dense(hidden, 4 * hidden, w_h, b_x + 4 * hidden))
            )
            position, inputs = b_x + 8 * hidden, hidden
        bias = None if last.bias is None else position + last.weight.numel()
        return cls(tuple(cells), Dense(last.in_features, last.out_features, position, bias))

    @torch.no_grad()
    def forward(self, theta: Tensor, x: Tensor) -> Tensor:
        """[n, B, C] logits."""
        return self._logits(theta, self._read(theta, x)[-1])

    def _logits(self, theta: Tensor, top: Trace) -> Tensor:
        w, b = self.head.weight_of(theta).transpose(1, 2), self.head.bias_of(theta)
        return torch.bmm(top.h[-1], w) if b is None else torch.baddbmm(b.unsqueeze(1), top.h[-1], w)

    def _read(self, theta: Tensor, x: Tensor) -> list[Trace]:
        wanted = self.cells[0].x.inputs
        if x.dim() != 4 or x.shape[3] != wanted or not x.is_floating_point():
            kind = "" if x.is_floating_point() else " tokens"
            raise ModelError(
                f"the model reads sequences of {wanted} numbers, [length, {wanted}]; "
                f"got examples of shape {list(x.shape[2:])}{kind}"
            )
        values, traces = x.permute(2, 0, 1, 3), []
        for cell in self.cells:
            traces.append(_forward(cell, theta, values))
            values = traces[-1].h[1:]
        return traces

    def _shares(self, theta: Tensor, traces: list[Trace], delta: Tensor) -> Iterator[Share]:
        """The gradients of all dense maps, from the last layer to the first, for delta [n, B, C] at the logits.

        The consumer may overwrite the parameters of a share it has in hand: what lies below is already propagated."""
        steps = len(traces[-1].x)
        below = torch.zeros_like(traces[-1].tanh_c)
        torch.bmm(delta, self.head.weight_of(theta), out=below[-1])
        yield Share(self.head, delta.unsqueeze(0), traces[-1].h[-1:])
        for number in range(len(self.cells) - 1, -1, -1):
            cell, trace = self.cells[number], traces[number]
            d = _backward(cell, theta, trace, below)
            if number:
                flat = torch.bmm(_by_client(d), cell.x.weight_of(theta))
                below = _by_time(flat, steps)
            yield Share(cell.x, d, trace.x)
            yield Share(cell.h, d, trace.h[:-1])

    @torch.no_grad()
    def grad(self, theta: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        traces = self._read(theta, x)
        out = torch.empty_like(theta, memory_format=torch.contiguous_format)
        for share in self._shares(theta, traces, output_delta(self._logits(theta, traces[-1]), y, weight)):
            delta = _by_client(share.delta)
            torch.bmm(delta.transpose(1, 2), _by_client(share.x), out=share.dense.weight_of(out))
            if (bias := share.dense.bias_of(out)) is not None:
                torch.sum(delta, 1, out=bias)
        return out

    @torch.no_grad()
    def descend_(
        self,
        theta: Tensor,
        x: Tensor,
        y: Tensor,
        weight: Tensor,
        lr: float | Tensor,
        pull: tuple[float | Tensor, Tensor] | None = None,
    ) -> None:
        """theta <- theta - lr * (grad + lam * (theta - center)), in place, without storing the gradient."""
        traces = self._read(theta, x)
        # The way back is linear in the delta of the output, so rates of the clients' own enter there.
        scale = 1.0 if isinstance(lr, Tensor) else -lr
        weight = weight * -lr[:, None] if isinstance(lr, Tensor) else weight
        amount: float | Tensor = 0.0 if pull is None else pull[0] * lr
        if isinstance(amount, Tensor):
            amount = amount.to(theta.dtype)[:, None]  # lerp does not mix types, and methods decide in float64
        for share in self._shares(theta, traces, output_delta(self._logits(theta, traces[-1]), y, weight)):
            dense, delta = share.dense, _by_client(share.delta)
            w, b = dense.weight_of(theta), dense.bias_of(theta)
            if pull is not None:
                w.lerp_(dense.weight_of(pull[1]), amount[..., None] if isinstance(amount, Tensor) else amount)
            w.baddbmm_(delta.transpose(1, 2), _by_client(share.x), alpha=scale)
            if b is not None:
                if pull is not None:
                    b.lerp_(_present(dense.bias_of(pull[1])), amount)
                b.add_(delta.sum(1), alpha=scale)

    @torch.no_grad()
    def per_example_grad(self, theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """[n, B, P]: for every example a sum over time."""
        traces = self._read(theta, x)
        out = theta.new_empty(*y.shape, theta.shape[1])
        ones = torch.ones(y.shape, dtype=theta.dtype, device=theta.device)
        for share in self._shares(theta, traces, output_delta(self._logits(theta, traces[-1]), y, ones)):
            dense = share.dense
            outer = torch.einsum("tnbo,tnbi->nboi", share.delta, share.x)
            out[..., dense.weight : dense.weight + dense.inputs * dense.outputs] = outer.flatten(2)
            if dense.bias is not None:
                out[..., dense.bias : dense.bias + dense.outputs] = share.delta.sum(0)
        return out


def _forward(cell: Cell, theta: Tensor, x: Tensor) -> Trace:
    """x [T, n, B, D]."""
    steps, n, batch, _ = x.shape
    hidden = cell.hidden
    bias = _present(cell.x.bias_of(theta)) + _present(cell.h.bias_of(theta))
    z = torch.baddbmm(bias.unsqueeze(1), _by_client(x), cell.x.weight_of(theta).transpose(1, 2))
    gates = _by_time(z, steps)  # of the input alone; the loop adds what the last output says
    again = cell.h.weight_of(theta).transpose(1, 2).contiguous()  # used in every step: turned once
    h = x.new_zeros(steps + 1, n, batch, hidden)
    c = torch.zeros_like(h)
    tanh_c = torch.empty_like(h[1:])
    parts = gates.view(steps, n, batch, 4, hidden)
    last_h, last_c = h[0], c[0]
    walk = zip(gates.unbind(0), *_gates(parts), h.unbind(0)[1:], c.unbind(0)[1:], tanh_c.unbind(0), strict=True)
    for t, (now, i, f, g, o, next_h, next_c, tanh) in enumerate(walk):
        if t:  # h_0 = 0
            now.baddbmm_(last_h, again)
        # tanh z = 2 σ(2 z) − 1: all four gates in one go over contiguous memory
        g.mul_(2)
        now.sigmoid_()
        g.mul_(2).sub_(1)
        torch.mul(f, last_c, out=next_c).addcmul_(i, g)
        torch.tanh(next_c, out=tanh)
        torch.mul(o, tanh, out=next_h)
        last_h, last_c = next_h, next_c
    return Trace(x, h, c, parts, tanh_c)


def _backward(cell: Cell, theta: Tensor, trace: Trace, below: Tensor) -> Tensor:
    """[T, n, B, 4 H] delta at z, from the delta at the outputs h, which is overwritten."""
    i, f, g, o = trace.gates.unbind(-2)
    slope = torch.addcmul(trace.gates, trace.gates, trace.gates, value=-1)  # σ' = σ (1 − σ)
    to_i, to_f, to_g, to_o = slope.unbind(-2)
    torch.addcmul(i, i * g, g, value=-1, out=to_g)  # tanh' = 1 − tanh²
    # z_i, z_f and z_g act through c, each by its slope and by what it multiplies there; z_o through h.
    to_i.mul_(g)
    to_f.mul_(trace.c[:-1])
    to_o.mul_(trace.tanh_c)
    to_c = torch.addcmul(o, o * trace.tanh_c, trace.tanh_c, value=-1)  # ∂h/∂c = o (1 − tanh² c)
    again = cell.h.weight_of(theta)
    through_c = torch.zeros_like(to_c[0])
    delta = slope.flatten(-2)
    walk = zip(
        below.unbind(0), to_c.unbind(0), slope[..., :3, :].unbind(0), to_o.unbind(0), f.unbind(0), delta.unbind(0),
        strict=True,
    )  # fmt: skip
    after = None
    for dh, h_to_c, c_to_z, h_to_o, forget, now in reversed(list(walk)):
        if after is not None:
            dh.baddbmm_(after, again)
        through_c.addcmul_(dh, h_to_c)
        c_to_z.mul_(through_c.unsqueeze(-2))
        h_to_o.mul_(dh)
        through_c.mul_(forget)
        after = now
    return delta


def _gates(parts: Tensor) -> list[tuple[Tensor, ...]]:
    """Views of i, f, g and o, each a list over time, of [T, n, B, 4, H]."""
    return [gate.unbind(0) for gate in parts.unbind(-2)]


def _by_client(x: Tensor) -> Tensor:
    """[T, n, B, F] to [n, T B, F]; a view where there is one client."""
    return x.transpose(0, 1).flatten(1, 2)


def _by_time(x: Tensor, steps: int) -> Tensor:
    """[n, T B, F] to [T, n, B, F], contiguous."""
    return x.reshape(len(x), steps, -1, x.shape[2]).transpose(0, 1).contiguous()


def _present(bias: Tensor | None) -> Tensor:
    assert bias is not None  # LSTM layers without biases are not compiled
    return bias
