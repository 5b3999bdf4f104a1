from __future__ import annotations

import importlib

import pytest
import torch

from rwkv_clip.ops import prepare
from rwkv_clip.ops.implementation import Implementation
from rwkv_clip.ops.wkv6_torch import wkv6_torch_backward, wkv6_torch_forward

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(params=["cpu", "torch", pytest.param("cuda", marks=needs_gpu)])
def device(request, monkeypatch) -> str:
    """Device of the tensors, once for each implementation: the C++ op, plain torch (on the CPU), the CUDA op."""
    if request.param == "torch":
        module = importlib.import_module("rwkv_clip.ops.wkv6")
        plain = Implementation("torch", wkv6_torch_forward, wkv6_torch_backward)
        monkeypatch.setattr(module, "implementation", lambda device_type: plain)
        return "cpu"
    assert prepare(request.param) == request.param
    return request.param


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=needs_gpu)])
def op_device(request) -> str:
    """Device of the tensors, for what is a matter of the compiled ops alone."""
    assert prepare(request.param) == request.param
    return request.param
