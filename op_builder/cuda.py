"""What the builders of CUDA ops share."""

from __future__ import annotations

import os

import torch
from deepspeed.ops.op_builder.builder import CUDAOpBuilder

from . import toolchain
from .builder import RWKVOpBuilder

# torch takes the operators of half types away from CUDA code that it compiles; the kernels are plain CUDA.
HALF_OPERATORS = [
    f"-U__CUDA_NO_{name}__"
    for name in ("HALF_OPERATORS", "HALF_CONVERSIONS", "HALF2_OPERATORS", "BFLOAT16_CONVERSIONS")
]


class RWKVCUDABuilder(RWKVOpBuilder, CUDAOpBuilder):
    def cxx_args(self) -> list[str]:
        return ["-O3"]

    def nvcc_args(self) -> list[str]:
        # No --use_fast_math, which DeepSpeed's default has: exp must be exact and small numbers must not become 0.
        archs = None if self.jit_mode or "TORCH_CUDA_ARCH_LIST" in os.environ else toolchain.default_cuda_archs()
        threads = os.environ.get("DS_NVCC_THREADS") or str(min(os.cpu_count() or 1, 8))
        return ["-O3", "-lineinfo", f"--threads={threads}", *HALF_OPERATORS, *self.compute_capability_args(archs)]

    def target(self) -> str:
        capabilities = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
        return f"{super().target()} {os.environ.get('TORCH_CUDA_ARCH_LIST')} {sorted(capabilities)}"

    def missing_for_build(self) -> list[str]:
        return toolchain.missing_for_cuda()

    def missing_here(self) -> list[str]:
        return toolchain.missing_device()
