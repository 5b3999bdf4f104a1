"""Runs a function in several processes that share a gloo group, as the ranks of a job."""

from __future__ import annotations

import os
import queue
import socket
import time
import traceback
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any

from forks import context


def run_ranks(world_size: int, function: Callable, *args: Any, timeout: float = 90) -> list[Any]:
    """`function(*args)` on each of `world_size` ranks; their results by rank. A rank that fails fails the test.

    The function must stand at the top level of its module, and return what pickle takes (numpy rather than tensors).
    """
    results = context.Queue()
    port = free_port()
    processes = [
        context.Process(target=_rank, args=(rank, world_size, port, results, function, args), daemon=True)
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    try:
        return _collect(results, world_size, time.monotonic() + timeout)
    finally:
        for process in processes:
            process.join(5)
            if process.is_alive():
                process.kill()


def start_rank(function: Callable, *args: Any) -> BaseProcess:
    """`function(*args)` in a process that is the only rank; it runs on until it ends or is killed."""
    results = context.Queue()
    process = context.Process(target=_rank, args=(0, 1, free_port(), results, function, args), daemon=True)
    process.results = results  # which must live as long
    process.start()
    return process


def _collect(results, world_size: int, deadline: float) -> list[Any]:
    values = {}
    while len(values) < world_size:
        try:
            rank, value, error = results.get(timeout=max(deadline - time.monotonic(), 0.1))
        except queue.Empty:
            raise AssertionError(f"only ranks {sorted(values)} of {world_size} ended in time") from None
        if error:
            raise AssertionError(f"rank {rank} failed:\n{error}")
        values[rank] = value
    return [values[rank] for rank in range(world_size)]


def _rank(rank: int, world_size: int, port: int, results, function: Callable, args: tuple) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    import torch

    torch.set_num_threads(1)
    import deepspeed

    # Gloo alone: DeepSpeed would first compile its shared-memory collective, which training does not use.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    try:
        deepspeed.init_distributed(dist_backend="gloo", verbose=False)
        results.put((rank, function(*args), None))
    except BaseException:
        results.put((rank, None, traceback.format_exc()))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
