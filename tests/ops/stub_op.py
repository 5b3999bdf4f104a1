"""Builder of the stub op; as a script, builds and loads it and prints what came out."""

from __future__ import annotations

import sys

from deepspeed.ops.op_builder.cpu.builder import CPUOpBuilder

from op_builder import OpBuildError, toolchain
from op_builder.builder import RWKVOpBuilder


class StubBuilder(RWKVOpBuilder, CPUOpBuilder):
    BUILD_VAR = "DS_BUILD_STUB"
    NAME = "stub"
    FILES = ("tests/ops/stub_op.py", "tests/ops/stub_op.cpp")

    def sources(self) -> list[str]:
        return ["tests/ops/stub_op.cpp"]

    def cxx_args(self) -> list[str]:
        return ["-O0"]

    def missing_for_build(self) -> list[str]:
        return toolchain.missing_for_cpp()


if __name__ == "__main__":
    try:
        module = StubBuilder().load()
    except OpBuildError as error:
        sys.exit(f"error: {error}")
    print("loaded", module.__name__)
