"""What the emulated thread block finds: a kernel with one fault for each of its checks."""

from __future__ import annotations

import ctypes
import re
import shutil

import pytest
import torch
from emulated import CHECKS, HERE, Params, cached, checked_like, compile_all, strided

FAULTS = (  # in the order of emulator/wkv6_faults.cu
    ("none", None),
    ("no_barrier_between_warps", "shared memory: (a write and a read|a read and a write)"),
    ("no_barrier_in_a_warp", "shared memory: (a write and a read|a read and a write)"),
    ("no_barrier_before_writing_again", "shared memory: (a write and a read|a read and a write)"),
    ("beyond_shared_memory", "access to byte .* of shared memory"),
    ("beyond_the_input", "read outside the tensors"),
    ("beyond_the_output", "write outside the tensors"),
    ("writes_twice", "second write"),
    ("leaves_out_a_value", "unwritten"),
    ("reads_fresh_scratch_memory", "no earlier launch has written"),
    ("misaligned", "access of 16 bytes"),
    ("a_lane_leaves", "lanes wait for others"),
    ("lanes_at_different_collectives", "collective"),
)

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@pytest.fixture(scope="session")
def faults(request) -> ctypes.CDLL:
    source = HERE / "emulator" / "wkv6_faults.cu"

    def objects(folder):
        return [*compile_all(folder, [source], True), *compile_all(folder, [CHECKS], False)]

    library = cached(request.config.cache.mkdir("wkv6_emulated"), "wkv6_faults", [], objects)
    library.wkv6_fault_message.restype = ctypes.c_char_p
    return library


@pytest.mark.parametrize(("fault", "message"), FAULTS, ids=[name for name, _ in FAULTS])
def test_the_emulator_finds(fault, message, faults):
    faults.wkv6_checks_reset()
    params = Params(1, 1, 1, 64, 0, 0, 0)
    x = torch.zeros(1, 1, 1, 64)
    for name in ("r", "k", "v", "w", "y"):
        setattr(params, name, strided(checked_like(faults, x)))
    params.u = checked_like(faults, x).data_ptr()
    params.workspace = checked_like(faults, x).data_ptr()
    faults.wkv6_checks_begin(ctypes.byref(params), 0, ctypes.c_size_t(256))
    number = [name for name, _ in FAULTS].index(fault)
    error = faults.wkv6_fault(number, ctypes.byref(params))
    if message == "unwritten":
        assert error == 0 and faults.wkv6_checks_unwritten() == 2
    elif message is None:
        assert error == 0 and faults.wkv6_checks_unwritten() == 0
    else:
        assert error and re.search(message, faults.wkv6_fault_message().decode())
