"""The image tower: (B, 3, height, width) pixels -> (B, C) features."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import UserError
from .blocks import BlockRunner
from .config import ImageConfig
from .init import IMAGE_TIME_MIX, LayerPosition
from .mixing import ImageChannelMix, TimeMix
from .shift import ImageShift


class PatchProjection(nn.Conv2d):
    """Linear map of every patch: (B, 3, rows * p, columns * p) -> (B, rows * columns, C).

    A convolution whose stride is its kernel, computed as one product that already has the tokens' layout.
    """

    def forward(self, images: Tensor) -> Tensor:
        p = self.kernel_size[0]
        batch, channels, height, width = images.shape
        patches = images.view(batch, channels, height // p, p, width // p, p).permute(0, 2, 4, 1, 3, 5)
        return F.linear(patches.flatten(3).flatten(1, 2), self.weight.flatten(1), self.bias)


class PatchEmbed(nn.Module):
    """Holds `projection`, under its published name."""

    def __init__(self, patch_size: int, width: int) -> None:
        super().__init__()
        self.projection = PatchProjection(3, width, kernel_size=patch_size, stride=patch_size)

    def forward(self, images: Tensor) -> Tensor:
        return self.projection(images)


class ImageBlock(nn.Module):
    """Time mix and channel mix, each a residual branch after a layer norm, with drop path: (B, T, C) -> (B, T, C)."""

    def __init__(self, config: ImageConfig, layer: LayerPosition) -> None:
        super().__init__()
        width = config.width
        shift = ImageShift(config.num_heads, config.with_cls_token)
        self.ln1 = nn.LayerNorm(width)
        self.ln2 = nn.LayerNorm(width)
        if layer.index == 0:
            self.ln0 = nn.LayerNorm(width)
        self.att = TimeMix(width, config.num_heads, layer, IMAGE_TIME_MIX, shift, eps=1e-5)
        self.ffn = ImageChannelMix(width, config.hidden_rate * width, layer, shift)

    def forward(self, x: Tensor, grid: tuple[int, int], branch_scales: Tensor | None = None) -> Tensor:
        """branch_scales: factors on the two branches for each sample [2, B, 1, 1] (see `ImageTower.branch_scales`)."""
        # The same code for every block of a tower, without the first one's ln0: they share one compiled graph.
        first, second = (None, None) if branch_scales is None else branch_scales.unbind(0)
        x = add_branch(x, self.att(self.ln1(x), grid), first)
        return add_branch(x, self.ffn(self.ln2(x), grid), second)


def add_branch(x: Tensor, branch: Tensor, scale: Tensor | None) -> Tensor:
    """x + branch, or x + branch * scale."""
    return x + branch if scale is None else torch.addcmul(x, branch, scale)


class ImageTower(nn.Module):
    """The image half of RWKV-CLIP; parameter names are the published ones."""

    def __init__(self, config: ImageConfig) -> None:
        super().__init__()
        self.config = config
        self.block_runner = BlockRunner()
        if config.with_cls_token:
            self.cls_token = nn.Parameter(torch.zeros(1, 1, config.width))
        self.pos_embed = nn.Parameter(torch.zeros(1, config.grid[0] * config.grid[1], config.width))
        self.patch_embed = PatchEmbed(config.patch_size, config.width)
        layers = (ImageBlock(config, LayerPosition(index, config.depth)) for index in range(config.depth))
        self.layers = nn.ModuleList(layers)
        self.ln1 = nn.LayerNorm(config.width)

    def forward(self, images: Tensor) -> Tensor:
        """Features before normalising, float32 [B, C]: the mean over patches, or the class token when it is the output.

        Args:
            images: float [B, 3, height, width], any multiples of the patch size; other sizes than the configured one
                get resized position embeddings.

        Raises:
            UserError: images of another shape.
        """
        grid = self.grid_of(images)
        x = self.block_runner.end(self, "stem", images)
        for layer, scales in zip(self.layers, self.branch_scales(x), strict=True):
            x = self.block_runner(layer, x, grid, scales)
        return self.block_runner.end(self, "pool", x)

    def stem(self, images: Tensor) -> Tensor:
        """What the first block is given, [B, T, C]: patches with their positions, and the class token behind them."""
        x = self.patch_embed(images.to(self.pos_embed.dtype)) + self.position_embedding(self.grid_of(images))
        if self.config.with_cls_token:
            x = torch.cat((x, self.cls_token.expand(x.shape[0], -1, -1)), dim=1)
        return self.layers[0].ln0(x)

    def pool(self, x: Tensor) -> Tensor:
        """The features, float32 [B, C], from what the last block gives, [B, T, C]."""
        x = self.ln1(x)
        if self.config.output_cls_token:
            return x[:, -1].float()
        if self.config.with_cls_token:
            x = x[:, :-1]
        return x.mean(dim=1, dtype=torch.float32)

    def branch_scales(self, x: Tensor) -> Sequence[Tensor | None]:
        """Drop path: for each layer the factors on its branches, [2, B, 1, 1] in x's dtype, or None for 1.

        In training a share of the samples, which rises linearly from 0 in the first layer to the configured rate in the
        last, loses a branch (factor 0); the others' is scaled up to keep the mean. Drawn for all layers at once.
        """
        rate, depth = self.config.drop_path_rate, self.config.depth
        if rate == 0.0 or not self.training:
            return [None] * depth
        kept = torch.linspace(1.0, 1.0 - rate, depth, device=x.device).view(-1, 1, 1, 1, 1)
        drawn = torch.rand(depth, 2, x.shape[0], 1, 1, device=x.device)
        return ((drawn < kept) / kept).to(x.dtype).unbind(0)

    def grid_of(self, images: Tensor) -> tuple[int, int]:
        """Rows and columns of patches in `images`."""
        p = self.config.patch_size
        if images.ndim != 4 or images.shape[1] != 3 or not images.is_floating_point():
            raise UserError(
                f"images must be floating point [B, 3, height, width], found {images.dtype} {list(images.shape)}; "
                "use image_transform() to prepare them"
            )
        height, width = images.shape[2:]
        if height == 0 or width == 0 or height % p or width % p:
            raise UserError(
                f"image size {height}x{width} does not fit patches of {p}x{p} pixels; resize to multiples of {p} "
                f"(the model was configured for {self.config.image_size})"
            )
        return height // p, width // p

    def position_embedding(self, grid: tuple[int, int]) -> Tensor:
        """[1, rows * columns, C]: as learned, or resized by bicubic interpolation for another grid."""
        if grid == self.config.grid:
            return self.pos_embed
        learned = self.pos_embed.unflatten(1, self.config.grid).permute(0, 3, 1, 2).float()
        resized = F.interpolate(learned, size=grid, mode="bicubic", align_corners=False)
        return resized.flatten(2).transpose(1, 2).to(self.pos_embed.dtype)
