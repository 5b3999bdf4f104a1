"""What DeepSpeed would write into a checkpoint, as copies in host memory, so that training may change the originals."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


class _Collector:
    """DeepSpeed's checkpoint engine, except that `save` keeps a copy of the content instead of writing it."""

    def __init__(self, original: Any) -> None:
        self._original = original
        self.files: dict[Path, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def save(self, state_dict: Any, path: str) -> None:
        self.files[Path(path)] = on_host(state_dict)


def engine_files(engine: DeepSpeedEngine, folder: Path) -> dict[Path, Any]:
    """This rank's files of a checkpoint in `folder`, which exists: content for `torch.save`, by path.

    Every rank calls it after the same step. DeepSpeed's own "decoupled" writer would not do: it sends the live tensors
    to another process and holds up the next optimizer step until they are written, and once that process has died it
    leaves saves out in silence.
    """
    collector = _Collector(engine.checkpoint_engine)
    engine.checkpoint_engine = collector
    try:
        engine.save_checkpoint(str(folder.parent), tag=folder.name, save_latest=False)
    finally:
        engine.checkpoint_engine = collector._original
    return collector.files


def on_host(value: Any) -> Any:
    """A copy of nested dicts, lists and tuples with each tensor on the CPU, equal to the bit, in its own storage."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        result = copy.copy(value)  # an OrderedDict stays one
        for key, entry in value.items():
            result[key] = on_host(entry)
        return result
    if isinstance(value, list):
        return [on_host(entry) for entry in value]
    if type(value) is tuple:
        return tuple(on_host(entry) for entry in value)
    return copy.deepcopy(value)
