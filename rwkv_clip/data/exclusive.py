"""A folder for one process at a time."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path

from ..errors import UserError


@contextlib.contextmanager
def exclusive(folder: Path, busy: str) -> Iterator[None]:
    """Make `folder` and hold its file `lock`, which the system lets go when the process ends, however it ends.

    busy: what to say of the other process, such as "another packer is writing OUT".

    Raises:
        UserError: the folder cannot be written, or another process holds it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / "lock", "w")
    except OSError as error:
        raise UserError(f"cannot write {folder}: {error.strerror}") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"{busy}: wait for it, or name another folder") from None
        yield
