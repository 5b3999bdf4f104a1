"""The CUDA kernels of WKV6 as functions of CPU tensors: their own source, compiled with emulator/wkv6_emulator.h.

Every access to memory is checked as emulator/wkv6_checks.cpp says.
"""

from __future__ import annotations

import ctypes
import hashlib
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from ptx import to_cpp
from torch import Tensor

HERE = Path(__file__).resolve().parent
CSRC = HERE.parent.parent / "rwkv_clip" / "ops" / "csrc"
CHECKS = HERE / "emulator" / "wkv6_checks.cpp"
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


def compile_all(folder: Path, sources: list[Path], checked: bool, *flags: str) -> list[Path]:
    """Object files of CUDA or C++ sources; `checked` ones call wkv6_checks.cpp before each access to memory."""
    command = ["g++", "-x", "c++", "-std=c++17", "-O1", "-fPIC", "-fno-strict-aliasing", "-fno-gnu-unique"]
    command += ["-DWKV6_EMULATE", f"-I{CSRC}", f"-I{HERE}/emulator", *flags]
    if checked:
        command += ["-fsanitize=thread", "--param", "tsan-instrument-func-entry-exit=0"]

    def compile(source: Path) -> Path:
        out = folder / f"{source.stem}.o"
        run = subprocess.run([*command, "-c", source, "-o", out], capture_output=True, text=True)
        assert run.returncode == 0, run.stderr[-3000:]
        return out

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(compile, sources))


def cached(folder: Path, name: str, parts: list[str], objects: Callable[[Path], list[Path]]) -> ctypes.CDLL:
    """The library that `objects` compiles, unless `folder` has it; `parts` are what it is made from."""
    headers = (*sorted(CSRC.glob("*.h")), *sorted(CSRC.glob("*.cuh")), *sorted(HERE.glob("emulator/*")))
    digest = hashlib.sha256(repr([parts, [path.read_bytes() for path in headers]]).encode()).hexdigest()[:16]
    library = folder / f"{name}_{digest}.so"
    if not library.exists():
        with TemporaryDirectory(dir=folder) as temporary:
            linked = Path(temporary) / library.name
            subprocess.run(["g++", "-shared", "-o", linked, *objects(Path(temporary))], check=True)
            linked.replace(library)
    loaded = ctypes.CDLL(str(library))
    loaded.wkv6_checks_allocate.restype = ctypes.c_void_p
    loaded.wkv6_checks_unwritten.restype = ctypes.c_size_t
    return loaded


def kernels(folder: Path, name: str, parts: list[str], pairs: list[tuple[str, str]], objects) -> ctypes.CDLL:
    """`cached` with the interface of wkv6.h; pairs of element types other than `pairs` answer with error 2."""
    others = {("Float32", "Float32"), *((x, w) for x in ELEMENTS[1:] for w in (x, "Float32"))} - set(pairs)
    missing = MISSING + "".join(MISSING_PAIR.format(*pair) for pair in sorted(others)) + "}\n"

    def with_missing(temporary: Path) -> list[Path]:
        (temporary / "missing.cu").write_text(missing)
        return [*objects(temporary), *compile_all(temporary, [temporary / "missing.cu", CHECKS], False)]

    loaded = cached(folder, name, [*parts, missing], with_missing)
    for direction in ("forward", "backward"):
        getattr(loaded, f"wkv6_cuda_{direction}_workspace_bytes").restype = ctypes.c_size_t
    loaded.wkv6_cuda_error_string.restype = ctypes.c_char_p
    return loaded


def build(folder: Path, types: dict[str, tuple[str, str]], *flags: str) -> ctypes.CDLL:
    """The kernels of some element types ({suffix of the .cu file: its pair}): each pair takes seconds to compile."""
    sources = [*(CSRC / f"wkv6_cuda_{suffix}.cu" for suffix in types), CSRC / "wkv6_cuda.cu"]
    parts = [*flags, *(path.read_text() for path in sources)]
    pairs = list(types.values())
    return kernels(folder, "wkv6_emulated", parts, pairs, lambda into: compile_all(into, sources, True, *flags))


def build_from_ptx(folder: Path, ptx: str, pair: tuple[str, str], wanted: str) -> ctypes.CDLL:
    """The kernels that nvcc made of one pair of element types, those whose ptx.kernel_name matches `wanted`."""
    source = to_cpp(ptx, wanted, pair)

    def objects(temporary: Path) -> list[Path]:
        (temporary / "from_ptx.cu").write_text(source)
        return compile_all(temporary, [temporary / "from_ptx.cu", CSRC / "wkv6_cuda.cu"], True)

    return kernels(folder, "wkv6_from_ptx", [source], [pair], objects)


def strided(x: Tensor) -> StridedTensor:
    return StridedTensor(x.data_ptr(), *x.stride()[:3])


def checked_like(library: ctypes.CDLL, x: Tensor) -> Tensor:
    """A tensor of NaN in checked memory: dtype, shape, strides and place in its storage as x."""
    count = x.storage_offset() + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True)) + 1
    address = library.wkv6_checks_allocate(ctypes.c_size_t(count * x.element_size()))
    assert address, "out of checked memory"
    memory = (ctypes.c_char * (count * x.element_size())).from_address(address)
    return torch.frombuffer(memory, dtype=x.dtype).as_strided(x.shape, x.stride(), x.storage_offset())


def call(library: ctypes.CDLL, direction: str, params: Params) -> None:
    """wkv6_cuda_forward or wkv6_cuda_backward, with scratch memory of NaN; what went wrong, if anything, is raised."""
    size = getattr(library, f"wkv6_cuda_{direction}_workspace_bytes")(ctypes.byref(params))
    params.workspace = library.wkv6_checks_allocate(ctypes.c_size_t(size + 1))
    library.wkv6_checks_begin(ctypes.byref(params), direction == "backward", ctypes.c_size_t(size))
    error = getattr(library, f"wkv6_cuda_{direction}")(ctypes.byref(params))
    if error:
        raise RuntimeError(library.wkv6_cuda_error_string(error).decode())
    if unwritten := library.wkv6_checks_unwritten():
        raise RuntimeError(f"{2 * unwritten} bytes of the outputs were not written")


def emulated_results(library: ctypes.CDLL, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """y, gr, gk, gv, gw, gu for r, k, v, w, u, gy as `wkv6_inputs.results` gives them."""
    r, w, u = inputs["r"], inputs["w"], inputs["u"]
    params = Params(*r.shape, *(DTYPES.index(x.dtype) for x in (r, w, u)))
    library.wkv6_checks_reset()
    for name in ("r", "k", "v", "w", "gy"):
        setattr(params, name, strided(checked_like(library, inputs[name]).copy_(inputs[name])))
    params.u = checked_like(library, u).copy_(u).data_ptr()
    dtypes = {**dict.fromkeys(("y", "gr", "gk", "gv"), r.dtype), "gw": w.dtype}
    out = {name: checked_like(library, torch.empty(r.shape, dtype=dtype)) for name, dtype in dtypes.items()}
    for name in dtypes:
        setattr(params, name, strided(out[name]))
    out["gu"] = checked_like(library, torch.empty_like(u))
    params.gu = out["gu"].data_ptr()
    for direction in ("forward", "backward"):
        call(library, direction, params)
    return {name: x.clone() for name, x in out.items()}
