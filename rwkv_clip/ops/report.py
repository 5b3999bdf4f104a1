"""`rwkv-clip report`: which ops are installed, which can be built here and why not. The form is that of ds_report."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import sys
from dataclasses import dataclass

import torch

from .builders import check_op_builder

NAME_WIDTH = 23
INSTALLED_WIDTH = 11
VALUE_WIDTH = 33


@dataclass(frozen=True)
class OpStatus:
    """One row of the report."""

    name: str
    installed: bool  # compiled ahead of time
    reason: str | None  # why it cannot be compiled just in time here; None when it can

    @property
    def compatible(self) -> bool:
        return self.reason is None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command has no arguments."""


def run(args: argparse.Namespace) -> int:
    """Print the report; exit status 0 whatever it says."""
    check_op_builder()
    print("\n".join(report_lines(color=sys.stdout.isatty())))
    return 0


def op_status() -> list[OpStatus]:
    """The state of every op of this project on this machine. Builds nothing."""
    from op_builder.prebuilt import OP_NAMES, is_prebuilt

    try:
        from op_builder import ALL_OPS
    except ImportError as error:
        reason = f"DeepSpeed, which builds the ops, cannot be imported: {error}"
        return [OpStatus(name, is_prebuilt(name), reason) for name in OP_NAMES]
    return [OpStatus(name, is_prebuilt(name), builder().incompatible_reason()) for name, builder in ALL_OPS.items()]


def environment() -> list[tuple[str, str]]:
    """Names and values of what the ops depend on."""
    from op_builder import toolchain

    nvcc = toolchain.nvcc_version()
    rows = [
        ("python version", platform.python_version()),
        ("torch install path", os.path.dirname(torch.__file__)),
        ("torch version", torch.__version__),
        ("torch cuda version", torch.version.cuda or "none (a CPU build)"),
        ("CUDA toolkit", toolchain.cuda_home() or "none found; CUDA_HOME is not set"),
        ("nvcc version", f"{nvcc[0]}.{nvcc[1]}" if nvcc else "none found"),
        ("GPUs", ", ".join(_devices()) or "none visible"),
        ("C++ compiler", toolchain.compiler_version()),
    ]
    for package in ("rwkv-clip", "deepspeed", "nvidia-dali-cuda120", "nvidia-dali-cuda130"):
        version = _version(package)
        if version or package in ("rwkv-clip", "deepspeed"):
            rows.append((package, version or "not installed"))
    if not any(_version(f"nvidia-dali-cuda{cuda}") for cuda in (120, 130)):
        rows.append(("nvidia-dali", "not installed"))
    rows.append(("just-in-time builds in", toolchain.extensions_root()))
    return rows


def report_lines(color: bool = False) -> list[str]:
    """The report; with ANSI colours for a terminal."""

    def mark(good: bool, yes: str, no: str) -> str:
        text = f"[{yes}]" if good else f"[{no}]"
        return f"\033[{92 if good else 93}m{text}\033[0m" if color else text

    from op_builder import toolchain

    rule = "-" * (NAME_WIDTH + INSTALLED_WIDTH + len("op name") + len("installed"))
    ninja = mark(toolchain.ninja_folder() is not None, "OKAY", "FAIL")
    lines = [
        rule,
        "RWKV-CLIP C++/CUDA extension op report",
        rule,
        "NOTE: Ops that are not installed are compiled just in time, once, when they",
        "      are first used. An op is compatible when this machine can do that.",
        rule,
        f"ninja {_dots('ninja', NAME_WIDTH)} {ninja}",
        rule,
        f"op name {_dots('op name', NAME_WIDTH)} installed {_dots('installed', INSTALLED_WIDTH)} compatible",
        rule,
    ]
    for op in op_status():
        installed = mark(op.installed, "YES", "NO")
        dots = _dots("[YES]" if op.installed else "[NO]", INSTALLED_WIDTH)
        lines.append(f"{op.name} {_dots(op.name, NAME_WIDTH)} {installed} {dots} {mark(op.compatible, 'OKAY', 'NO')}")
        lines += [f"    {line}" for line in (op.reason or "").split("; ") if line]
    lines += [rule, "General environment info:"]
    lines += [f"{name} {_dots(name, VALUE_WIDTH)} {value}" for name, value in environment()]
    return lines


def _dots(text: str, width: int) -> str:
    return "." * (width - len(text))


def _devices() -> list[str]:
    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
