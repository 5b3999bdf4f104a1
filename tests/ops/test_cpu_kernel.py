"""The CPU kernels by themselves, without PyTorch: every vector length, and no access outside the tensors."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from wkv6_inputs import assert_close, oracle, random_inputs, recorded

CSRC = Path(__file__).resolve().parent.parent.parent / "rwkv_clip" / "ops" / "csrc"
FLAGS = ("-std=c++17", "-fPIC", "-fopenmp", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math")

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


class Tensor4(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("stride_b", ctypes.c_int64), ("stride_t", ctypes.c_int64)]
    _fields_ += [("stride_h", ctypes.c_int64)]


class Params(ctypes.Structure):
    """WKV6Params of wkv6.h."""

    _fields_ = [(name, ctypes.c_int32) for name in ("B", "T", "H", "N")]
    _fields_ += [(name, ctypes.c_int) for name in ("dtype", "w_dtype", "u_dtype")]
    _fields_ += [(name, Tensor4) for name in ("r", "k", "v", "w")] + [("u", ctypes.c_void_p)]
    _fields_ += [(name, Tensor4) for name in ("y", "gy", "gr", "gk", "gv", "gw")]
    _fields_ += [(name, ctypes.c_void_p) for name in ("gu", "workspace", "stream")]


def run_library(library: ctypes.CDLL, x: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """y and the gradients of float32 inputs."""
    x = {name: value.contiguous() for name, value in x.items()}
    found = {"y": torch.empty_like(x["r"]), **{f"g{name}": torch.empty_like(x[name]) for name in "rkvwu"}}
    workspace = torch.empty(x["r"].shape[0], *x["u"].shape)
    params = Params(*x["r"].shape)
    for name, value in {**{name: x[name] for name in ("r", "k", "v", "w", "gy")}, **found}.items():
        if name != "gu":
            setattr(params, name, Tensor4(value.data_ptr(), *value.stride()[:3]))
    params.u, params.gu, params.workspace = x["u"].data_ptr(), found["gu"].data_ptr(), workspace.data_ptr()
    library.wkv6_cpu_forward(ctypes.byref(params), 2)
    library.wkv6_cpu_backward(ctypes.byref(params), 2)
    return found


@needs_compiler
@pytest.mark.parametrize("vector_bytes", [16, 64])
def test_each_vector_length_is_right_without_special_instructions(vector_bytes, tmp_path, fixtures):
    path = tmp_path / "wkv6.so"
    variant = ("-DWKV6_CPU_BASELINE_ONLY", f"-DWKV6_VECTOR_BYTES={vector_bytes}", "-Wno-psabi")
    subprocess.run(["g++", "-O1", *FLAGS, *variant, "-shared", CSRC / "wkv6_cpu.cpp", "-o", path], check=True)
    library = ctypes.CDLL(str(path))
    library.wkv6_cpu_instruction_set.restype = ctypes.c_char_p
    assert library.wkv6_cpu_instruction_set() == b"baseline"
    for file in sorted((fixtures / "wkv").glob("*.npz")):
        x = recorded(file)
        assert_close(run_library(library, x), x, y=1e-5, gradients=1e-4)
    x = random_inputs((1, 150, 1, 12))
    assert_close(run_library(library, x), oracle(x), y=1e-5, gradients=1e-4)


def run_with_sanitizers(program, name: str, *flags: str) -> str:
    """What the program of the kernels' bounds prints; it ends at the first access outside a tensor."""
    sanitizers = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", f"-I{CSRC}", *flags)
    sources = (Path(__file__).parent / f"{name}_bounds.cpp", CSRC / f"{name}.cpp")
    built = subprocess.run(["g++", *FLAGS, *sanitizers, *sources, "-o", program], capture_output=True, text=True)
    if "cannot find" in built.stderr:
        pytest.skip("the sanitizers' libraries are not installed")
    assert built.returncode == 0, built.stderr
    run = subprocess.run([program], capture_output=True, text=True, env={"ASAN_OPTIONS": "detect_leaks=0"})
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout.strip()


@needs_compiler
def test_K10_nothing_outside_the_tensors_is_read_or_written(tmp_path):
    assert run_with_sanitizers(tmp_path / "bounds", "wkv6_cpu") in ("baseline", "avx2", "avx512")


@needs_compiler
def test_the_interpolation_is_right_without_special_instructions_and_stays_inside_the_tensors(tmp_path):
    assert run_with_sanitizers(tmp_path / "bounds", "lerp_cpu", "-DLERP_CLONES=") == "right"


def test_only_bindings_include_headers_of_pytorch():
    for path in CSRC.iterdir():
        included = re.findall(r'#include\s+[<"](torch|ATen|c10|Python|pybind11)', path.read_text())
        assert not included or "binding" in path.name, f"{path.name} includes {included}"
