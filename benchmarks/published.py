"""The published RWKV-CLIP code on this machine: speed and memory of its training step on one kept batch.

    git clone https://github.com/deepglint/RWKV-CLIP
    python benchmarks/published.py RWKV-CLIP                              B/32, batch 512, bf16
    python benchmarks/published.py RWKV-CLIP --model RWKV-CLIP-B-16 --checkpointing
    python benchmarks/inference.py --published RWKV-CLIP                  its encode_image beside ours

Its own model, kernels and arguments, under bf16 autocast with AdamW and clipping as its trainer has them; only the few
classes that it takes from mmcv and mmcls, whose releases do not install beside today's PyTorch, are replaced. Its
kernels are compiled on first use. Batches lie on the GPU: nothing is read or decoded.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import os
import sys
import time
import types
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CONFIGS = {"RWKV-CLIP-B-32": "RWKV_CLIP_B32.json", "RWKV-CLIP-B-16": "RWKV_CLIP_B16.json"}


class _BaseModule(nn.Module):
    """mmcv's: a module with a configuration of its initialisation, which the published model leaves out."""

    def __init__(self, init_cfg: None = None):
        super().__init__()


class _PatchEmbed(nn.Module):
    """mmcv's, as far as it is used: a convolution whose stride is its size; tokens and their grid."""

    def __init__(self, in_channels, input_size, embed_dims, conv_type, kernel_size, stride, bias):
        super().__init__()
        self.projection = nn.Conv2d(in_channels, embed_dims, kernel_size, stride, bias=bias)
        self.init_out_size = (input_size // stride, input_size // stride)

    def forward(self, images: Tensor) -> tuple[Tensor, tuple[int, int]]:
        grid = self.projection(images)
        return grid.flatten(2).transpose(1, 2), (grid.shape[2], grid.shape[3])


def _same_size(pos_embed: Tensor, source, target, mode, num_extra_tokens) -> Tensor:
    """mmcls's resize_pos_embed for pictures of the trained size."""
    assert tuple(source) == tuple(target)
    return pos_embed


def _stand_in(name: str, **contents) -> None:
    """A module `name`, and the packages around it, that holds `contents`."""
    parts = name.split(".")
    for length in range(1, len(parts) + 1):
        sys.modules.setdefault(".".join(parts[:length]), types.ModuleType(".".join(parts[:length])))
    vars(sys.modules[name]).update(contents)


def load(code: Path, model: str, *, train: bool, checkpointing: bool = False) -> nn.Module:
    """The published model with fresh weights, in fp32 on the GPU; the working folder becomes `code`.

    Once per process: its modules hold the number of tokens as constants.

    Args:
        code: a checkout of the published repository.
        model: a key of CONFIGS.
        train: with the drop path of its configuration file; its image tower's is 0 without.
        checkpointing: its --open-checkpoint.
    """
    os.chdir(code)
    sys.path.insert(0, str(code))
    args = argparse.Namespace(**json.loads(Path("model_config", CONFIGS[model]).read_text()))
    args.with_cp, args.text_initialization = checkpointing, False
    os.environ |= {
        "RWKV_HEAD_SIZE": str(args.head_size),
        "RWKV_FLOAT_MODE": args.precision,
        "Image_T_max": str((args.input_size / args.image_patch_size) ** 2),
        "Text_T_max": "256",
        "Image_HEAD_SIE": str(args.image_embed_dims // args.image_num_heads),
    }
    # Its kernels have their lengths as constants and always the same name.
    kernels = Path(os.environ.get("TORCH_EXTENSIONS_DIR", Path.home() / ".cache" / "torch_extensions"))
    os.environ["TORCH_EXTENSIONS_DIR"] = str(kernels / f"published_{model}")
    _stand_in("mmcv.runner.base_module", BaseModule=_BaseModule, ModuleList=nn.ModuleList)
    _stand_in("mmcv.cnn.bricks.transformer", PatchEmbed=_PatchEmbed)
    _stand_in("mmcls.models.builder", BACKBONES=None)
    _stand_in("mmcls.models.utils", resize_pos_embed=_same_size)
    _stand_in("mmcls.models.backbones.base_backbone", BaseBackbone=_BaseModule)
    # Its package without its __init__, which imports torchvision and more.
    _stand_in("model", __path__=[str(code / "model")])
    from model.Image_rwkv import Image_RWKV
    from model.Text_rwkv import Text_RWKV

    sys.modules["model"].Image_RWKV, sys.modules["model"].Text_RWKV = Image_RWKV, Text_RWKV
    from model.utils import get_model

    image = Image_RWKV(
        img_size=args.input_size,
        patch_size=args.image_patch_size,
        embed_dims=args.image_embed_dims,
        hidden_rate=args.image_hidden_rate,
        depth=args.image_depth,
        num_heads=args.image_num_heads,
        drop_path_rate=args.drop_path_rate if train else 0.0,
        with_cp=checkpointing,
    )
    return get_model(image, Text_RWKV(args)).cuda().train(train)


def encode_image(code: Path, model: str, batch: int, repetitions: int) -> dict[str, float]:
    """Milliseconds per call under bf16 autocast, samples per second, and GiB that torch held."""
    published = load(code, model, train=False)
    from model.utils import WarperCLIP_V_T_RWKV

    encoder = WarperCLIP_V_T_RWKV(published)
    images = torch.randn(batch, 3, 224, 224, device="cuda")
    times = []
    with torch.inference_mode(), torch.autocast("cuda", torch.bfloat16):
        for _ in range(repetitions + 5):
            started = time.perf_counter()
            F.normalize(encoder(images), dim=-1)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - started)
    seconds = sorted(times[5:])[repetitions // 2]
    return {
        "ms": 1e3 * seconds,
        "samples_per_second": batch / seconds,
        "torch_peak_gib": torch.cuda.max_memory_allocated() / 2**30,
    }


def train(code: Path, model: str, batch: int, checkpointing: bool, steps: int) -> dict[str, float]:
    """Pairs per second and GiB that torch held."""
    published = load(code, model, train=True, checkpointing=checkpointing)
    optimizer = torch.optim.AdamW(published.parameters(), lr=1e-5, betas=(0.9, 0.98), weight_decay=0.2)
    images = torch.randn(batch, 3, 224, 224, device="cuda")
    tokens = torch.randint(1, 49408, (batch, 77), device="cuda")
    targets = torch.arange(batch, device="cuda")
    warm_up = 5
    for step in range(warm_up + steps):
        if step == warm_up:
            torch.cuda.synchronize()
            started = time.perf_counter()
        with torch.autocast("cuda", torch.bfloat16):
            image, text, scale = published(images, tokens)
            logits = scale * F.normalize(image, dim=-1) @ F.normalize(text, dim=-1).T
            loss = (F.cross_entropy(logits, targets) + F.cross_entropy(logits.T, targets)) / 2
        loss.backward()
        nn.utils.clip_grad_norm_(published.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    return {
        "samples_per_second": steps * batch / (time.perf_counter() - started),
        "torch_peak_gib": torch.cuda.max_memory_allocated() / 2**30,
    }


def checkout(text: str) -> Path:
    """`--published` and the like."""
    missing = [name for name in CONFIGS.values() if not (Path(text) / "model_config" / name).is_file()]
    if missing:
        raise argparse.ArgumentTypeError(
            f"{text} has no model_config/{missing[0]}: give a checkout of https://github.com/deepglint/RWKV-CLIP"
        )
    if not torch.cuda.is_available():
        raise argparse.ArgumentTypeError("the published kernels need a GPU, and PyTorch sees none")
    return Path(text).resolve()


def main() -> int:
    from train_step import machine

    from rwkv_clip.training.arguments import COUNT

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("code", type=checkout, help="a checkout of https://github.com/deepglint/RWKV-CLIP")
    parser.add_argument("--model", default="RWKV-CLIP-B-32", choices=list(CONFIGS))
    parser.add_argument("--batch-size", type=COUNT, default=512)
    parser.add_argument("--checkpointing", action="store_true", help="its --open-checkpoint")
    parser.add_argument("--steps", type=COUNT, default=20, help="steps that are timed (default: %(default)s)")
    args = parser.parse_args()
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        given = (args.code, args.model, args.batch_size, args.checkpointing, args.steps)
        figures = pool.apply(train, given)
    print(
        f"published {args.model}, batch {args.batch_size}{', checkpointing' * args.checkpointing}: "
        f"{figures['samples_per_second']:,.0f} pairs/s, {figures['torch_peak_gib']:.1f} GiB "
        f"({machine()}, torch {torch.__version__}, {datetime.date.today()})"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
