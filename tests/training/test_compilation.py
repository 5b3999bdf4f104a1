"""The "compile" section: what it takes, that a compiled run trains like a plain one, and that a failure is survived."""

from __future__ import annotations

import logging
import os
import re
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from ranks import run_ranks
from tiny import make_engine, micro_batches

from rwkv_clip.errors import UserError
from rwkv_clip.model.clip import RWKVCLIP
from rwkv_clip.model.compile import compiled_end, compiled_forward
from rwkv_clip.model.config import ImageConfig, ModelConfig, TextConfig
from rwkv_clip.training import compilation
from rwkv_clip.training.compilation import check_section, compile_towers
from rwkv_clip.training.config import recomputed
from rwkv_clip.training.loss import ClipLoss
from rwkv_clip.training.masters import set_masters
from rwkv_clip.training.sigmoid_loss import SigmoidLoss
from rwkv_clip.training.step import train_step
from rwkv_clip.training.weights import gather_weights

CONFIG = ModelConfig(
    "tiny",
    ImageConfig(image_size=16, patch_size=8, width=16, depth=2, num_heads=2, hidden_rate=2),
    TextConfig(context_length=8, vocab_size=40, width=16, depth=2, num_heads=2, ffn_width=32),
)
PAIRS, STEPS = 12, 20
# Inductor's division of the work between the passes, without waiting for a compiler of kernels.
tracing = partial(compiled_forward, backend="aot_eager_decomp_partition")
tracing_ends = partial(compiled_end, backend="aot_eager_decomp_partition")


def make_pairs(seed: int):
    generator = torch.Generator().manual_seed(seed)
    return SimpleNamespace(
        images=torch.randn(PAIRS, 3, 16, 16, generator=generator),
        tokens=torch.randint(1, 40, (PAIRS, 8), generator=generator),
    )


def alone() -> SimpleNamespace:
    place = SimpleNamespace(local_rank=0, local_world_size=1)
    return SimpleNamespace(device=torch.device("cpu"), place=place, gather=lambda text: [text], wait=lambda: None)


def section(micro_batch: int = 4, **compile) -> dict:
    return {"train_micro_batch_size_per_gpu": micro_batch, "compile": {"enabled": True, "force": True, **compile}}


def train(precision: str, accumulation: int, checkpointed: bool, compiled: bool, kernels: str = ""):
    """fp32 weights by name after STEPS steps. kernels: a tower to compile alone, down to the machine's own code."""
    import deepspeed
    import torch.distributed as dist

    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = RWKVCLIP(CONFIG).train()
    exact = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    micro_batch = PAIRS // world_size // accumulation
    engine = make_engine(model, micro_batch, accumulation, 1, precision, lr=1e-4)
    set_masters(engine, exact)
    if checkpointed:
        deepspeed.checkpointing.configure(None, deepspeed_config=engine.config)
        model.set_activation_checkpointing(deepspeed.checkpointing.non_reentrant_checkpoint)
    if compiled:
        compilation.compiled_forward, compilation.compiled_end = tracing, tracing_ends
        assert compile_towers(model, section(micro_batch), alone(), with_replay=accumulation > 1)
    if kernels:
        runner = getattr(model, kernels).block_runner
        runner.compiled_forward = compiled_forward()
        runner.compiled_ends = {name: compiled_end(name) for name in compilation.ENDS}
    for step in range(STEPS):
        batches = micro_batches(make_pairs(step), rank, world_size, accumulation)
        train_step(engine, batches, ClipLoss(group=engine.data_parallel_group))
    return {name: value.numpy() for name, value in gather_weights(engine, {}).items()}


# name -> (precision, accumulation, activation checkpointing)
SETTINGS = {"fp32": ("fp32", 1, False), "bf16": ("bf16", 1, False), "replayed and checkpointed": ("fp32", 3, True)}


# One tower for each, as generating code for a CPU takes long.
KERNELS = {"fp32": "text_model", "bf16": "image_model"}


def trainings(cache: str, names: list[str]):
    """name -> (weights of the plain run, of the compiled run, of the run with generated kernels or None)."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    return {
        name: (
            train(*SETTINGS[name], compiled=False),
            train(*SETTINGS[name], compiled=True),
            train(*SETTINGS[name], compiled=False, kernels=KERNELS[name]) if name in KERNELS else None,
        )
        for name in names
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """`trainings` of all settings, in two processes, as each computes on one core. Neither takes what an earlier run
    left, perhaps half written."""

    def train_some(names: list[str]):
        return run_ranks(1, trainings, str(tmp_path_factory.mktemp("inductor")), names, timeout=500)[0]

    shares = [["bf16"], [name for name in SETTINGS if name != "bf16"]]
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(train_some, shares)
    return {**first, **second}


def distance(found, expected) -> float:
    """Norm of the difference of all weights together, as a share of the expected ones' norm."""
    found, expected = (np.concatenate([value.ravel() for value in weights.values()]) for weights in (found, expected))
    return np.linalg.norm(found - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize(("name", "share"), [("fp32", 1e-5), ("bf16", 1e-3), ("replayed and checkpointed", 1e-5)])
def test_weights_after_20_steps_are_those_of_an_uncompiled_run(runs, name: str, share: float) -> None:
    plain, compiled, _ = runs[name]
    assert 0 < distance(compiled, plain) <= share


@pytest.mark.parametrize(("name", "share"), [("fp32", 1e-5), ("bf16", 1e-3)])
def test_generated_kernels_train_20_steps_like_an_uncompiled_run(runs, name: str, share: float) -> None:
    plain, _, kernels = runs[name]
    assert 0 < distance(kernels, plain) <= share
    if name == "bf16":  # fused code rounds less often, so it is no farther from the run in fp32
        assert distance(kernels, runs["fp32"][0]) <= 1.1 * distance(plain, runs["fp32"][0])


# name -> (precision, ZeRO stage, keys of the DeepSpeed JSON)
ENGINES = {
    "ZeRO-1": ("bf16", 1, {}),
    "ZeRO-2": ("bf16", 2, {}),
    "ZeRO-1 in fp32": ("fp32", 1, {}),
    "BF16_Optimizer": ("bf16", 1, {"data_types": {"grad_accum_dtype": "fp32"}}),
    "bf16 without ZeRO": ("bf16", 0, {}),
    "fp32 without ZeRO": ("fp32", 0, {}),
}


def misaligned(model: RWKVCLIP) -> list[str]:
    """Names of the blocks' weights and buffers that start at no multiple of 16 bytes."""
    tensors = (*model.named_parameters(), *model.named_buffers())
    return [name for name, x in tensors if re.search(r"\.(layers|blocks)\.", name) and x.data_ptr() % 16]


def misaligned_in_engines():
    """name -> what is misaligned in that engine, with a temperature and a logit bias, before and after a step."""
    import torch.distributed as dist

    rank, world_size = dist.get_rank(), dist.get_world_size()
    found = {}
    for name, (precision, stage, keys) in ENGINES.items():
        model = RWKVCLIP(CONFIG).train()
        model.add_logit_bias()
        exact = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        engine = make_engine(model, PAIRS // world_size, 1, stage, precision, **keys)
        set_masters(engine, exact)
        before = misaligned(model)
        batches = micro_batches(make_pairs(0), rank, world_size, 1)
        train_step(engine, batches, SigmoidLoss(group=engine.data_parallel_group))
        found[name] = (before, misaligned(model))
    return found


@pytest.fixture(scope="module")
def found_misaligned():
    return {world_size: run_ranks(world_size, misaligned_in_engines) for world_size in (1, 2)}


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("world_size", [1, 2])
def test_every_weight_of_a_block_lies_where_compiled_kernels_can_load_it(found_misaligned, world_size, name) -> None:
    assert [found[name] for found in found_misaligned[world_size]] == [([], [])] * world_size


def compile_with(monkeypatch, forward) -> None:
    """Let `forward` stand for compiled blocks, and the plain methods for the compiled ones before and behind them."""
    monkeypatch.setattr(compilation, "compiled_forward", lambda *_: forward)
    monkeypatch.setattr(compilation, "compiled_end", lambda name, *_: lambda tower, x: getattr(tower, name)(x))


def test_a_weight_that_compiled_kernels_cannot_load_keeps_the_run_from_compiling(monkeypatch, caplog) -> None:
    model = RWKVCLIP(CONFIG)
    weight = model.text_model.blocks[1].att.key.weight
    flat = torch.zeros(weight.numel() + 1)
    weight.data = flat[1:].view(weight.shape)
    compile_with(monkeypatch, lambda block, *arguments: block(*arguments))
    monkeypatch.setattr(logging.getLogger("rwkv_clip"), "propagate", True)
    assert not compile_towers(model, section(), alone(), False)
    assert model.text_model.block_runner.compiled_forward is None
    reason = "text_model.blocks.1.att.key.weight starts 4 bytes past a multiple of 16"
    assert reason in caplog.text and "training goes on without" in caplog.text


def test_on_a_cpu_nothing_is_compiled_unless_forced() -> None:
    model = RWKVCLIP(CONFIG)
    assert not compile_towers(model, section(force=False), alone(), False)
    assert not compile_towers(model, section(enabled=False), alone(), False)
    assert model.image_model.block_runner.compiled_forward is None


@pytest.mark.parametrize("failure", ["compiler", "wrong kernel", "another rank"])
def test_a_failure_leaves_the_blocks_as_they_are_after_one_warning(monkeypatch, caplog, failure: str) -> None:
    def forward(block, *arguments):
        if failure == "compiler":
            raise RuntimeError("no working\nC compiler")
        return block(*arguments) * (2 if failure == "wrong kernel" else 1)

    compile_with(monkeypatch, forward)
    monkeypatch.setattr(logging.getLogger("rwkv_clip"), "propagate", True)
    world = alone()
    if failure == "another rank":
        world.gather = lambda text: [text, "rank 1's reason"]
    model = RWKVCLIP(CONFIG)
    random_state = torch.get_rng_state()
    assert not compile_towers(model, section(), world, False)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert model.image_model.block_runner.compiled_forward is None
    (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    reason = {
        "compiler": "RuntimeError: no working C compiler",
        "wrong kernel": "the image tower's block: the gradient of input is off by",
        "another rank": "rank 1's reason",
    }[failure]
    assert reason in record.getMessage() and "training goes on without" in record.getMessage()


@pytest.mark.parametrize("name", compilation.ENDS)
@pytest.mark.parametrize("tower", ["image", "text"])
def test_a_wrong_kernel_before_or_behind_the_blocks_is_found_too(monkeypatch, caplog, tower: str, name: str) -> None:
    def end(method, *_):
        def call(module, x):
            wrong = method == name and module.config == getattr(CONFIG, tower)
            return getattr(module, method)(x) * (2 if wrong else 1)

        return call

    compile_with(monkeypatch, lambda block, *arguments: block(*arguments))
    monkeypatch.setattr(compilation, "compiled_end", end)
    monkeypatch.setattr(logging.getLogger("rwkv_clip"), "propagate", True)
    assert not compile_towers(RWKVCLIP(CONFIG), section(), alone(), False)
    assert f"the {tower} tower's {name}: the gradient of " in caplog.text


@pytest.mark.parametrize("local_rank", [0, 1])
def test_one_rank_of_a_machine_compiles_while_the_others_wait_for_its_code(monkeypatch, local_rank: int) -> None:
    events = []

    def forward(block, *arguments):
        events.append("compile")
        return block(*arguments)

    compile_with(monkeypatch, forward)
    world = alone()
    world.place = SimpleNamespace(local_rank=local_rank, local_world_size=2)
    world.wait = lambda: events.append("all are here")
    assert compile_towers(RWKVCLIP(CONFIG), section(), world, False)
    assert events.index("all are here") == (0 if local_rank else len(events) - 1)


def test_a_slow_compiler_is_seen_in_the_log(monkeypatch, caplog) -> None:
    import time

    monkeypatch.setattr(compilation, "REMINDER", 0.01)
    monkeypatch.setattr(logging.getLogger("rwkv_clip"), "propagate", True)
    caplog.set_level(logging.INFO)

    def forward(block, *arguments):
        time.sleep(0.1)
        return block(*arguments)

    compile_with(monkeypatch, forward)
    assert compile_towers(RWKVCLIP(CONFIG), section(), alone(), False)
    assert "still compiling, after" in caplog.text
    assert re.search(r"the image tower's block is compiled: \d", caplog.text)


def test_a_locked_tower_is_compiled_too(monkeypatch) -> None:
    model = RWKVCLIP(CONFIG)
    model.image_model.requires_grad_(False)
    monkeypatch.setattr(compilation, "compiled_forward", tracing)
    monkeypatch.setattr(compilation, "compiled_end", tracing_ends)
    assert compile_towers(model, section(), alone(), False)
    batch = make_pairs(0)
    model(batch.images[:4], batch.tokens[:4])[1].sum().backward()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"enabled": 1}, "compile.enabled must be a bool, found 1"),
        ({"backend": "inductor"}, "unknown key 'compile.backend'; known are enabled, force, recompute, options"),
        (
            {"recompute": "all"},
            "compile.recompute must be one of automatic, elementwise, wide, products, everything, found 'all'",
        ),
    ],
)
def test_a_wrong_section_is_refused(values: dict, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(f"x.json: {message}")):
        check_section(values, "x.json")


def test_an_unknown_option_of_the_compiler_ends_the_run() -> None:
    with pytest.raises(UserError, match="refuses its options"):
        compile_towers(RWKVCLIP(CONFIG), section(options={"no_such": 1}), alone(), False)


@pytest.mark.parametrize("with_graphs", [False, True])
def test_cuda_graphs_are_left_out_where_gradients_stay(with_graphs: bool, monkeypatch) -> None:
    given = []

    def compiling(recompute: str, options: dict) -> partial:
        given.append(options)
        return tracing(recompute)

    monkeypatch.setattr(compilation, "compiled_forward", compiling)
    monkeypatch.setattr(compilation, "compiled_end", tracing_ends)
    options = {"triton.cudagraphs": True, "epilogue_fusion": True}
    assert compile_towers(RWKVCLIP(CONFIG), section(options=options), alone(), False, with_graphs)
    assert given == [options if with_graphs else {"epilogue_fusion": True}]
    assert options["triton.cudagraphs"]  # the configuration, which is written into the run folder, stays as it was


@pytest.mark.parametrize(
    ("checkpointing", "compiling", "expected"),
    [
        (None, {}, "elementwise"),
        ({"enabled": True}, {}, "everything"),
        ({"enabled": False}, {}, "elementwise"),
        ({"enabled": True, "cpu_checkpointing": True}, {}, "elementwise"),
        ({"enabled": True}, {"recompute": "products"}, "products"),
    ],
)
def test_checkpointing_is_the_compiled_backward_passs_own_unless_deepspeed_is_asked_for_more(
    checkpointing: dict | None, compiling: dict, expected: str
) -> None:
    config = {"compile": {"enabled": True, **compiling}}
    config |= {"activation_checkpointing": checkpointing} if checkpointing is not None else {}
    assert recomputed(config) == expected
