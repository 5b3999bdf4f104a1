"""Every op of this project by name: what `rwkv-clip report` lists and setup.py can build ahead of time."""

from __future__ import annotations

from .builder import RWKVOpBuilder
from .lerp import LerpBuilder
from .wkv6 import WKV6Builder
from .wkv6_cpu import WKV6CPUBuilder

ALL_OPS: dict[str, type[RWKVOpBuilder]] = {
    builder.NAME: builder for builder in (WKV6Builder, LerpBuilder, WKV6CPUBuilder)
}
