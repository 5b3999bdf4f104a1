"""Token shift with interpolation: the kernels against plain PyTorch."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lerp_cases import CASES, largest_error

from rwkv_clip import create_model
from rwkv_clip.ops import lerp

MOST = {"float32": 2e-6, "float16": 3e-3, "bfloat16": 2e-2}
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_the_kernels_give_the_plain_results_in_tritons_interpreter() -> None:
    script = Path(__file__).with_name("lerp_in_interpreter.py")
    environment = dict(os.environ, TRITON_INTERPRET="1")
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line.split("\t") for line in done.stdout.splitlines()]
    assert [case for dtype, case, _ in lines if dtype == "float32"] == list(CASES)
    too_large = [line for line in lines if not float(line[2]) <= MOST[line[0]]]
    assert not too_large


@needs_gpu
@pytest.mark.parametrize("dtype", MOST)
@pytest.mark.parametrize("case", CASES)
def test_the_kernels_give_the_plain_results_on_a_gpu(case: str, dtype: str) -> None:
    assert largest_error(case, getattr(torch, dtype), "cuda") <= MOST[dtype]


@needs_gpu
@pytest.mark.parametrize(("tokens", "layout"), [(49, (7, 80, 4, False)), (77, (77, 80, 2, False))])
def test_two_runs_give_the_same_bits(tokens: int, layout: lerp.Layout) -> None:
    torch.manual_seed(0)
    x, g = (torch.randn(64, tokens, 640, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    hidden = torch.randn(64 * tokens, 160, device="cuda", dtype=torch.bfloat16)
    w2, c = torch.randn(5, 32, 640, device="cuda", dtype=torch.bfloat16), torch.randn(5, 640, device="cuda")
    runs = [torch.ops.rwkv_clip.ddlerp_backward(x, hidden, w2, c, [g] * 5, *layout) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@needs_gpu
def test_a_model_gives_the_same_with_and_without_the_kernels(monkeypatch) -> None:
    torch.manual_seed(0)
    model = create_model("RWKV-CLIP-Nano", device="cuda").train()
    images = torch.randn(8, 3, 48, 48, device="cuda")
    tokens = torch.randint(1, 1000, (8, 40), device="cuda")

    def gradients() -> list[torch.Tensor]:
        image, text, *_ = model(images, tokens)
        return torch.autograd.grad((image * text).sum(), [p for p in model.parameters() if p is not model.logit_scale])

    with_kernels = gradients()
    monkeypatch.setattr(lerp, "usable", lambda device: False)
    for a, b in zip(with_kernels, gradients(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3 * b.abs().max().item())


def test_without_a_gpu_they_are_not_used() -> None:
    assert not lerp.usable(torch.device("cpu"))
    assert lerp.usable(torch.device("meta"))  # on which a GPU's memory is worked out
