"""Processes that work beside the one that was started."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import resource_tracker
from typing import Any

from ..errors import UserError


@contextlib.contextmanager
def without_sigint() -> Iterator[None]:
    """Processes started in the block never see Ctrl-C, which reaches all of a terminal: their parent ends them.

    Blocked from the start, it prints no traceback of a process that is still importing.
    """
    resource_tracker.ensure_running()  # its start would unblock the signal
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def map_in_processes(function: Callable, items: Sequence, done: Callable[[Any], None] = lambda _: None) -> list:
    """`[function(item), ...]`, several items in processes of their own, one a core.

    Args:
        done: called with each result as it comes, in any order.

    Raises:
        UserError: the system ended a process; also what `function` raises.
    """
    workers = min(len(items), len(os.sched_getaffinity(0)))
    if workers < 2 or len(items) < 4:
        results = []
        for item in items:
            results.append(function(item))
            done(results[-1])
        return results
    others = set(multiprocessing.active_children())
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context) as pool:
        try:
            with without_sigint():
                futures = [pool.submit(function, item) for item in items]
            for future in as_completed(futures):
                done(future.result())
            return [future.result() for future in futures]
        except BaseException as error:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in set(multiprocessing.active_children()) - others:
                process.terminate()
            if isinstance(error, BrokenProcessPool):
                raise UserError(
                    "a process that reads the source was ended (out of memory?): the same command goes on where it "
                    "stopped"
                ) from None
            raise
