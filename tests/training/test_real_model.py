"""RWKV-CLIP itself in bf16 ZeRO-1 engines: it trains, exports, and replays drop path under activation checkpointing."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from ranks import run_ranks
from tiny import make_engine, micro_batches

from rwkv_clip.model.clip import RWKVCLIP
from rwkv_clip.model.config import ImageConfig, ModelConfig, TextConfig
from rwkv_clip.model.published import published_state_dict
from rwkv_clip.training.loss import ClipLoss
from rwkv_clip.training.masters import set_masters
from rwkv_clip.training.optimizer import build_optimizer
from rwkv_clip.training.sigmoid_loss import SigmoidLoss
from rwkv_clip.training.step import train_step

CONFIG = ModelConfig(
    "tiny",
    ImageConfig(image_size=16, patch_size=8, width=16, depth=3, num_heads=2, hidden_rate=2, drop_path_rate=0.3),
    TextConfig(context_length=8, vocab_size=40, width=16, depth=2, num_heads=2, ffn_width=32, dropout=0.2),
)
PLAIN = replace(CONFIG, image=replace(CONFIG.image, drop_path_rate=0.0), text=replace(CONFIG.text, dropout=0.0))
LOSSES = {"clip": ClipLoss, "siglip": SigmoidLoss}
PAIRS, STEPS = 24, 10


def make_pairs(seed: int):
    generator = torch.Generator().manual_seed(seed)
    return SimpleNamespace(
        images=torch.randn(PAIRS, 3, 16, 16, generator=generator),
        tokens=torch.randint(1, 40, (PAIRS, 8), generator=generator),
    )


def use_plain_operator():
    """It needs no compiler and waits for no other process's build."""
    from rwkv_clip.ops import implementation
    from rwkv_clip.ops.wkv6_torch import wkv6_torch_backward, wkv6_torch_forward

    plain = implementation.Implementation("torch", wkv6_torch_forward, wkv6_torch_backward)
    sys.modules["rwkv_clip.ops.wkv6"].implementation = lambda device_type: plain


def make_model(config: ModelConfig, loss: str) -> RWKVCLIP:
    torch.manual_seed(0)
    model = RWKVCLIP(config).train()
    if loss == "siglip":
        model.add_logit_bias()
    return model


def train(accumulation: int, precision: str, checkpointed: bool, steps: int = 2, config=CONFIG, loss: str = "clip"):
    import deepspeed
    import torch.distributed as dist

    use_plain_operator()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = make_model(config, loss)
    exact = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    engine = make_engine(model, PAIRS // world_size // accumulation, accumulation, 1, precision, lr=1e-3)
    set_masters(engine, exact)
    if checkpointed:
        deepspeed.checkpointing.configure(None, deepspeed_config=engine.config)
        model.set_activation_checkpointing(deepspeed.checkpointing.non_reentrant_checkpoint)
    losses = []
    for step in range(steps):
        torch.manual_seed(100 * step + rank)
        batches = micro_batches(make_pairs(step), rank, world_size, accumulation)
        losses.append(train_step(engine, batches, LOSSES[loss](group=engine.data_parallel_group)).loss.item())
    weights = {name: value.numpy() for name, value in published_state_dict(model).items()}
    return losses, weights


def train_at_once(accumulation: int, world_size: int, steps: int = 2, config=CONFIG, loss: str = "clip"):
    """Plain PyTorch, fp32, all ranks' micro batches in one graph, each with its rank's random numbers."""
    use_plain_operator()
    model = make_model(config, loss)
    optimizer = build_optimizer(model, lr=1e-3, weight_decay=0.1)
    losses = []
    for step in range(steps):
        features = []
        for rank in range(world_size):
            torch.manual_seed(100 * step + rank)
            for batch in micro_batches(make_pairs(step), rank, world_size, accumulation):
                features.append(model(batch.images, batch.tokens))
        images, texts, scales, *biases = zip(*features, strict=True)
        logits = scales[0] * torch.cat(images) @ torch.cat(texts).T
        if biases:
            value = -F.logsigmoid((2 * torch.eye(PAIRS) - 1) * (logits + biases[0][0])).sum() / PAIRS
        else:
            labels = torch.arange(PAIRS)
            value = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses, {name: value.numpy() for name, value in published_state_dict(model).items()}


def trainings(settings):
    return [train(*setting) for setting in settings]


@pytest.fixture(scope="module")
def runs():
    settings = [(1, "bf16", False), (1, "fp32", False)]
    settings += [(3, precision, checkpointed) for precision in ("fp32", "bf16") for checkpointed in (False, True)]
    return dict(zip(settings, zip(*run_ranks(2, trainings, settings), strict=True), strict=True))


def test_M7_a_bf16_zero1_run_starts_and_exports_the_temperature_as_a_number(runs):
    for losses, weights in runs[(1, "bf16", False)]:
        assert np.isfinite(losses).all()
        assert weights["logit_scale"].shape == ()
        assert weights["logit_scale"] != np.float32(np.log(1 / 0.07))
        assert {value.dtype for value in weights.values()} == {np.dtype(np.float32)}


def test_ranks_end_with_the_same_weights(runs):
    for (_, first), (_, second) in runs.values():
        assert all(np.array_equal(first[name], second[name]) for name in first)


@pytest.fixture(scope="module")
def at_once():
    """Ten steps of plain PyTorch by loss."""
    return {loss: run_ranks(1, train_at_once, 1, 1, STEPS, PLAIN, loss)[0] for loss in LOSSES}


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_O1_ten_steps_of_any_number_of_ranks_are_those_of_one_with_the_whole_batch(at_once, world_size):
    # Other combinations run in test_step.py, with a smaller model.
    settings = [(1, "fp32", False, STEPS, PLAIN, "clip"), (2, "fp32", False, STEPS, PLAIN, "siglip")]
    for setting, (losses, weights) in zip(settings, run_ranks(world_size, trainings, settings)[0], strict=True):
        wanted_losses, wanted = at_once[setting[-1]]
        assert losses == pytest.approx(wanted_losses, rel=1e-4), setting
        for name, value in wanted.items():
            np.testing.assert_allclose(weights[name], value, atol=1e-4, err_msg=f"{name} {setting}")


def test_accumulation_with_drop_path_and_dropout_on_two_ranks_takes_the_whole_batch_s_steps(runs):
    losses, weights = runs[(3, "fp32", False)][0]
    ((wanted_losses, wanted),) = run_ranks(1, train_at_once, 3, 2)
    assert losses == pytest.approx(wanted_losses, rel=1e-5)
    for name, value in wanted.items():
        np.testing.assert_allclose(weights[name], value, atol=1e-5, err_msg=name)
    # The regularisation counts: other random numbers, another loss.
    assert abs(losses[0] - runs[(1, "fp32", False)][0][0][0]) > 1e-3


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_activation_checkpointing_changes_nothing_under_drop_path_and_replay(runs, precision):
    (losses, weights), _ = runs[(3, precision, False)]
    (checkpointed_losses, checkpointed_weights), _ = runs[(3, precision, True)]
    assert checkpointed_losses == pytest.approx(losses, rel=1e-6)
    for name, value in weights.items():
        np.testing.assert_allclose(checkpointed_weights[name], value, rtol=1e-5, atol=1e-6, err_msg=name)
