"""A folder for one process at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from ..errors import UserError


def refuse_unreplaceable(out: Path) -> None:
    """Refuse a folder whose place a finished one could not take, before the work is done.

    out: with all links followed.

    Raises:
        UserError: `out` is a mount point, or a link that leads to itself.
    """
    if out.is_symlink():
        raise UserError(f"{out} is a link that leads to itself: remove it, or name another folder")
    if os.path.ismount(out):
        raise UserError(
            f"{out} is a mount point, which cannot be replaced: name a folder in it, such as {out / 'data'}"
        )


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
