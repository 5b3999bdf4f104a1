"""Pictures to normalised tensors, for evaluation and small-scale training; large-scale training decodes with DALI."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .clip import RWKVCLIP
from .config import ModelConfig, load_config

if TYPE_CHECKING:
    from PIL.Image import Image

MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)

CROP_AREA = (0.7, 1.0)
CROP_ASPECT = (0.8, 1.25)
CROP_ATTEMPTS = 100
FLIP_PROBABILITY = 0.5


@dataclass(frozen=True)
class ImageTransform:
    """PIL image -> float32 [3, size, size], normalised with the published mean and deviation.

    EXIF orientation is applied and any mode becomes RGB (alpha is dropped), as in the training pipeline. Evaluation:
    bicubic resize of the shorter side, centre crop. Training: random crop (area 0.7-1, aspect 0.8-1.25), bilinear
    resize and random flip, drawn from PyTorch's global generator.
    """

    size: int
    train: bool = False

    def __call__(self, image: Image) -> Tensor:
        from PIL import ImageOps

        image = ImageOps.exif_transpose(image).convert("RGB")
        return self.to_tensor(self.random_crop(image) if self.train else self.centre_crop(image))

    def centre_crop(self, image: Image) -> Image:
        """Shorter side to `size`, then the middle square."""
        from PIL import Image as pil

        width, height = image.size
        short = min(width, height)
        if short != self.size:
            width, height = int(self.size * width / short), int(self.size * height / short)
            image = image.resize((width, height), pil.Resampling.BICUBIC)
        left, top = round((width - self.size) / 2), round((height - self.size) / 2)
        return image.crop((left, top, left + self.size, top + self.size))

    def random_crop(self, image: Image) -> Image:
        """A random part of the picture at `size`, flipped with probability 0.5."""
        from PIL import Image as pil

        left, top, width, height = random_box(*image.size)
        box = (left, top, left + width, top + height)
        image = image.resize((self.size, self.size), pil.Resampling.BILINEAR, box=box)
        if torch.rand(()).item() < FLIP_PROBABILITY:
            image = image.transpose(pil.Transpose.FLIP_LEFT_RIGHT)
        return image

    def to_tensor(self, image: Image) -> Tensor:
        """RGB image -> normalised float32 [3, height, width]."""
        import numpy

        pixels = torch.from_numpy(numpy.array(image)).permute(2, 0, 1).float() / 255
        return (pixels - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]


def random_box(width: int, height: int) -> tuple[int, int, int, int]:
    """(left, top, width, height) of a random crop of a picture; the largest centred one if no attempt fits."""
    log_low, log_high = (torch.tensor(ratio).log().item() for ratio in CROP_ASPECT)
    for area, log_aspect in torch.rand(CROP_ATTEMPTS, 2).tolist():
        area = width * height * (CROP_AREA[0] + area * (CROP_AREA[1] - CROP_AREA[0]))
        aspect = torch.tensor(log_low + log_aspect * (log_high - log_low)).exp().item()
        crop_width, crop_height = round((area * aspect) ** 0.5), round((area / aspect) ** 0.5)
        if 0 < crop_width <= width and 0 < crop_height <= height:
            left = int(torch.randint(width - crop_width + 1, ()))
            top = int(torch.randint(height - crop_height + 1, ()))
            return left, top, crop_width, crop_height
    crop_width = min(width, max(1, round(height * CROP_ASPECT[1])))
    crop_height = min(height, max(1, round(width / CROP_ASPECT[0])))
    return (width - crop_width) // 2, (height - crop_height) // 2, crop_width, crop_height


def image_transform(model: RWKVCLIP | ModelConfig | str | Path, train: bool = False) -> ImageTransform:
    """The transform for a model, a configuration or a model's name.

    Args:
        model: whose configured image size the pictures get.
        train: random crops and flips instead of the centre crop.

    Raises:
        UserError: an unknown model name.
    """
    config = model.config if isinstance(model, RWKVCLIP) else load_config(model)
    return ImageTransform(config.image.image_size, train)
