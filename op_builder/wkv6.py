"""The CUDA op."""

from __future__ import annotations

from .builder import CSRC, ROOT
from .cuda import RWKVCUDABuilder


class WKV6Builder(RWKVCUDABuilder):
    BUILD_VAR = "DS_BUILD_WKV6"
    NAME = "wkv6"
    FILES = (
        "op_builder/wkv6.py",
        "op_builder/cuda.py",
        f"{CSRC}/cuda_launch.cuh",
        f"{CSRC}/wkv6.h",
        f"{CSRC}/wkv6_binding.h",
        f"{CSRC}/wkv6_cuda*",
    )

    def sources(self) -> list[str]:
        kernels = sorted(path.name for path in (ROOT / CSRC).glob("wkv6_cuda*.cu"))
        return [f"{CSRC}/{name}" for name in ("wkv6_cuda_binding.cpp", *kernels)]
