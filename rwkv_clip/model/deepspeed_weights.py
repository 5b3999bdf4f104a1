"""Float32 weights out of a run folder or a DeepSpeed checkpoint folder, without an engine."""

from __future__ import annotations

import contextlib
import pickle
import sys
from pathlib import Path

import torch
from torch import Tensor

from ..errors import UserError

LATEST = "latest"
CHECKPOINTS = "checkpoints"


def read_checkpoint_folder(folder: Path) -> dict[str, Tensor]:
    """The weights of a checkpoint: ZeRO's float32 masters where there are some, the module's own otherwise.

    A frozen parameter has no master; it comes as the module holds it. DeepSpeed's files are pickles that can run code:
    read only folders of known origin.

    Args:
        folder: a run folder, its `checkpoints`, or one checkpoint in it.

    Raises:
        UserError: no checkpoint there, or an incomplete one.
    """
    checkpoint = find_checkpoint(folder)
    try:
        if any(checkpoint.glob("*_optim_states.pt")):
            from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

            with contextlib.redirect_stdout(sys.stderr):
                return get_fp32_state_dict_from_zero_checkpoint(str(checkpoint.parent), tag=checkpoint.name)
        states = torch.load(checkpoint / "mp_rank_00_model_states.pt", map_location="cpu", weights_only=False)
        return dict(states["module"])
    except ImportError as error:
        raise UserError(f"{checkpoint}: reading a checkpoint folder needs DeepSpeed ({error}); install it") from None
    except (OSError, ValueError, KeyError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{checkpoint}: incomplete or damaged checkpoint ({reason}); give an earlier one") from None


def find_checkpoint(folder: Path) -> Path:
    """The checkpoint folder meant by a run folder, its `checkpoints` (both: the one named in `latest`) or itself."""
    if any(folder.glob("*_model_states.pt")):
        return folder
    checkpoints = folder / CHECKPOINTS if (folder / CHECKPOINTS).is_dir() else folder
    found = sorted(path.parent.name for path in checkpoints.glob("*/*_model_states.pt"))
    if not found:
        raise UserError(f"{folder}: no checkpoint in this folder; give a run folder, a checkpoint folder or a file")
    latest = checkpoints / LATEST
    tag = latest.read_text(encoding="utf-8").strip() if latest.is_file() else ""
    if tag not in found:
        state = f"names {tag!r}, which is not there" if tag else "is missing or empty"
        raise UserError(f"{latest} {state}; name a checkpoint yourself, such as {checkpoints / found[-1]}")
    return checkpoints / tag
