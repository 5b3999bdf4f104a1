"""Small models for the tests of this folder."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rwkv_clip.model.clip import RWKVCLIP
from rwkv_clip.model.config import ImageConfig, ModelConfig, TextConfig


def small_config(image: dict[str, Any] | None = None, text: dict[str, Any] | None = None, **model: Any) -> ModelConfig:
    """A model of width 32 and two layers; arguments replace single values."""
    image_values = dict(image_size=16, patch_size=4, width=32, depth=2, num_heads=4, hidden_rate=2)
    text_values = dict(context_length=12, vocab_size=64, width=32, depth=2, num_heads=2, ffn_width=64)
    image_config = ImageConfig(**{**image_values, **(image or {})})
    return ModelConfig("small", image_config, TextConfig(**{**text_values, **(text or {})}), **model)


def small_model(seed: int = 0, **options: Any) -> RWKVCLIP:
    """`small_config`'s model with every weight away from its fresh value, so that no branch is silent."""
    torch.manual_seed(seed)
    model = RWKVCLIP(small_config(**options))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name != "logit_scale":
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
        for parameter, buffer in model.precise_parameters().values():
            buffer.copy_(parameter)
    return model


def small_batch(model: RWKVCLIP, size: int = 3, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Random images and tokens that fit the model."""
    generator = torch.Generator().manual_seed(seed)
    image, text = model.config.image, model.config.text
    images = torch.randn(size, 3, image.image_size, image.image_size, generator=generator)
    tokens = torch.randint(1, text.vocab_size, (size, text.context_length), generator=generator)
    return images, tokens
