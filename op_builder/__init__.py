"""Builders of this project's ops, by DeepSpeed's conventions: `WKV6CPUBuilder().load()`.

Light on purpose: `import deepspeed` imports any top-level package of this name to see whether it is DeepSpeed's own, so
nothing here may import DeepSpeed before it is asked for.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "WKV6Builder": "op_builder.wkv6",
    "LerpBuilder": "op_builder.lerp",
    "WKV6CPUBuilder": "op_builder.wkv6_cpu",
    "OpBuildError": "op_builder.toolchain",
    "ALL_OPS": "op_builder.all_ops",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
