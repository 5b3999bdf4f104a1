"""The processes of a job: finding one another, agreeing on errors, and leaving together.

Control messages go through torch's key-value store at rank 0 (or torchrun's agent), not through collectives: a rank
that failed can still be heard there, and nothing waits for a device.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

from ..errors import UserError
from .launcher import OWN_VARIABLES, Place, planned_hosts

PATIENCE = 2 * 3600.0
"""Seconds to wait for a peer in a phase without collectives; the watchdog ends it earlier if the peer has failed."""


class CommonError(UserError):
    """A `UserError` that every rank raises alike, so that one of them may report it."""


class World:
    """All processes of the job as one of them sees it.

    Attributes: `place`, `rank`, `local_rank`, `world_size`, `device`; `store`, where keys are this job's own, None for
    a world of one; `hosts`, by rank; `is_failing`, whether this rank is about to leave with an error of its own.
    """

    def __init__(
        self, place: Place, device: torch.device, store: dist.Store | None, hosts: list[str], job: str = ""
    ) -> None:
        self.place = place
        self.rank = place.rank
        self.local_rank = place.local_rank
        self.world_size = place.world_size
        self.device = device
        self.store = store
        self.hosts = hosts
        self.is_failing = False
        self._job = job
        self._gathers = 0

    def connect(self) -> dist.Store | None:
        """A connection of its own to the store, for a second thread: one connection serves one call at a time."""
        return _connect(self.place, 30, self._job, as_client=True) if self.store is not None else None

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def gather(self, text: str) -> list[str]:
        """Every rank's `text`, by rank. All ranks must call it, in the same order as their other gathers."""
        if self.store is None:
            return [text]
        self._gathers += 1
        prefix = f"gather/{self._gathers}"
        self.store.set(f"{prefix}/{self.rank}", text)
        if self.is_first:
            keys = [f"{prefix}/{rank}" for rank in range(self.world_size)]
            wait_for(self.store, keys)
            texts = [self.store.get(key).decode() for key in keys]
            for key in keys:
                self.store.delete_key(key)
            self.store.set(f"{prefix}/all", json.dumps(texts))
        wait_for(self.store, [f"{prefix}/all"])
        return json.loads(self.store.get(f"{prefix}/all").decode())

    def from_first(self, value: object) -> object:
        """Rank 0's JSON-able `value`, on every rank."""
        return json.loads(self.gather(json.dumps(value) if self.is_first else "")[0])

    def wait(self) -> None:
        """Return when every rank has come here."""
        self.gather("")

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """A phase that all ranks pass, or that fails on all of them with the same `UserError`.

        A `UserError` on any rank is raised on every rank, at the end of the phase. Other exceptions pass as they are.
        """
        error: UserError | None = None
        try:
            yield
        except UserError as caught:
            error = caught
        texts = self.gather(str(error) if error else "")
        failed = [rank for rank, text in enumerate(texts) if text]
        if failed:
            text = texts[failed[0]]
            everywhere = len(failed) == self.world_size and len(set(texts)) == 1
            raise CommonError(text if everywhere else f"rank {failed[0]} ({self.hosts[failed[0]]}): {text}") from error

    def leave(self, patience: float = 10.0) -> None:
        """The last thing that a rank does. Rank 0 goes last, as the store ends with it.

        The others wait until it has come here, its error printed: a launcher ends all ranks when it sees one go.
        """
        if self.store is None:
            return
        deadline = time.monotonic() + patience
        with contextlib.suppress(RuntimeError):
            if self.is_first:
                self.store.set("left/0", "")
                while self.store.add("left", 0) < self.world_size - 1 and time.monotonic() < deadline:
                    time.sleep(0.05)
                return
            while not self.is_failing and not self.store.check(["left/0"]) and time.monotonic() < deadline:
                time.sleep(0.05)
            self.store.add("left", 1)


def wait_for(store: dist.Store, keys: list[str]) -> None:
    """Return when all keys are set; `RuntimeError` after PATIENCE. Signals are handled meanwhile, each second."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return store.wait(keys, timedelta(seconds=1))
        except dist.DistStoreError:
            if time.monotonic() > deadline:
                raise


def choose_device(place: Place) -> torch.device:
    """This process's GPU if there are GPUs, otherwise the CPU; sets DS_ACCELERATOR, before DeepSpeed is imported.

    `DS_ACCELERATOR=cpu` in the environment chooses the CPU.
    """
    wanted = os.environ.get("DS_ACCELERATOR")
    if wanted not in (None, "cpu", "cuda"):
        raise UserError(f"DS_ACCELERATOR is '{wanted}': this trainer runs on 'cuda' and 'cpu'; unset it")
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UserError("DS_ACCELERATOR is 'cuda' but PyTorch finds no GPU: check nvidia-smi and the PyTorch build")
    if wanted != "cpu" and torch.cuda.is_available():
        count = torch.cuda.device_count()
        # srun and MPI may show each process its own GPU only.
        index = 0 if count == 1 and place.launcher in OWN_VARIABLES else place.local_rank
        if index >= count:
            raise UserError(
                f"{place.local_world_size} processes on {socket.gethostname()} but {count} GPU(s): start one process "
                "for each GPU"
            )
        os.environ["DS_ACCELERATOR"] = "cuda"
        torch.cuda.set_device(index)
        return torch.device("cuda", index)
    os.environ["DS_ACCELERATOR"] = "cpu"
    return torch.device("cpu")


def share_cores(place: Place) -> None:
    """Let torch use this process's share of the machine's cores, unless OMP_NUM_THREADS says how many.

    It would give all of them to each process: with four processes on 64 cores, building a model then takes minutes
    instead of seconds, as threads that wait keep the others' from running.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, available_cores() // place.local_world_size))


def available_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def meet(place: Place, device: torch.device, timeout: int, job: str) -> World:
    """Wait for all processes of the job, and check that they agree on who they are.

    timeout: seconds for all to appear. job: text that only processes of the same job share; a process that ends up at
    another job's rank 0 (same machine, same port) is not taken for one of it.
    """
    if place.world_size == 1:
        return World(place, device, None, [socket.gethostname()])
    store = _connect(place, timeout, job)
    try:
        return World(place, device, store, _wait_for_all(place, store, timeout), job)
    except dist.DistNetworkError:  # the store lives in rank 0's process
        raise UserError(
            f"rank 0 at {place.master_address}:{place.master_port} left before all processes had met: look for its "
            "error"
        ) from None


def _wait_for_all(place: Place, store: dist.Store, timeout: int) -> list[str]:
    """Host names by rank, once every process has said that it is there."""
    started = time.monotonic()
    me = json.dumps([socket.gethostname(), os.getpid(), place.world_size])
    if store.add(f"seen/{place.rank}", 1) > 1:
        raise UserError(f"two processes have RANK {place.rank}: start one process for each rank")
    store.set(f"here/{place.rank}", me)
    keys = [f"here/{rank}" for rank in range(place.world_size)]
    told = 0.0
    while not store.check(keys):
        waited = time.monotonic() - started
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])] if waited > told + 10 else []
        if waited > timeout:
            missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
            raise UserError(
                f"{len(missing)} of {place.world_size} processes did not start within {timeout} s (rank "
                f"{_ranges(missing)}{_machines(place, missing)}): look for their errors above, check that every "
                "machine has this code, its Python and its own RANK, or give --start-timeout more seconds"
            )
        if missing and place.rank == 0:
            told = waited
            print(f"waiting for rank {_ranges(missing)} of {place.world_size}", file=sys.stderr, flush=True)
        time.sleep(0.2)
    hosts = []
    for rank, key in enumerate(keys):
        host, _, world_size = json.loads(store.get(key).decode())
        if world_size != place.world_size:
            raise UserError(
                f"rank {rank} on {host} has WORLD_SIZE {world_size}, rank {place.rank} has {place.world_size}: start "
                "all of them with one command"
            )
        hosts.append(host)
    return hosts


def _connect(place: Place, timeout: int, job: str, as_client: bool = False) -> dist.Store:
    # torchrun's agent has a store already.
    has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    hosts_store = place.rank == 0 and not has_agent and not as_client
    digest = hashlib.sha256(job.encode()).hexdigest()[:16]
    prefix = f"rwkv_clip/{digest}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
    try:
        store = _tcp_store(place, place.master_address, place.master_port, timeout, hosts_store)
        if has_agent and place.local_world_size == place.world_size:
            store = _store_beside(place, dist.PrefixStore(prefix, store), timeout, as_client)
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        where = f"{place.master_address}:{place.master_port}"
        if hosts_store:
            raise UserError(
                f"rank 0 cannot listen on {where} ({reason}): another job may have the port; give the launcher another "
                "--master_port"
            ) from None
        raise UserError(
            f"rank {place.rank} on {socket.gethostname()} found no rank 0 at {where} within {timeout} s ({reason}): "
            "check that it started, and that the port is open"
        ) from None
    return dist.PrefixStore(prefix, store)


def _store_beside(place: Place, agents: dist.Store, timeout: int, as_client: bool) -> dist.Store:
    """A store of rank 0's own: a signal that kills torchrun takes its agent's store away before the ranks can save.

    Only for ranks on one machine, where rank 0 is found without asking which of its addresses the others reach.
    """
    if place.rank == 0 and not as_client:
        store = _tcp_store(place, "127.0.0.1", 0, timeout, hosts=True)
        agents.set("port", str(store.port))
        return store
    agents.wait(["port"], timedelta(seconds=timeout))
    return _tcp_store(place, "127.0.0.1", int(agents.get("port")), timeout, hosts=False)


def _tcp_store(place: Place, address: str, port: int, timeout: int, hosts: bool) -> dist.TCPStore:
    seconds = timedelta(seconds=timeout)
    return dist.TCPStore(address, port, place.world_size, is_master=hosts, timeout=seconds, wait_for_workers=False)


def _machines(place: Place, ranks: list[int]) -> str:
    hosts = planned_hosts(place)
    names = dict.fromkeys(hosts[rank] for rank in ranks if rank < len(hosts))
    return f" on {', '.join(names)}" if names else ""


def _ranges(numbers: list[int]) -> str:
    """[1, 2, 3, 7] -> "1-3, 7"."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in spans)


def device_to_bind(world: World) -> torch.device | None:
    """The GPU to bind the collectives to; without one PyTorch warns at each barrier that it takes the current GPU.

    As DeepSpeed does it: not for a single rank (DeepSpeed#8248), nor where binding may hang, before torch 2.7.1
    (pytorch#153960).
    """
    binds = world.device.type == "cuda" and world.world_size > 1 and torch.__version__ >= (2, 7, 1)
    return world.device if binds else None


def start_collectives(world: World) -> None:
    """Initialize torch.distributed (NCCL on GPUs, gloo on CPUs) and tell DeepSpeed about it.

    DEEPSPEED_TIMEOUT (minutes, default 10) bounds a collective; failing ranks are noticed within seconds (watchdog.py).
    """
    import deepspeed
    from deepspeed.constants import default_pg_timeout

    if world.store is None:
        store = dist.HashStore()
    else:
        store = dist.PrefixStore("collectives", world.store)
    dist.init_process_group(
        "nccl" if world.device.type == "cuda" else "gloo",
        store=store,
        rank=world.rank,
        world_size=world.world_size,
        timeout=default_pg_timeout,
        device_id=device_to_bind(world),
    )
    if world.device.type == "cpu":
        # Its shared-memory all-reduce would be compiled on first use, and waits for ever when a peer dies.
        from deepspeed.accelerator import get_accelerator

        builder = get_accelerator().create_op_builder("ShareMemCommBuilder")
        if builder is not None:
            deepspeed.ops.__compatible_ops__[builder.NAME] = False
    deepspeed.init_distributed()
