"""Which checkpoint a run goes on from: the newest that all ranks find whole, or the one that was named."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..model.checksum import CHECKSUMS, STATE, check
from .distributed import CommonError, World
from .log import logger, phase

LATEST = "latest"
FORMAT = 3
"""Of a save. The order of parameters in the optimizer's groups is part of it: masters and moments lie without names."""
NAME = re.compile(r"step_(\d{8,})$")
# Files of one rank: DeepSpeed's of its part of the optimizer's state, or of the model, and its random state.
_OF_A_RANK = re.compile(r"(?:.*zero_pp_)?rank_(\d+)[_.]")


def checkpoint_name(step: int) -> str:
    return f"step_{step:08d}"


def state_checksum(state: dict[str, Any]) -> str:
    """Of state.json's content, without the format and the checksum itself."""
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def verify(folder: Path) -> dict[str, Any]:
    """state.json of a checkpoint of which every file is there and has its size; `UserError` otherwise.

    What the files hold is checked by the ranks that read them: `find_checkpoint`.
    """
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
    if found[1] != state_checksum(state):
        raise UserError(f"{folder}: {STATE} was changed after it was written; put it back, or use another checkpoint")
    for name, size in state["files"].items():
        path = folder / name
        found = path.stat().st_size if path.is_file() else None
        if found != size:
            what = "is missing" if found is None else f"has {found} bytes instead of {size}"
            raise UserError(f"{folder} is not complete: {name} {what}; use another checkpoint")
    return state


def complete_checkpoints(folder: Path) -> list[Path]:
    """Folders named like checkpoints in `folder`, newest first; they still have to be verified."""
    if not folder.is_dir():
        return []
    try:
        found = [(int(match.group(1)), path) for path in folder.iterdir() if (match := NAME.match(path.name))]
    except OSError as error:
        raise UserError(f"cannot read the checkpoints in {folder}: {error.strerror}") from None
    return [path for _, path in sorted(found, reverse=True)]


def find_checkpoint(resume: str, own: Path, world: World) -> tuple[Path, dict[str, Any]] | None:
    """The checkpoint to go on from, with its state; None when `auto` finds none and may start afresh.

    Every rank calls it. Rank 0 looks for checkpoints and at the sizes of their files, each rank at the bytes of those
    that it will read. Broken ones are passed over with a warning, except one that is named itself.

    resume: "auto" for the newest complete one in `own` (the run's checkpoints folder), or a path: of a run folder, of
        its checkpoints folder, or of one checkpoint.
    """
    candidates: list[Path] = []
    with world.together():
        if world.is_first:
            candidates = _candidates(resume, own)
    candidates = [Path(path) for path in world.from_first([str(path) for path in candidates])]
    is_named = resume != "auto" and NAME.match(Path(resume).name) is not None
    for candidate in candidates:
        with world.together():
            if not candidate.is_dir():
                raise UserError(
                    f"{candidate} is not to be seen from here: --output must be on a disk that all machines share"
                )
        try:
            state = _verified(candidate, world)
        except CommonError as error:
            if is_named:
                raise
            if world.is_first:
                logger.warning("passing over a broken checkpoint: %s", error)
            continue
        if world.is_first and not is_named:
            _compare_latest(candidate)
        return candidate, state
    if candidates:
        raise CommonError(
            f"none of the {len(candidates)} checkpoints in {candidates[0].parent} can be used (the newest: "
            f"{candidates[0].name}): restore one, or start a new run in another folder"
        )
    return None


def _candidates(resume: str, own: Path) -> list[Path]:
    """Checkpoints to try in turn; none only where `auto` may start afresh."""
    folder = own if resume == "auto" else Path(resume)
    if not folder.is_dir():
        if resume == "auto":
            return []
        raise UserError(f"--resume {resume}: no such folder; give a run folder or a checkpoint, or 'auto'")
    if NAME.match(folder.name):
        return [folder]
    if (folder / "checkpoints").is_dir():
        folder = folder / "checkpoints"
    found = complete_checkpoints(folder)
    if not found and resume != "auto":
        raise UserError(
            f"--resume {resume}: there is no checkpoint in it; give a run folder or a checkpoint, or 'auto'"
        )
    return found


def _verified(folder: Path, world: World) -> dict[str, Any]:
    """state.json of a checkpoint that all ranks can go on from, on every rank; `CommonError` otherwise."""
    state = None
    with world.together():
        if world.is_first:
            state = verify(folder)
    state = world.from_first(state)
    if CHECKSUMS not in state:
        logger.info("%s is of a version that kept no checksums: the bytes of its files are not checked", folder)
    same_ranks = state["world_size"] == world.world_size
    with world.together(), phase("checking the checkpoint"):
        for name, recorded in state.get(CHECKSUMS, {}).items():
            if is_read_by(world.rank, name, same_ranks):
                check(folder / name, recorded)
    return state


def is_read_by(rank: int, name: str, same_ranks: bool) -> bool:
    """Whether a rank reads a file of a checkpoint when the run goes on.

    same_ranks: as many as have saved it. Otherwise rank 0 divides the optimizer's state anew, for all of them, and
    nobody takes a random state.
    """
    owner = _OF_A_RANK.match(name)
    if owner is None:
        return True  # the model, a locked tower, averaged weights
    return rank == int(owner[1]) if same_ranks else rank == 0 and "_states" in name


def _compare_latest(chosen: Path) -> None:
    latest = chosen.parent / LATEST
    try:
        named = latest.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        named = None
    if named != chosen.name:
        says = "is missing" if named is None else f"says '{named}'"
        logger.warning("%s %s; going on from the newest complete checkpoint, %s", latest, says, chosen.name)
