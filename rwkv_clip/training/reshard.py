"""Resuming with another number of GPUs: DeepSpeed's universal checkpoint, made and removed without the user's help."""

from __future__ import annotations

import contextlib
import io
import shutil
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import UserError
from .distributed import World
from .log import logger, phase
from .optimizer import separate_steps


@contextlib.contextmanager
def universal_copy(world: World, checkpoint: Path, workspace: Path) -> Iterator[Path]:
    """A copy of a checkpoint in which each parameter's master and moments are whole, removed afterwards.

    checkpoint: as saved by any number of ranks under ZeRO-1, 2 or 3. workspace: a folder that all ranks can read.
    """
    copy = workspace / f"{checkpoint.name}.universal.tmp"
    with world.together():
        if world.is_first:
            with phase("dividing the optimizer's state anew"):
                _convert(checkpoint, copy)
    try:
        yield copy
    finally:
        world.wait()
        if world.is_first:
            shutil.rmtree(copy, ignore_errors=True)
            (workspace / "latest_universal").unlink(missing_ok=True)


@contextlib.contextmanager
def groups_of_their_own(engine: Any) -> Iterator[None]:
    """Around DeepSpeed's load of a universal copy, which gives groups and weights what is not theirs.

    With ZeRO stage 3 all groups get the first one's options, its weight decay among them.
    """
    groups = engine.basic_optimizer.param_groups
    # The rate is the one that the run had reached.
    options = [{name: value for name, value in group.items() if name not in ("params", "lr")} for group in groups]
    yield
    if hasattr(engine.optimizer, "fp32_partitioned_groups_flat"):
        for group, own in zip(groups, options, strict=True):
            group.update(own)
    separate_steps(engine.basic_optimizer)


def _convert(checkpoint: Path, copy: Path) -> None:
    from deepspeed.checkpoint import ds_to_universal

    shutil.rmtree(copy, ignore_errors=True)
    words = io.StringIO()
    try:
        with contextlib.redirect_stdout(words), contextlib.redirect_stderr(words):
            ds_to_universal.main(
                Namespace(
                    input_folder=str(checkpoint),
                    output_folder=str(copy),
                    num_extract_workers=1,  # more would fork a process that may hold a GPU
                    num_merge_workers=1,
                    keep_temp_folder=False,
                    strict=True,
                    inject_missing_state=True,
                )
            )
    except Exception as error:
        logger.debug("%s", words.getvalue())
        shutil.rmtree(copy, ignore_errors=True)
        raise UserError(
            f"cannot divide {checkpoint} for another number of GPUs ({' '.join(str(error).split())[:300]}): resume "
            "with the number that saved it"
        ) from error
