"""The interpolation kernels as functions of CPU tensors: their own source, compiled with emulator/wkv6_emulator.h."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from emulated import CHECKS, CSRC, cached, compile_all
from torch import Tensor


class Layout(ctypes.Structure):
    """LerpLayout of lerp.h."""

    _fields_ = [(name, ctypes.c_int32) for name in ("tokens", "grid", "width", "head_size", "directions")]


class Params(ctypes.Structure):
    """LerpParams of lerp.h."""

    _fields_ = [
        ("rows", ctypes.c_int32),
        ("channels", ctypes.c_int32),
        ("layout", Layout),
        ("count", ctypes.c_int32),
        *((name, ctypes.c_void_p) for name in ("x", "c", "hidden", "w2", "w2_packed")),
        ("y", ctypes.c_void_p * 5),
        ("gy", ctypes.c_void_p * 5),
        *(
            (name, ctypes.c_void_p)
            for name in ("base", "extra", "gx", "g_hidden", "g_w2", "g_c", "c_parts", "w2_parts", "stream")
        ),
    ]


class EmulatedLerp:
    """The CUDA functions of ops/lerp.py, on CPU tensors of bfloat16."""

    def __init__(self, folder: Path) -> None:
        source = CSRC / "lerp_cuda.cu"

        def objects(temporary: Path) -> list[Path]:
            return compile_all(temporary, [source, CHECKS], False)

        self.library = cached(folder, "lerp_emulated", [source.read_text()], objects)
        self.library.lerp_error_string.restype = ctypes.c_char_p

    def _params(self, x: Tensor, c: Tensor, layout: tuple[int, int, int, bool], **pointers: Tensor) -> Params:
        width, head_size, directions, with_cls_token = layout
        tokens = x.shape[1]
        params = Params(
            x.shape[0] * tokens, x.shape[2], Layout(tokens, tokens - with_cls_token, width, head_size, directions)
        )
        params.count = len(c)
        for name, tensor in {"x": x, "c": c, **pointers}.items():
            setattr(params, name, tensor.data_ptr())
        return params

    def _scratch_for_weights(self, params: Params) -> Tensor:
        floats = self.library.lerp_packed_bytes(ctypes.byref(params)) // 4
        return torch.full((floats,), torch.nan)

    def _call(self, name: str, params: Params) -> None:
        if error := getattr(self.library, name)(ctypes.byref(params)):
            raise RuntimeError(self.library.lerp_error_string(error).decode())

    def lerp(self, x: Tensor, c: Tensor, *layout: int) -> list[Tensor]:
        x, c = x.contiguous(), c.float().contiguous()
        results = [torch.full_like(x, torch.nan) for _ in c]
        params = self._params(x, c, layout)
        params.y[: len(c)] = [y.data_ptr() for y in results]
        self._call("lerp_forward", params)
        return results

    def lerp_backward(self, x, c, gradients, base, extra, *layout) -> tuple[Tensor, Tensor]:
        values, gx = c.float().contiguous(), torch.full_like(x, torch.nan)
        gradients = [gradient.contiguous() for gradient in gradients]
        more = {} if base is None else {"base": base, "extra": extra}
        params = self._params(x, values, layout, gx=gx, **more)
        parts = torch.full((self.library.lerp_parts(ctypes.byref(params)), *c.shape), torch.nan)
        params.c_parts = parts.data_ptr()
        params.gy[: len(c)] = [gradient.data_ptr() for gradient in gradients]
        self._call("lerp_backward", params)
        return gx, parts.sum(0).to(c.dtype)

    def ddlerp(self, x: Tensor, hidden: Tensor, w2: Tensor, c: Tensor, *layout: int) -> list[Tensor]:
        values = c.float().contiguous()
        results = [torch.full_like(x, torch.nan) for _ in c]
        params = self._params(x, values, layout, hidden=hidden, w2=w2)
        params.y[:] = [y.data_ptr() for y in results]
        packed = self._scratch_for_weights(params)
        params.w2_packed = packed.data_ptr()
        self._call("ddlerp_forward", params)
        return results

    def ddlerp_backward(self, x, hidden, w2, c, gradients, *layout) -> tuple[Tensor, ...]:
        values = c.float().contiguous()
        gradients = [gradient.contiguous() for gradient in gradients]
        names = ("base", "extra", "g_hidden", "g_w2", "g_c")
        results = [torch.full_like(tensor, torch.nan) for tensor in (x, x, hidden, w2, values)]
        outputs = dict(zip(names, results, strict=True))
        params = self._params(x, values, layout, hidden=hidden, w2=w2, **outputs)
        count = self.library.ddlerp_parts(ctypes.byref(params))
        c_parts, w2_parts = torch.full((count, *c.shape), torch.nan), torch.full((count, *w2.shape), torch.nan)
        params.c_parts, params.w2_parts = c_parts.data_ptr(), w2_parts.data_ptr()
        params.gy[:] = [gradient.data_ptr() for gradient in gradients]
        packed = self._scratch_for_weights(params)
        params.w2_packed = packed.data_ptr()
        self._call("ddlerp_backward", params)
        return tuple(results)
