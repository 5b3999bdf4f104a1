"""Every file in ds_configs/ trains on two ranks, and those that differ only in where things are kept train alike."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from ranks import run_ranks

from rwkv_clip.model.clip import RWKVCLIP
from rwkv_clip.model.compile import compiled_end, compiled_forward
from rwkv_clip.model.config import ImageConfig, ModelConfig, TextConfig
from rwkv_clip.training import compilation
from rwkv_clip.training.arguments import parse_arguments
from rwkv_clip.training.config import read_config, resolve_config
from rwkv_clip.training.engine import build_engine
from rwkv_clip.training.loss import ClipLoss
from rwkv_clip.training.step import train_step
from rwkv_clip.training.weights import gather_weights

FOLDER = Path(__file__).parents[2] / "ds_configs"
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))
CONFIG = ModelConfig(
    "tiny",
    ImageConfig(image_size=16, patch_size=8, width=16, depth=2, num_heads=2, hidden_rate=2),
    TextConfig(context_length=8, vocab_size=40, width=16, depth=2, num_heads=2, ffn_width=32),
)
BATCH, STEPS = 4, 3


# fp32 with every weight divided and taken away after each use; gradients in small buckets.
DIVIDED = {
    "gradient_clipping": 1.0,
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": 1000,
        "stage3_param_persistence_threshold": 0,
        "stage3_max_live_parameters": 0,
        "stage3_max_reuse_distance": 0,
    },
}


def names_gathered(engine) -> set[str]:
    """Names of the modules whose weights DeepSpeed gathers at a time, filled as the engine runs; stage 3 only."""
    names = {module: name for name, module in engine.module.named_modules()}
    coordinator = engine.optimizer.parameter_offload.get_param_coordinator()
    fetch, gathered = coordinator.fetch_sub_module, set()

    def noting_fetch(module, *args, **kwargs):
        gathered.add(names[module])
        return fetch(module, *args, **kwargs)

    coordinator.fetch_sub_module = noting_fetch
    return gathered


def train(name: str, values: dict | None = None) -> tuple | None:
    """(losses, which steps were applied, fp32 weights, `names_gathered`); None if it cannot run here."""
    import torch.distributed as dist
    from deepspeed.accelerator import get_accelerator

    rank, world_size = dist.get_rank(), dist.get_world_size()
    path = FOLDER / f"{name}.json"
    words = ["--model", "m", "--train-data", "d", "--output", "o", "--deepspeed_config", str(path)]
    args = parse_arguments([*words, "--batch-size", str(BATCH), "--lr", "3e-4"])
    config, _ = resolve_config(values or read_config(path), args, world_size)
    if config["fp16"]["enabled"] and not get_accelerator().is_fp16_supported():
        return None
    if "compile" in config:  # traced on a CPU too, without waiting for a compiler of kernels
        config["compile"]["force"] = True
        compilation.compiled_forward = partial(compiled_forward, backend="eager")
        compilation.compiled_end = partial(compiled_end, backend="eager")
    world = SimpleNamespace(
        device=torch.device("cpu"),
        place=SimpleNamespace(local_rank=rank, local_world_size=world_size),
        gather=lambda text: [text],
        wait=dist.barrier,
    )
    torch.manual_seed(0)
    engine = build_engine(RWKVCLIP(CONFIG), config, args, world, lambda step: 1.0)
    gathered = names_gathered(engine) if config["zero_optimization"]["stage"] == 3 else set()
    losses, applied = [], []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(10 * step + rank)
        images = torch.randn(BATCH, 3, 16, 16, generator=generator)
        tokens = torch.randint(1, 40, (BATCH, 8), generator=generator)
        batch = SimpleNamespace(images=images, tokens=tokens)
        result = train_step(engine, [batch], ClipLoss(group=engine.data_parallel_group))
        losses.append(float(result.loss))
        applied.append(result.applied)
    weights = {name: value.numpy() for name, value in gather_weights(engine, {}).items()}
    engine.destroy()
    return losses, applied, weights, gathered


def trainings() -> dict:
    divided = {"divided": DIVIDED, "divided, computed again": DIVIDED | {"activation_checkpointing": {}}}
    return {name: train(name) for name in NAMES} | {name: train(name, values) for name, values in divided.items()}


@pytest.fixture(scope="module")
def runs() -> dict:
    """name -> what `train` gave on rank 0."""
    return run_ranks(2, trainings, timeout=300)[0]


@pytest.mark.parametrize("name", NAMES)
def test_it_trains_on_two_ranks_with_the_losses_of_fp32(runs, name: str) -> None:
    if runs[name] is None:
        pytest.skip("this CPU cannot compute in fp16")
    losses, applied = runs[name][:2]
    if "fp16" in name:  # the loss scale may still be on its way down
        losses, applied = losses[:1], [True]
    assert all(applied)
    np.testing.assert_allclose(losses, runs["fp32"][0][: len(losses)], rtol=0.05)


@pytest.mark.parametrize("name", ["zero2_bf16", "zero1_bf16_offload", "zero1_bf16_checkpointing", "zero1_bf16_profile"])
def test_where_things_are_kept_does_not_change_the_weights(runs, name: str) -> None:
    for key, value in runs["zero1_bf16"][2].items():
        np.testing.assert_allclose(runs[name][2][key], value, rtol=1e-5, atol=1e-6, err_msg=key)


@pytest.mark.parametrize("name", ["divided", "divided, computed again"])
def test_stage_3_divides_every_weight_and_takes_the_steps_of_stage_1(runs, name: str) -> None:
    losses, _, weights, _ = runs[name]
    np.testing.assert_allclose(losses, runs["fp32"][0], rtol=1e-6)
    assert weights.keys() == runs["fp32"][2].keys()
    for key, value in runs["fp32"][2].items():
        np.testing.assert_allclose(weights[key], value, rtol=1e-5, atol=1e-6, err_msg=key)


def test_stage_3_gathers_the_weights_of_a_mixing_layer_together(runs) -> None:
    gathered = runs["zero3_bf16"][3]
    blocks = [f"{tower}.{i}" for tower in ("image_model.layers", "text_model.blocks") for i in range(2)]
    layers = {f"{block}.{mix}" for block in blocks for mix in ("att", "ffn")}
    assert layers < gathered and not any(name.startswith(tuple(f"{layer}." for layer in layers)) for name in gathered)


def test_the_files_that_only_add_a_section_have_the_default_ones_values() -> None:
    default = json.loads((FOLDER / "zero1_bf16.json").read_text())
    for name in NAMES:
        values = json.loads((FOLDER / f"{name}.json").read_text())
        assert values["gradient_clipping"] == default["gradient_clipping"] == 1.0
        assert values["train_micro_batch_size_per_gpu"] == values["gradient_accumulation_steps"] == "auto"
