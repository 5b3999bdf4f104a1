"""The processes that pack shards side by side, and what becomes of them when one fails or the packer is killed."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait

from ..errors import UserError, os_errors_in_words
from .children import without_sigint
from .images import ImageChecker
from .pack_shard import Job, pack_shard

# Seconds between looks at the processes.
POLL_SECONDS = 0.25
# Rows between two updates of a process's counter.
TICK_ROWS = 16


def run(job: Job, shards: Sequence[int], num_workers: int, progress: Callable[[int], None]) -> None:
    """Pack `shards` in `num_workers` processes; with 0 in this one.

    Args:
        progress: called with the number of rows done since the last call.

    Raises:
        UserError: a process said so, or ended without a word.
    """
    if num_workers == 0:
        checker = ImageChecker(job.limits)
        for shard in shards:
            pack_shard(job, shard, checker, lambda: progress(1))
        return
    context = multiprocessing.get_context("spawn")
    next_shard, rows_done = context.Value("q", 0), context.Value("q", 0)
    workers, receivers = [], []
    try:
        for _ in range(min(num_workers, len(shards))):
            receiver, sender = context.Pipe(duplex=False)
            arguments = (job, list(shards), next_shard, rows_done, sender, os.getpid())
            workers.append(context.Process(target=_work, args=arguments, daemon=True))
            with without_sigint():
                workers[-1].start()
            sender.close()
            receivers.append(receiver)
        _watch(workers, receivers, rows_done, progress)
    finally:
        for worker in workers:
            worker.terminate()
        for worker in workers:
            worker.join()


def _watch(workers: list, receivers: list[Connection], rows_done, progress: Callable[[int], None]) -> None:
    told = 0
    running = dict(zip((worker.sentinel for worker in workers), zip(workers, receivers, strict=True), strict=True))
    while running:
        ended = wait(list(running), timeout=POLL_SECONDS)
        done = rows_done.value
        progress(done - told)
        told = done
        for sentinel in ended:
            worker, receiver = running.pop(sentinel)
            worker.join()
            with contextlib.suppress(EOFError):  # it closed without a message
                raise UserError(receiver.recv())
            if worker.exitcode < 0:
                name = signal.Signals(-worker.exitcode).name
                raise UserError(
                    f"a packing process was ended by {name} (out of memory?): the same command goes on where it "
                    "stopped; give it fewer --workers if memory is short"
                )
            if worker.exitcode:
                raise UserError(f"a packing process failed with exit code {worker.exitcode}; its error stands above")


def _work(job: Job, shards: list[int], next_shard, rows_done, sender: Connection, parent: int) -> None:
    _end_with_parent(parent)
    warnings.simplefilter("ignore")  # about odd metadata in pictures
    with _CapturedStderr() as messages:
        checker = ImageChecker(job.limits, messages.new)
        count = 0

        def tick() -> None:
            nonlocal count
            count += 1
            if count % TICK_ROWS == 0:
                with rows_done.get_lock():
                    rows_done.value += TICK_ROWS
                _end_if_orphaned(parent)

        while True:
            with next_shard.get_lock():
                position = next_shard.value
                next_shard.value += 1
            if position >= len(shards):
                break
            try:
                with os_errors_in_words(job.folder):
                    pack_shard(job, shards[position], checker, tick)
            except UserError as error:
                sender.send(str(error))
                return
        with rows_done.get_lock():
            rows_done.value += count % TICK_ROWS


def _end_with_parent(parent: int) -> None:
    """Let the system end this process when its parent dies, so that it never writes beside the next packer's."""
    set_parent_death_signal = 1  # PR_SET_PDEATHSIG
    prctl = getattr(ctypes.CDLL(None), "prctl", None)  # Linux
    if prctl is not None:
        prctl(set_parent_death_signal, signal.SIGKILL)
    _end_if_orphaned(parent)


def _end_if_orphaned(parent: int) -> None:
    if os.getppid() != parent:
        os._exit(1)


class _CapturedStderr:
    """Sends what native code writes to stderr into a file, where the reason of a failed decode can be read.

    An exception that leaves the block gets the real stderr back first.
    """

    def __enter__(self) -> _CapturedStderr:
        self._file = tempfile.TemporaryFile()
        self._real = os.dup(2)
        sys.stderr.flush()
        os.dup2(self._file.fileno(), 2)
        return self

    def __exit__(self, *_) -> None:
        sys.stderr.flush()
        os.dup2(self._real, 2)

    def new(self) -> str:
        """What was written since the last call."""
        text = os.pread(self._file.fileno(), 1 << 16, 0).decode("utf-8", "replace")
        os.ftruncate(self._file.fileno(), 0)
        os.lseek(self._file.fileno(), 0, os.SEEK_SET)
        return text
