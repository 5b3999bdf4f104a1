"""DeepSpeed's launcher for several machines, with a stand-in for pdsh that starts each machine's part here."""

from jobs import CONFIGS, Job


def start(folder, data, model, name, hosts, *more):
    home = folder / name  # .deepspeed_env is looked for in the working folder
    home.mkdir()
    (home / "hosts").write_text("".join(f"{host} slots=1\n" for host in hosts))
    variables = ["DS_ACCELERATOR=cpu", "OMP_NUM_THREADS=1", "NCCL_SOCKET_IFNAME=lo", "OWN_VARIABLE=a=b"]
    (home / ".deepspeed_env").write_text("\n".join(variables))
    job = ["--model", model, "--train-data", data, "--output", home / "run", "--epochs", 1, "--batch-size", 8]
    job += ["--deepspeed_config", CONFIGS / "fp32.json", "--expect-world-size", 2, *more]
    return Job(*job, log=home / "log", launcher="pdsh", hostfile=str(home / "hosts"))


def test_N3_variables_reach_the_processes_of_other_machines(folder, data, model, monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    monkeypatch.setenv("OTHER_VARIABLE", "stays")
    job = start(folder, data, model, "n3", ["first", "second"])
    job.wait_for("records in 2 shard")
    for rank in job.ranks():
        seen = rank.environ()
        assert seen["PYTHONHASHSEED"] == "7" and "OTHER_VARIABLE" not in seen  # by their names
        assert seen["NCCL_SOCKET_IFNAME"] == "lo" and seen["OWN_VARIABLE"] == "a=b"  # by .deepspeed_env
    result = job.wait()
    assert result.status == 0, result.output
    assert "the run is complete" in result.output


def test_N4_a_machine_without_the_checkout_is_named_and_the_others_leave(folder, data, model):
    result = start(folder, data, model, "n4", ["first", "bare"], "--start-timeout", 5).wait()
    assert result.status != 0 and result.seconds < 60
    assert "bare: " in result.output and "no_checkout/train.py': [Errno 2]" in result.output
    assert "1 of 2 processes did not start within 5 s (rank 1 on bare)" in result.output
