"""Which process this is: rank and world size as the launcher gives them, and what a launcher gets wrong in silence.

deepspeed, torchrun, SLURM's srun and MPI each say it in variables of their own; started alone, the world is 1. All of
torch's variables (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT) are set afterwards, since DeepSpeed looks for
MPI when one of them is missing.
"""

from __future__ import annotations

import base64
import json
import os
import re
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..errors import UserError

# Launchers that give the place of a process in their own variables: rank, world size, local rank, local world size.
OWN_VARIABLES = {
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", None),
    "Open MPI": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "MVAPICH": ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    "MPICH": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}


@dataclass(frozen=True)
class Place:
    """This process among all of the job's."""

    launcher: str
    """deepspeed, torchrun, srun, Open MPI, MVAPICH, MPICH, "variables" (set by hand) or "alone"."""
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    """Processes on this machine; at least local_rank + 1 where the launcher does not say."""
    master_address: str
    master_port: int
    """0: any free port (alone)."""

    def export(self, environment: dict[str, str] | os._Environ = os.environ) -> None:
        """Set torch's five variables, and LOCAL_WORLD_SIZE."""
        environment.update(
            RANK=str(self.rank),
            WORLD_SIZE=str(self.world_size),
            LOCAL_RANK=str(self.local_rank),
            LOCAL_WORLD_SIZE=str(self.local_world_size),
            MASTER_ADDR=self.master_address,
            MASTER_PORT=str(self.master_port),
        )


def find_place(local_rank_argument: int | None = None, environment: Mapping[str, str] = os.environ) -> Place:
    """Read the launcher's variables; `UserError` when they are incomplete or contradict one another.

    local_rank_argument: the `--local_rank` that the deepspeed launcher passes.
    """
    launcher = _which_launcher(environment)
    if launcher == "alone":
        place = Place(launcher, 0, 1, 0, 1, "127.0.0.1", 0)
    elif launcher in OWN_VARIABLES:
        place = _own_place(launcher, environment)
    else:
        place = _torch_place(launcher, environment)
    if not 0 <= place.rank < place.world_size:
        raise UserError(f"RANK is {place.rank} but WORLD_SIZE is {place.world_size}: ranks go from 0 to WORLD_SIZE - 1")
    if not 0 <= place.local_rank < place.local_world_size <= place.world_size:
        raise UserError(
            f"LOCAL_RANK is {place.local_rank} with {place.local_world_size} processes on this machine and "
            f"WORLD_SIZE {place.world_size}: they contradict one another"
        )
    if local_rank_argument is not None and local_rank_argument not in (-1, place.local_rank):
        raise UserError(f"--local_rank is {local_rank_argument} but LOCAL_RANK is {place.local_rank}: unset LOCAL_RANK")
    return place


def _which_launcher(environment: Mapping[str, str]) -> str:
    if "TORCHELASTIC_RUN_ID" in environment:
        return "torchrun"
    if "CROSS_RANK" in environment:
        return "deepspeed"
    if "SLURM_STEP_ID" in environment and "SLURM_STEP_NUM_TASKS" in environment:
        # An interactive step is one task; variables set by hand inside it mean more.
        if environment["SLURM_STEP_NUM_TASKS"] != "1" or "RANK" not in environment:
            return "srun"
    for launcher, (rank, size, _, _) in OWN_VARIABLES.items():
        if launcher != "srun" and rank in environment and size in environment:
            return launcher
    return "variables" if "RANK" in environment or "WORLD_SIZE" in environment else "alone"


def _integer(environment: Mapping[str, str], name: str, launcher: str) -> int:
    if name not in environment:
        given = [other for other in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if other in environment]
        raise UserError(
            f"{name} is not set, but {' and '.join(given) or launcher} would need it: start with deepspeed, torchrun "
            "or srun, or unset all of RANK, WORLD_SIZE and LOCAL_RANK to train with one process"
        )
    try:
        return int(environment[name])
    except ValueError:
        raise UserError(f"{name} must be a whole number, found '{environment[name]}'") from None


def _torch_place(launcher: str, environment: Mapping[str, str]) -> Place:
    rank, world_size, local_rank = (
        _integer(environment, name, launcher) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    )
    # DeepSpeed's launcher calls it LOCAL_SIZE.
    local_sizes = [environment[name] for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE") if name in environment]
    local_world_size = int(local_sizes[0]) if local_sizes else local_rank + 1
    if world_size == 1 and "MASTER_PORT" not in environment:
        return Place(launcher, rank, 1, local_rank, local_world_size, "127.0.0.1", 0)
    if "MASTER_ADDR" not in environment:
        raise UserError(f"MASTER_ADDR is not set, but WORLD_SIZE is {world_size}: set it to the machine of rank 0")
    port = _integer(environment, "MASTER_PORT", launcher)
    return Place(launcher, rank, world_size, local_rank, local_world_size, environment["MASTER_ADDR"], port)


def _own_place(launcher: str, environment: Mapping[str, str]) -> Place:
    names = OWN_VARIABLES[launcher]
    rank, world_size, local_rank = (_integer(environment, name, launcher) for name in names[:3])
    for theirs, torchs in zip(names[:3], ("RANK", "WORLD_SIZE", "LOCAL_RANK"), strict=True):
        if torchs in environment and environment[torchs] != environment[theirs]:
            raise UserError(
                f"{torchs} is {environment[torchs]} but {launcher} says {theirs}={environment[theirs]}: unset {torchs}"
            )
    if launcher == "srun":
        # For instance "4(x2),3": tasks on each node in turn.
        tasks = re.sub(r"\(x\d+\)", "", environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
        counts = {int(count) for count in tasks.split(",") if count}
        local_world_size = counts.pop() if len(counts) == 1 else local_rank + 1
    else:
        local_world_size = int(environment.get(names[3], local_rank + 1))
    address = environment.get("MASTER_ADDR") or _first_host(launcher, world_size, environment)
    # Jobs on one machine must not share a port, and every process must know it without asking.
    port = int(environment.get("MASTER_PORT") or 20000 + int(environment.get("SLURM_JOB_ID", "9500")) % 20000)
    return Place(launcher, rank, world_size, local_rank, local_world_size, address, port)


def _first_host(launcher: str, world_size: int, environment: Mapping[str, str]) -> str:
    if world_size == 1:
        return "127.0.0.1"
    hosts = environment.get("SLURM_STEP_NODELIST") if launcher == "srun" else None
    if hosts and not set(hosts) & set("[,"):
        return hosts
    if hosts:
        try:
            return subprocess.run(
                ["scontrol", "show", "hostnames", hosts], check=True, capture_output=True, text=True, timeout=30
            ).stdout.split()[0]
        except (OSError, subprocess.SubprocessError, IndexError):
            pass
    raise UserError(
        f"MASTER_ADDR is not set, and {launcher} does not say which machine rank 0 is on: export MASTER_ADDR"
    )


def check_launcher(place: Place, process: int | None = None) -> None:
    """Raise `UserError` for what DeepSpeed's launcher lets pass.

    A hostfile that does not exist is only a warning to it, and the job would train on one machine; and a script between
    the launcher and this process may have changed RANK or WORLD_SIZE. Reads the command lines of the processes above
    (Linux only; elsewhere it checks nothing).
    """
    if place.launcher != "deepspeed":
        return
    for ancestor, words in _ancestors(os.getppid() if process is None else process, 3):
        world = _option(words, "--world_info")
        if world:
            sizes = [len(slots) for slots in json.loads(base64.urlsafe_b64decode(world)).values()]
            if sum(sizes) != place.world_size:
                raise UserError(
                    f"WORLD_SIZE is {place.world_size}, but the deepspeed launcher started {sum(sizes)} processes: "
                    "do not set WORLD_SIZE"
                )
        hostfile = _option(words, "--hostfile", "-H")
        if hostfile and any("deepspeed" in word for word in words):
            path = Path(os.readlink(f"/proc/{ancestor}/cwd")) / hostfile
            if not path.is_file():
                raise UserError(
                    f"the hostfile {hostfile} does not exist, so DeepSpeed would train on {socket.gethostname()} "
                    "alone: correct --hostfile, or leave it out to train on one machine"
                )


def planned_hosts(place: Place, process: int | None = None) -> list[str]:
    """The machine of each rank as DeepSpeed's launcher was told; empty where nobody says."""
    if place.launcher != "deepspeed":
        return []
    for _, words in _ancestors(os.getppid() if process is None else process, 3):
        world = _option(words, "--world_info")
        if world:
            machines = json.loads(base64.urlsafe_b64decode(world))
            return [host for host, slots in machines.items() for _ in slots]
    return []


def _ancestors(process: int, count: int) -> list[tuple[int, list[str]]]:
    """(id, command line) of a process and the ones above it, as far as they can be read."""
    found = []
    while process > 1 and len(found) < count:
        try:
            words = Path(f"/proc/{process}/cmdline").read_bytes().decode(errors="replace").split("\0")
            os.readlink(f"/proc/{process}/cwd")
        except OSError:
            break
        found.append((process, words))
        process = _parent_of(process)
    return found


def _option(words: list[str], *names: str) -> str | None:
    """Value of the first of `names` on a command line, as `--name value` or `--name=value`."""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        for name in names:
            if word == name:
                return following
            if word.startswith(name + "="):
                return word[len(name) + 1 :]
    return None


def launcher_is_gone(place: Place, parent: int, grandparent: int) -> bool:
    """Whether the launcher above this process, deepspeed or torchrun, has died and left it behind.

    parent, grandparent: their ids at the start. A signal like SIGUSR1 kills a launcher and reaches nobody else; with
    DeepSpeed's on one machine SIGTERM does too.
    """
    if place.launcher not in ("deepspeed", "torchrun"):
        return False
    if os.getppid() != parent:
        return True
    if place.launcher == "torchrun":  # one process, the parent
        return False
    if grandparent == 1:  # the launcher is the first process of a container, or had died before this one looked
        return "deepspeed" not in _command_line(1)
    return grandparent > 1 and _parent_of(parent) != grandparent


def ancestors_now() -> tuple[int, int]:
    """Ids of the parent and the grandparent, for `launcher_is_gone`; 0 where it cannot be read."""
    parent = os.getppid()
    return parent, _parent_of(parent)


def _parent_of(process: int) -> int:
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return 0
    return int(re.search(r"^PPid:\s*(\d+)", status, re.MULTILINE).group(1))


def _command_line(process: int) -> str:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""
