"""Starts real training jobs of the smallest kind: their data, their model, their processes."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
from forks import context

from rwkv_clip.data.recordio import RecordWriter

REPOSITORY = Path(__file__).parents[2]
TRAIN = REPOSITORY / "launch" / "train.py"
CONFIGS = REPOSITORY / "ds_configs"
PICTURES = ("rgb.jpg", "sub444.jpg", "gray.jpg", "progressive.jpg", "rgb.png")

MODEL = {
    "image": {"image_size": 16, "patch_size": 8, "width": 16, "depth": 2, "num_heads": 2, "hidden_rate": 2},
    "text": {"context_length": 12, "vocab_size": 49408, "width": 16, "depth": 2, "num_heads": 2, "ffn_width": 32},
}


def write_model(path: Path, drop_path_rate: float = 0.0) -> Path:
    model = {**MODEL, "image": {**MODEL["image"], "drop_path_rate": drop_path_rate}}
    path.write_text(json.dumps(model))
    return path


def label(number: int) -> np.ndarray:
    """Three captions [start, a word or two, end, 0, ...], as float32 [231]."""
    captions = np.zeros((3, 77), np.float32)
    captions[:, 0], captions[:, 1], captions[:, 2], captions[:, 3] = 49406, 320 + number % 7, 1000 + number, 49407
    captions[1:, 1] += [1, 2]
    return captions.reshape(-1)


def write_data(prefix: Path, payloads: list[bytes]) -> Path:
    """A RecordIO pair without a manifest."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    with RecordWriter(prefix) as writer:
        for key, payload in enumerate(payloads):
            writer.write(key, label(key), payload)
    return prefix


def pictures(fixtures: Path, count: int) -> list[bytes]:
    return [(fixtures / "img" / PICTURES[number % len(PICTURES)]).read_bytes() for number in range(count)]


def write_evaluation(folder: Path, fixtures: Path) -> Path:
    """A prepared folder to evaluate on: pictures of two classes, each with a caption."""
    folder.mkdir()
    names = ["rgb.jpg", "gray.jpg", "rgb.png"]
    for name in names:
        shutil.copy(fixtures / "img" / name, folder)
    rows = "".join(f"{name}\t{number % 2}\n" for number, name in enumerate(names))
    (folder / "zs_kinds.tsv").write_text("image\tlabel\n" + rows)
    (folder / "zs_kinds.json").write_text(json.dumps({"classes": ["square", "circle"], "templates": ["a {}"]}))
    rows = "".join(f"{name}\ta picture {name}\n" for name in names)
    (folder / "retrieval_pairs.tsv").write_text("image\tcaption\n" + rows)
    return folder


@dataclass
class Result:
    """How a job ended."""

    status: int
    output: str
    seconds: float

    @property
    def errors(self) -> list[str]:
        return [line for line in self.output.splitlines() if line.startswith("error: ")]


class Job:
    """A running job.

    launcher: "deepspeed" or "torchrun", both with two ranks, "pdsh" (deepspeed on the machines of `hostfile`, with
    the stand-in beside this file), or "alone". prefix: words in front of its command.
    """

    def __init__(
        self, *arguments: object, log: Path, launcher: str = "deepspeed", prefix: tuple = (), hostfile: str = ""
    ):
        port = str(free_port())
        hosts = ["--hostfile", hostfile] if hostfile else []
        command = {
            "deepspeed": ["deepspeed", *hosts, "--num_gpus", "2", "--master_port", port],
            "pdsh": ["deepspeed", *hosts, "--master_addr", "127.0.0.1", "--master_port", port, "--no_ssh_check"],
            "torchrun": ["torchrun", "--nproc-per-node", "2", "--master-port", port],
            "alone": [sys.executable],
        }[launcher]
        self.log = log
        self._started = time.monotonic()
        with open(log, "w") as out:
            self.process = subprocess.Popen(
                [*prefix, *command, str(TRAIN), *(str(argument) for argument in arguments)],
                stdout=out,
                stderr=subprocess.STDOUT,
                env=environment(),
                cwd=log.parent,
            )

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def ranks(self) -> list[psutil.Process]:
        """The training processes, by rank."""
        found = {}
        for process in psutil.Process(self.process.pid).children(recursive=True):
            words = process.cmdline()
            if str(TRAIN) in words and "deepspeed.launcher.launch" not in words:
                found[int(process.environ()["RANK"])] = process
        return [found[rank] for rank in sorted(found)]

    def wait_for(self, text: str, timeout: float = 180) -> None:
        deadline = time.monotonic() + timeout
        while text not in self.output:
            if self.has_ended() or time.monotonic() > deadline:
                raise AssertionError(f"{text!r} did not appear in:\n{self.output}")
            time.sleep(0.2)

    def wait(self, timeout: float = 240) -> Result:
        """Its end; a job that hangs fails the test."""
        try:
            status = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the job still ran after {timeout} s:\n{self.output}") from None
        finally:
            self.kill()
        return Result(status, self.output, time.monotonic() - self._started)

    def kill(self) -> None:
        """End what is left of it."""
        try:
            everyone = [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]
        except psutil.NoSuchProcess:
            return
        for process in everyone:
            try:
                process.send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess:
                pass
        self.process.wait()


class WarmJob(Job):
    """A job whose ranks are forks of a process with the libraries loaded: no launcher helps them, and a start takes
    seconds less. For what is the business of the ranks alone.
    """

    def __init__(self, *arguments: object, log: Path, world_size: int = 2):
        self.log = log
        log.touch()
        words = [str(argument) for argument in arguments]
        variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        variables |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
        self._started = time.monotonic()
        self._ranks = []
        for rank in range(world_size):
            place = {**variables, "RANK": str(rank), "LOCAL_RANK": str(rank)} if world_size > 1 else {}
            job = (words, log, {**environment(), **place})
            self._ranks.append(context.Process(target=_run_rank, args=job, daemon=True))
            self._ranks[-1].start()

    def has_ended(self) -> bool:
        return all(rank.exitcode is not None for rank in self._ranks)

    def ranks(self) -> list[psutil.Process]:
        return [psutil.Process(rank.pid) for rank in self._ranks]

    def wait(self, timeout: float = 240) -> Result:
        """Its end; a job that hangs fails the test. The status is the worst of the ranks'."""
        deadline = time.monotonic() + timeout
        for rank in self._ranks:
            rank.join(max(0, deadline - time.monotonic()))
        ended = self.has_ended()
        self.kill()
        if not ended:
            raise AssertionError(f"the job still ran after {timeout} s:\n{self.output}")
        return Result(max(abs(rank.exitcode) for rank in self._ranks), self.output, time.monotonic() - self._started)

    def kill(self) -> None:
        for rank in self._ranks:
            rank.kill()
            rank.join()


def _run_rank(words: list[str], log: Path, variables: dict[str, str]) -> None:
    out = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.chdir(log.parent)
    os.environ.clear()
    os.environ.update(variables)
    sys.argv = [str(TRAIN), *words]
    runpy.run_path(str(TRAIN), run_name="__main__")  # ends the process itself


def run(*arguments: object, **options) -> Result:
    return Job(*arguments, **options).wait()


def run_warm(*arguments: object, **options) -> Result:
    return WarmJob(*arguments, **options).wait()


def wait_until_gone(processes: list[psutil.Process], timeout: float = 60) -> float:
    """Seconds until all processes have ended; those that have not are killed and fail the test."""
    started = time.monotonic()
    _, alive = psutil.wait_procs(processes, timeout)
    for process in alive:
        process.kill()
    assert not alive, f"{len(alive)} processes were still there after {timeout} s"
    return time.monotonic() - started


def environment() -> dict[str, str]:
    """One thread per rank, no launcher's leftovers, this checkout's package, this Python's scripts."""
    left_out = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    kept = {name: value for name, value in os.environ.items() if name not in left_out}
    path = [str(Path(__file__).parent), str(Path(sys.executable).parent), kept.get("PATH", "")]
    packages = [str(REPOSITORY), *filter(None, [kept.get("PYTHONPATH")])]
    return {
        **kept,
        "PATH": os.pathsep.join(path),
        "PYTHONPATH": os.pathsep.join(packages),
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def metrics(run: Path) -> list[dict]:
    """Lines of metrics.jsonl that belong to a step."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line]
