"""One build at a time per folder, nobody waits in silence, and nobody waits for a process that is gone.

torch's own `lock` file stays behind when its process is killed, and everyone then waits for it for ever. Ours is a lock
of the operating system (flock), which ends with its process, also on NFS. Whoever holds it knows that torch's file, if
there is one, is stale.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from .toolchain import OpBuildError

POLL_SECONDS = 0.1
FIRST_MESSAGE_SECONDS = 2.0
REPEAT_SECONDS = 60.0


def say(text: str) -> None:
    print(f"[rwkv-clip] {text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def build_lock(folder: Path, op_name: str) -> Iterator[float | None]:
    """Hold the folder's build lock; yields when the wait for it began (time.time()), None if it was free at once."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / "build.flock", "a+")  # noqa: SIM115 (closed below)
    except OSError as error:
        raise OpBuildError(
            f"The op {op_name} cannot be built: {error}; set TORCH_EXTENSIONS_DIR to a folder that you may write"
        ) from None
    with file:
        waiting_since = _acquire(file, op_name)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        stale = folder / "lock"
        if stale.exists():
            say(f"removing {stale}, left by a build that was killed")
            stale.unlink(missing_ok=True)
        yield waiting_since


def _acquire(file: TextIO, op_name: str) -> float | None:
    started = time.time()
    waited, next_message = False, started + FIRST_MESSAGE_SECONDS
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return started if waited else None
        except BlockingIOError:
            waited = True
        except OSError as error:
            raise OpBuildError(
                f"The op {op_name} cannot be built: no file locks in {os.path.dirname(file.name)} ({error}); set "
                "TORCH_EXTENSIONS_DIR to a folder on a local disk"
            ) from None
        if time.time() >= next_message:
            next_message += REPEAT_SECONDS
            file.seek(0)
            holder = file.read() or "another process"
            say(f"waiting {time.time() - started:.0f} s for {holder} to build the op {op_name} (lock: {file.name})")
        time.sleep(POLL_SECONDS)
