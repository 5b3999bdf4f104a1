"""Token shift with interpolation: the kernels against plain PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from emulated_lerp import EmulatedLerp
from lerp_cases import CASES, largest_error

from rwkv_clip import create_model
from rwkv_clip.model.compile import compiled_forward
from rwkv_clip.ops import lerp
from rwkv_clip.ops.lerp_check import kernels_are_right

MOST = {torch.float32: 2e-6, torch.bfloat16: 1.5e-2}  # by what the results are rounded to
NAMES = ("lerp", "lerp_backward", "ddlerp", "ddlerp_backward")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(scope="module")
def kernels(tmp_path_factory) -> EmulatedLerp:
    return EmulatedLerp(tmp_path_factory.mktemp("emulated"))


@pytest.fixture
def emulated(kernels: EmulatedLerp, monkeypatch) -> None:
    """The ops on CPU tensors, by the CUDA kernels' own source in the emulated thread block."""
    found = SimpleNamespace(interpolations={name: getattr(kernels, name) for name in NAMES})
    monkeypatch.setattr(lerp, "implementation", lambda device_type: found)
    monkeypatch.setitem(lerp.DTYPES, "cpu", torch.bfloat16)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("case", CASES)
def test_the_kernels_give_the_plain_results_in_the_emulator(case: str, emulated: None) -> None:
    assert largest_error(case, torch.bfloat16, "cpu") <= MOST[torch.bfloat16]


@pytest.mark.parametrize("case", CASES)
def test_the_kernels_give_the_plain_results_on_a_cpu(case: str) -> None:
    assert largest_error(case, torch.float32, "cpu") <= MOST[torch.float32]


def test_the_results_on_a_cpu_do_not_depend_on_the_number_of_threads(threads: None) -> None:
    torch.manual_seed(0)
    x, gradients = torch.randn(30, 40, 96), [torch.randn(30, 40, 96) for _ in range(5)]
    hidden, w2, c = torch.randn(1200, 160), torch.randn(5, 32, 96), torch.randn(5, 96)
    runs = []
    for count in (1, 2):
        torch.set_num_threads(count)
        c_gradient = torch.ops.rwkv_clip.ddlerp_backward(x, hidden, w2, c, gradients, 40, 32, 2, False)[4]
        runs.append([c_gradient, *torch.ops.rwkv_clip.lerp_backward(x, c, gradients, None, None, 40, 32, 2, False)])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_what_does_not_fit_is_refused_before_anything_is_read() -> None:
    x, c = torch.zeros(2, 12, 32), torch.zeros(2, 32)
    for layout, message in (((5, 32, 4, False), "rows of 5"), ((4, 24, 4, False), "heads of 24")):
        with pytest.raises(RuntimeError, match=message):
            torch.ops.rwkv_clip.lerp(x, c, *layout)
    with pytest.raises(RuntimeError, match="each gradient must be float32"):
        torch.ops.rwkv_clip.lerp_backward(x, c, [x, x[:1]], None, None, 4, 32, 4, False)
    with pytest.raises(RuntimeError, match="hidden must be float32"):
        torch.ops.rwkv_clip.ddlerp(x, torch.zeros(3, 160), torch.zeros(5, 32, 32), torch.zeros(5, 32), 4, 32, 4, False)


def test_a_block_is_traced_with_them_and_gives_the_same_gradients(emulated: None) -> None:
    torch.manual_seed(0)
    model = create_model("RWKV-CLIP-Nano", dtype=torch.bfloat16)
    for tower, block, arguments in (
        (model.image_model, model.image_model.layers[1], ((6, 6),)),
        (model.text_model, model.text_model.blocks[1], ()),
    ):
        x = torch.randn(2, 36 if arguments else 40, tower.config.width, dtype=torch.bfloat16, requires_grad=True)
        inputs = [x, *(p for name, p in block.named_parameters() if not name.startswith("ln0"))]
        direction = torch.randn_like(x)
        plain = torch.autograd.grad(block(x, *arguments), inputs, direction)
        compiled = compiled_forward(backend="aot_eager")
        traced = torch.autograd.grad(compiled(block, x, *arguments), inputs, direction)
        for a, b in zip(traced, plain, strict=True):
            torch.testing.assert_close(a, b, rtol=0.05, atol=0.02 * b.abs().max().item())


def test_right_kernels_are_found_right(emulated: None) -> None:
    assert kernels_are_right({name: getattr(torch.ops.rwkv_clip, name) for name in NAMES}, torch.device("cpu"))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("result", range(5))
def test_each_wrong_result_is_found(name: str, result: int, emulated: None) -> None:
    ops = {name: getattr(torch.ops.rwkv_clip, name) for name in NAMES}
    right = ops[name]

    def wrong(*args: object) -> list[torch.Tensor]:
        results = list(right(*args))
        at = result % len(results)
        results[at] = results[at].roll(1, dims=-1)
        return results

    assert not kernels_are_right({**ops, name: wrong}, torch.device("cpu"))


@needs_gpu
@pytest.mark.parametrize("case", CASES)
def test_the_kernels_give_the_plain_results_on_a_gpu(case: str) -> None:
    assert largest_error(case, torch.bfloat16, "cuda") <= MOST[torch.bfloat16]


@needs_gpu
@pytest.mark.parametrize(("tokens", "layout"), [(49, (7, 80, 4, False)), (77, (77, 80, 2, False))])
def test_two_runs_give_the_same_bits(tokens: int, layout: lerp.Layout) -> None:
    torch.manual_seed(0)
    x, g = (torch.randn(64, tokens, 640, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    hidden = torch.randn(64 * tokens, 160, device="cuda", dtype=torch.bfloat16)
    w2, c = torch.randn(5, 32, 640, device="cuda", dtype=torch.bfloat16), torch.randn(5, 640, device="cuda")
    runs = [torch.ops.rwkv_clip.ddlerp_backward(x, hidden, w2, c, [g] * 5, *layout) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize(
    ("device", "dtype", "most"),
    [("cpu", torch.float32, 1e-4), pytest.param("cuda", torch.bfloat16, 0.1, marks=needs_gpu)],
)
def test_a_model_gives_the_same_with_and_without_the_kernels(device, dtype, most, monkeypatch) -> None:
    torch.manual_seed(0)
    model = create_model("RWKV-CLIP-Nano", device=device, dtype=dtype).train()
    images = torch.randn(8, 3, 48, 48, device=device)
    tokens = torch.randint(1, 1000, (8, 40), device=device)

    def gradients() -> list[torch.Tensor]:
        image, text, *_ = model(images, tokens)
        return torch.autograd.grad((image * text).sum(), [p for p in model.parameters() if p is not model.logit_scale])

    with_kernels = gradients()
    monkeypatch.setattr(lerp, "usable", lambda x, layout: False)
    for a, b in zip(with_kernels, gradients(), strict=True):
        assert (a - b).norm() <= most * b.norm() + most / 100


def test_they_are_used_for_bf16_on_a_gpu_and_for_float32_on_a_cpu(monkeypatch) -> None:
    layout = (7, 80, 4, False)
    x = torch.zeros(1, 49, 640, dtype=torch.bfloat16)
    assert not lerp.usable(x, layout)
    assert lerp.usable(x.float(), layout)
    assert lerp.usable(x.to("meta"), layout)  # on which a GPU's memory is worked out
    assert not lerp.usable(x.to("meta", torch.float32), layout)
    assert not lerp.usable(x.to("meta"), (7, 20, 4, False))  # five channels share a neighbour
    assert not lerp.usable(x.float(), (7, 20, 4, False))
    monkeypatch.setattr(lerp, "implementation", lambda device_type: SimpleNamespace(interpolations={}))
    assert not lerp.usable(x.float(), layout)  # where the C++ op cannot be built
