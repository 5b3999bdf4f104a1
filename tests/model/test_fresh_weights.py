"""Fresh weights follow the published scheme: one test per kind of parameter, with the formulas written out again."""

from __future__ import annotations

import math

import pytest
import torch
from small_models import small_config
from torch import Tensor

from rwkv_clip.model.clip import RWKVCLIP

WIDTH, DEPTH = 128, 3


@pytest.fixture(scope="module")
def model() -> RWKVCLIP:
    torch.manual_seed(0)
    return RWKVCLIP(wide_config())


def wide_config(**options: object):
    image = dict(width=WIDTH, depth=DEPTH, patch_size=8, with_cls_token=True)
    return small_config(image=image, text=dict(width=WIDTH, depth=DEPTH, ffn_width=320, vocab_size=512), **options)


def blocks(model: RWKVCLIP) -> list:
    """(layer, block) of both towers."""
    return [*enumerate(model.image_model.layers), *enumerate(model.text_model.blocks)]


def assert_values(found: Tensor, formula) -> None:
    """Every channel's value equals formula(channel) to 1e-6."""
    expected = torch.tensor([formula(channel) for channel in range(found.numel())], dtype=torch.float64)
    torch.testing.assert_close(found.detach().double().flatten(), expected, rtol=0, atol=1e-6)


def assert_uniform(found: Tensor, bound: float) -> None:
    """Drawn from [-bound, bound]: inside, centred, and of a uniform draw's spread within 5 %."""
    assert found.abs().max() <= bound
    assert abs(found.mean()) < 0.05 * bound
    assert found.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)


def assert_orthogonal(weight: Tensor, gain: float) -> None:
    """The shorter side's vectors are orthogonal and of length `gain`."""
    rows, columns = weight.shape
    product = weight @ weight.T if rows <= columns else weight.T @ weight
    torch.testing.assert_close(product.detach(), gain**2 * torch.eye(min(rows, columns)), rtol=0, atol=1e-5 * gain**2)


@pytest.mark.parametrize(
    ("name", "exponent", "extra"), [("x", 1, 0), ("w", 1, 0), ("k", 1, 0), ("v", 1, 0.3), ("r", 0.5, 0), ("g", 0.5, 0)]
)
def test_time_mix_constants(model: RWKVCLIP, name: str, exponent: float, extra: float) -> None:
    for layer, block in blocks(model):
        falling, rising = 1 - layer / DEPTH, layer / (DEPTH - 1)
        found = getattr(block.att, f"time_maa_{name}")
        assert_values(found, lambda i, f=falling, r=rising: 1 - ((i / WIDTH) ** (exponent * f) + extra * r))


def test_channel_mix_constants_are_complementary_between_the_towers(model: RWKVCLIP) -> None:
    for layer, block in enumerate(model.image_model.layers):
        for found in (block.ffn.spatial_mix_k, block.ffn.spatial_mix_r):
            assert_values(found, lambda i, f=1 - layer / DEPTH: (i / WIDTH) ** f)
    for layer, block in enumerate(model.text_model.blocks):
        for found in (block.ffn.time_maa_k, block.ffn.time_maa_r):
            assert_values(found, lambda i, f=1 - layer / DEPTH: 1 - (i / WIDTH) ** f)


def decay(layer: int):
    return lambda i: -6 + 5 * (i / (WIDTH - 1)) ** (0.7 + 1.3 * layer / (DEPTH - 1))


def bonus(layer: int):
    return lambda i: layer / (DEPTH - 1) * (1 - i / (WIDTH - 1)) + ((i + 1) % 3 - 1) * 0.1


def in_bfloat16(formula):
    return lambda i: torch.tensor(formula(i)).bfloat16().item()


def test_decay_and_bonus_of_the_image_tower(model: RWKVCLIP) -> None:
    for layer, block in enumerate(model.image_model.layers):
        assert_values(block.att.time_decay, decay(layer))
        assert_values(block.att.time_faaaa, bonus(layer))


def test_decay_and_bonus_of_the_text_tower_have_bfloat16_values(model: RWKVCLIP) -> None:
    for layer, block in enumerate(model.text_model.blocks):
        assert_values(block.att.time_decay, in_bfloat16(decay(layer)))
        assert_values(block.att.time_faaaa, in_bfloat16(bonus(layer)))
        assert block.att.time_decay.dtype == torch.float32


def test_low_rank_matrices(model: RWKVCLIP) -> None:
    for block in model.image_model.layers:
        for name in ("time_maa_w1", "time_maa_w2", "time_decay_w1", "time_decay_w2"):
            assert_uniform(getattr(block.att, name), 1e-4)
    for block in model.text_model.blocks:
        assert_uniform(block.att.time_maa_w2, 1e-2)
        assert_uniform(block.att.time_decay_w2, 1e-2)
        assert not block.att.time_maa_w1.any() and not block.att.time_decay_w1.any()


@pytest.mark.parametrize("layer", ["receptance", "key", "value", "gate", "output"])
def test_image_time_mix_projections_keep_pytorchs_default(model: RWKVCLIP, layer: str) -> None:
    for block in model.image_model.layers:
        assert_uniform(getattr(block.att, layer).weight, WIDTH**-0.5)


def test_other_image_projections_keep_pytorchs_default(model: RWKVCLIP) -> None:
    for block in model.image_model.layers:
        assert_uniform(block.ffn.key.weight, WIDTH**-0.5)
        assert_uniform(block.ffn.receptance.weight, WIDTH**-0.5)
        assert_uniform(block.ffn.value.weight, (2 * WIDTH) ** -0.5)
    projection = model.image_model.patch_embed.projection
    assert_uniform(projection.weight, (3 * 8 * 8) ** -0.5)
    assert projection.bias.abs().max() <= (3 * 8 * 8) ** -0.5 and projection.bias.std() > 0.04


def test_position_embedding_and_class_token_start_at_zero(model: RWKVCLIP) -> None:
    assert not model.image_model.pos_embed.any() and not model.image_model.cls_token.any()


def test_text_embedding_is_small_and_uniform(model: RWKVCLIP) -> None:
    assert_uniform(model.text_model.emb.weight, 1e-4)


def test_text_projections_are_orthogonal_with_their_gains(model: RWKVCLIP) -> None:
    for block in model.text_model.blocks:
        assert_orthogonal(block.att.receptance.weight, 1.0)
        assert_orthogonal(block.att.key.weight, 0.1)
        assert_orthogonal(block.att.value.weight, 1.0)
        assert_orthogonal(block.att.gate.weight, 0.1)
        assert_orthogonal(block.ffn.key.weight, 0.5 * math.sqrt(320 / WIDTH))


def test_text_matrices_that_write_to_the_residual_stream_are_zero(model: RWKVCLIP) -> None:
    for block in model.text_model.blocks:
        for linear in (block.att.output, block.ffn.receptance, block.ffn.value):
            assert not linear.weight.any()


def test_norms_start_neutral_and_the_text_group_norm_grows_with_depth(model: RWKVCLIP) -> None:
    for layer, block in enumerate(model.text_model.blocks):
        assert_values(block.att.ln_x.weight, lambda i, n=layer: ((n + 1) / DEPTH) ** 0.7)
    scaled = {f"text_model.blocks.{layer}.att.ln_x.weight" for layer in range(DEPTH)}
    norms = {name: p for name, p in model.named_parameters() if ".ln" in name and name not in scaled}
    assert len(norms) == 2 * (2 * 2 + 6 * DEPTH) - DEPTH
    for name, parameter in norms.items():
        assert torch.all(parameter == (1.0 if name.endswith("weight") else 0.0)), name


def test_temperature_starts_at_fourteen(model: RWKVCLIP) -> None:
    assert model.logit_scale.shape == (1,)
    assert model.logit_scale.item() == pytest.approx(math.log(1 / 0.07), abs=1e-6)


def test_text_without_the_scheme_keeps_pytorchs_defaults() -> None:
    torch.manual_seed(0)
    text = RWKVCLIP(wide_config(initialize_text=False)).text_model
    assert text.emb.weight.std().item() == pytest.approx(1.0, rel=0.05)
    for block in text.blocks:
        for linear in (block.att.key, block.att.output, block.ffn.receptance):
            assert_uniform(linear.weight, WIDTH**-0.5)
        assert torch.all(block.att.ln_x.weight == 1.0)
    assert_values(text.blocks[1].att.time_decay, in_bfloat16(decay(1)))


def test_M1_towers_of_one_layer_take_ratio_zero() -> None:
    model = RWKVCLIP(small_config(image=dict(depth=1), text=dict(depth=1)))
    for block in (*model.image_model.layers, *model.text_model.blocks):
        assert block.att.time_decay[0, 0, -1] == -1.0
        torch.testing.assert_close(
            block.att.time_faaaa.flatten()[:3], torch.tensor([0.0, 0.1, -0.1]), rtol=0, atol=3e-4
        )
