"""Attention, forward and backward, one position at a time, with preallocated buffers (see `bptt_parts.py`).

Shapes: H attention heads, G heads of keys and values, N = B·H, M = 2·N, S keys that a query sees.
"""

# ruff: noqa: D102  (bptt_parts.py describes these functions)

from math import sqrt

import torch
from torch import Tensor

from contextready.model.attention import Attend, channel_pairs
from contextready.model.transformer import Attention
from contextready.solve.bptt_parts import (
    Gradients,
    PerToken,
    StepDropout,
    StepLinear,
    aten,
    rms_backward,
    rms_scale,
)

KEY_BLOCK = 32
"""The number of queries whose gradients are added to earlier keys in one product."""


class StepAttention:
    """Attention of one query at a time over buffers of keys and values.

    A key gets gradients from all later queries. Those from its own block of positions are added when the backward
    reaches the key. When a block of queries is done, their gradients are added to all earlier keys in one product.
    """

    def __init__(self, attention: Attention, like: PerToken, attend: Attend, window: int) -> None:
        T, B, _ = like.all.shape
        H, G, E, new = attention.heads, attention.shared_heads, attention.head_size, like.all.new_empty
        # Order: keys, queries, values. Channel pairs of keys and queries that rotate together are adjacent.
        pairs_E = channel_pairs(torch.arange(E, device=like.all.device), attend.pair_dim)
        pairs_E = pairs_E.movedim(attend.pair_dim, -1).flatten()
        q, k, v = torch.split(torch.arange((H + 2 * G) * E, device=like.all.device).view(-1, E), [H, G, G])
        order = torch.cat((k[:, pairs_E].flatten(), q[:, pairs_E].flatten(), v.flatten()))
        self.kqv, self.out = StepLinear(attention.qkv, like, order), StepLinear(attention.out, like)
        self.norms = None if attention.q_norm is None else _HeadNorms(attention, pairs_E)
        self.mixed, self.dy = like.like(H * E), self.out.dy
        self.drop = StepDropout(attention.dropout)
        self.undropped: list[Tensor] = []
        # The rotation by each position's angle, which also scales the query.
        cos, sin = attend.cos, attend.sin
        if not attention.has_rope:
            cos, sin = torch.ones_like(cos), torch.zeros_like(sin)
        scale_R1 = like.all.new_tensor([1.0] * G + [1.0 / sqrt(E)] * H)[:, None]
        rotation_TRE = torch.complex(cos, sin)[:, None] * scale_R1
        self.rotation, self.inverse_rotation = rotation_TRE.unbind(0), rotation_TRE.conj().resolve_conj().unbind(0)
        self.T, self.W, self.sizes = T, window, (B, H, G, E)
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
        if self.norms is not None:
            self.norms.begin()

    def forward(self, t: int, x_BC: Tensor) -> Tensor:
        first, (B, H, G, E) = max(0, t + 1 - self.W), self.sizes
        kq_BRE, v_BGE = torch.split(self.kqv.forward(t, x_BC).view(B, -1, E), [G + H, G], dim=1)
        if self.norms is not None:
            kq_BRE = self.norms.forward(kq_BRE)
        _rotate(kq_BRE, self.rotation[t], out=kq_BRE)
        k_BGE, q_BHE = kq_BRE[:, :G], kq_BRE[:, G:]
        q_N1E = q_BHE.reshape(B * H, 1, E)
        # Heads that share keys and values get copies of them.
        self.k_NTE[:, t].view(B, G, H // G, E).copy_(k_BGE[:, :, None])
        self.v_NTE[:, t].view(B, G, H // G, E).copy_(v_BGE[:, :, None])
        self.q_NTE[:, t : t + 1] = q_N1E
        p_N1S = torch.bmm(q_N1E, self.k_NTE[:, first : t + 1].mT).softmax(-1)
        if self.drop.p > 0.0:
            self.undropped.append(p_N1S)
            p_N1S = self.drop.forward(p_N1S)
        self.p_NTP[:, t : t + 1, first - t - 1 :] = p_N1S
        torch.bmm(p_N1S, self.v_NTE[:, first : t + 1], out=self.mixed.at[t].view(B * H, 1, E))
        return self.out.forward(t, self.mixed.at[t])

    def backward(self, t: int, out: Tensor) -> None:
        first, (B, H, G, E) = max(0, t + 1 - self.W), self.sizes
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
        dv_BHE, dk_BHE, dq_BHE = self.dvkq_3BHTE[:, :, :, t].unbind(0)
        dkq_BRE, dv_BGE = torch.split(self.kqv.dy.at[t].view(B, -1, E), [G + H, G], dim=1)
        _rotate(_summed(dk_BHE, G), self.inverse_rotation[t][:G], out=dkq_BRE[:, :G])
        _rotate(dq_BHE, self.inverse_rotation[t][G:], out=dkq_BRE[:, G:])
        if self.norms is not None:
            dkq_BRE.copy_(self.norms.backward(t, self.kqv.y.at[t].view(B, -1, E)[:, : G + H], dkq_BRE))
        dv_BGE.copy_(_summed(dv_BHE, G))
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
        if self.norms is not None:
            yield from self.norms.gather()


class _HeadNorms:
    """The RMS norms of the keys and queries of every head, whose channels are in the order of `pairs_E`."""

    def __init__(self, attention: Attention, pairs_E: Tensor) -> None:
        assert attention.k_norm is not None
        assert attention.q_norm is not None
        self.norms, self.pairs_E = (attention.k_norm, attention.q_norm), pairs_E
        self.numbers = [attention.shared_heads, attention.heads]

    def begin(self) -> None:
        weights = zip(self.norms, self.numbers, strict=True)
        self.weight_RE = torch.cat([norm.weight[self.pairs_E].expand(number, -1) for norm, number in weights])
        self.dweight_RE = torch.zeros_like(self.weight_RE)
        self.scales: list[Tensor] = []

    def forward(self, x_BRE: Tensor) -> Tensor:
        self.scales.append(rms_scale(x_BRE, self.norms[0].eps))
        return x_BRE * self.scales[-1] * self.weight_RE

    def backward(self, t: int, x_BRE: Tensor, dy_BRE: Tensor) -> Tensor:
        self.dweight_RE += (dy_BRE * x_BRE * self.scales[t]).sum(0)
        return rms_backward(dy_BRE * self.weight_RE, x_BRE, self.scales[t])

    def gather(self) -> Gradients:
        for norm, of_heads in zip(self.norms, torch.split(self.dweight_RE, self.numbers), strict=True):
            yield norm.weight, torch.empty_like(norm.weight).index_copy_(0, self.pairs_E, of_heads.sum(0))


def _summed(x_BHE: Tensor, groups: int) -> Tensor:
    """Add up the gradients of all heads that share keys and values."""
    B, H, E = x_BHE.shape
    return x_BHE if groups == H else x_BHE.reshape(B, groups, H // groups, E).sum(2)


def _rotate(x_BHE: Tensor, rotation: Tensor, out: Tensor) -> None:
    """Multiply pairs of channels, viewed as complex numbers, by a rotation."""
    torch.mul(_as_complex(x_BHE), rotation, out=_as_complex(out))


def _as_complex(x: Tensor) -> Tensor:
    return torch.view_as_complex(x.view(*x.shape[:-1], -1, 2))
