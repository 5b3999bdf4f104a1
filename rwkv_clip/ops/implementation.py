"""What computes WKV6 on a device: the CUDA op, the C++ op, or plain torch on a CPU where the op cannot be built.

The first call builds or loads the op through its builder in `op_builder/`. A job calls `prepare` beforehand, where a
long build and its messages are expected.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from ..errors import UserError
from .builders import check_op_builder
from .wkv6_torch import wkv6_torch_backward, wkv6_torch_forward

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Implementation:
    """Functions with the signatures of `rwkv_clip::wkv6` and `rwkv_clip::wkv6_backward`."""

    name: str  # "cuda", "cpu" or "torch"
    forward: Callable
    backward: Callable
    interpolations: Mapping[str, Callable] = field(default_factory=dict)
    """The kernels of lerp.py's ops by their names; none where there are none, or wrong ones."""


def prepare(device_type: str) -> str:
    """Build or load the op for "cuda" or "cpu" now; return what will serve: "cuda", "cpu" or "torch".

    Safe to call on every rank at once: one process of a node builds, the others say that they wait for it.

    Raises:
        UserError: for "cuda", when the op cannot be built; the message says why and what to do.
    """
    return implementation(device_type).name


@functools.cache
def implementation(device_type: str) -> Implementation:
    """The implementation for tensors on `device_type` ("cuda" or "cpu"), built on the first call."""
    if device_type == "cuda":
        _load("wkv6")
        ops = torch.ops.rwkv_clip
        forward, backward = ops.wkv6_cuda_forward.default, ops.wkv6_cuda_backward.default
        return Implementation("cuda", forward, backward, _interpolations_of_this_gpu())
    try:
        _load("wkv6_cpu")
    except UserError as error:
        logger.warning("%s Using the slower torch implementation of WKV6.", error)
        return Implementation("torch", wkv6_torch_forward, wkv6_torch_backward)
    ops = torch.ops.rwkv_clip
    forward, backward = ops.wkv6_cpu_forward.default, ops.wkv6_cpu_backward.default
    return Implementation("cpu", forward, backward, _interpolations_of("cpu"))


def _interpolations_of(device_type: str) -> Mapping[str, Callable]:
    ops, names = torch.ops.rwkv_clip, ("lerp", "ddlerp")
    return {
        f"{name}{suffix}": getattr(ops, f"{name}_{device_type}{suffix}").default
        for name in names
        for suffix in ("", "_backward")
    }


def _interpolations_of_this_gpu() -> Mapping[str, Callable]:
    if torch.cuda.get_device_capability() < (8, 0):
        return {}
    _load("lerp")
    from .lerp_check import kernels_are_right

    kernels = _interpolations_of("cuda")
    if kernels_are_right(kernels, torch.device("cuda", torch.cuda.current_device())):
        return kernels
    logger.warning(
        "The op lerp gives wrong results on this GPU (%s), so it is not used: training is right, and slower. Please "
        "report it with the output of `rwkv-clip report`.",
        torch.cuda.get_device_name(),
    )
    return {}


def _load(op_name: str) -> None:
    """Load the op of that name, built ahead of time or just in time; UserError when neither is possible."""
    check_op_builder()
    from op_builder.prebuilt import import_prebuilt

    if import_prebuilt(op_name) is not None:
        return
    try:
        from op_builder import ALL_OPS, OpBuildError
    except ImportError as error:
        raise UserError(
            f"The op {op_name} cannot be built without DeepSpeed ({error}): pip install deepspeed."
        ) from None
    try:
        ALL_OPS[op_name]().load()
    except OpBuildError as error:
        raise UserError(str(error)) from None
