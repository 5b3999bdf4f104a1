"""A file that shows under its name when it is whole, and what a writer that was killed has left beside it.

Until then it has a hidden name that ends in .tmp, made of its own and random letters, and its writer holds it locked.
The system lets a lock go when the process ends, however it ends: a file of such a name whose lock is free has no writer
any more.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_SUFFIX = ".tmp"


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write; at the end it is brought onto the disk and takes the name `path`, or is removed after an error.

    What dead writers of the same path have left is removed first. `OSError` when it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(path)
    file, name = _create(path)
    with file:  # and with it the lock
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.chmod(name, 0o666 & ~_umask())
            os.replace(name, path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)
            raise


def remove_leftovers(path: Path) -> None:
    """Remove what dead writers of `path` have left; files of live ones, and all other files, stay.

    Where the file system knows no locks nothing is removed.
    """
    ours = re.compile(re.escape(f".{path.name}.") + r"[a-z0-9_]{8}" + re.escape(_SUFFIX))
    with contextlib.suppress(OSError):
        for found in path.parent.iterdir():
            if ours.fullmatch(found.name) and found.is_file() and not found.is_symlink():
                _remove_if_dead(found)


def _remove_if_dead(leftover: Path) -> None:
    with contextlib.suppress(OSError), open(leftover, "r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        leftover.unlink()


def _create(path: Path) -> tuple[BinaryIO, str]:
    """(a new file beside `path`, locked, its name)."""
    while True:
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=_SUFFIX, dir=path.parent)
        file = os.fdopen(descriptor, "wb")
        with contextlib.suppress(OSError):  # file systems without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        if os.path.exists(name):
            return file, name
        file.close()  # taken for a leftover in the moment before it was locked


def _umask() -> int:
    """The process's umask; the temporary file was made private, the whole one need not be."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
