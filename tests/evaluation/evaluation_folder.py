"""What the evaluation tests are made of. A module of its own name: processes that a test starts import it too."""

from __future__ import annotations

import torch

from rwkv_clip.model.clip import RWKVCLIP
from rwkv_clip.model.config import ImageConfig, ModelConfig, TextConfig

TINY = ModelConfig(
    "tiny",
    ImageConfig(image_size=16, patch_size=8, width=16, depth=2, num_heads=2, hidden_rate=2),
    TextConfig(context_length=16, vocab_size=49408, width=16, depth=1, num_heads=2, ffn_width=32),
)


COLOURS = {"red": (220, 30, 30), "green": (30, 200, 40), "blue": (30, 50, 220), "yellow": (230, 220, 40)}


def make_model() -> RWKVCLIP:
    torch.manual_seed(0)
    return RWKVCLIP(TINY).eval()


def write_table(path, header: str, rows: list[str]) -> None:
    path.write_text("\n".join([header, *rows]) + "\n", encoding="utf-8")
