"""The text tower: (B, T) token ids -> (B, C) features."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import UserError
from .blocks import BlockRunner
from .config import TextConfig
from .init import TEXT_TIME_MIX, LayerPosition
from .mixing import TextChannelMix, TimeMix
from .shift import TextShift


class TextBlock(nn.Module):
    """Time mix and channel mix, each a residual branch after a layer norm: (B, T, C) -> (B, T, C)."""

    def __init__(self, config: TextConfig, layer: LayerPosition) -> None:
        super().__init__()
        width = config.width
        shift = TextShift(config.num_heads)
        self.dropout = config.dropout
        self.ln1 = nn.LayerNorm(width)
        self.ln2 = nn.LayerNorm(width)
        if layer.index == 0:
            self.ln0 = nn.LayerNorm(width)
        eps = 1e-5 * config.head_size_divisor**2
        self.att = TimeMix(width, config.num_heads, layer, TEXT_TIME_MIX, shift, eps)
        self.ffn = TextChannelMix(width, config.ffn_width, layer, shift)

    def forward(self, x: Tensor) -> Tensor:
        # The same code for every block of a tower, without the first one's ln0: they share one compiled graph.
        # Dropout acts on the sum, the residual included, as published.
        x = F.dropout(x + self.att(self.ln1(x)), self.dropout, self.training)
        return F.dropout(x + self.ffn(self.ln2(x)), self.dropout, self.training)


class TextTower(nn.Module):
    """The text half of RWKV-CLIP; parameter names are the published ones."""

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.config = config
        self.block_runner = BlockRunner()
        self.emb = nn.Embedding(config.vocab_size, config.width)
        blocks = (TextBlock(config, LayerPosition(index, config.depth)) for index in range(config.depth))
        self.blocks = nn.ModuleList(blocks)
        self.ln_out = nn.LayerNorm(config.width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Features before normalising, float32 [B, C]: the mean over all positions, padding included, of unit tokens.

        Args:
            tokens: integer ids [B, T], 1 <= T <= context_length.

        Raises:
            UserError: tokens of another shape or dtype.
        """
        if tokens.ndim != 2 or tokens.is_floating_point() or not 1 <= tokens.shape[1] <= self.config.context_length:
            raise UserError(
                f"tokens must be whole numbers [B, T] with T from 1 to {self.config.context_length}, found "
                f"{tokens.dtype} {list(tokens.shape)}; use tokenize(texts, model.context_length)"
            )
        # Outside `stem`: compiled code adds up the gradient of a table in an order that changes from run to run.
        x = F.dropout(self.emb(tokens), self.config.dropout, self.training)
        x = self.block_runner.end(self, "stem", x)
        for block in self.blocks:
            x = self.block_runner(block, x)
        return self.block_runner.end(self, "pool", x)

    def stem(self, x: Tensor) -> Tensor:
        """What the first block is given, [B, T, C], from the tokens' embeddings of that shape."""
        return self.blocks[0].ln0(x)

    def pool(self, x: Tensor) -> Tensor:
        """The features, float32 [B, C], from what the last block gives, [B, T, C]."""
        return F.normalize(self.ln_out(x).float(), dim=-1).mean(dim=1)
