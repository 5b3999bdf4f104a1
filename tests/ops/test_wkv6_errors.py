"""Bad input of WKV6: a ValueError that states what it got, and a live interpreter."""

from __future__ import annotations

import pytest
import torch

from rwkv_clip.ops import wkv6

SHAPE = (2, 5, 3, 8)


def good() -> dict[str, torch.Tensor]:
    return {**{name: torch.zeros(SHAPE) for name in "rkvw"}, "u": torch.zeros(3, 8)}


BAD = {
    "three dimensions": ({"r": torch.zeros(2, 5, 24)}, r"r must be \[B, T, H, N\], got shape \(2, 5, 24\)"),
    "no tokens": (
        {name: torch.zeros(2, 0, 3, 8) for name in "rkvw"},
        r"T must be at least 1, got shape \(2, 0, 3, 8\)",
    ),
    "other shape": ({"v": torch.zeros(2, 5, 3, 12)}, r"v must have r's shape \(2, 5, 3, 8\), got \(2, 5, 3, 12\)"),
    "broadcast shape": ({"w": torch.zeros(1, 5, 3, 8)}, r"w must have r's shape .* got \(1, 5, 3, 8\)"),
    "u per channel": ({"u": torch.zeros(24)}, r"u must be \[H, N\] = \(3, 8\), got \(24,\)"),
    "float64": ({name: torch.zeros(SHAPE).double() for name in "rkvw"}, "r must be float32, .* got torch.float64"),
    "integers": ({"r": torch.zeros(SHAPE, dtype=torch.int64)}, "r must be float32, .* got torch.int64"),
    "mixed dtypes": ({"k": torch.zeros(SHAPE).bfloat16()}, "k must have r's dtype torch.float32, got torch.bfloat16"),
    "half w beside float32": ({"w": torch.zeros(SHAPE).half()}, "w must have .* or float32, got torch.float16"),
    "two devices": ({"k": torch.zeros(SHAPE, device="meta")}, "k must be on r's device cpu, got meta"),
}


@pytest.mark.parametrize("change, message", BAD.values(), ids=BAD)
def test_a_bad_input_is_named_with_its_value(change, message):
    with pytest.raises(ValueError, match=message):
        wkv6(**{**good(), **change})


@pytest.mark.parametrize("size", [1, 2, 10, 132, 256])
def test_K12_a_head_size_that_is_not_supported_is_an_error_and_the_process_lives(size):
    x = torch.zeros(2, 5, 3, size)
    with pytest.raises(ValueError, match=f"N must be a multiple of 4 up to 128, got {size}"):
        wkv6(x, x, x, x, torch.zeros(3, size))
    assert wkv6(**good()).shape == SHAPE


WRONG = {
    "three dimensions": ({"r": torch.zeros(2, 5, 24)}, r"r must be \[B, T, H, N\], got \[2, 5, 24\]"),
    "no tokens": ({name: torch.zeros(2, 0, 3, 8) for name in "rkvw"}, r"got \[2, 0, 3, 8\]"),
    "head size": ({**{name: torch.zeros(2, 5, 3, 6) for name in "rkvw"}, "u": torch.zeros(3, 6)}, "multiple of 4"),
    "fewer tokens": ({"k": torch.zeros(SHAPE)[:, :3]}, r"k, v and w must be as r .* got \[2, 3, 3, 8\]"),
    "u per channel": ({"u": torch.zeros(24)}, r"u must be \[H, N\] .* got \[24\]"),
    "mixed dtypes": ({"v": torch.zeros(SHAPE).bfloat16()}, "r, k and v must have one dtype"),
    "float64": ({name: torch.zeros(SHAPE).double() for name in "rkvw"}, "expected float32, bfloat16 or float16"),
    "the gradient": ({"gy": torch.zeros(1, 5, 3, 8)}, r"the gradient of y must be as r, got \[1, 5, 3, 8\]"),
}


@pytest.mark.parametrize("change, message", WRONG.values(), ids=WRONG)
def test_a_direct_call_of_the_compiled_op_is_checked_too_and_the_process_lives(change, message, op_device):
    op = {name: getattr(torch.ops.rwkv_clip, f"wkv6_{op_device}_{name}") for name in ("forward", "backward")}
    x = {name: value.to(op_device) for name, value in {**good(), "gy": torch.zeros(SHAPE), **change}.items()}
    gy = x.pop("gy")
    for _ in range(3):
        if "gy" not in change:
            with pytest.raises(RuntimeError, match=message):
                op["forward"](*x.values())
        with pytest.raises(RuntimeError, match=message):
            op["backward"](*x.values(), gy)
    assert op["forward"](*(value.to(op_device) for value in good().values())).shape == SHAPE


def test_a_second_derivative_is_refused():
    x = {name: value.requires_grad_() for name, value in good().items()}
    (gradient,) = torch.autograd.grad(wkv6(**x).sum(), x["r"], create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        gradient.sum().backward()
