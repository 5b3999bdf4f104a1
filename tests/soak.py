"""Kills and resumes a job of two ranks at random moments, then compares it with the job that nobody touched.

    python tests/soak.py [--kills 30] [--seed 1] [--folder FOLDER]

Not a part of the test suite: it takes about 10 minutes on two cores. Each attempt goes on where the last one left off
(`--resume auto`) and is hit once, by SIGKILL (to one rank, the launcher, or all), SIGTERM or SIGUSR1 (to one rank or
the launcher): while it starts, in a step, around a save, or in an evaluation. Afterwards the run is left to finish.
Exit status 1 if a process stayed behind for a minute, a stop signal was not answered by a save, a traceback was
printed, or a weight differs by more than 1e-6.

Attempts in which the launcher is hit are started by `deepspeed`. In the others the ranks are forks of a process with
the libraries loaded, and RANK and the like set: no launcher helps them, and a start takes seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent / "integration"), str(Path(__file__).parents[1])]

import psutil  # noqa: E402
from jobs import (  # noqa: E402
    CONFIGS,
    Job,
    WarmJob,
    environment,
    metrics,
    pictures,
    write_data,
    write_evaluation,
    write_model,
)

from rwkv_clip.model.published import read_state_dict  # noqa: E402

# The ranks' environment, before the server that they are forks of starts.
os.environ.update(environment())

FIXTURES = Path(__file__).parent / "fixtures"
TRAIN = Path(__file__).parents[1] / "launch" / "train.py"
SIGNALS = ("SIGKILL", "SIGKILL", "SIGTERM", "SIGUSR1")
TARGETS = ("rank 0", "rank 1", "launcher", "all")
MOMENTS = ("start", "step", "save", "evaluation")
SAVE_EVERY, EVAL_EVERY = 3, 5
STEPS_AHEAD = 10
"""An attempt is hit at most so many steps after where it began."""
PATIENCE = 60.0
"""Seconds in which everything must be gone after a hit."""


@dataclass
class Hit:
    """One attempt: what hit it, when, and how it went."""

    name: str
    target: str
    moment: str
    began: int = 0
    """Step that the attempt went on from."""
    seen: int = 0
    """Last step in its log."""
    gone: float = 0.0
    """Seconds from the signal to the end of the last process."""
    problem: str = ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30, help="attempts that are hit (default 30)")
    parser.add_argument("--seed", type=int, default=1, help="of the moments (default 1)")
    parser.add_argument("--folder", type=Path, help="where to work (default: a new temporary folder)")
    args = parser.parse_args()
    folder = args.folder or Path(tempfile.mkdtemp(prefix="soak-"))
    folder.mkdir(parents=True, exist_ok=True)
    chance = random.Random(args.seed)
    print(f"working in {folder}", flush=True)
    job = Soak(folder, epochs=max(2, args.kills * STEPS_AHEAD // 4))
    job.run_untouched()
    hits = [job.attempt(number, chance) for number in range(args.kills)]
    job.finish()
    return job.report(hits)


class Soak:
    """The job, and its attempts under `folder`."""

    def __init__(self, folder: Path, epochs: int) -> None:
        self.folder = folder
        payloads = pictures(FIXTURES, 32)
        write_data(folder / "data" / "a", payloads[:20])
        write_data(folder / "data" / "b", payloads[20:])
        model = write_model(folder / "model.json", drop_path_rate=0.3)
        prepared = write_evaluation(folder / "prepared", FIXTURES)
        # Batches of 2 ranks x 2 accumulated x 2 pairs: 4 steps an epoch.
        self.arguments = ["--model", model, "--train-data", folder / "data", "--epochs", epochs, "--batch-size", 2]
        self.arguments += ["--gradient-accumulation", 2, "--deepspeed_config", CONFIGS / "fp32.json", "--seed", 5]
        self.arguments += ["--save-every", SAVE_EVERY, "--eval-every", EVAL_EVERY, "--log-every", 1]
        self.arguments += ["--val-data", folder / "data", "--eval-data", prepared, "--ema-decay", 0.9]
        self.run = folder / "run"
        self.untouched = folder / "untouched"
        self.start_seconds = {False: 8.0, True: 20.0}  # without and with the launcher, as last seen

    def start(self, output: Path, name: str, launched: bool = False) -> LaunchedJob | ForkedJob:
        kind = LaunchedJob if launched else ForkedJob
        return kind(*self.arguments, "--output", output, "--resume", "auto", log=self.folder / f"{name}.log")

    def run_untouched(self) -> None:
        result = self.start(self.untouched, "untouched").wait(3600)
        if result.status:
            raise SystemExit(f"the untouched run failed:\n{result.output}")
        print(f"untouched run: {metrics(self.untouched)[-1]['step']} steps in {result.seconds:.0f} s", flush=True)

    def attempt(self, number: int, chance: random.Random) -> Hit:
        hit = Hit(chance.choice(SIGNALS), chance.choice(TARGETS), chance.choice(MOMENTS))
        if hit.target == "all" and hit.name != "SIGKILL":
            hit.target = "launcher"
        launched = hit.target == "launcher"
        started = time.monotonic()
        job = self.start(self.run, f"{number:02d}", launched)
        try:
            if hit.moment == "start":
                time.sleep(chance.uniform(0, self.start_seconds[launched]))
            else:
                while "training begins" not in job.output and not job.has_ended():
                    time.sleep(0.02)
                self.start_seconds[launched] = time.monotonic() - started
                await_moment(job, hit.moment, chance)
            processes = job.everyone()
            strike(job, hit)
            hit.gone = wait_until_gone(processes)
        except (Unexpected, psutil.NoSuchProcess) as error:
            hit.problem = str(error)
        finally:
            job.kill()
        hit.began = int((re.findall(r"going on from \S+ \(step (\d+)\)", job.output) or [0])[-1])
        hit.seen = max(logged_steps(job.output), default=hit.began)
        hit.problem = hit.problem or wrong_words(hit, job.output)
        print(f"{number + 1:3d}  {row(hit)}", flush=True)
        return hit

    def finish(self) -> None:
        result = self.start(self.run, "last").wait(3600)
        if result.status:
            raise SystemExit(f"the last start failed:\n{result.output}")

    def report(self, hits: list[Hit]) -> int:
        """The table, and the comparison with the untouched run."""
        worst = 0.0
        for name in ("weights.pt", "weights_ema.pt"):
            expected, found = (read_state_dict(output / name) for output in (self.untouched, self.run))
            worst = max([worst, *(float((found[key] - value).abs().max()) for key, value in expected.items())])
        losses = [{line["step"]: line["loss"] for line in metrics(output)} for output in (self.untouched, self.run)]
        same_steps = list(losses[0]) == list(losses[1])
        loss = max(abs(losses[0][step] - losses[1].get(step, float("inf"))) for step in losses[0])
        print(f"\n{'hit by':8}  {'target':9}  {'moment':11}  {'began':>5}  {'seen':>5}  {'gone':>6}")
        for hit in hits:
            print(row(hit))
        problems = [hit for hit in hits if hit.problem]
        good = worst <= 1e-6 and same_steps and not problems
        print(f"\n{len(hits)} attempts hit, {len(problems)} with problems; {len(losses[0])} steps")
        print(f"metrics.jsonl holds every step once: {same_steps}; largest difference of a loss: {loss:.3g}")
        print(f"largest difference of a final weight or average: {worst:.3g} (allowed 1e-06)")
        print("PASS" if good else "FAIL")
        (self.folder / "soak.json").write_text(json.dumps([vars(hit) for hit in hits], indent=1))
        return 0 if good else 1


class ForkedJob(WarmJob):
    """A job of two ranks that no launcher helps."""

    def everyone(self) -> list[psutil.Process]:
        return self.ranks()


class LaunchedJob(Job):
    """A job under DeepSpeed's launcher."""

    def everyone(self) -> list[psutil.Process]:
        top = psutil.Process(self.process.pid)
        return [top, *top.children(recursive=True)]


class Unexpected(Exception):
    """What should not happen to an attempt."""


def await_moment(job: LaunchedJob | ForkedJob, moment: str, chance: random.Random) -> None:
    """Return at a random instant of the wanted kind, of a job that trains."""
    # The log's line of a step comes before its save and its evaluation.
    period = {"step": 1, "save": SAVE_EVERY, "evaluation": EVAL_EVERY}[moment]
    wanted = 1 + chance.randrange(STEPS_AHEAD) // period
    deadline = time.monotonic() + 300
    while sum(step % period == 0 for step in logged_steps(job.output)) < wanted:
        if job.has_ended() or time.monotonic() > deadline:
            raise Unexpected("ended or hung before its moment")
        time.sleep(0.01)
    time.sleep(chance.uniform(0, {"step": 0.2, "save": 0.2, "evaluation": 0.6}[moment]))


def logged_steps(output: str) -> list[int]:
    return [int(step.replace(",", "")) for step in re.findall(r"  epoch \S+ step ([\d,]+)/", output)]


def strike(job: LaunchedJob | ForkedJob, hit: Hit) -> None:
    number = signal.Signals[hit.name]
    if hit.target == "launcher":
        job.process.send_signal(number)
        return
    for process in job.everyone() if hit.target == "all" else [job.ranks()[int(hit.target[-1])]]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def wait_until_gone(processes: list[psutil.Process]) -> float:
    """Seconds until all have ended; `Unexpected` if they do not."""
    started = time.monotonic()
    while alive := [process for process in processes if is_alive(process)]:
        if time.monotonic() - started > PATIENCE:
            for process in alive:
                process.kill()
            raise Unexpected(f"{len(alive)} processes still there after {PATIENCE:.0f} s")
        time.sleep(0.05)
    return time.monotonic() - started


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wrong_words(hit: Hit, output: str) -> str:
    """What an attempt's output should not say, or should; "" if all is well."""
    if "Traceback" in output:
        return "a traceback"
    if hit.name == "SIGKILL" or "the run is complete" in output:
        return ""
    stopped = re.search(r"stopped by \S+.* after step ([\d,]+), saved|before training began: nothing to save", output)
    return "" if stopped else "no line about the stop"


def row(hit: Hit) -> str:
    numbers = f"{hit.began:5d}  {hit.seen:5d}  {hit.gone:5.1f}s"
    return f"{hit.name:8}  {hit.target:9}  {hit.moment:11}  {numbers}  {hit.problem}".rstrip()


if __name__ == "__main__":
    sys.exit(main())
