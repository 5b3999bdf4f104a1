"""The C++ op for the CPU: WKV6, and the token shift with interpolation, built together."""

from __future__ import annotations

from deepspeed.ops.op_builder.cpu.builder import CPUOpBuilder

from . import toolchain
from .builder import CSRC, RWKVOpBuilder


class WKV6CPUBuilder(RWKVOpBuilder, CPUOpBuilder):
    BUILD_VAR = "DS_BUILD_WKV6_CPU"
    NAME = "wkv6_cpu"
    FILES = (
        "op_builder/wkv6_cpu.py",
        f"{CSRC}/wkv6.h",
        f"{CSRC}/wkv6_binding.h",
        f"{CSRC}/wkv6_cpu*",
        f"{CSRC}/lerp.h",
        f"{CSRC}/lerp_binding.h",
        f"{CSRC}/lerp_cpu*",
    )

    def sources(self) -> list[str]:
        return [f"{CSRC}/{name}.cpp" for name in ("wkv6_cpu_binding", "lerp_cpu_binding", "wkv6_cpu", "lerp_cpu")]

    def cxx_args(self) -> list[str]:
        # No -march=native, which DeepSpeed's default has: the op chooses its instruction set at run time, so one build
        # serves every machine that shares the folder. Without errno and traps, conversions and selections vectorise.
        return ["-O3", "-fopenmp", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"]

    def extra_ldflags(self) -> list[str]:
        return ["-fopenmp", *super().extra_ldflags()]

    def missing_for_build(self) -> list[str]:
        return toolchain.missing_for_cpp()
