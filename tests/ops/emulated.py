"""The CUDA kernels of WKV6 as functions of CPU tensors: their own source, compiled with emulator/wkv6_emulator.h."""

from __future__ import annotations

import ctypes
import hashlib
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

HERE = Path(__file__).resolve().parent
CSRC = HERE.parent.parent / "rwkv_clip" / "ops" / "csrc"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # in the order of WKV6Dtype
ELEMENTS = ("Float32", "Bfloat16", "Float16")
MISSING = '#include "wkv6_cuda_plan.h"\nnamespace wkv6 {\n'
MISSING_PAIR = """template <> int launch_forward<{0}, {1}>(const Job&, const Plan&) {{ return 2; }}
template <> int launch_backward<{0}, {1}>(const Job&, const Plan&) {{ return 2; }}
"""


class StridedTensor(ctypes.Structure):
    """WKV6Tensor of wkv6.h."""

    _fields_ = [("data", ctypes.c_void_p), *((f"stride_{axis}", ctypes.c_int64) for axis in "bth")]


class Params(ctypes.Structure):
    """WKV6Params of wkv6.h."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in "BTHN"),
        *((name, ctypes.c_int) for name in ("dtype", "w_dtype", "u_dtype")),
        *((name, StridedTensor) for name in ("r", "k", "v", "w")),
        ("u", ctypes.c_void_p),
        *((name, StridedTensor) for name in ("y", "gy", "gr", "gk", "gv", "gw")),
        *((name, ctypes.c_void_p) for name in ("gu", "workspace", "stream")),
    ]


def build(folder: Path, types: dict[str, tuple[str, str]], *flags: str) -> ctypes.CDLL:
    """Compile the kernels of some element types ({suffix of the .cu file: its pair}) unless `folder` has them already.

    The other pairs answer with error 2: each pair takes seconds to compile.
    """
    sources = [CSRC / "wkv6_cuda.cu", *(CSRC / f"wkv6_cuda_{suffix}.cu" for suffix in types)]
    inputs = (*sources, *sorted(CSRC.glob("wkv6*.h")), *sorted(CSRC.glob("*.cuh")), *sorted(HERE.glob("emulator/*.h")))
    digest = hashlib.sha256(repr(flags).encode() + b"".join(path.read_bytes() for path in inputs)).hexdigest()[:16]
    library = folder / f"wkv6_emulated_{digest}.so"
    if not library.exists():
        pairs = {("Float32", "Float32"), *((x, w) for x in ELEMENTS[1:] for w in (x, "Float32"))} - set(types.values())
        missing = folder / f"missing_{digest}.cu"
        missing.write_text(MISSING + "".join(MISSING_PAIR.format(*pair) for pair in sorted(pairs)) + "}\n")
        command = [
            "g++",
            "-x",
            "c++",
            "-std=c++17",
            "-O1",
            "-fPIC",
            "-DWKV6_EMULATE",
            f"-I{CSRC}",
            f"-I{HERE}/emulator",
        ]

        def compile(source: Path) -> Path:
            out = folder / f"{source.stem}_{digest}.o"
            run = subprocess.run([*command, *flags, "-c", source, "-o", out], capture_output=True, text=True)
            assert run.returncode == 0, run.stderr[-3000:]
            return out

        with ThreadPoolExecutor(2) as pool:
            objects = list(pool.map(compile, [*sources, missing]))
        subprocess.run(["g++", "-shared", "-o", library, *objects], check=True)
    loaded = ctypes.CDLL(str(library))
    for direction in ("forward", "backward"):
        getattr(loaded, f"wkv6_cuda_{direction}_workspace_bytes").restype = ctypes.c_size_t
    return loaded


def strided(x: Tensor) -> StridedTensor:
    return StridedTensor(x.data_ptr(), *x.stride()[:3])


def call(library: ctypes.CDLL, direction: str, params: Params) -> int:
    """The error code of wkv6_cuda_forward or wkv6_cuda_backward, with scratch memory of NaN."""
    size = getattr(library, f"wkv6_cuda_{direction}_workspace_bytes")(ctypes.byref(params))
    workspace = torch.full((size + 1,), 255, dtype=torch.uint8)
    params.workspace = workspace.data_ptr()
    return getattr(library, f"wkv6_cuda_{direction}")(ctypes.byref(params))


def emulated_results(library: ctypes.CDLL, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """y, gr, gk, gv, gw, gu for r, k, v, w, u, gy as `wkv6_inputs.results` gives them."""
    r, w, u = inputs["r"], inputs["w"], inputs["u"]
    params = Params(*r.shape, *(DTYPES.index(x.dtype) for x in (r, w, u)))
    for name in ("r", "k", "v", "w", "gy"):
        setattr(params, name, strided(inputs[name]))
    params.u = u.data_ptr()
    out = {name: torch.full(r.shape, float("nan"), dtype=r.dtype) for name in ("y", "gr", "gk", "gv")}
    out["gw"] = torch.full(r.shape, float("nan"), dtype=w.dtype)
    out["gu"] = torch.full(u.shape, float("nan"), dtype=u.dtype)
    for name in ("y", "gr", "gk", "gv", "gw"):
        setattr(params, name, strided(out[name]))
    params.gu = out["gu"].data_ptr()
    for direction in ("forward", "backward"):
        assert call(library, direction, params) == 0
    return out
