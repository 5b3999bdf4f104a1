"""A run's folder: what it holds, and when one may be written to.

args.json  model.json  ds_config.json  training.log  metrics.jsonl  tensorboard/
checkpoints/step_00001000/  checkpoints/latest
run.lock, which the job that writes here holds locked
weights.pt, when the run has ended, and weights_ema.pt with its averaged weights
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
from pathlib import Path
from typing import IO, Any

from ..errors import UserError
from ..model.averaged import FINAL_WEIGHTS as FINAL_AVERAGED
from ..model.whole_file import remove_leftovers

LOCK = "run.lock"


class RunFolder:
    """The paths of a run."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.args = self.path / "args.json"
        self.model = self.path / "model.json"
        self.deepspeed_config = self.path / "ds_config.json"
        self.log = self.path / "training.log"
        self.metrics = self.path / "metrics.jsonl"
        self.tensorboard = self.path / "tensorboard"
        self.checkpoints = self.path / "checkpoints"
        self.weights = self.path / "weights.pt"
        self.weights_ema = self.path / FINAL_AVERAGED
        self._lock: IO[str] | None = None

    @property
    def holds_a_run(self) -> bool:
        """Whether a run got as far as its description; one that was refused before leaves an empty folder."""
        return self.args.exists() or self.metrics.exists() or any(self.checkpoints.glob("*"))

    def check_free(self, resume: str | None) -> None:
        """`UserError` if there is a run already and nobody said to go on with it."""
        try:
            holds_a_run = self.holds_a_run
        except OSError as error:
            raise UserError(f"cannot read --output {self.path}: {error.strerror}; choose another folder") from None
        if holds_a_run and resume is None:
            raise UserError(
                f"{self.path} already holds a run: give --resume auto to go on with it, or another --output"
            )

    def create(self, resume: str | None = None) -> None:
        """Make the folder, see that it can be written to, and keep other jobs out of it for as long as this one lives.

        Rank 0 calls it. Two jobs that start at the same time both find the folder free; here one of them is refused.
        What a job that was killed while it wrote its final weights has left is removed.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.checkpoints.mkdir(exist_ok=True)
            self._lock_it()
        except OSError as error:
            raise UserError(f"cannot write to --output {self.path}: {error.strerror}; choose another folder") from None
        self.check_free(resume)
        for weights in (self.weights, self.weights_ema):
            remove_leftovers(weights)

    def _lock_it(self) -> None:
        lock = open(self.path / LOCK, "a+", encoding="utf-8")  # noqa: SIM115 - held open: closing it gives the lock up
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                lock.seek(0)
                raise UserError(
                    f"another job ({lock.read().strip() or 'unknown'}) is writing to --output {self.path}: wait until "
                    "it has ended, or choose another --output"
                ) from None
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):  # file systems without locks
                raise
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        lock.flush()
        self._lock = lock

    def describe(self, args: dict[str, Any], model: dict[str, Any], deepspeed_config: dict[str, Any]) -> None:
        """Write the three JSON files that say what the run is."""
        write_json(self.model, model)
        write_json(self.deepspeed_config, deepspeed_config)
        write_json(self.args, args)


def write_json(path: Path, value: Any) -> None:
    """Write JSON under `path`: all of it or nothing new."""
    try:
        write_text(path, json.dumps(value, indent=2) + "\n")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; free some space or choose another --output") from None


def write_text(path: Path, text: str) -> None:
    """Write a small file under `path`, on the disk before it shows under its name."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder onto the disk, where the file system can."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(number)
