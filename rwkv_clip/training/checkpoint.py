"""Checkpoints: complete or invisible, thinned out as the run goes on.

    checkpoints/latest                    name of the newest one
    checkpoints/step_00001000/            DeepSpeed's files, and
        state.json                        what the run was, where it stood; names, sizes, checksums of all other files
        rank_00000.pt                     each rank's random state
        frozen.pt                         fp32 weights of a locked tower, if there is one
        ema_00000.pt                      each rank's part of the averaged weights, if there are any (see ema.py)

A save is copied to host memory in the step, written by a thread under `step_00001000.tmp`, and renamed when every rank
has finished, so a folder with its final name is whole unless it was damaged later, which resume.py finds by state.json.
"""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import UserError
from ..model import averaged
from ..model.checksum import CHECKSUMS, STATE
from .background import BackgroundWriter, Written, reason
from .distributed import World
from .ema import WeightAverage
from .log import logger
from .resume import FORMAT, LATEST, NAME, checkpoint_name, complete_checkpoints, state_checksum
from .run_folder import sync_folder, write_text
from .snapshot import engine_files
from .step import RandomState

FROZEN = "frozen.pt"


@dataclass(frozen=True)
class Position:
    """Where a run stands: optimizer steps done, and the epoch with the samples that it has consumed."""

    step: int = 0
    epoch: int = 0
    samples: int = 0


class Checkpoints:
    """Saves and loads of one run.

    folder: the run's checkpoints. keep_last: newest ones to keep. keep_every: steps whose multiples are kept too.
    `saved_step` is the step of the last save, which `finish` completes.
    """

    def __init__(self, world: World, folder: Path, keep_last: int, keep_every: int | None) -> None:
        self._world = world
        self._folder = folder
        self._keep_last = keep_last
        self._keep_every = keep_every
        self._bytes = 0
        self._writer = BackgroundWriter(world)
        self.saved_step: int | None = None

    @property
    def has_failed(self) -> bool:
        """Whether this rank knows that the save under way cannot be completed; `finish` then raises on all ranks."""
        return self._writer.has_failed

    def prepare(self, resumed_from: Path | None) -> None:
        """Clear away what interrupted saves left, and set newer checkpoints aside when the run goes back. Rank 0."""
        try:
            for path in self._folder.iterdir():
                if path.suffix == ".tmp":
                    shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
            if resumed_from is not None and resumed_from.parent.resolve() == self._folder.resolve():
                self._set_aside(resumed_from)
        except OSError as error:
            raise UserError(f"cannot write to {self._folder}: {error.strerror}; make it writable") from None

    def _set_aside(self, resumed_from: Path) -> None:
        for path in complete_checkpoints(self._folder):
            if path.name > resumed_from.name:
                aside = path.with_name(f"{path.name}.set_aside")
                shutil.rmtree(aside, ignore_errors=True)
                path.rename(aside)
                logger.warning("%s is newer than where the run goes on from: renamed %s", path, aside.name)

    def save(
        self,
        engine: Any,
        position: Position,
        state: dict[str, Any],
        frozen: dict[str, Tensor],
        average: WeightAverage | None = None,
    ) -> None:
        """Begin a checkpoint; every rank calls it after the same step, and may change its weights when it returns.

        state: JSON-able description kept with it. frozen: fp32 weights that no optimizer holds, which never change.
        Raises `UserError` when this save cannot be begun, or the one before could not be completed; what is there stays
        as it is.
        """
        self.finish()
        world, started = self._world, time.perf_counter()
        final = self._folder / checkpoint_name(position.step)
        temporary = final.with_name(final.name + ".tmp")
        with world.together():
            if world.is_first:
                self._make_room(temporary)
        try:
            files = engine_files(engine, temporary)
        except (OSError, RuntimeError) as error:
            # Others may be waiting inside DeepSpeed's save; they learn of it through the watchdog.
            raise UserError(f"cannot write the checkpoint {temporary}: {reason(error, self._folder)}") from error
        files[temporary / _random_name(world)] = _random_state(world)
        shard = average.shard() if average is not None else None
        if shard is not None:
            files[temporary / averaged.file_name(world.rank)] = shard
        if world.is_first and frozen:
            files[temporary / FROZEN] = frozen
        # As it is now, and as it will be read.
        content = json.loads(json.dumps({"position": asdict(position), **state}))
        copied = time.perf_counter() - started

        def complete(written: dict[str, Written]) -> None:
            sizes = {name: size for name, (size, _) in written.items()}
            checksums = {name: checksum for name, (_, checksum) in written.items()}
            try:
                self._publish(temporary, final, content | {"files": sizes, CHECKSUMS: checksums})
            except OSError as error:
                raise UserError(f"cannot finish the checkpoint {final}: {reason(error, self._folder)}") from error
            seconds = time.perf_counter() - started
            logger.info("saved %s in %.1f s, of which training waited %.2f s", final, seconds, copied)

        self._writer.start(files, complete)
        self.saved_step = position.step

    def finish(self) -> None:
        """Wait for the save under way; every rank calls it. `UserError` on all ranks if it could not be completed."""
        self._writer.finish()

    def _make_room(self, temporary: Path) -> None:
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            free = shutil.disk_usage(self._folder).free
        except OSError as error:
            raise UserError(f"cannot write the checkpoint {temporary}: {reason(error, self._folder)}") from None
        if free < self._bytes:
            shutil.rmtree(temporary, ignore_errors=True)
            raise UserError(
                f"no room for a checkpoint in {self._folder}: the last one took {self._bytes / 2**20:.0f} MiB and "
                f"{free / 2**20:.0f} MiB are free; make room, then go on with --resume auto"
            )

    def _publish(self, temporary: Path, final: Path, state: dict[str, Any]) -> None:
        content = {"format": FORMAT, "checksum": state_checksum(state), **state}
        write_text(temporary / STATE, json.dumps(content, indent=2) + "\n")
        sync_folder(temporary)
        shutil.rmtree(final, ignore_errors=True)
        temporary.rename(final)
        write_text(self._folder / LATEST, final.name)
        sync_folder(self._folder)
        self._bytes = sum(state["files"].values())
        self._thin_out()

    def _thin_out(self) -> None:
        for path in complete_checkpoints(self._folder)[self._keep_last :]:
            step = int(NAME.match(path.name).group(1))
            if self._keep_every is None or step % self._keep_every:
                doomed = path.with_name(path.name + ".tmp")
                path.rename(doomed)
                shutil.rmtree(doomed, ignore_errors=True)

    def load(
        self, engine: Any, folder: Path, state: dict[str, Any], average: WeightAverage | None = None
    ) -> dict[str, Tensor]:
        """Bring the engine, the averaged weights and this rank's random state to a checkpoint.

        Returns the frozen weights kept with it. Raises `UserError` when a file cannot be read.

        With another number of ranks the optimizer's state is divided anew (DeepSpeed's universal checkpoint), moments
        included; random states start from each rank's own again.
        """
        from .reshard import groups_of_their_own, universal_copy

        self._bytes = sum(state["files"].values())
        if state["world_size"] == self._world.world_size or not engine.zero_optimization():
            _load(engine, folder.parent, folder.name)
        else:
            with universal_copy(self._world, folder, self._folder) as copy, groups_of_their_own(engine):
                _load(engine, copy.parent, copy.name, universal=True)
        if state["world_size"] == self._world.world_size:
            RandomState(device=self._world.device, **_read(folder / _random_name(self._world))).restore()
        if average is not None:
            average.load(folder)
        self.saved_step = state["position"]["step"]
        path = folder / FROZEN
        return _read(path) if path.is_file() else {}


def _load(engine: Any, folder: Path, tag: str, universal: bool = False) -> None:
    engine._config.load_universal_checkpoint = universal
    try:
        path, _ = engine.load_checkpoint(str(folder), tag=tag)
    except Exception as error:
        raise _unreadable(folder / tag, error) from error
    finally:
        engine._config.load_universal_checkpoint = False
    if path is None:
        raise UserError(f"DeepSpeed found nothing to load in {folder / tag}")


def _read(path: Path) -> dict[str, Any]:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever pickle and zip make of a damaged file
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> UserError:
    words = " ".join(str(error).split())[:300] or type(error).__name__
    return UserError(f"cannot load the checkpoint {path}: {words}; give --resume an earlier one")


def _random_name(world: World) -> str:
    return f"rank_{world.rank:05d}.pt"


def _random_state(world: World) -> dict[str, Any]:
    state = vars(RandomState.capture(world.device))
    return {name: value for name, value in state.items() if name != "device"}
