"""The parts of a transformer, forward and backward, one position at a time, with preallocated buffers.

All parts have the same functions: `begin` reads the current weights, `forward` is called for t = 0 … T-1, `backward`
for t = T-1 … 0, and `gather` yields the gradients of the weights. Shapes: N = B·H, M = 2·N, S keys that a query sees.
"""

# ruff: noqa: D102  (the text above describes these functions)

from collections.abc import Iterator
from math import sqrt

import torch
from torch import Tensor, nn

from contextready.model.attention import Attend, channel_pairs
from contextready.model.transformer import FFN, Attention

aten = torch.ops.aten
KEY_BLOCK = 32
"""The number of queries whose gradients are added to earlier keys in one product."""
Gradients = Iterator[tuple[Tensor, Tensor]]
"""Pairs of a weight and its gradient."""


class PerToken:
    """One vector per token: all of them (T, B, width), and a view of each position, created once."""

    def __init__(self, like_BT: Tensor, width: int) -> None:
        B, T = like_BT.shape[:2]
        self.all = like_BT.new_empty(T, B, width)
        self.at = self.all.unbind(0)

    def like(self, width: int) -> "PerToken":
        """Create a PerToken of another width for the same tokens."""
        return PerToken(self.all.transpose(0, 1), width)

    @property
    def flat(self) -> Tensor:
        """All vectors (T · B, width)."""
        return self.all.flatten(0, 1)


class StepLinear:
    """A linear layer. The next part writes its gradient to dy; `gather` needs all inputs again."""

    def __init__(self, linear: nn.Linear, like: PerToken, order: Tensor | None = None) -> None:
        self.linear, self.order = linear, order
        self.y, self.dy = like.like(linear.out_features), like.like(linear.out_features)

    def begin(self) -> None:
        weight, bias, order = self.linear.weight, self.linear.bias, self.order
        self.weight: Tensor = weight if order is None else weight[order]
        self.bias: Tensor | None = bias if order is None or bias is None else bias[order]
        self.transposed = self.weight.t()

    def forward(self, t: int, x_BC: Tensor) -> Tensor:
        if self.bias is None:
            return torch.mm(x_BC, self.transposed, out=self.y.at[t])
        return torch.addmm(self.bias, x_BC, self.transposed, out=self.y.at[t])

    def backward(self, t: int, out: Tensor | None = None) -> Tensor:
        return torch.mm(self.dy.at[t], self.weight, out=out)

    def gather(self, x: Tensor) -> Gradients:
        yield self.linear.weight, self._unordered(self.dy.flat.t() @ x)
        if self.linear.bias is not None:
            yield self.linear.bias, self._unordered(self.dy.flat.sum(0))

    def _unordered(self, tensor: Tensor) -> Tensor:
        return tensor if self.order is None else torch.empty_like(tensor).index_copy_(0, self.order, tensor)


class StepNorm:
    """A layer norm. The next part writes its gradient to dy."""

    def __init__(self, norm: nn.LayerNorm, x: PerToken) -> None:
        self.norm, self.x, self.dy = norm, x, x.like(x.all.shape[2])

    def begin(self) -> None:
        n = self.norm
        self.weight, self.bias = n.weight, n.bias
        self.moments: list[tuple[Tensor, Tensor]] = []

    def forward(self, t: int) -> Tensor:
        y_BC, *moments = self._forward(self.x.at[t])
        self.moments.append((moments[0], moments[1]))
        return y_BC

    def backward(self, t: int) -> Tensor:
        """Return the gradient of the input, given dy."""
        return self._backward(self.dy.at[t], self.x.at[t], *self.moments[t], [True, False, False])[0]

    def gather(self) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Return the outputs of all tokens, recomputed to save memory, and the gradients of the weights."""
        y, mean, rstd = self._forward(self.x.flat)
        wanted = [False, True, self.bias is not None]
        _, *gradients = self._backward(self.dy.flat, self.x.flat, mean, rstd, wanted)
        return y, [(p, g) for p, g in zip((self.weight, self.bias), gradients, strict=True) if p is not None]

    def _forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return torch.native_layer_norm(x, self.norm.normalized_shape, self.weight, self.bias, self.norm.eps)

    def _backward(self, dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, wanted: list[bool]) -> tuple[Tensor, ...]:
        out: tuple[Tensor, ...] = aten.native_layer_norm_backward(
            dy, x, self.norm.normalized_shape, mean, rstd, self.weight, self.bias, wanted
        )
        return out


class StepDropout:
    """Dropout with one mask per position."""

    def __init__(self, dropout: nn.Dropout) -> None:
        self.p = dropout.p if dropout.training else 0.0
        self.masks: list[Tensor] = []

    def forward(self, x_BC: Tensor) -> Tensor:
        if self.p == 0.0:
            return x_BC
        y_BC, mask_BC = torch.native_dropout(x_BC, self.p, True)
        self.masks.append(mask_BC)
        return y_BC

    def backward(self, dy_BC: Tensor) -> Tensor:
        if self.p == 0.0:
            return dy_BC
        dx_BC: Tensor = aten.native_dropout_backward(dy_BC, self.masks.pop(), 1.0 / (1.0 - self.p))
        return dx_BC


class StepFFN:
    """Linear, GELU, linear."""

    def __init__(self, ffn: FFN, like: PerToken) -> None:
        self.up, self.down = StepLinear(ffn.up, like), StepLinear(ffn.down, like)
        self.active, self.dy = like.like(ffn.up.out_features), self.down.dy

    def begin(self) -> None:
        self.up.begin()
        self.down.begin()

    def forward(self, t: int, x_BC: Tensor) -> Tensor:
        aten.gelu.out(self.up.forward(t, x_BC), out=self.active.at[t])
        return self.down.forward(t, self.active.at[t])

    def backward(self, t: int, out: Tensor) -> None:
        hidden = self.up.y
        if t == len(hidden.at) - 1:
            # Computes the derivatives for all tokens at once and overwrites their arguments.
            one = hidden.all.new_ones(()).expand_as(hidden.all)
            aten.gelu_backward.grad_input(one, hidden.all, grad_input=hidden.all)
        self.down.backward(t, out=self.up.dy.at[t]).mul_(hidden.at[t])
        self.up.backward(t, out=out)

    def gather(self, x: Tensor) -> Gradients:
        yield from self.up.gather(x)
        yield from self.down.gather(self.active.flat)


class StepResidual:
    """A residual branch: h + dropout(inner(LN(h)))."""

    def __init__(self, h: PerToken, norm: nn.LayerNorm, inner: "StepFFN | StepAttention", dropout: nn.Dropout) -> None:
        self.h, self.norm, self.inner, self.drop = h, StepNorm(norm, h), inner, StepDropout(dropout)
        self.y = h.like(h.all.shape[2])

    def begin(self) -> None:
        self.norm.begin()
        self.inner.begin()

    def forward(self, t: int) -> None:
        branch_BC = self.drop.forward(self.inner.forward(t, self.norm.forward(t)))
        torch.add(self.h.at[t], branch_BC, out=self.y.at[t])

    def backward(self, t: int, dy_BC: Tensor) -> Tensor:
        self.inner.dy.at[t].copy_(self.drop.backward(dy_BC))
        self.inner.backward(t, out=self.norm.dy.at[t])
        return self.norm.backward(t).add_(dy_BC)

    def gather(self) -> Gradients:
        x, gradients = self.norm.gather()
        yield from gradients
        yield from self.inner.gather(x)


class StepAttention:
    """Attention of one query at a time over buffers of keys and values.

    A key gets gradients from all later queries. Those from its own block of positions are added when the backward
    reaches the key. When a block of queries is done, their gradients are added to all earlier keys in one product.
    """

    def __init__(self, attention: Attention, like: PerToken, attend: Attend, window: int) -> None:
        T, B, C = like.all.shape
        H, E, new = attention.heads, attention.head_size, like.all.new_empty
        # Order: keys, queries, values. Channel pairs of keys and queries that rotate together are adjacent.
        q, k, v = torch.arange(3 * C, device=like.all.device).view(3, H, E)
        k, q = (channel_pairs(x, attend.pair_dim).movedim(attend.pair_dim, -1) for x in (k, q))
        order = torch.cat((k.flatten(), q.flatten(), v.flatten()))
        self.kqv, self.out = StepLinear(attention.qkv, like, order), StepLinear(attention.out, like)
        self.mixed, self.dy = like.like(C), self.out.dy
        self.drop = StepDropout(attention.dropout)
        self.undropped: list[Tensor] = []
        # The rotation by each position's angle, which also scales the query.
        scale_21E = like.all.new_tensor([1.0, 1.0 / sqrt(E)])[:, None, None]
        rotation_T21E = torch.complex(attend.cos, attend.sin)[:, None, None] * scale_21E
        self.rotation, self.inverse_rotation = rotation_T21E.unbind(0), rotation_T21E.conj().resolve_conj().unbind(0)
        self.T, self.W, self.shape_BHE = T, window, (B, H, E)
        self.k_NTE, self.v_NTE, self.dy_q_MTE = *new(2, B * H, T, E), new(2 * B * H, T, E)
        self.dy_NTE, self.q_NTE = self.dy_q_MTE.chunk(2)
        self.dvkq_3BHTE = new(3, B, H, T, E)
        self.dv_dk_MTE, self.dq_NTE = self.dvkq_3BHTE[:2].flatten(0, 2), self.dvkq_3BHTE[2].flatten(0, 1)
        # Row t holds the W keys t - W + 1 … t, newest last. The zeros before them let a block of rows be viewed as a
        # matrix of queries by keys.
        self.p_ds_MTP = new(2 * B * H, T, KEY_BLOCK - 1 + window)
        self.p_ds_MTP[:, :, : KEY_BLOCK - 1] = 0.0
        self.p_NTP, self.ds_NTP = self.p_ds_MTP.chunk(2)

    def begin(self) -> None:
        self.kqv.begin()
        self.out.begin()

    def forward(self, t: int, x_BC: Tensor) -> Tensor:
        first, (B, H, E) = max(0, t + 1 - self.W), self.shape_BHE
        kqv_B3HE = self.kqv.forward(t, x_BC).view(B, 3, H, E)
        kq_B2HE = kqv_B3HE[:, :2]
        _rotate(kq_B2HE, self.rotation[t], out=kq_B2HE)
        k_BHE, q_BHE, v_BHE = kqv_B3HE.unbind(1)
        q_N1E = q_BHE.reshape(B * H, 1, E)
        self.k_NTE[:, t].view(B, H, E).copy_(k_BHE)
        self.v_NTE[:, t].view(B, H, E).copy_(v_BHE)
        self.q_NTE[:, t : t + 1] = q_N1E
        p_N1S = torch.bmm(q_N1E, self.k_NTE[:, first : t + 1].mT).softmax(-1)
        if self.drop.p > 0.0:
            self.undropped.append(p_N1S)
            p_N1S = self.drop.forward(p_N1S)
        self.p_NTP[:, t : t + 1, first - t - 1 :] = p_N1S
        torch.bmm(p_N1S, self.v_NTE[:, first : t + 1], out=self.mixed.at[t].view(B * H, 1, E))
        return self.out.forward(t, self.mixed.at[t])

    def backward(self, t: int, out: Tensor) -> None:
        first, (B, H, E) = max(0, t + 1 - self.W), self.shape_BHE
        if t == self.T - 1:
            self.dv_dk_MTE.zero_()
        dy_N1E = self.out.backward(t).view(B * H, 1, E)
        self.dy_NTE[:, t : t + 1] = dy_N1E
        p_N1S = self.p_NTP[:, t : t + 1, first - t - 1 :]
        dp_N1S = self.drop.backward(torch.bmm(dy_N1E, self.v_NTE[:, first : t + 1].mT))
        if self.drop.p > 0.0:
            p_N1S = self.undropped.pop()
        ds_N1S = aten._softmax_backward_data(dp_N1S, p_N1S, -1, p_N1S.dtype)
        self.ds_NTP[:, t : t + 1, first - t - 1 :] = ds_N1S
        self.dq_NTE[:, t : t + 1] = torch.bmm(ds_N1S, self.k_NTE[:, first : t + 1])
        begin = t - t % KEY_BLOCK
        end = min(begin + KEY_BLOCK, self.T)
        self._add_to_keys(range(t, t + 1), range(t, min(end, t + self.W)))
        dkqv_3BHE = self.kqv.dy.at[t].view(B, 3, H, E).transpose(0, 1)
        _rotate(
            self.dvkq_3BHTE[1:, :, :, t].transpose(0, 1), self.inverse_rotation[t], out=dkqv_3BHE[:2].transpose(0, 1)
        )
        dkqv_3BHE[2] = self.dvkq_3BHTE[0, :, :, t]
        if t == begin:
            self._add_to_keys(range(first, t), range(t, end))
        self.kqv.backward(t, out=out)

    def _add_to_keys(self, keys: range, queries: range) -> None:
        """Add the contributions of these queries, at most one block, to the gradients of these earlier keys."""
        if not keys:
            return
        M, T, P = self.p_ds_MTP.shape
        # A key moves one column to the left with each query. With rows that are one shorter, it stays in its column.
        size, stride = (M, len(queries), len(keys)), (T * P, P - 1, 1)
        matrix = self.p_ds_MTP.as_strided(size, stride, (queries.start + 1) * (P - 1) + keys.start)
        # A copy, because bmm multiplies matrices with these strides one at a time.
        product = torch.bmm(matrix.mT.contiguous(), self.dy_q_MTE[:, queries.start : queries.stop])
        self.dv_dk_MTE[:, keys.start : keys.stop] += product

    def gather(self, x: Tensor) -> Gradients:
        yield from self.kqv.gather(x)
        yield from self.out.gather(self.mixed.flat)


def _rotate(x_BPHE: Tensor, rotation: Tensor, out: Tensor) -> None:
    """Multiply pairs of channels, viewed as complex numbers, by a rotation."""
    torch.mul(_as_complex(x_BPHE), rotation, out=_as_complex(out))


def _as_complex(x: Tensor) -> Tensor:
    return torch.view_as_complex(x.view(*x.shape[:-1], -1, 2))
