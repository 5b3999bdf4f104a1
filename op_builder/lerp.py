"""The CUDA op of the token shift with interpolation."""

from __future__ import annotations

from .builder import CSRC
from .cuda import RWKVCUDABuilder


class LerpBuilder(RWKVCUDABuilder):
    BUILD_VAR = "DS_BUILD_LERP"
    NAME = "lerp"
    FILES = (
        "op_builder/lerp.py",
        "op_builder/cuda.py",
        f"{CSRC}/cuda_launch.cuh",
        f"{CSRC}/lerp.h",
        f"{CSRC}/lerp_binding.h",
        f"{CSRC}/lerp_cuda*",
        f"{CSRC}/wkv6_cuda_warp.cuh",
        f"{CSRC}/wkv6_binding.h",
        f"{CSRC}/wkv6.h",
    )

    def sources(self) -> list[str]:
        return [f"{CSRC}/lerp_cuda_binding.cpp", f"{CSRC}/lerp_cuda.cu"]
