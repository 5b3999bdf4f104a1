"""Checkpoints: complete or invisible, checked before they are used, thinned out as the run goes on.

    checkpoints/latest                    name of the newest one
    checkpoints/step_00001000/            DeepSpeed's files, and
        state.json                        what the run was and where it stood; names and sizes of all other files
        rank_00000.pt                     each rank's random state
        frozen.pt                         fp32 weights of a locked tower, if there is one
        ema_00000.pt                      each rank's part of the averaged weights, if there are any (see ema.py)

A save is copied to host memory in the step, written by a thread under `step_00001000.tmp`, and renamed when every rank
has finished, so a folder with its final name is whole unless somebody damaged it later; `verify` tells by the sizes and
the checksum in state.json.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import UserError
from ..model import averaged
from .background import BackgroundWriter, reason
from .distributed import World
from .ema import WeightAverage
from .log import logger
from .run_folder import sync_folder, write_text
from .snapshot import engine_files
from .step import RandomState

STATE = "state.json"
FROZEN = "frozen.pt"
LATEST = "latest"
FORMAT = 3
"""Of a save. The order of parameters in the optimizer's groups is part of it: masters and moments lie without names."""
_NAME = re.compile(r"step_(\d{8,})$")


@dataclass(frozen=True)
class Position:
    """Where a run stands: optimizer steps done, and the epoch with the samples that it has consumed."""

    step: int = 0
    epoch: int = 0
    samples: int = 0


def checkpoint_name(step: int) -> str:
    return f"step_{step:08d}"


def verify(folder: Path) -> dict[str, Any]:
    """state.json of a checkpoint of which every file is there in full; `UserError` otherwise."""
    try:
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
        found = state.pop("format"), state.pop("checksum", None)
    except OSError as error:
        raise UserError(f"{folder} is not a complete checkpoint: no {STATE} ({error.strerror}); use another") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{folder} is not a complete checkpoint: {STATE} is damaged; use another") from None
    if found[0] != FORMAT:
        raise UserError(
            f"{folder} was written by another version (format {found[0]}, expected {FORMAT}); go on with that version, "
            f"or start a new run from its weights: --pretrained {folder}"
        )
    if found[1] != _checksum(state):
        raise UserError(f"{folder}: {STATE} was changed after it was written; put it back, or use another checkpoint")
    for name, size in state["files"].items():
        path = folder / name
        found = path.stat().st_size if path.is_file() else None
        if found != size:
            what = "is missing" if found is None else f"has {found} bytes instead of {size}"
            raise UserError(f"{folder} is not complete: {name} {what}; use another checkpoint")
    return state


def _checksum(state: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def complete_checkpoints(folder: Path) -> list[Path]:
    """Folders named like checkpoints in `folder`, newest first; they still have to be verified."""
    if not folder.is_dir():
        return []
    try:
        found = [(int(match.group(1)), path) for path in folder.iterdir() if (match := _NAME.match(path.name))]
    except OSError as error:
        raise UserError(f"cannot read the checkpoints in {folder}: {error.strerror}") from None
    return [path for _, path in sorted(found, reverse=True)]


def find_checkpoint(resume: str, own: Path) -> tuple[Path, dict[str, Any]] | None:
    """The checkpoint to go on from, with its state; None when `auto` finds none and may start afresh.

    resume: "auto" for the newest complete one in `own` (the run's checkpoints folder), or a path: of a run folder, of
        its checkpoints folder, or of one checkpoint. Broken ones are passed over with a warning, except one that is
        named itself.
    """
    folder = own if resume == "auto" else Path(resume)
    if not folder.is_dir():
        if resume == "auto":
            return None
        raise UserError(f"--resume {resume}: no such folder; give a run folder or a checkpoint, or 'auto'")
    if _NAME.match(folder.name):
        return folder, verify(folder)
    if (folder / "checkpoints").is_dir():
        folder = folder / "checkpoints"
    candidates = complete_checkpoints(folder)
    for candidate in candidates:
        try:
            state = verify(candidate)
        except UserError as error:
            logger.warning("passing over a broken checkpoint: %s", error)
            continue
        _compare_latest(folder, candidate)
        return candidate, state
    if candidates:
        raise UserError(
            f"none of the {len(candidates)} checkpoints in {folder} can be used (the newest: {candidates[0].name}): "
            "restore one, or start a new run in another folder"
        )
    if resume == "auto":
        return None
    raise UserError(f"--resume {resume}: there is no checkpoint in it; give a run folder or a checkpoint, or 'auto'")


def _compare_latest(folder: Path, chosen: Path) -> None:
    latest = folder / LATEST
    try:
        named = latest.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        named = None
    if named != chosen.name:
        says = "is missing" if named is None else f"says '{named}'"
        logger.warning("%s %s; going on from the newest complete checkpoint, %s", latest, says, chosen.name)


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

        def complete(sizes: dict[str, int]) -> None:
            try:
                self._publish(temporary, final, content | {"files": sizes})
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
        content = {"format": FORMAT, "checksum": _checksum(state), **state}
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
            step = int(_NAME.match(path.name).group(1))
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
        from .reshard import universal_copy

        self._bytes = sum(state["files"].values())
        if state["world_size"] == self._world.world_size or not engine.zero_optimization():
            _load(engine, folder.parent, folder.name)
        else:
            with universal_copy(self._world, folder, self._folder) as copy:
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
