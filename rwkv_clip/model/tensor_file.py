"""Reading what this project saved with `torch.save`: tensors in dicts and lists, and nothing that runs code."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch

from ..errors import UserError


def read_tensors(path: Path, way_out: str) -> Any:
    """The content of a file, its tensors on the CPU.

    way_out: what a user with a damaged file can do, the end of the message.

    Raises:
        UserError: the file cannot be read, or is damaged.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
        words = " ".join(str(error).split())[:200] or "it ends too early"
        raise UserError(f"{path}: damaged ({words}); {way_out}") from None
