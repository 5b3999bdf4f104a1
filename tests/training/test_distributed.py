"""Finding one another and agreeing, with a thread per rank: all of it goes through the store."""

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.torch_version import TorchVersion

from rwkv_clip.errors import UserError
from rwkv_clip.training.distributed import CommonError, World, meet, start_collectives
from rwkv_clip.training.launcher import Place
from rwkv_clip.training.signals import Agreement, Interrupted, StopRequest
from rwkv_clip.training.watchdog import lost_peer

TRAIN = Path(__file__).parents[2] / "launch" / "train.py"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def on_ranks(function, sizes=(2, 2), present=None, timeout=20, job="job"):
    """`function(world)` on each rank; results or exceptions by rank. sizes: WORLD_SIZE as each rank believes it."""
    port, results = free_port(), {}
    keep_alive = threading.Barrier(len(present or sizes))

    def run(rank):
        place = Place("variables", rank, sizes[rank], rank, len(sizes), "127.0.0.1", port)
        try:
            world = meet(place, torch.device("cpu"), timeout, job)
            results[rank] = function(world)
        except Exception as error:
            results[rank] = error
        keep_alive.wait(30)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in present or range(len(sizes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
    return results


def test_texts_are_gathered_by_rank():
    assert on_ranks(lambda world: world.gather(f"rank {world.rank}")) == {rank: ["rank 0", "rank 1"] for rank in (0, 1)}


def test_rank_0_s_value_reaches_all():
    results = on_ranks(lambda world: world.from_first({"step": 3} if world.is_first else None))
    assert results == {0: {"step": 3}, 1: {"step": 3}}


def test_an_error_of_one_rank_is_raised_on_all_with_its_host():
    def phase(world):
        with world.together():
            if world.rank == 1:
                raise UserError("no such data")

    results = on_ranks(phase)
    assert all(isinstance(error, CommonError) for error in results.values())
    assert {str(error) for error in results.values()} == {f"rank 1 ({socket.gethostname()}): no such data"}


def test_a_log_that_cannot_be_written_ends_all_ranks_with_the_same_line(tmp_path, monkeypatch):
    from rwkv_clip.training import job
    from rwkv_clip.training.run_folder import RunFolder

    run = RunFolder(tmp_path)
    run.log.mkdir()
    monkeypatch.setattr(job, "make_plan", lambda args, world: SimpleNamespace(run=run))
    errors = on_ranks(lambda world: job.run_job(None, world, StopRequest()))
    assert all(isinstance(error, CommonError) for error in errors.values()), errors
    assert all(f"cannot write the log {run.log}: Is a directory; make it" in str(error) for error in errors.values())


def test_the_same_error_on_all_ranks_names_none():
    def phase(world):
        with world.together():
            raise UserError("no such model")

    assert {str(error) for error in on_ranks(phase).values()} == {"no such model"}


def test_a_rank_that_does_not_appear_is_named_in_time():
    results = on_ranks(lambda world: None, sizes=(3, 3, 3), present=[0, 2], timeout=2)
    assert all("1 of 3 processes did not start within 2 s (rank 1)" in str(error) for error in results.values())


def test_ranks_with_different_world_sizes_are_an_error():
    errors = on_ranks(lambda world: None, sizes=(2, 3), timeout=2)
    assert "WORLD_SIZE 3" in str(errors[0])


def test_a_rank_without_a_rank_0_says_where_it_looked():
    error = on_ranks(lambda world: None, present=[1], timeout=2)[1]
    assert "found no rank 0 at 127.0.0.1:" in str(error)


def test_a_process_of_another_job_at_the_same_port_is_not_counted():
    port, outcome = free_port(), {}

    def run(rank, job):
        place = Place("variables", rank, 2, rank, 2, "127.0.0.1", port)
        try:
            meet(place, torch.device("cpu"), 3, job)
            outcome[rank] = "met"
        except UserError as error:
            outcome[rank] = str(error)

    threads = [threading.Thread(target=run, args=(rank, f"job {rank}")) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert "rank 1" in outcome[0] and outcome[1] != "met"


def test_ranks_of_one_torchrun_agree_also_when_its_agent_s_store_is_gone(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    port = free_port()
    agents = [dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)]
    met = threading.Barrier(3)
    results = {}

    def run(rank):
        world = meet(Place("torchrun", rank, 2, rank, 2, "127.0.0.1", port), torch.device("cpu"), 20, "job")
        met.wait(20)
        met.wait(20)  # the agent has died
        results[rank] = world.gather(f"rank {rank}")
        world.leave()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    met.wait(20)
    agents.clear()
    met.wait(20)
    for thread in threads:
        thread.join(20)
    assert results == {rank: ["rank 0", "rank 1"] for rank in (0, 1)}


def test_a_collective_broken_off_by_a_killed_rank_is_told_from_other_errors():
    def told(world):
        gloo = RuntimeError("[gloo/transport/tcp/pair.cc:537] Read error [10.0.0.2]:9386: Connection reset by peer")
        return [lost_peer(world, error) for error in (gloo, RuntimeError("sizes do not match"), ValueError("x"))]

    lost, other, another = on_ranks(told)[1]
    assert lost.startswith("rank 1 (") and "--resume auto" in lost and other is None and another is None


@pytest.mark.parametrize(
    ("device", "ranks", "version", "binds"),
    [
        ("cuda:1", 2, "2.7.1", True),
        ("cuda:1", 2, "2.13.0+cu130", True),
        ("cuda:1", 2, "2.7.0", False),
        ("cuda:0", 1, "2.13.0", False),
        ("cpu", 2, "2.13.0", False),
    ],
)
def test_collectives_are_bound_to_the_rank_s_gpu_where_that_is_safe(monkeypatch, device, ranks, version, binds):
    import deepspeed

    given = {}
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **options: given.update(options, backend=backend))
    monkeypatch.setattr(deepspeed, "init_distributed", lambda: None)
    device = torch.device(device)
    start_collectives(World(Place("variables", 0, ranks, 0, ranks, "127.0.0.1", 1), device, None, ["here"] * ranks))
    assert given["device_id"] == (device if binds else None)
    assert given["backend"] == ("nccl" if device.type == "cuda" else "gloo")


def test_the_largest_number_wins_and_is_forgotten():
    agreement = Agreement(torch.device("cpu"))
    assert agreement.result() == 0
    agreement.submit(2)
    assert agreement.result() == 2 and agreement.result() == 0
    assert agreement.now(1) == 1


def test_a_signal_is_remembered_and_ends_an_interruptible_section():
    stop = StopRequest()
    stop.install()
    try:
        with pytest.raises(Interrupted), stop.interruptible():
            os.kill(os.getpid(), signal.SIGUSR1)
            for _ in range(10**7):
                pass
        assert stop.requested and stop.reason == "SIGUSR1"
        with pytest.raises(Interrupted), stop.interruptible():
            pass
    finally:
        stop.uninstall()


@pytest.mark.parametrize(
    ("reason", "status"),
    [
        ("SIGTERM", 143),
        ("SIGUSR1 to rank 3 (host)", 138),
        ("SIGINT", 130),
        ("the end of the launcher", 143),
        (None, 143),
    ],
)
def test_a_stopped_process_ends_with_the_signal_s_status(reason, status):
    stop = StopRequest()
    stop.reason = reason
    assert stop.exit_status == status


def test_a_stop_before_training_ends_the_job_with_the_signal_s_status(tmp_path):
    job = [sys.executable, str(TRAIN), "--model", "Nano", "--train-data", "/no/such", "--output", str(tmp_path / "run")]
    variables = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    variables |= {"MASTER_PORT": str(free_port()), "DS_ACCELERATOR": "cpu"}
    process = subprocess.Popen(
        job, env=os.environ | variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert "waiting for rank 1 of 2" in process.stderr.readline()  # which nobody starts
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 143 and "stopped by SIGTERM before training began: nothing to save" in output


def test_a_request_from_another_thread_ends_an_interruptible_section():
    import time

    stop = StopRequest()
    stop.install()
    try:
        threading.Timer(0.2, stop.request, ["SIGTERM to rank 3"]).start()
        with pytest.raises(Interrupted), stop.interruptible():
            time.sleep(5)
        assert stop.reason == "SIGTERM to rank 3"
    finally:
        stop.uninstall()
