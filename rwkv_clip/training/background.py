"""Writes a checkpoint's files on a thread of each rank while training goes on; rank 0 completes it at the end."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..model import checksum
from .distributed import World, wait_for

Written = tuple[int, str]
"""Of a file: its size in bytes and its checksum."""


class BackgroundWriter:
    """One save at a time: `start` it on every rank, then `finish` it on every rank before the next."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._store = world.connect()
        self._saves = 0
        self._thread: threading.Thread | None = None
        self._error: UserError | None = None

    @property
    def has_failed(self) -> bool:
        """Whether this rank knows that the save cannot be completed; `finish` then raises."""
        return self._error is not None

    def start(self, files: Mapping[Path, Any], complete: Callable[[dict[str, Written]], None]) -> None:
        """Write `files` (content for `torch.save`, by path), then on rank 0 call `complete`.

        The contents must not change afterwards. complete: gets sizes and checksums of all ranks' files by name; it may
        raise `UserError`, and is not called when a file of any rank could not be written.
        """
        self._saves += 1
        self._thread = threading.Thread(target=self._run, args=(files, complete), name="checkpoint", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Wait until every rank has written and rank 0 has completed it; `UserError` on all ranks if one failed."""
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        error, self._error = self._error, None
        with self._world.together():
            if error is not None:
                raise error

    def _run(self, files: Mapping[Path, Any], complete: Callable[[dict[str, Written]], None]) -> None:
        try:
            try:
                written = {path.name: _write(path, content) for path, content in files.items()}
            except UserError:
                self._gather(None)
                raise
            everyone = self._gather(written)
            if self._world.is_first and None not in everyone:
                complete({name: tuple(one) for written in everyone for name, one in written.items()})
        except UserError as error:
            self._error = error
        except Exception as error:  # a lost store, a disk that answers nonsense: the job ends with its words
            self._error = UserError(f"cannot complete the checkpoint: {type(error).__name__}: {error}")

    def _gather(self, written: dict[str, Written] | None) -> list[dict[str, Written] | None]:
        """On rank 0 what every rank has written, None for a rank that failed; elsewhere []."""
        if self._store is None:
            return [written]
        prefix = f"written/{self._saves}"
        self._store.set(f"{prefix}/{self._world.rank}", json.dumps(written))
        if not self._world.is_first:
            return []
        keys = [f"{prefix}/{rank}" for rank in range(self._world.world_size)]
        wait_for(self._store, keys)
        everyone = [json.loads(self._store.get(key).decode()) for key in keys]
        for key in keys:
            self._store.delete_key(key)
        return everyone


def _write(path: Path, content: Any) -> Written:
    """Write one file, onto the disk."""
    try:
        return checksum.save(content, path)
    except (OSError, RuntimeError) as error:  # torch's name for a full disk
        raise UserError(f"cannot write the checkpoint {path.parent}: {reason(error, path.parent)}") from error


def reason(error: Exception, folder: Path) -> str:
    """One line on what went wrong, with the free space, as torch hides "disk full" behind words of its own."""
    text = " ".join(str(error).split()) or type(error).__name__
    try:
        return f"{text[:300]} ({shutil.disk_usage(folder).free / 2**20:.0f} MiB free)"
    except OSError:
        return text[:300]
