"""Float32 weights out of a run folder or a DeepSpeed checkpoint folder, without an engine.

DeepSpeed's files are pickles that can run code when they are loaded: read only folders of known origin.
"""

from __future__ import annotations

import contextlib
import pickle
import re
import sys
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import UserError
from . import averaged, checksum
from .tensor_file import read_tensors

CHECKPOINTS = "checkpoints"
FINAL_WEIGHTS = "weights.pt"
"""In a run folder: the weights that a finished run ended with, in the published format."""
FROZEN = "frozen.pt"
"""In a checkpoint: float32 weights of a locked tower, of which no optimizer holds masters."""
MODEL_STATES = "mp_rank_00_model_states.pt"
_STEP = re.compile(r"step_\d+$")


def read_folder(folder: Path, ema: bool = False) -> dict[str, Tensor]:
    """The newest weights of a run folder, its `checkpoints` folder, or one checkpoint; `ema`: the averaged ones.

    Trained parameters come from the optimizer's float32 masters, frozen ones from the float32 copy kept with them.
    Where DeepSpeed keeps no masters by name (ZeRO stage 0 in bf16 or fp16) the model's rounded copies are taken, and
    a line on stderr says so.

    Raises:
        UserError: no weights there, or an incomplete or damaged checkpoint.
    """
    final, checkpoint = folder / (averaged.FINAL_WEIGHTS if ema else FINAL_WEIGHTS), find_checkpoint(folder)
    if final.is_file() and (checkpoint is None or final.stat().st_mtime >= checkpoint.stat().st_mtime):
        return read_tensors(final, "remove it, and a checkpoint is read instead")
    if checkpoint is None:
        raise UserError(f"{folder}: no checkpoint in this folder; give a run folder, a checkpoint folder or a file")
    _check(checkpoint, (averaged.PATTERN, FROZEN) if ema else ("*_states.pt", FROZEN))
    try:
        return _read_averaged(checkpoint) if ema else read_checkpoint(checkpoint)
    except ImportError as error:
        raise UserError(f"{checkpoint}: reading a checkpoint needs DeepSpeed ({error}); install it") from None
    except (OSError, ValueError, KeyError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{checkpoint}: incomplete or damaged checkpoint ({reason}); give an earlier one") from None


def find_checkpoint(folder: Path) -> Path | None:
    """`folder` if it is a checkpoint, else the newest one in it or in its `checkpoints`, None if there is none."""
    if any(folder.glob("*_model_states.pt")):
        return folder
    checkpoints = folder / CHECKPOINTS if (folder / CHECKPOINTS).is_dir() else folder
    found = [path for path in checkpoints.iterdir() if _STEP.match(path.name) and any(path.glob("*_model_states.pt"))]
    return max(found, key=lambda path: int(path.name.removeprefix("step_")), default=None)


def _check(checkpoint: Path, patterns: Sequence[str]) -> None:
    """`UserError` if files of these names hold other bytes than were written, as far as that was recorded."""
    for name, recorded in checksum.recorded(checkpoint).items():
        if any(fnmatch(name, pattern) for pattern in patterns) and (checkpoint / name).is_file():
            checksum.check(checkpoint / name, recorded)


def read_checkpoint(checkpoint: Path) -> dict[str, Tensor]:
    """Float32 weights of one checkpoint folder, as `read_folder` describes."""
    state: dict[str, Tensor] = {}
    shards = sorted(checkpoint.glob("*_optim_states.pt"), key=_rank)
    model = _load(checkpoint / MODEL_STATES) if (checkpoint / MODEL_STATES).is_file() else None
    if model is not None:
        state.update(model["module"])
    if shards and "zero_stage" in _load(shards[0])["optimizer_state_dict"]:
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        with contextlib.redirect_stdout(sys.stderr):
            state.update(get_fp32_state_dict_from_zero_checkpoint(str(checkpoint.parent), tag=checkpoint.name))
    elif shards:
        state.update(_bf16_optimizer_masters(model["param_shapes"], shards))
    elif any(value.dtype != torch.float32 for value in state.values()):
        print(f"{checkpoint}: no float32 masters by name in it; its weights are rounded", file=sys.stderr)
    return state | _read_frozen(checkpoint)


def _read_averaged(checkpoint: Path) -> dict[str, Tensor]:
    weights = averaged.read_averaged(checkpoint)
    if not weights:
        raise UserError(f"{checkpoint} holds no averaged weights: it was trained without --ema-decay; leave out --ema")
    return weights | _read_frozen(checkpoint)


def _read_frozen(checkpoint: Path) -> dict[str, Tensor]:
    path = checkpoint / FROZEN
    return read_tensors(path, "give an earlier checkpoint") if path.is_file() else {}


def _bf16_optimizer_masters(groups: list[dict[str, torch.Size]], shards: list[Path]) -> dict[str, Tensor]:
    """Masters of DeepSpeed's BF16_Optimizer, which `zero_to_fp32` does not read.

    groups: shapes by name, in the order in which each group's masters stand one after another over all the ranks.
    """
    states = [_load(shard)["optimizer_state_dict"] for shard in shards]
    if len(states) != max(states[0]["partition_count"]):
        raise ValueError(f"{len(states)} optimizer files of {max(states[0]['partition_count'])}")
    masters = {}
    for index, shapes in enumerate(groups):
        flat = torch.cat([state["single_partition_of_fp32_groups"][index] for state in states])
        start = 0
        for name, shape in shapes.items():
            masters[name] = flat[start : start + shape.numel()].view(shape)
            start += shape.numel()
    return masters


def _rank(shard: Path) -> int:
    return int(re.search(r"rank_(\d+)_mp", shard.name).group(1))


def _load(path: Path) -> dict[str, Any]:
    return torch.load(path, map_location="cpu", weights_only=False, mmap=True)
