"""WKV6 as it is defined, in a few lines of torch: the oracle for the fast implementations, in any float dtype."""

from __future__ import annotations

import torch
from torch import Tensor


def wkv6_reference(r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor) -> Tensor:
    """Bidirectional WKV6 as a recurrence over tokens; differentiable, slow, O(B·T·H·N²) memory under autograd.

        y[t] = Σ_{s<t} (r[t] · Π_{s<m<t} d[m] · k[s]) v[s]
             + (r[t] · u · k[t]) v[t]
             + Σ_{s>t} (r[t] · Π_{t<m<s} d[m] · k[s]) v[s]

    with d = exp(−exp(w)) and sums over the N channels of the key. RWKV-6 (arXiv 2404.05892) in both directions, as in
    Vision-RWKV (arXiv 2403.02308) and RWKV-CLIP (arXiv 2406.06973).

    Args:
        r, k, v, w: [B, T, H, N]; w is the raw value.
        u: [H, N].

    Returns:
        y: [B, T, H, N], in the dtype that torch's promotion gives (all float64: exact to about 1e-15).
    """
    # Above 6.7 the decay is 0 in float64 too; without the limit, exp(w) overflows and its gradient is 0 * inf.
    decay = torch.exp(-torch.exp(w.clamp(max=6.7)))
    outputs = [(r[:, t] * u * k[:, t]).sum(-1, keepdim=True) * v[:, t] for t in range(r.shape[1])]
    for order in (range(r.shape[1]), reversed(range(r.shape[1]))):
        state = r.new_zeros(r.shape[0], r.shape[2], r.shape[3], v.shape[3])  # [B, H, N of the key, N of the value]
        for t in order:
            outputs[t] = outputs[t] + (r[:, t, :, None, :] @ state)[:, :, 0]
            state = decay[:, t, :, :, None] * state + k[:, t, :, :, None] * v[:, t, :, None, :]
    return torch.stack(outputs, dim=1)
