"""The job's log: lines on rank 0's standard output and in the run folder's `training.log`."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

from ..errors import UserError

logger = logging.getLogger("rwkv_clip.training")
# The whole package's lines are the job's: the loader's about bad records, the op's about its build.
_package = logging.getLogger("rwkv_clip")

_FORMAT = logging.Formatter("%(asctime)s  %(message)s", datefmt="%Y-%m-%d %H:%M:%S")


def start_log(is_first: bool) -> None:
    """Show the job's lines on rank 0, warnings of other ranks on stderr, and quieten the libraries."""
    _package.propagate = False
    _package.setLevel(logging.INFO if is_first else logging.WARNING)
    handler = logging.StreamHandler(sys.stdout if is_first else sys.stderr)
    handler.setFormatter(_FORMAT)
    _package.handlers[:] = [handler]
    # Torch warns about its own and DeepSpeed's use of older interfaces, which no user of this trainer can change.
    for category in (FutureWarning, DeprecationWarning):
        warnings.filterwarnings("ignore", category=category)
    warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*before.*optimizer.step.*")


class _FileHandler(logging.FileHandler):
    """On a full disk a line is left out; standard output has it too, without a traceback for each line."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


def log_to_file(path: Path) -> None:
    """Append the job's lines to a file as well; `UserError` when it cannot be written."""
    try:
        handler = _FileHandler(path, encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"cannot write the log {path}: {error.strerror}; make it writable, or choose another --output"
        ) from None
    handler.setFormatter(_FORMAT)
    _package.addHandler(handler)


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """A start-up phase: a line with its duration when it took a second or longer."""
    started = time.monotonic()
    yield
    seconds = time.monotonic() - started
    if seconds >= 1:
        logger.info("%s: %.1f s", name, seconds)


def duration(seconds: float) -> str:
    """3 d 4 h, 5 h 12 min, 7 min 3 s, 12 s."""
    seconds = max(0, round(seconds))
    units = [("d", seconds // 86400), ("h", seconds // 3600 % 24), ("min", seconds // 60 % 60), ("s", seconds % 60)]
    while len(units) > 1 and units[0][1] == 0:
        units.pop(0)
    return " ".join(f"{value} {unit}" for unit, value in units[:2])
