"""WKV6 against float64, on every implementation that this machine has."""

from __future__ import annotations

import pytest
import torch
from wkv6_inputs import NAMES, assert_close, oracle, random_inputs, recorded, relative_error, results

from rwkv_clip.ops import wkv6, wkv6_reference

FLOAT32 = {"y": 1e-5, "gradients": 1e-4}
HALF = {"y": 1e-2, "gradients": 1e-2}


def shape_id(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def test_reference_is_the_sum_over_pairs():
    x = {name: value.double() for name, value in random_inputs((2, 5, 2, 4)).items()}
    decay = torch.exp(-torch.exp(x["w"]))
    y = torch.zeros_like(x["r"])
    for t in range(5):
        for s in range(5):
            between = decay[:, min(s, t) + 1 : max(s, t)].prod(1) if s != t else x["u"]
            y[:, t] += (x["r"][:, t] * x["k"][:, s] * between).sum(-1, keepdim=True) * x["v"][:, s]
    assert relative_error(wkv6_reference(*(x[name] for name in NAMES)), y) < 1e-14


def test_reference_gradients_are_those_of_its_values():
    x = random_inputs((1, 4, 1, 4))
    assert torch.autograd.gradcheck(wkv6_reference, [x[name].double().requires_grad_() for name in NAMES])


@pytest.mark.parametrize("name", ["T49_N80_b32", "T77_N64_text", "T196_N80_b16"])
def test_recorded_float64_results_of_the_models_shapes(name, device, fixtures):
    x = recorded(fixtures / "wkv" / f"{name}.npz")
    assert_close(results(x, device), x, **FLOAT32)


@pytest.mark.parametrize("name", ["T1_N8", "T2_N16", "T3_N8", "T4_N20"])
def test_K10_short_sequences_give_the_recorded_float64_results(name, device, fixtures):
    x = recorded(fixtures / "wkv" / f"{name}.npz")
    found = results(x, device)
    assert_close(found, x, y=1e-5, gradients=1e-4)
    if x["r"].shape[1] <= 2:
        assert found["gw"].abs().max() == 0, "no token has tokens on both sides"


def test_K12_two_head_sizes_in_one_process(device, fixtures):
    for name in ("T77_N64_text", "T49_N80_b32", "T77_N64_text"):
        x = recorded(fixtures / "wkv" / f"{name}.npz")
        assert_close(results(x, device), x, **FLOAT32)


def test_K14_all_inputs_bfloat16_give_gradients_in_bfloat16(device, fixtures):
    x = {name: value.bfloat16() for name, value in recorded(fixtures / "wkv" / "T49_N80_b32.npz").items()}
    found = results(x, device)
    assert {value.dtype for value in found.values()} == {torch.bfloat16}
    assert_close(found, oracle(x), **HALF)


@pytest.mark.parametrize("tokens", [15, 17, 33, 49, 77, 196, 197])
def test_K16_any_length(tokens, device):
    x = random_inputs((1, tokens, 2, 16))
    assert_close(results(x, device), oracle(x), **FLOAT32)


@pytest.mark.parametrize(
    "shape",
    [(3, 7, 1, 4), (2, 33, 3, 12), (1, 5, 2, 128), (1, 64, 1, 100), (1, 65, 2, 8), (1, 128, 1, 8), (1, 129, 1, 8)],
    ids=shape_id,
)
def test_any_batch_and_head_size(shape, device):
    x = random_inputs(shape)
    assert_close(results(x, device), oracle(x), **FLOAT32)


def test_long_sequences(op_device):
    x = random_inputs((1, 700, 1, 8))
    assert_close(results(x, op_device), oracle(x), **FLOAT32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(2, 49, 2, 80), (1, 77, 2, 64)], ids=shape_id)
def test_half_precision_beside_float32_decays(dtype, shape, device):
    x = random_inputs(shape, dtype=dtype)
    found = results(x, device)
    assert [found[name].dtype for name in ("y", "gr", "gk", "gv")] == [dtype] * 4
    assert [found[name].dtype for name in ("gw", "gu")] == [torch.float32] * 2
    assert_close(found, oracle(x), **HALF)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_gradient_of_the_decay_is_right_from_no_decay_to_total_decay(dtype, seed, device):
    w = torch.rand(1, 61, 2, 32, generator=torch.Generator().manual_seed(seed)) * 20 - 8
    x = random_inputs((1, 61, 2, 32), w, seed, dtype)
    assert_close(results(x, device), oracle(x), **(FLOAT32 if dtype == torch.float32 else HALF))


@pytest.mark.parametrize("value", [-1e4, -80.0, 4.69, 4.71, 12.0, 89.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_single_extreme_decays(value, dtype, device):
    x = random_inputs((1, 37, 1, 8), dtype=dtype)
    x["w"][:, [1, 9, 20, 35]] = value
    assert_close(results(x, device), oracle(x), **(FLOAT32 if dtype == torch.float32 else HALF))


@pytest.mark.parametrize("tokens", [49, 300])
def test_the_gradient_of_a_decay_of_zero_is_zero(tokens, op_device):
    x = random_inputs((1, tokens, 1, 8))
    x["w"][:, 1::2] = 6.0
    assert results(x, op_device)["gw"][:, 1::2].abs().max() == 0


@pytest.mark.parametrize("tokens", [49, 200])
def test_slow_constant_decay_loses_no_precision(tokens, op_device):
    x = random_inputs((1, tokens, 1, 32), torch.full((1, tokens, 1, 32), -8.0))
    assert_close(results(x, op_device), oracle(x), **FLOAT32)


def test_not_a_number_is_passed_on(device):
    for name in ("r", "k", "v", "w"):
        x = random_inputs((1, 20, 1, 8))
        x[name][0, 7, 0, 3] = float("nan")
        assert results(x, device)["y"].isnan().any(), name


def as_heads_first(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def as_part_of_a_wider_tensor(x: torch.Tensor) -> torch.Tensor:
    wide = torch.full((*x.shape[:-1], x.shape[-1] * 2 + 3), float("nan"), dtype=x.dtype, device=x.device)
    wide[..., 1 : 1 + x.shape[-1]] = x
    return wide[..., 1 : 1 + x.shape[-1]]


def as_channels_apart(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)


@pytest.mark.parametrize("change", [as_heads_first, as_part_of_a_wider_tensor, as_channels_apart])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_strides_do_not_change_the_result(change, dtype, device):
    x = random_inputs((2, 19, 3, 12), dtype=dtype)
    strided = {name: change(value) if name != "u" else value.T.contiguous().T for name, value in x.items()}
    assert strided["r"].stride() != x["r"].stride()
    assert_close(results(strided, device), oracle(x), **(FLOAT32 if dtype == torch.float32 else HALF))


def test_expanded_inputs_and_gradients(device):
    x = random_inputs((1, 19, 1, 12))
    wide = {name: value.expand(3, 19, 2, 12) if name != "u" else value.expand(2, 12) for name, value in x.items()}
    wide["gy"] = torch.ones(()).expand(3, 19, 2, 12)
    assert_close(results(wide, device), oracle(wide), **FLOAT32)


@pytest.mark.parametrize("shape", [(0, 7, 2, 8), (2, 7, 0, 8)], ids=shape_id)
def test_an_empty_batch_gives_empty_results_and_no_gradient_of_u(shape, device):
    x = random_inputs(shape)
    found = results(x, device)
    assert found["y"].shape == found["gr"].shape == found["gw"].shape == shape
    assert found["gu"].shape == shape[2:] and found["gu"].abs().sum() == 0


@pytest.mark.parametrize("tokens", [49, 200])
def test_two_runs_give_the_same_bits(tokens, op_device):
    x = random_inputs((5, tokens, 3, 32), dtype=torch.bfloat16)
    first, second = results(x, op_device), results(x, op_device)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_number_of_threads_changes_no_bit():
    x = random_inputs((3, 20, 2, 16))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = results(x, "cpu")
        torch.set_num_threads(3)
        together = results(x, "cpu")
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(alone[name], together[name]) for name in alone)


def test_only_the_inputs_are_kept_for_the_backward_pass(device):
    x = random_inputs((2, 9, 2, 8))
    leaves = [x[name].to(device).requires_grad_() for name in NAMES]
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        wkv6(*leaves)
    assert sorted(tensor.data_ptr() for tensor in kept) == sorted(leaf.data_ptr() for leaf in leaves)


def test_inputs_stay_as_they_are(device):
    x = random_inputs((2, 9, 2, 8))
    before = {name: value.clone() for name, value in x.items()}
    results(x, device)
    assert all(torch.equal(x[name], before[name]) for name in x)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_side_stream_is_obeyed():
    x = random_inputs((64, 77, 8, 64))
    wanted = results(x, "cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late = {name: value.cuda() * 1 for name, value in x.items()}
        found = results(late, "cuda")
    stream.synchronize()
    assert all(torch.equal(found[name], wanted[name]) for name in found)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_of_another_device_than_the_current_one():
    x = random_inputs((2, 49, 2, 64))
    found = results(x, "cuda:1")
    assert found["y"].device == torch.device("cuda:1")
    assert_close(found, oracle(x), **FLOAT32)
