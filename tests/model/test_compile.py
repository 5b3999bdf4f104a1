"""torch.compile of the blocks: one graph per tower, the same results, and few activations kept."""

from __future__ import annotations

import pytest
import torch
from golden import contrastive_loss
from small_models import small_batch, small_model
from torch.utils.checkpoint import checkpoint

from rwkv_clip.errors import UserError
from rwkv_clip.model.clip import RWKVCLIP
from rwkv_clip.model.compile import RECOMPUTE, compiled_end, compiled_forward

# Traces both passes and divides the work between them as Inductor does, without needing a compiler of kernels.
TRACING = "aot_eager_decomp_partition"


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def loss_and_gradients(model: RWKVCLIP) -> dict[str, torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(5)
    loss = contrastive_loss(*model(*small_batch(model)))
    loss.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    return {"loss": loss.detach(), **gradients}


def compile_blocks(model: RWKVCLIP, **how) -> None:
    model.image_model.block_runner.compiled_forward = compiled_forward(**how)
    model.text_model.block_runner.compiled_forward = compiled_forward(**how)


def compile_ends(model: RWKVCLIP) -> None:
    for tower in (model.image_model, model.text_model):
        tower.block_runner.compiled_ends = {name: compiled_end(name, backend=TRACING) for name in ("stem", "pool")}


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], share: float) -> None:
    for name, value in expected.items():
        assert found[name].shape == value.shape and found[name].dtype == value.dtype, name
        difference = (found[name].float() - value.float()).norm()
        assert difference <= share * value.float().norm() + 1e-7, f"{name}: {difference} of {value.norm()}"


@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_compiled_blocks_give_the_same_loss_and_gradients_with_drop_path(recompute: str) -> None:
    model = small_model(image=dict(drop_path_rate=0.3, depth=3))
    expected = loss_and_gradients(model)
    compile_blocks(model, recompute=recompute, backend=TRACING)
    assert_close(loss_and_gradients(model), expected, 1e-5)


@pytest.mark.parametrize("image", [{}, {"with_cls_token": True}, {"with_cls_token": True, "output_cls_token": True}])
def test_compiled_stems_and_pools_give_the_same_loss_and_gradients(image: dict) -> None:
    model = small_model(image=image)
    expected = loss_and_gradients(model)
    compile_ends(model)
    torch._dynamo.utils.counters.clear()
    assert_close(loss_and_gradients(model), expected, 1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 4


def test_evaluations_of_any_size_compile_no_stem_or_pool() -> None:
    model = small_model().eval()
    compile_ends(model)
    torch._dynamo.utils.counters.clear()
    with torch.no_grad():
        model(*small_batch(model))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 0


def test_a_compiled_pool_keeps_no_fp32_tensor_of_all_tokens() -> None:
    model = small_model().to(torch.bfloat16)
    tower = model.text_model
    x = torch.randn(6, 8, tower.config.width, dtype=torch.bfloat16, requires_grad=True)
    kept: dict[bool, int] = {}
    for compiled in (False, True):
        if compiled:
            compile_ends(model)
        saved: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, saved=saved: saved.append(t) or t, lambda t: t):
            tower.block_runner.end(tower, "pool", x)
        kept[compiled] = sum(t.numel() >= x.numel() and t.dtype == torch.float32 for t in saved)
    assert kept[False] > 0 and kept[True] == 0


def test_all_blocks_of_a_tower_share_one_graph() -> None:
    model = small_model(image=dict(drop_path_rate=0.3, depth=4), text=dict(depth=3))
    compile_blocks(model, backend=TRACING)
    torch._dynamo.utils.counters.clear()
    loss_and_gradients(model)
    loss_and_gradients(model)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


def test_compiled_blocks_run_under_activation_checkpointing() -> None:
    model = small_model(image=dict(drop_path_rate=0.3, depth=3))
    expected = loss_and_gradients(model)
    compile_blocks(model, backend=TRACING)
    model.set_activation_checkpointing(lambda function, *args: checkpoint(function, *args, use_reentrant=False))
    assert_close(loss_and_gradients(model), expected, 1e-5)


@pytest.mark.parametrize(("recompute", "calls"), [("elementwise", 1), ("everything", 2)])
def test_the_operator_runs_at_most_twice_per_block_and_step(recompute: str, calls: int) -> None:
    model = small_model(image=dict(depth=3), text=dict(depth=2))
    compile_blocks(model, recompute=recompute, backend=TRACING)
    loss_and_gradients(model)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        loss_and_gradients(model)
    assert sum(event.count for event in profiler.key_averages() if event.key == "rwkv_clip::wkv6") == calls * (3 + 2)


def test_an_evaluation_runs_uncompiled_at_any_batch_size() -> None:
    model = small_model()
    compile_blocks(model, backend=TRACING)
    torch._dynamo.utils.counters.clear()
    model.eval()
    with torch.no_grad():
        for size in (1, 2, 5):
            model(*small_batch(model, size=size))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 0


@pytest.mark.parametrize(("recompute", "most"), [("elementwise", 12), ("wide", 10), ("products", 4), ("everything", 1)])
@pytest.mark.parametrize("tower", ["image", "text"])
def test_few_activations_are_kept_for_the_backward_pass(tower: str, recompute: str, most: float) -> None:
    # As wide as low ranks need to be few: 160 + 64 low-rank values per token beside a width of 256.
    sizes = dict(width=256, num_heads=4)
    model = small_model(image=dict(hidden_rate=2, **sizes), text=dict(ffn_width=512, **sizes)).bfloat16()
    width, tokens = 256, 16 if tower == "image" else 12
    block = model.image_model.layers[1] if tower == "image" else model.text_model.blocks[1]
    x = torch.randn(8, tokens, width, dtype=torch.bfloat16, requires_grad=True)
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, torch.nn.Parameter):
            kept[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    forward = compiled_forward(recompute, backend=TRACING)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        forward(block, x, *([(4, 4)] if tower == "image" else []))
    weights = {tensor.data_ptr() for tensor in [*block.parameters(), *block.buffers()]}
    units = sum(size for place, size in kept.items() if place not in weights) / (x.numel() * 2)
    assert units <= most


def test_wrong_choices_are_refused() -> None:
    with pytest.raises(UserError, match="unknown recompute 'nothing': choose one of automatic"):
        compiled_forward("nothing")
    with pytest.raises(UserError, match="torch.compile refuses its options: .*no_such_option"):
        compiled_forward(options={"no_such_option": True})


def test_both_towers_compile_as_one_graph() -> None:
    model = small_model(image=dict(depth=1), text=dict(depth=1)).eval()
    images, tokens = small_batch(model)
    for function, argument in ((model.encode_image, images), (model.encode_text, tokens)):
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(argument), function(argument))


@pytest.mark.parametrize(("version", "off"), [("2.11.0+cu130", True), ("2.13.0", False), ("3.0.1", False)])
def test_the_reductions_that_lose_shapes_in_old_versions_are_off_there(
    monkeypatch: pytest.MonkeyPatch, version: str, off: bool
) -> None:
    given = []
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(torch, "compile", lambda function, **how: given.append(how["options"]))
    compiled_forward(options={"epilogue_fusion": True})
    expected = {"triton.mix_order_reduction": False} if off else {}
    assert given == [{**expected, "epilogue_fusion": True}]
