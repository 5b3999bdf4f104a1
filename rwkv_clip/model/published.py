"""Weights in the published format: reading them from any source, loading them into a model, writing them.

A published file holds one dict: the published names, float32 (two text tensors per block in bfloat16), `logit_scale` of
shape (). Files written by a wrapped model carry `module.` or `_orig_mod.` in their names; these are taken off. A model
that was trained with the sigmoid loss has one name more, `logit_bias` of shape ().
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UserError
from .precise import precise_parameters
from .whole_file import whole_file

LOGIT_BIAS = "logit_bias"
SCALARS = ("logit_scale", LOGIT_BIAS)
"""Parameters of shape () in files and (1,) in models."""
SUFFIXES = (".pt", ".pth", ".safetensors")


def read_state_dict(path: str | Path, ema: bool = False) -> dict[str, Tensor]:
    """Weights by published name, on the CPU, in the dtypes that are stored.

    Args:
        path: a `.pt`/`.pth` file (read with `weights_only=True`), a `.safetensors` file, a run folder (its newest
            checkpoint) or a checkpoint folder (its float32 masters).
        ema: of a folder, the averaged weights (training's `--ema-decay`) instead.

    Raises:
        UserError: nothing there, or nothing that holds weights.
    """
    path = Path(path)
    if path.is_dir():
        from .deepspeed_weights import read_folder

        state = read_folder(path, ema)
    elif ema and path.exists():
        raise UserError(f"{path} is a file, which holds one set of weights: give a run folder, or leave out --ema")
    elif not path.is_file():
        raise UserError(f"weights {path} do not exist; give a weights file, a run folder or a checkpoint folder")
    elif path.suffix == ".safetensors":
        state = _read_safetensors(path)
    else:
        state = _read_torch(path)
    return strip_prefixes(state)


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path, device="cpu")
    except SafetensorError as error:
        raise UserError(f"{path}: not a readable safetensors file ({error}); copy it again") from None


def _read_torch(path: Path) -> dict[str, Tensor]:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError):
        raise UserError(f"{path}: damaged, or more than tensors in it; give a saved state dict") from None
    if isinstance(state, Mapping) and isinstance(state.get("state_dict"), Mapping):
        state = state["state_dict"]
    if not isinstance(state, Mapping) or not state or not all(isinstance(value, Tensor) for value in state.values()):
        raise UserError(f"{path}: holds {type(state).__name__}, not a state dict (name -> tensor); export one")
    return dict(state)


def strip_prefixes(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`state` without the marks of DistributedDataParallel (`module.`, in front) and torch.compile (`_orig_mod.`)."""
    stripped = {}
    for name, value in state.items():
        name = name.replace("_orig_mod.", "")
        while name.startswith("module."):
            name = name.removeprefix("module.")
        stripped[name] = value
    return stripped


def load_into(model: nn.Module, path: str | Path, ema: bool = False) -> None:
    """Load weights from `path` (see `read_state_dict`) into an `RWKVCLIP`, on whatever device and dtype it is.

    Raises:
        UserError: names or shapes that do not fit the model.
    """
    state = read_state_dict(path, ema)
    check_fit(model, state, str(path))
    if LOGIT_BIAS in state and model.logit_bias is None:
        model.add_logit_bias()
    model.load_state_dict(state, strict=True)


def check_fit(model: nn.Module, state: Mapping[str, Tensor], source: str) -> None:
    """`UserError` in one line when `state` is not the state dict of a model like `model` (which may be on meta).

    Either may have a `logit_bias` that the other lacks.
    """
    wanted = model.state_dict()
    problems = []
    missing = [name for name in wanted if name not in state and name != LOGIT_BIAS]
    unexpected = [name for name in state if name not in wanted and name != LOGIT_BIAS]
    if missing:
        problems.append(f"{len(missing)} missing, first {missing[0]!r}")
    if unexpected:
        problems.append(f"{len(unexpected)} unknown, first {unexpected[0]!r}")
    for name in wanted:
        if name in state and published_shape(name, wanted[name]) != published_shape(name, state[name]):
            found, want = list(state[name].shape), list(wanted[name].shape)
            problems.append(f"{name!r} has shape {found}, the model {want}")
            break
    if problems:
        raise UserError(
            f"{source}: not this model's weights ({'; '.join(problems)}); name the model they were made for"
        )


def published_shape(name: str, value: Tensor) -> tuple[int, ...]:
    """Shape in a published file: as it is, except that `logit_scale` and `logit_bias` have none."""
    return () if name in SCALARS and value.numel() == 1 else tuple(value.shape)


def published_state_dict(source: Mapping[str, Tensor] | nn.Module) -> dict[str, Tensor]:
    """The published form of a model's weights: float32 copies on the CPU, `logit_scale` of shape ().

    Args:
        source: a state dict, or a model. Of a bf16 or fp16 model the precise parameters give their float32 values; the
            others are what bf16 holds, as only an optimizer's masters know more.
    """
    if isinstance(source, nn.Module):
        state = dict(source.state_dict())
        for name, (parameter, buffer) in precise_parameters(source).items():
            state[name] = parameter if parameter.dtype == torch.float32 else buffer
        source = strip_prefixes(state)
    return {
        name: value.detach().to("cpu", torch.float32, copy=True).reshape(published_shape(name, value)).contiguous()
        for name, value in source.items()
    }


def save(path: str | Path, state: Mapping[str, Tensor]) -> None:
    """Write `state` to a `.pt`, `.pth` or `.safetensors` file; under its name stands all of it or nothing new.

    Raises:
        UserError: another suffix, or a folder that cannot be written.
    """
    path, writing = Path(path), False
    if path.suffix not in SUFFIXES:
        raise UserError(f"cannot write weights to {path}: the name must end in one of {', '.join(SUFFIXES)}")
    try:
        with whole_file(path) as file:
            writing = True
            _write(file, path.suffix, dict(state))
    except (OSError, RuntimeError) as error:  # torch hides a full disk behind an error of its own
        cause = error if isinstance(error, OSError) else error.__context__
        words = getattr(cause, "strerror", None) or " ".join(str(error).split())
        way_out = "free some space" if writing else "choose another place"
        raise UserError(f"cannot write weights to {path}: {words}; {way_out}") from None


def _write(file: Any, suffix: str, state: dict[str, Tensor]) -> None:
    if suffix == ".safetensors":
        from safetensors.torch import save as to_bytes

        file.write(to_bytes(state))
    else:
        torch.save(state, file)
