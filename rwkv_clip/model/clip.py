"""RWKV-CLIP: an image tower and a text tower that share one embedding."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .blocks import CheckpointFunction
from .config import ModelConfig, load_config
from .image_tower import ImageTower
from .init import initialize_text_
from .precise import PreciseModule, precise_parameters, precise_value
from .published import SCALARS, load_into
from .text_tower import TextTower


class RWKVCLIP(PreciseModule):
    """The model; its methods have open_clip's shapes.

    The state dict has the published keys. `logit_scale` has shape (1,) here, as DeepSpeed cannot start with a parameter
    of dimension 0, and () in published files; either form loads. `logit_bias` is None, except where a sigmoid loss
    learns it (`add_logit_bias`); features and their ranking do not depend on it.

    Args:
        config: a `ModelConfig`. Fresh weights are drawn from PyTorch's global generator.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.register_precise("logit_scale", torch.full((1,), math.log(1 / 0.07)))
        self.register_parameter("logit_bias", None)
        self.text_model = TextTower(config.text)
        self.image_model = ImageTower(config.image)
        if config.initialize_text:
            initialize_text_(self.text_model)

    @property
    def context_length(self) -> int:
        """The most token ids that a caption may have, for `tokenize(texts, model.context_length)`."""
        return self.config.text.context_length

    @property
    def image_size(self) -> int:
        """Side of the square pictures that `image_transform` makes for this model, in pixels."""
        return self.config.image.image_size

    def encode_image(self, images: Tensor, normalize: bool = False) -> Tensor:
        """Image features, float32 [B, C].

        Args:
            images: float [B, 3, height, width], normalised as `image_transform` does; cast to the weights' dtype.
            normalize: scale each row to length 1.

        Raises:
            UserError: a shape that the model cannot take.
        """
        features = self.image_model(images)
        return F.normalize(features, dim=-1) if normalize else features

    def encode_text(self, tokens: Tensor, normalize: bool = False) -> Tensor:
        """Text features, float32 [B, C].

        Args:
            tokens: whole numbers [B, T] with T up to the context length.
            normalize: scale each row to length 1.

        Raises:
            UserError: a shape that the model cannot take.
        """
        features = self.text_model(tokens)
        return F.normalize(features, dim=-1) if normalize else features

    def add_logit_bias(self) -> None:
        """Add the learned bias of a sigmoid loss, and start it and the temperature at that loss's values.

        Source: Zhai et al., "Sigmoid Loss for Language Image Pre-Training" (2023): scale 10, bias -10.
        """
        device = self.logit_scale.device
        self.register_precise("logit_bias", torch.full((1,), -10.0, device=device))
        with torch.no_grad():
            self.logit_scale.fill_(math.log(10))
            self.logit_scale_fp32.fill_(math.log(10))

    def forward(self, images: Tensor, tokens: Tensor) -> tuple[Tensor, ...]:
        """Image features [B, C] and text features [B, C] of length 1, and exp(logit_scale) of shape (); all float32.

        A model with a `logit_bias` gives that as well, of shape ().
        """
        image_features = self.encode_image(images, normalize=True)
        text_features = self.encode_text(tokens, normalize=True)
        scale = precise_value(self.logit_scale, self.logit_scale_fp32).exp().squeeze(0)
        if self.logit_bias is None:
            return image_features, text_features, scale
        return image_features, text_features, scale, precise_value(self.logit_bias, self.logit_bias_fp32).squeeze(0)

    def set_activation_checkpointing(self, function: CheckpointFunction | None) -> None:
        """Run every block through `function(block, *args)`, or plainly if None (see blocks.py)."""
        self.image_model.block_runner.checkpoint_function = function
        self.text_model.block_runner.checkpoint_function = function

    def precise_parameters(self) -> dict[str, tuple[nn.Parameter, Tensor]]:
        """Name -> (parameter, float32 buffer) of the parameters that act with float32 values (see precise.py)."""
        return precise_parameters(self)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for name in SCALARS:
            value = state_dict.get(prefix + name)
            if value is not None and value.ndim == 0:
                state_dict[prefix + name] = value.reshape(1)
        super()._load_from_state_dict(state_dict, prefix, *args)


def create_model(
    name_or_path: str | Path | ModelConfig,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    checkpoint: str | Path | None = None,
    ema: bool = False,
) -> RWKVCLIP:
    """Build a model.

    Args:
        name_or_path: a name from `list_models()`, a JSON file, or a run folder (its configuration, not its weights).
        device: where the weights go.
        dtype: of the weights; features are float32 in any case.
        checkpoint: weights to load: a published or exported file, a run folder or a checkpoint folder.
        ema: of a folder, load the averaged weights (training's `--ema-decay`).

    Returns:
        With `checkpoint`, a model in eval mode, ready to encode; without, fresh weights in train mode.

    Raises:
        UserError: an unknown model, or weights that do not fit it.
    """
    config = load_config(name_or_path)
    if checkpoint is None:
        model = RWKVCLIP(config)
    else:
        with torch.device("meta"):  # drawing weights that are replaced at once takes seconds
            model = RWKVCLIP(config)
        model.to_empty(device="cpu")
        load_into(model, checkpoint, ema)
        model.eval()
    return model.to(device=device, dtype=dtype)
