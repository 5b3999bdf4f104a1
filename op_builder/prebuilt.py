"""Ops that were compiled ahead of time, at installation (`DS_BUILD_WKV6=1 pip install --no-build-isolation .`)."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

OP_NAMES = ("wkv6", "lerp", "wkv6_cpu")

# Written beside the ops at installation: {"torch": "2.13.0+cu130", "ops": ["wkv6"]}.
RECORD = Path(__file__).resolve().parent.parent / "rwkv_clip" / "ops" / "prebuilt.json"


def module_name(op_name: str) -> str:
    """Where a compiled op lies in the package: rwkv_clip.ops.wkv6_op."""
    return f"rwkv_clip.ops.{op_name}_op"


def is_prebuilt(op_name: str) -> bool:
    return RECORD.is_file() and op_name in json.loads(RECORD.read_text())["ops"]


def import_prebuilt(op_name: str) -> ModuleType | None:
    """The compiled op, or None when there is none or when it belongs to another torch (which is said)."""
    if not is_prebuilt(op_name):
        return None
    import torch

    built_with = json.loads(RECORD.read_text())["torch"]
    if built_with != torch.__version__:
        # Not imported even to try: C++ code for another torch may crash instead of failing to load.
        print(
            f"[rwkv-clip] the installed op {op_name} was compiled for torch {built_with}, this is torch "
            f"{torch.__version__}: not used. Install rwkv-clip again to compile it ahead of time.",
            file=sys.stderr,
            flush=True,
        )
        return None
    return importlib.import_module(module_name(op_name))


def write_record(folder: Path, ops: list[str]) -> None:
    """Record that `ops` were compiled into `folder`/rwkv_clip/ops with the running torch. For setup.py."""
    import torch

    path = folder / "rwkv_clip" / "ops" / RECORD.name
    path.write_text(json.dumps({"torch": torch.__version__, "ops": ops}) + "\n")
