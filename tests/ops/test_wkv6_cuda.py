"""The CUDA kernels' source on the CPU: lane by lane in an emulated thread block, so that it is tested without a GPU.

Every access to memory is checked (emulator/wkv6_checks.cpp): a missing barrier, an address outside a tensor, a
misaligned vector, an output that is not written or written twice is an error, and the lanes run in a random order. What
nvcc makes of the same source is in test_wkv6_ptx.py; what only a GPU can show (ptxas's work, speed) in test_wkv6.py,
which runs the built op where there is one.
"""

from __future__ import annotations

import ctypes
import shutil

import pytest
import torch
from emulated import Params, build, emulated_results, strided
from wkv6_inputs import assert_close, oracle, random_inputs, recorded

FLOAT32 = {"y": 1e-5, "gradients": 1e-4}
HALF = {"y": 1e-2, "gradients": 1e-2}

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@pytest.fixture(scope="session")
def kernels(request):
    types = {"fp32": ("Float32", "Float32"), "bf16_w32": ("Bfloat16", "Float32"), "fp16": ("Float16", "Float16")}
    return build(request.config.cache.mkdir("wkv6_emulated"), types)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["T1_N8", "T2_N16", "T3_N8", "T4_N20", "T49_N80_b32", "T77_N64_text", "T196_N80_b16"])
def test_K10_K16_emulated_kernels_give_the_recorded_float64_results(name, dtype, kernels, fixtures):
    x = recorded(fixtures / "wkv" / f"{name}.npz")
    if dtype != torch.float32:
        x = {key: value if key in ("w", "u") else value.to(dtype) for key, value in x.items()}
    found = emulated_results(kernels, x)
    assert_close(found, x if dtype == torch.float32 else oracle(x), **(FLOAT32 if dtype == torch.float32 else HALF))
    if x["r"].shape[1] <= 2:
        assert found["gw"].abs().max() == 0


@pytest.mark.parametrize("tokens", [16, 17, 64, 65, 81, 129])
def test_lengths_around_the_borders_of_blocks_and_chunks(tokens, kernels):
    x = random_inputs((1, tokens, 1, 20))
    assert_close(emulated_results(kernels, x), oracle(x), **FLOAT32)


@pytest.mark.parametrize("channels", [4, 20, 128])
def test_the_token_that_follows_three_blocks_has_all_its_gradients(channels, kernels):
    x = random_inputs((2, 49, 2, channels), dtype=torch.bfloat16)
    found, wanted = emulated_results(kernels, x), oracle(x)
    assert_close(found, wanted, **HALF)
    # Alone, so that its errors do not drown in those of the others.
    last = [
        {name: values[:, 48:] if values.dim() == 4 else values for name, values in of.items()} for of in (found, wanted)
    ]
    assert_close(*last, **HALF)
    assert found["gw"][:, 48].abs().max() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("channels", [64, 72])
def test_chunks_with_the_numbers_of_channels_that_kernels_are_compiled_for(channels, dtype, kernels):
    x = random_inputs((1, 130, 1, channels), dtype=dtype)
    assert_close(emulated_results(kernels, x), oracle(x), **(FLOAT32 if dtype == torch.float32 else HALF))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [49, 61, 150])
def test_gradient_of_the_decay_from_no_decay_to_total_decay(tokens, dtype, kernels):
    w = torch.rand(1, tokens, 1, 16, generator=torch.Generator().manual_seed(1)) * 20 - 8
    x = random_inputs((1, tokens, 1, 16), w, dtype=dtype)
    assert_close(emulated_results(kernels, x), oracle(x), **(FLOAT32 if dtype == torch.float32 else HALF))


@pytest.mark.parametrize("tokens", [20, 49, 100])
def test_a_decay_of_zero_has_a_gradient_of_exactly_zero(tokens, kernels):
    x = random_inputs((1, tokens, 1, 8), dtype=torch.bfloat16)
    x["w"][:, ::3] = 89.0
    found = emulated_results(kernels, x)
    assert found["gw"][:, ::3].abs().max() == 0
    assert_close(found, oracle(x), **HALF)


def test_float16_throughout_keeps_more_digits_than_bfloat16(kernels):
    x = {name: value.half() for name, value in random_inputs((1, 33, 1, 12)).items()}
    assert_close(emulated_results(kernels, x), oracle(x), y=1e-3, gradients=2e-3)


def test_strided_inputs_are_read_in_place(kernels):
    x = random_inputs((2, 18, 3, 8), dtype=torch.bfloat16)
    wanted = emulated_results(kernels, x)
    strided_x = {name: value.transpose(1, 2).contiguous().transpose(1, 2) for name, value in x.items() if name != "u"}
    strided_x["k"] = torch.stack([x["k"]] * 4, dim=2)[:, :, 2]
    found = emulated_results(kernels, {**strided_x, "u": x["u"]})
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_order_of_the_lanes_between_barriers_changes_no_bit(dtype, kernels):
    x = random_inputs((1, 85, 2, 36), dtype=dtype)
    first, second = emulated_results(kernels, x), emulated_results(kernels, x)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("kilobytes", "dtype", "shape"),
    [
        (kilobytes, dtype, shape)
        for dtype, shape in ((torch.float32, (1, 40, 1, 128)), (torch.bfloat16, (1, 77, 1, 64)))
        for kilobytes in (99, 64)  # the least of all devices from sm_75 on
    ],
    ids=str,
)
def test_devices_with_less_shared_memory_take_smaller_chunks(kilobytes, dtype, shape, kernels, monkeypatch):
    monkeypatch.setenv("WKV6_SHARED_KB", str(kilobytes))
    x = random_inputs(shape, dtype=dtype)
    assert_close(emulated_results(kernels, x), oracle(x), **(FLOAT32 if dtype == torch.float32 else HALF))


@pytest.mark.parametrize("shape", [(512, 49, 8, 80), (512, 77, 10, 64)], ids=str)
def test_scratch_memory_at_the_models_shapes_is_that_of_the_sum_for_gu(shape, kernels):
    params = Params(*shape, 1, 0, 0)
    assert kernels.wkv6_cuda_forward_workspace_bytes(ctypes.byref(params)) == 0
    assert kernels.wkv6_cuda_backward_workspace_bytes(ctypes.byref(params)) == 4 * shape[0] * shape[2] * shape[3]


def test_scratch_memory_of_long_sequences_is_linear_in_their_length(kernels):
    def size(tokens: int) -> int:
        return kernels.wkv6_cuda_backward_workspace_bytes(ctypes.byref(Params(16, tokens, 8, 80, 1, 0, 0)))

    assert size(4096) == 4 * size(1024)


def test_offsets_and_sizes_too_large_for_the_kernels_are_an_error(kernels):
    x = random_inputs((1, 2, 1, 4))
    params = Params(1, 2, 1, 4, 0, 0, 0)
    for name in ("r", "k", "v", "w"):
        setattr(params, name, strided(x[name]))
    params.k.stride_t = 1 << 31
    assert kernels.wkv6_cuda_forward(ctypes.byref(params)) == 1
    for batch, heads in ((1 << 20, 1 << 10), (1, 1 << 29)):
        assert kernels.wkv6_cuda_forward(ctypes.byref(Params(batch, 1, heads, 4, 0, 0, 0))) == 1


@pytest.mark.parametrize("tokens", [20, 81])
def test_without_tensor_cores_the_same(tokens, request):
    plain = build(request.config.cache.mkdir("wkv6_emulated"), {"bf16_w32": ("Bfloat16", "Float32")}, "-DWKV6_PLAIN")
    x = random_inputs((1, tokens, 1, 4), dtype=torch.bfloat16)
    assert_close(emulated_results(plain, x), oracle(x), **HALF)
