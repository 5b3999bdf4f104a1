"""Run by test_lerp.py with TRITON_INTERPRET=1: the Triton kernels on the CPU. Prints "dtype<tab>case<tab>error" lines.

Not in bf16, whose products Triton's interpreter gets wrong.
"""

import torch
from lerp_cases import CASES, largest_error

from rwkv_clip.ops import lerp_triton

for name in ("lerp", "lerp_backward", "ddlerp", "ddlerp_backward"):
    torch.library.impl(f"rwkv_clip::{name}", "cpu")(getattr(lerp_triton, name))
for dtype in ("float32", "float16"):
    for case in CASES:
        print(dtype, case, largest_error(case, getattr(torch, dtype), "cpu"), sep="\t", flush=True)
