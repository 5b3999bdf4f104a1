"""torch.compile for the towers' blocks, one graph per tower, and for what is before and behind them.

A block is compiled rather than a whole tower: one graph serves all blocks, so compiling takes no longer with depth.
Left to itself the compiler keeps about 27 activations of width C per token and layer. Here it keeps what is dear to
compute and takes the rest from it again, which costs one more read of what is kept.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from .. import ops  # noqa: F401  registers the operator
from ..errors import UserError
from ..ops import lerp  # noqa: F401  registers the interpolations
from .init import TIME_DECAY_RANK

_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
_OPERATOR = torch.ops.rwkv_clip.wkv6.default
_SQUARE = torch.ops.aten.pow.Tensor_Scalar
_INTERPOLATIONS = (torch.ops.rwkv_clip.lerp.default, torch.ops.rwkv_clip.ddlerp.default)


def _keeps_all_but_elementwise(op: Any, args: tuple[Any, ...]) -> bool:
    """Keep what `_keeps_narrow_products` does, the squared ReLU, and the interpolated inputs of the products."""
    return op in (*_INTERPOLATIONS, _SQUARE) or _keeps_narrow_products(op, args)


def _keeps_products(op: Any, args: tuple[Any, ...]) -> bool:
    """Keep the operator's output and the full products; recompute the low-rank ones and all element-wise work."""
    if op in _PRODUCTS:
        return args[-1].shape[0] > TIME_DECAY_RANK
    return op is _OPERATOR


def _keeps_narrow_products(op: Any, args: tuple[Any, ...]) -> bool:
    """As `_keeps_products`, but recompute products that are wider than what they are made of: the squared ReLU's."""
    return _keeps_products(op, args) and not (op in _PRODUCTS and args[-1].shape[1] > args[-1].shape[0])


def _keeps_operator(op: Any, args: tuple[Any, ...]) -> bool:
    """Keep the operator's output and the products that make few values of many."""
    return op is _OPERATOR or (op in _PRODUCTS and args[-1].shape[1] < args[-1].shape[0])


def _keeps_nothing(_op: Any, _args: tuple[Any, ...]) -> bool:
    """Keep a block's input alone: activation checkpointing of whole blocks, inside the compiled backward pass."""
    return False


CUDA_GRAPHS = "triton.cudagraphs"
"""Inductor's option that records the launches of compiled code and replays them."""
EVERYTHING = "everything"
RECOMPUTE: dict[str, Callable[[Any, tuple[Any, ...]], bool] | None] = {
    "automatic": None,
    "elementwise": _keeps_all_but_elementwise,
    "wide": _keeps_narrow_products,
    "products": _keeps_operator,
    EVERYTHING: _keeps_nothing,
}
"""What the backward pass computes again, from least to most, by name -> whether to keep an op's output.

Values of width C kept per token and layer, image / text tower of B/32:
"automatic", 27 / 24: the compiler's own choice. "elementwise", 14.4 / 12.9: everything but full products and the
operator; where the interpolations are kernels (ops/lerp.py) their 8 results are kept too, 22.4 / 20.9. "wide", 9.4 /
9.4: also the squared ReLU and its product. "products", 3.4 / 3.4: all products but the channel mix's last, whose output
stands for five. "everything", 1 / 1.
"""


def compiled_forward(
    recompute: str = "elementwise", options: dict[str, Any] | None = None, backend: str = "inductor"
) -> Callable[..., Tensor]:
    """The compiled form of calling a block: function(block, *args) -> Tensor.

    Args:
        recompute: a key of `RECOMPUTE`.
        options: torch.compile's options of Inductor.
        backend: torch.compile's, which is asked without options unless it is Inductor.

    Raises:
        UserError: an unknown `recompute` or option.
    """
    if recompute not in RECOMPUTE:
        raise UserError(f"unknown recompute '{recompute}': choose one of {', '.join(RECOMPUTE)}")
    keeps = RECOMPUTE[recompute]
    # It warns once about in-place operations, of which the blocks have none.
    logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)

    def contexts() -> Any:
        return create_selective_checkpoint_contexts(partial(_policy, keeps))

    def forward(block: nn.Module, *args: Any) -> Tensor:
        if keeps is None or not torch.is_grad_enabled():
            return block(*args)
        return checkpoint(block, *args, use_reentrant=False, context_fn=contexts)

    return _compiled(forward, options, backend)


def compiled_end(
    name: str, options: dict[str, Any] | None = None, backend: str = "inductor"
) -> Callable[[nn.Module, Tensor], Tensor]:
    """The compiled form of a tower's method `stem` or `pool`: function(tower, x) -> Tensor.

    Without CUDA graphs, for which what comes from outside, such as a batch of images, would be copied first.

    Args:
        name: of the method.
        options, backend: as for `compiled_forward`.

    Raises:
        UserError: an unknown option.
    """

    def forward(tower: nn.Module, x: Tensor) -> Tensor:
        return getattr(tower, name)(x)

    return _compiled(forward, {k: v for k, v in (options or {}).items() if k != CUDA_GRAPHS}, backend)


def _compiled(function: Any, options: dict[str, Any] | None, backend: str) -> Any:
    # Code of its own, as the compiler counts what it compiled per code object and refuses more than a few.
    function.__code__ = function.__code__.replace()
    if backend != "inductor":
        return torch.compile(function, fullgraph=True, dynamic=False, backend=backend)
    try:
        return torch.compile(function, fullgraph=True, dynamic=False, options={**_defaults(), **(options or {})})
    except RuntimeError as error:  # an unknown option; compiling itself comes later
        raise UserError(f"torch.compile refuses its options: {' '.join(str(error).split())[:200]}") from None


def _defaults() -> dict[str, Any]:
    # Before PyTorch 2.13 its fused reductions over rows and columns lose the shape of gradients like [1, 1, C], and
    # before 2.11 their values (pytorch issues 178080 and 190796).
    version = tuple(int(number) for number in re.match(r"(\d+)\.(\d+)", torch.__version__).groups())
    name = "triton.mix_order_reduction"
    return {name: False} if version < (2, 13) and name in torch._inductor.list_options() else {}


def _policy(
    keeps: Callable[[Any, tuple[Any, ...]], bool], _context: Any, op: Any, *args: Any, **_kwargs: Any
) -> CheckpointPolicy:
    random = torch.Tag.nondeterministic_seeded in op.tags
    return CheckpointPolicy.MUST_SAVE if random or keeps(op, args) else CheckpointPolicy.PREFER_RECOMPUTE
