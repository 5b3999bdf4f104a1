"""Signals, killed and failing ranks: nothing is lost, and nobody is left behind."""

import signal
import time

import pytest
from jobs import CONFIGS, Job, WarmJob, pictures, run_warm, wait_until_gone, write_data

from rwkv_clip.data.dataset import write_manifest
from rwkv_clip.training.resume import complete_checkpoints, verify


def arguments(data, model, output, *more):
    common = ["--model", model, "--train-data", data, "--output", output, "--epochs", 1000, "--log-every", 1]
    return [*common, "--deepspeed_config", CONFIGS / "fp32.json", "--batch-size", 8, *more]


@pytest.fixture(scope="module")
def output(folder):
    return folder / "interrupted"


def newest_step(output) -> int:
    newest = complete_checkpoints(output / "checkpoints")[0]
    return verify(newest)["position"]["step"]


@pytest.fixture(scope="module")
def held_out(folder, fixtures):
    """So many pairs that an evaluation takes seconds."""
    write_data(folder / "held_out" / "pairs", pictures(fixtures, 4000))
    write_manifest(folder / "held_out", ["pairs"], ["raw", "synthetic", "generated"])
    return folder / "held_out"


def test_C16_a_signal_to_one_rank_in_an_evaluation_saves_a_common_step_on_all(folder, data, model, output, held_out):
    rarely = ["--save-every", 1000000, "--save-minutes", 0.01, "--val-data", held_out, "--eval-every", 40]
    job = WarmJob(*arguments(data, model, output, *rarely), log=folder / "signal.log")
    job.wait_for("saved")  # by the clock, which is rank 0's
    job.wait_for("step 40/")
    time.sleep(0.3)
    ranks = job.ranks()
    ranks[1].send_signal(signal.SIGUSR1)
    assert wait_until_gone(ranks) < 60
    result = job.wait(30)
    assert result.status == 138, result.output  # 128 + SIGUSR1
    assert "stopped by" in result.output and "--resume auto" in result.output
    assert "after step 40, saved" in result.output and newest_step(output) == 40
    assert "evaluated" not in result.output


def test_a_signal_to_the_launcher_stops_and_saves_and_the_next_start_goes_on_there(folder, data, model, output):
    before = newest_step(output)
    job = Job(*arguments(data, model, output, "--resume", "auto", "--val-data", data), log=folder / "launcher.log")
    job.wait_for(f"step {before + 4:,}/")
    ranks = job.ranks()
    job.process.send_signal(signal.SIGTERM)
    assert wait_until_gone(ranks) < 60
    output_text = job.wait(30).output
    assert f"(step {before})" in output_text
    assert f"evaluated step {before} in" in output_text  # which the stop had cut short
    assert newest_step(output) > before + 2


def test_C5_a_rank_killed_while_saving_takes_the_others_with_it_and_costs_no_save(folder, data, model, output):
    before = newest_step(output)
    job = Job(*arguments(data, model, output, "--resume", "auto", "--save-every", 1), log=folder / "killed.log")
    job.wait_for(f"step_{before + 5:08d} in")
    ranks = job.ranks()
    ranks[0].send_signal(signal.SIGKILL)
    assert wait_until_gone(ranks) < 60
    result = job.wait(30)
    assert result.status != 0 and "Traceback" not in result.output
    assert newest_step(output) >= before + 5


def test_steps_with_nan_gradients_are_skipped_and_end_the_run_when_they_do_not_stop(folder, data, model):
    job = ["--lr", 2e9, "--max-skipped", 3, "--save-every", 1]
    result = run_warm(*arguments(data, model, folder / "nan", *job), log=folder / "nan.log", world_size=1)
    assert result.status == 2, result.output
    assert "2 skipped" in result.output and "Traceback" not in result.output
    assert len(result.errors) == 1 and "3 steps in a row had NaN or Inf gradients" in result.errors[0]
    assert ".rec key" in result.errors[0] and "the last good save is of step 1" in result.errors[0]
    assert "from step 2 of epoch 1 on" in result.errors[0] and "epoch 1/1000 step 3/" in result.output


def test_a_complete_run_tells_how_many_steps_were_left_out_and_their_row_goes_on_in_a_resume(folder, data, model):
    output = folder / "nan_to_the_end"
    job = [*arguments(data, model, output, "--lr", 2e9), "--epochs"]
    result = run_warm(*job, 1, log=folder / "nan_1.log", world_size=1)
    assert result.status == 0 and "Traceback" not in result.output, result.output
    lines = [line for line in result.output.splitlines() if "of the run's 8 steps" in line]
    assert len(lines) == 1 and " 7 of the run's 8 steps (87.5 %) were left out" in lines[0], result.output
    more = [2, "--resume", "auto", "--max-skipped", 9]
    result = run_warm(*job, *more, log=folder / "nan_2.log", world_size=1)
    assert result.status == 2 and len(result.errors) == 1, result.output
    assert "9 steps in a row" in result.errors[0] and "from step 2 of epoch 1 on" in result.errors[0]
    assert "the last good save is of step 8" in result.errors[0]


def test_N5_a_rank_that_fails_ends_all_and_its_message_is_shown(folder, fixtures, model):
    data = folder / "one_bad"
    payloads = pictures(fixtures, 63) + [(fixtures / "img" / "trunc_60pct.jpg").read_bytes()]
    write_data(data / "train", payloads)
    write_manifest(data, ["train"], ["raw", "synthetic", "generated"])  # so that the start-up check trusts the pictures
    job = WarmJob(*arguments(data, model, folder / "n5"), log=folder / "n5.log")
    job.wait_for("training begins")
    assert wait_until_gone(job.ranks()) < 60
    result = job.wait(30)
    assert result.status != 0
    assert any("train.rec key 63" in line for line in result.errors), result.output
    assert "Traceback" not in result.output


def test_C8_a_full_disk_ends_all_ranks_with_one_clear_line(folder, data, model):
    output = folder / "full"
    # Files may grow to 4,000 KiB: enough for a model's weights, too little for the optimizer's state.
    limit = ("bash", "-c", 'ulimit -f 4000; exec "$@"', "limited")
    job = Job(*arguments(data, model, output, "--save-every", 2), log=folder / "full.log", prefix=limit)
    result = job.wait(120)
    assert result.status != 0
    assert any("cannot write the checkpoint" in line for line in result.errors), result.output
    assert complete_checkpoints(output / "checkpoints") == []


def test_a_signal_while_the_op_is_being_built_ends_all_ranks_in_a_line(folder, data, model, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(folder / "cold"))
    job = WarmJob(*arguments(data, model, folder / "start"), log=folder / "start.log")
    job.wait_for("building the op")
    ranks = job.ranks()
    ranks[1].send_signal(signal.SIGUSR1)
    assert wait_until_gone(ranks) < 60
    result = job.wait(30)
    lines = [line for line in result.output.splitlines() if "before training began: nothing to save" in line]
    assert len(lines) == 1 and "stopped by SIGUSR1 to rank 1" in lines[0], result.output
    assert result.status == 138 and not result.errors and "Traceback" not in result.output
