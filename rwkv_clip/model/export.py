"""`rwkv-clip export`: a run's weights as one file that the published code loads."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from .clip import RWKVCLIP
from .config import load_config
from .published import LOGIT_BIAS, check_fit, published_state_dict, read_state_dict, save


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, help="run folder (its newest checkpoint), checkpoint folder, weights file")
    parser.add_argument("out", type=Path, help="file to write: .pt, .pth or .safetensors")
    parser.add_argument("--ema", action="store_true", help="the averaged weights of a run with --ema-decay")


def run(args: argparse.Namespace) -> int:
    """Write `args.source`'s weights to `args.out`: published names, float32, `logit_scale` of shape ()."""
    state = published_state_dict(read_state_dict(args.source, args.ema))
    description = find_model_json(args.source)
    if description is not None:
        with torch.device("meta"):
            model = RWKVCLIP(load_config(description))
        check_fit(model, state, str(args.source))
    save(args.out, state)
    parameters = sum(value.numel() for value in state.values())
    print(f"wrote {args.out}: {len(state)} tensors, {parameters / 1e6:.1f} M parameters, float32")
    if LOGIT_BIAS in state:
        print(f"{LOGIT_BIAS} is the sigmoid loss's: take it out for code that knows the published names only")
    return 0


def find_model_json(source: Path) -> Path | None:
    """`model.json` of the run that `source` belongs to, or None for a file on its own."""
    for folder in (source, *source.absolute().parents[:2]) if source.is_dir() else ():
        if (folder / "model.json").is_file():
            return folder / "model.json"
    return None
