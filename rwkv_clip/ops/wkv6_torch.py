"""WKV6 in plain torch, for a machine without a compiler: exact, and some times slower than the op.

One step treats all pairs of tokens at one distance. Everything is float32; the decays between two tokens are a running
product, so nothing overflows. Memory of the backward pass grows with T², a batch entry at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _decay(w: Tensor) -> Tensor:
    """exp(−exp(w)) in float32; 0 above 4.7, where float32 cannot hold it."""
    w = w.float()
    return torch.exp(-torch.exp(w.clamp(max=4.7))).masked_fill(w > 4.7, 0.0)


def wkv6_torch_forward(r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor) -> Tensor:
    """y [B, T, H, N] of r, k, v, w [B, T, H, N] and u [H, N], in r's dtype."""
    dtype = r.dtype
    r, k, v, u, decay = r.float(), k.float(), v.float(), u.float(), _decay(w)
    tokens = r.shape[1]
    y = (r * u * k).sum(-1, keepdim=True) * v
    between = torch.ones_like(decay[:, 1:])  # decays between tokens s and s + distance
    for distance in range(1, tokens):
        early, late = slice(0, tokens - distance), slice(distance, tokens)
        y[:, late] += (r[:, late] * k[:, early] * between).sum(-1, keepdim=True) * v[:, early]
        y[:, early] += (r[:, early] * k[:, late] * between).sum(-1, keepdim=True) * v[:, late]
        between = between[:, :-1] * decay[:, distance:-1]
    return y.to(dtype)


def _gradients_of_one(
    r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor, gy: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of one batch entry: r, k, v, w, gy [T, H, N] float32."""
    decay = _decay(w)
    tokens = r.shape[0]
    diagonal = (gy * v).sum(-1, keepdim=True)
    gr, gk, gu = diagonal * u * k, diagonal * u * r, (diagonal * r * k).sum(0)
    gv = (r * u * k).sum(-1, keepdim=True) * gy
    between = torch.ones_like(decay[1:])
    terms = []  # by distance: what each pair adds to the gradient of every log decay between its tokens
    for distance in range(1, tokens):
        early, late = slice(0, tokens - distance), slice(distance, tokens)
        term = torch.zeros_like(between)
        for a, b in ((late, early), (early, late)):
            pair = r[a] * k[b] * between
            gradient = (gy[a] * v[b]).sum(-1, keepdim=True)
            gv[b] += pair.sum(-1, keepdim=True) * gy[a]
            gr[a] += gradient * between * k[b]
            gk[b] += gradient * between * r[a]
            term += gradient * pair
        terms.append(term)
        between = between[:-1] * decay[distance:-1]
    # From the longest distance down: `total[s]` sums the pairs of s with all tokens at this distance or beyond, which
    # are those that straddle token s + distance - 1. A difference of sums over all pairs would cancel.
    gradient_of_log = torch.zeros_like(decay)
    total = torch.zeros_like(decay[:0])
    for distance in range(tokens - 1, 1, -1):
        term = terms[distance - 1]
        term[: len(total)] += total
        total = term
        gradient_of_log[distance - 1 : tokens - 1] += total
    return gr, gk, gv, -torch.exp(w.clamp(max=4.7)) * gradient_of_log, gu


def wkv6_torch_backward(
    r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor, gy: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of r, k, v, w [B, T, H, N] and u [H, N], each in its input's dtype."""
    gradients = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (r, k, v, w)]
    gu = torch.zeros(u.shape, dtype=torch.float32, device=u.device)
    for entry in range(r.shape[0]):
        *of_entry, of_u = _gradients_of_one(*(x[entry].float() for x in (r, k, v, w)), u.float(), gy[entry].float())
        for gradient, value in zip(gradients, of_entry, strict=True):
            gradient[entry] = value
        gu += of_u
    return (*gradients, gu.to(u.dtype))
