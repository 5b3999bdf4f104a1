import base64
import json
import subprocess
import sys
import time

import pytest

from rwkv_clip.errors import UserError
from rwkv_clip.training.launcher import Place, check_launcher, find_place, planned_hosts

TORCH = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "123",
    "SLURM_STEP_NODELIST": "node7",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
}
MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "MASTER_ADDR": "node0",
}


def test_started_alone_the_world_is_one_process():
    assert find_place(environment={}) == Place("alone", 0, 1, 0, 1, "127.0.0.1", 0)


def test_torchrun_s_and_deepspeed_s_variables_are_read():
    torchrun = find_place(environment={**TORCH, "TORCHELASTIC_RUN_ID": "x", "LOCAL_WORLD_SIZE": "2"})
    assert torchrun == Place("torchrun", 3, 8, 1, 2, "node0", 29500)
    deepspeed = find_place(1, environment={**TORCH, "CROSS_RANK": "1", "LOCAL_SIZE": "4"})
    assert deepspeed == Place("deepspeed", 3, 8, 1, 4, "node0", 29500)


def test_srun_s_variables_are_read():
    place = find_place(environment=SLURM)
    assert (place.launcher, place.rank, place.world_size, place.local_rank, place.local_world_size) == (
        "srun",
        5,
        8,
        1,
        4,
    )
    assert place.master_address == "node7"
    assert place.master_port == find_place(environment={**SLURM, "SLURM_PROCID": "2"}).master_port


def test_torchrun_inside_a_slurm_job_goes_by_torchrun():
    place = find_place(environment={**SLURM, **TORCH, "TORCHELASTIC_RUN_ID": "x", "LOCAL_WORLD_SIZE": "2"})
    assert (place.launcher, place.rank, place.world_size) == ("torchrun", 3, 8)


def test_mpi_s_variables_are_read():
    assert find_place(environment=MPI).rank == 5


def test_L11_two_machines_with_the_same_local_ranks_keep_their_own_ranks():
    places = [find_place(environment={**TORCH, "RANK": rank, "LOCAL_RANK": "0"}) for rank in ("0", "1")]
    assert [(place.rank, place.local_rank) for place in places] == [(0, 0), (1, 0)]


@pytest.mark.parametrize(
    ("environment", "argument", "words"),
    [
        ({"RANK": "0"}, None, ["WORLD_SIZE is not set"]),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, None, ["MASTER_ADDR"]),
        ({**TORCH, "RANK": "8"}, None, ["RANK is 8", "WORLD_SIZE is 8"]),
        ({**TORCH, "WORLD_SIZE": "two"}, None, ["WORLD_SIZE", "two"]),
        ({**TORCH, "CROSS_RANK": "0", "LOCAL_SIZE": "4"}, 2, ["--local_rank is 2", "LOCAL_RANK is 1"]),
        ({**TORCH, "TORCHELASTIC_RUN_ID": "x", "LOCAL_WORLD_SIZE": "1"}, None, ["LOCAL_RANK is 1"]),
        ({**SLURM, "RANK": "0"}, None, ["RANK is 0", "SLURM_PROCID=5"]),
        ({**MPI, "WORLD_SIZE": "4"}, None, ["WORLD_SIZE is 4", "OMPI_COMM_WORLD_SIZE=8"]),
    ],
)
def test_variables_that_contradict_the_launcher_are_an_error(environment, argument, words):
    with pytest.raises(UserError) as caught:
        find_place(argument, environment)
    assert all(word in str(caught.value) for word in words)


def process_with(*words: str, folder) -> subprocess.Popen:
    """A process with these words on its command line, standing in for the launcher."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", *words], cwd=folder)
    time.sleep(0.2)
    return process


def checked(folder, *words: str, world_size: int = 1) -> None:
    process = process_with(*words, folder=folder)
    try:
        check_launcher(Place("deepspeed", 0, world_size, 0, 1, "127.0.0.1", 1), process.pid)
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("words", [["--hostfile", "hosts"], ["--hostfile=hosts"], ["-H", "hosts"]])
def test_N1_a_hostfile_that_does_not_exist_is_an_error(tmp_path, words):
    with pytest.raises(UserError, match="the hostfile hosts does not exist"):
        checked(tmp_path, "deepspeed", *words)
    (tmp_path / "hosts").write_text("localhost slots=1\n")
    checked(tmp_path, "deepspeed", *words)


def test_a_world_size_other_than_the_launcher_s_is_an_error(tmp_path):
    world = base64.urlsafe_b64encode(json.dumps({"a": [0, 1], "b": [0, 1]}).encode()).decode()
    checked(tmp_path, f"--world_info={world}", world_size=4)
    with pytest.raises(UserError, match="WORLD_SIZE is 3, but the deepspeed launcher started 4"):
        checked(tmp_path, f"--world_info={world}", world_size=3)


def test_the_machine_of_each_rank_is_known_from_deepspeed_s_launcher():
    world = base64.urlsafe_b64encode(json.dumps({"node1": [0, 1], "node2": [0]}).encode()).decode()
    words = [sys.executable, "-c", "import time; time.sleep(60)", f"--world_info={world}"]
    launcher = subprocess.Popen(words)
    place = Place("deepspeed", 0, 3, 0, 2, "node1", 29500)
    try:
        deadline = time.monotonic() + 10
        while planned_hosts(place, launcher.pid) != ["node1", "node1", "node2"]:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        launcher.kill()
        launcher.wait()
    assert planned_hosts(Place("torchrun", 0, 3, 0, 2, "node1", 29500)) == []
