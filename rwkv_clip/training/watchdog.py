"""A thread that notices when another process of the job has failed or fallen silent, and ends this one.

A rank that fails leaves its message in the store; the others, perhaps waiting for it in a collective, read it within
seconds and leave. A rank that is killed leaves no message: each rank also watches the heartbeat of the next one.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
import time

import torch.distributed as dist

from .distributed import World
from .launcher import ancestors_now, launcher_is_gone
from .signals import StopRequest

INTERVAL = 2.0
"""Seconds between two looks."""
START_LOOKS = 4
"""Looks that a start which is asked to stop may take to break off by itself."""
SILENT_LOOKS = 15
"""Looks without a heartbeat after which a rank is taken for dead (counted, since a suspended job loses no time)."""


class Watchdog:
    """Runs from `start` to `stop`; passes stop requests between the ranks as well."""

    def __init__(self, world: World, stop_request: StopRequest) -> None:
        self._world = world
        self._stop_request = stop_request
        self._store = world.connect()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._family = ancestors_now()
        self._beats = 0
        self._neighbour_beats = b""
        self._silent = 0
        self._stopping_looks = 0

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Call it on every rank after a common wait: a process that leaves early would be missed."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(timeout=10)

    def _run(self) -> None:
        while not self._ended.wait(INTERVAL):
            if launcher_is_gone(self._world.place, *self._family):
                self._stop_request.request("the end of the launcher")
            self._end_start()
            if self._store is None:
                continue
            try:
                self._look()
            except RuntimeError as error:  # torch's name for a lost connection
                if not self._ended.wait(1.0):
                    self._end_start(at_once=True)
                    self._leave(f"lost the connection to rank 0 ({self._world.hosts[0]}): {str(error).splitlines()[0]}")

    def _end_start(self, at_once: bool = False) -> None:
        """Leave a start that was asked to stop and hangs, perhaps in a collective with a rank that has left."""
        if self._stop_request.requested and not self._stop_request.training_began:
            self._stopping_looks += 1
            if at_once or self._stopping_looks > START_LOOKS:
                os._exit(self._stop_request.exit_status)

    def _look(self) -> None:
        store, world = self._store, self._world
        if world.is_failing:
            return
        if store.check(["failure"]):
            failure = store.get("failure").decode()
            self._leave(failure if world.is_first else "")
        self._share_stop()
        self._beats += 1
        store.set(f"beat/{world.rank}", str(self._beats))
        neighbour = (world.rank + 1) % world.world_size
        beats = store.get(f"beat/{neighbour}") if store.check([f"beat/{neighbour}"]) else b""
        # One that was killed before its first beat is as silent: watchdogs start as soon as all ranks have met.
        self._silent = self._silent + 1 if beats == self._neighbour_beats else 0
        self._neighbour_beats = beats
        if self._silent >= SILENT_LOOKS:
            message = f"rank {neighbour} ({world.hosts[neighbour]}) has been silent for {SILENT_LOOKS * INTERVAL:.0f} s"
            store.set("failure", message)
            self._leave(message)

    def _share_stop(self) -> None:
        store, request = self._store, self._stop_request
        if store.check(["stop"]):
            request.request(store.get("stop").decode())
        elif request.requested:
            store.set("stop", _told(self._world, request))

    def _leave(self, message: str) -> None:
        if self._ended.is_set():
            return
        if message:
            print(f"error: {message}", file=sys.stderr, flush=True)
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(1)


def _told(world: World, request: StopRequest) -> str:
    return f"{request.reason} to rank {world.rank} ({world.hosts[world.rank]})"


def announce_stop(world: World, request: StopRequest) -> None:
    """Tell the other ranks, through their watchdogs, that this one was asked to stop before training began."""
    if world.store is not None:
        with contextlib.suppress(RuntimeError):
            if not world.store.check(["stop"]):
                world.store.set("stop", _told(world, request))


def failure_elsewhere(world: World) -> str | None:
    """Why another rank has failed, when that is what made this one fail; None when it failed by itself."""
    if world.store is None:
        return None
    try:
        return world.store.get("failure").decode() if world.store.check(["failure"]) else None
    except RuntimeError:
        return f"lost the connection to rank 0 ({world.hosts[0]})"


def lost_peer(world: World, error: BaseException) -> str | None:
    """One line for a collective that failed as another rank was killed, which leaves no message of its own."""
    words = " ".join(str(error).split())
    if not isinstance(error, dist.DistBackendError) and not re.search(
        r"[Cc]onnection (closed|reset)|[Bb]roken pipe", words
    ):
        return None
    return (
        f"rank {world.rank} ({world.hosts[world.rank]}) lost another rank, which was killed or whose machine failed "
        f"({words[:150]}); go on with --resume auto"
    )


def announce_failure(world: World, message: str) -> None:
    """Tell the other ranks why this one fails, and give them time to hear it where the store ends with this rank."""
    if world.store is None:
        return
    world.is_failing = True
    with contextlib.suppress(RuntimeError):
        if not world.store.check(["failure"]):
            line = " ".join(message.split())
            world.store.set("failure", f"rank {world.rank} ({world.hosts[world.rank]}) failed: {line}")
    if world.is_first:
        time.sleep(2 * INTERVAL)
