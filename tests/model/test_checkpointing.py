"""Activation checkpointing changes memory, not results."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from golden import contrastive_loss
from small_models import small_batch, small_model
from torch.utils.checkpoint import checkpoint

from rwkv_clip import ops


def deepspeed_checkpoint(function, *args):
    return pytest.importorskip("deepspeed").checkpointing.non_reentrant_checkpoint(function, *args)


FUNCTIONS = [
    pytest.param(partial(checkpoint, use_reentrant=False), id="torch"),
    pytest.param(deepspeed_checkpoint, id="deepspeed"),
]


def regularised_model():
    return small_model(image=dict(drop_path_rate=0.3, depth=3), text=dict(dropout=0.1)).train()


def loss_and_gradients(model) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    images, tokens = small_batch(model, size=8)
    torch.manual_seed(5)
    loss = contrastive_loss(*model(images, tokens))
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("function", FUNCTIONS)
def test_M5_loss_and_every_gradient_are_the_same_with_drop_path_and_dropout(function) -> None:
    plain_loss, plain = loss_and_gradients(regularised_model())
    model = regularised_model()
    model.set_activation_checkpointing(function)
    loss, gradients = loss_and_gradients(model)
    torch.testing.assert_close(loss, plain_loss, rtol=1e-5, atol=1e-5)
    for name, gradient in gradients.items():
        assert gradient is not None, name
        torch.testing.assert_close(gradient, plain[name], rtol=1e-5, atol=1e-5, msg=name)


def test_M5_the_seed_matters_so_the_comparison_could_fail() -> None:
    model = regularised_model()
    images, tokens = small_batch(model, size=8)
    torch.manual_seed(5)
    first = contrastive_loss(*model(images, tokens))
    torch.manual_seed(6)
    assert abs(first - contrastive_loss(*model(images, tokens))) > 1e-3


@pytest.mark.parametrize("function", FUNCTIONS)
def test_M5_a_frozen_first_block_does_not_cut_off_the_gradient(function) -> None:
    model = regularised_model()
    model.set_activation_checkpointing(function)
    for module in (model.image_model.patch_embed, model.image_model.layers[0]):
        module.requires_grad_(False)
    model.image_model.pos_embed.requires_grad_(False)
    gradients = loss_and_gradients(model)[1]
    assert gradients["image_model.layers.1.att.key.weight"].abs().sum() > 0
    assert gradients["image_model.layers.0.att.key.weight"] is None


@pytest.mark.parametrize("function", FUNCTIONS)
def test_M6_the_operator_runs_twice_per_block_and_step(monkeypatch: pytest.MonkeyPatch, function) -> None:
    calls = []
    original = ops.wkv6
    monkeypatch.setattr(ops, "wkv6", lambda *args: calls.append(1) or original(*args))
    model = regularised_model()
    num_blocks = 3 + 2
    loss_and_gradients(model)
    assert len(calls) == num_blocks
    calls.clear()
    model.set_activation_checkpointing(function)
    loss_and_gradients(model)
    assert len(calls) == 2 * num_blocks


def test_M6_less_is_saved_for_the_backward_pass() -> None:
    saved = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.numel() * tensor.element_size())
        return tensor

    def saved_bytes(function) -> int:
        model = regularised_model()
        model.set_activation_checkpointing(function)
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            model(*small_batch(model, size=8))
        return sum(saved)

    assert saved_bytes(partial(checkpoint, use_reentrant=False)) < saved_bytes(None) / 4


def test_without_gradients_nothing_is_checkpointed_and_none_restores_the_plain_pass() -> None:
    calls = []
    model = small_model()
    model.set_activation_checkpointing(lambda block, *args: calls.append(1) or block(*args))
    with torch.no_grad():
        model(*small_batch(model))
    assert not calls
    model(*small_batch(model))
    assert len(calls) == 4
    model.set_activation_checkpointing(None)
    model(*small_batch(model))
    assert len(calls) == 4
