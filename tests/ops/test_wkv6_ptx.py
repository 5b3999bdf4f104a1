"""What nvcc made of the CUDA kernels, instruction by instruction in the emulated thread block (see ptx.py)."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess

import pytest
import torch
from emulated import CSRC, build_from_ptx, emulated_results
from wkv6_inputs import assert_close, oracle, random_inputs

from op_builder import toolchain

pytestmark = pytest.mark.skipif(
    toolchain.nvcc_version() is None or shutil.which("g++") is None, reason="needs nvcc and g++"
)


@pytest.fixture(scope="session")
def kernels(request):
    """The kernels of bfloat16 tensors with w in float32, of one chunk of up to 64 tokens, as compiled for sm_90."""
    source = CSRC / "wkv6_cuda_bf16_w32.cu"
    folder = request.config.cache.mkdir("wkv6_emulated")
    command = [os.path.join(toolchain.cuda_home(), "bin", "nvcc"), "-O3", "-std=c++17", "-arch=compute_90", "-ptx"]
    files = [source, *sorted(CSRC.glob("wkv6_cuda*.cuh")), *sorted(CSRC.glob("*.h"))]
    text = f"{toolchain.nvcc_version()} {command}".encode() + b"".join(path.read_bytes() for path in files)
    ptx = folder / f"wkv6_{hashlib.sha256(text).hexdigest()[:16]}.ptx"
    if not ptx.exists():
        run = subprocess.run([*command, source, "-o", ptx], capture_output=True, text=True)
        assert run.returncode == 0, run.stderr[-3000:]
    return build_from_ptx(folder, ptx.read_text(), ("Bfloat16", "Float32"), "(forward|backward)_kernel_[34]_0")


@pytest.mark.parametrize("shape", [(1, 49, 1, 80), (2, 36, 3, 32), (1, 17, 1, 20), (1, 1, 1, 4)], ids=str)
def test_nvccs_instructions_give_the_float64_results_without_a_race(shape, kernels):
    x = random_inputs(shape, dtype=torch.bfloat16)
    assert_close(emulated_results(kernels, x), oracle(x), y=1e-2, gradients=1e-2)
