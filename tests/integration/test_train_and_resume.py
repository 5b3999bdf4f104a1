"""A job from start to end, its artefacts, and the same job stopped and continued."""

import json
import shutil

import pytest
import torch
from jobs import CONFIGS, metrics, run, run_warm, write_evaluation
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rwkv_clip import create_model
from rwkv_clip.cli import main
from rwkv_clip.model.published import read_state_dict


@pytest.fixture(scope="module")
def straight(folder, data, model):
    """(run folder, result) of two epochs on two ranks, under the deepspeed launcher."""
    output = folder / "straight"
    result = run(*arguments(data, model, output), log=folder / "straight.log")
    return output, result


def arguments(data, model, output, *more):
    common = ["--model", model, "--train-data", data, "--output", output, "--epochs", 2, "--log-every", 1]
    sizes = ["--deepspeed_config", CONFIGS / "fp32.json", "--batch-size", 8, "--grad-clip", 1.0, "--save-every", 3]
    return [*common, *sizes, "--val-data", data, "--lr-schedule", "cosine", "--ema-decay", 0.9, *more]


def scalars(output, tag):
    events = EventAccumulator(str(output / "tensorboard"))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_O7_an_epoch_has_exactly_its_steps_and_the_last_rate_is_the_minimum(straight):
    output, result = straight
    assert result.status == 0, result.output
    assert [line["step"] for line in metrics(output)] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert metrics(output)[-1]["learning_rate"] == 0.0


def test_the_run_folder_holds_what_the_run_was(straight):
    output, result = straight
    assert json.loads((output / "args.json").read_text())["epochs"] == 2
    assert json.loads((output / "model.json").read_text())["image"]["drop_path_rate"] == 0.3
    config = json.loads((output / "ds_config.json").read_text())
    assert config["train_micro_batch_size_per_gpu"] == 8 and config["train_batch_size"] == 16
    assert "step 8/8" in (output / "training.log").read_text()
    assert sorted(path.name for path in (output / "checkpoints").glob("step_*")) == [
        "step_00000003",
        "step_00000006",
        "step_00000008",
    ]
    assert (output / "checkpoints" / "latest").read_text() == "step_00000008"


def test_G3_tensorboard_counts_steps_and_shows_the_scale_itself(straight):
    output, _ = straight
    assert [step for step, _ in scalars(output, "loss")] == list(range(1, 9))
    assert scalars(output, "logit_scale")[0][1] == pytest.approx(14.29, abs=0.01)
    assert [step for step, _ in scalars(output, "validation/loss")] == [4, 8]


def test_the_last_line_of_an_interval_tells_speed_memory_and_data_wait(straight):
    line = metrics(straight[0])[-1]
    assert line["samples_per_second"] == pytest.approx(2 * line["samples_per_second_per_gpu"])
    assert 0 <= line["data_wait_pct"] <= 100 and line["max_memory_gib"] > 0.01 and line["skipped_steps"] == 0
    assert line["loss_spikes"] == 0
    assert {"loss_by_caption/raw", "loss_by_caption/synthetic", "loss_by_caption/generated"} <= set(line)


def test_C14_the_final_weights_are_the_checkpoint_s_and_load_as_a_model(straight, fixtures):
    output, _ = straight
    weights = read_state_dict(output / "weights.pt")
    assert weights["logit_scale"].shape == () and {value.dtype for value in weights.values()} == {torch.float32}
    from_checkpoint = read_state_dict(output / "checkpoints" / "step_00000008")
    assert weights.keys() == from_checkpoint.keys()
    assert all(torch.equal(weights[name], from_checkpoint[name].view_as(weights[name])) for name in weights)
    features = create_model(output, checkpoint=output / "weights.pt").encode_image(torch.zeros(1, 3, 16, 16))
    assert features.isfinite().all()


def test_averaged_weights_are_written_kept_in_checkpoints_and_scored(straight, folder):
    output, result = straight
    averaged = read_state_dict(output / "weights_ema.pt")
    assert averaged.keys() == read_state_dict(output / "weights.pt").keys()
    last, first = (read_state_dict(output / "checkpoints" / f"step_{step:08d}") for step in (8, 3))
    name = "image_model.layers.0.att.key.weight"
    assert (averaged[name] - last[name]).norm() > 0 and (averaged[name] - first[name]).norm() > 0
    assert main(["export", str(output / "checkpoints" / "step_00000008"), str(folder / "ema.pt"), "--ema"]) == 0
    exported = read_state_dict(folder / "ema.pt")
    assert all(torch.equal(exported[name], averaged[name]) for name in averaged)
    assert "averaged weights: decay 0.9; evaluations use them" in result.output


def test_the_same_command_on_an_existing_run_is_refused(straight, folder, data, model):
    output, _ = straight
    result = run_warm(*arguments(data, model, output), log=folder / "again.log")
    assert result.status != 0 and len(result.errors) == 1
    assert "already holds a run" in result.errors[0] and "--resume auto" in result.errors[0]


@pytest.fixture(scope="module")
def resumed(straight, folder, data, model):
    """The straight run as it was after step 3, but with `latest` naming a save that is gone; continued."""
    output = folder / "resumed"
    shutil.copytree(straight[0], output)
    for step in (6, 8):
        shutil.rmtree(output / "checkpoints" / f"step_{step:08d}")
    (output / "weights.pt").unlink()
    (output / "weights_ema.pt").unlink()
    (events,) = (output / "tensorboard").iterdir()
    events.write_bytes(events.read_bytes()[:-9])  # killed while it wrote
    result = run_warm(*arguments(data, model, output, "--resume", "auto"), log=folder / "resumed.log")
    return output, result


def test_C1_a_resume_in_mid_epoch_reaches_the_same_losses_and_weights(straight, resumed):
    assert resumed[1].status == 0, resumed[1].output
    assert "going on from" in resumed[1].output and "(step 3)" in resumed[1].output
    for before, after in zip(metrics(straight[0]), metrics(resumed[0]), strict=True):
        assert after["step"] == before["step"]
        assert after["loss"] == pytest.approx(before["loss"], abs=1e-6)
        assert after["learning_rate"] == before["learning_rate"]
    for file in ("weights.pt", "weights_ema.pt"):
        expected, found = (read_state_dict(output / file) for output in (straight[0], resumed[0]))
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6, msg=f"{file} {name}")


def test_a_latest_file_that_names_nothing_is_a_warning(resumed):
    assert (
        "latest says 'step_00000008'; going on from the newest complete checkpoint, step_00000003" in resumed[1].output
    )


def test_G1_tensorboard_shows_every_step_once_after_a_resume(resumed):
    for tag in ("loss", "learning_rate"):
        assert [step for step, _ in scalars(resumed[0], tag)] == list(range(1, 9))
    assert [step for step, _ in scalars(resumed[0], "validation/loss")] == [4, 8]
    assert len(list((resumed[0] / "tensorboard").rglob("events*"))) == 2  # one for each start, in one folder


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_C5_saves_with_a_flipped_bit_are_passed_over_and_refused_when_named(straight, folder, data, model):
    output = folder / "flipped"
    shutil.copytree(straight[0], output)
    saves = output / "checkpoints"
    files = [
        saves / "step_00000008" / "zero_pp_rank_1_mp_rank_00_optim_states.pt",
        saves / "step_00000006" / "mp_rank_00_model_states.pt",
    ]
    for path in files:
        flip_a_bit(path)
    named = run_warm(*arguments(data, model, folder / "named", "--resume", files[0].parent), log=folder / "named.log")
    assert named.status == 2 and len(named.errors) == 1 and "Traceback" not in named.output, named.output
    assert f"{files[0]} is damaged" in named.errors[0] and "use an earlier checkpoint" in named.errors[0]
    result = run_warm(*arguments(data, model, output, "--resume", "auto"), log=folder / "flipped.log")
    assert result.status == 0 and "(step 3)" in result.output, result.output
    for path in files:
        lines = [line for line in result.output.splitlines() if f"{path} is damaged" in line]
        assert len(lines) == 1 and "passing over a broken checkpoint" in lines[0]
    expected, found = (read_state_dict(path / "weights.pt") for path in (straight[0], output))
    assert all(torch.allclose(found[name], value, rtol=0, atol=1e-6) for name, value in expected.items())


@pytest.fixture(scope="module")
def two_ranks(folder, data, plain_model):
    """Run folder of two epochs on two ranks without drop path, whose random numbers differ from rank to rank."""
    output = folder / "two_ranks"
    result = run(*arguments(data, plain_model, output), log=folder / "two_ranks.log", launcher="torchrun")
    assert result.status == 0, result.output
    return output


def test_C3_a_run_goes_on_with_another_number_of_ranks(two_ranks, folder, data, plain_model):
    before, after = two_ranks, folder / "one_rank"
    last = ["--resume", before / "checkpoints" / "step_00000003"]
    second = run(*arguments(data, plain_model, after, *last), log=folder / "one_rank.log", launcher="alone")
    assert second.status == 0, second.output
    assert "global batch 16 (8 x 2 accumulated x 1 GPUs)" in second.output
    for expected, found in zip(metrics(before)[3:], metrics(after), strict=True):
        assert found["step"] == expected["step"]
        assert found["loss"] == pytest.approx(expected["loss"], abs=1e-4)
        assert found["learning_rate"] == pytest.approx(expected["learning_rate"], rel=1e-6)
    assert not list((after / "checkpoints").glob("*universal*"))
    expected, found = (read_state_dict(output / "weights_ema.pt") for output in (before, after))
    assert all(torch.allclose(found[name], value, rtol=0, atol=1e-4) for name, value in expected.items())


@pytest.fixture(scope="module")
def stage_3(folder, data, plain_model, fixtures):
    """(run folder, its arguments): as `two_ranks`, with most weights divided, and scores of a prepared folder."""
    output, config = folder / "stage_3", folder / "stage_3.json"
    section = {"stage": 3, "reduce_bucket_size": 10000, "param_persistence_threshold": 20}
    section |= {"max_live_parameters": 5000, "max_reuse_distance": 5000}
    config.write_text(json.dumps({"zero_optimization": section}))
    words = arguments(data, plain_model, output, "--eval-data", write_evaluation(folder / "stage_3_eval", fixtures))
    words[words.index("--deepspeed_config") + 1] = config
    result = run_warm(*words, log=folder / "stage_3.log")
    assert result.status == 0 and "fp32, ZeRO stage 3" in result.output, result.output
    return output, words


def goes_on(stage_3, last, output, world_size):
    """Losses and final weights of a run that goes on from a checkpoint of a stage 3 run in a new folder."""
    words = [output if word == stage_3[0] else word for word in stage_3[1]]
    result = run_warm(*words, "--resume", last, log=output.with_suffix(".log"), world_size=world_size)
    assert result.status == 0, result.output
    weights = {file: read_state_dict(output / file) for file in ("weights.pt", "weights_ema.pt")}
    return [line["loss"] for line in metrics(output)], weights


def test_stage_3_trains_evaluates_and_writes_weights_as_stage_1_does(two_ranks, stage_3):
    output, _ = stage_3
    expected, found = ([json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
                       for run in (two_ranks, output))  # fmt: skip
    for name in ("loss", "gradient_norm", "logit_scale", "validation/loss"):
        values = [line[name] for line in expected if name in line]
        assert [line[name] for line in found if name in line] == pytest.approx(values, rel=1e-5), name
    assert sum("zero_shot/kinds/accuracy" in line for line in found) == 2
    for file in ("weights.pt", "weights_ema.pt"):
        weights, own = read_state_dict(two_ranks / file), read_state_dict(output / file)
        assert list(own) == list(weights)
        for name, value in weights.items():
            torch.testing.assert_close(own[name], value, rtol=0, atol=1e-6, msg=f"{file} {name}")


def test_stage_3_goes_on_to_the_bit_and_with_other_numbers_of_ranks(stage_3, folder):
    losses = [line["loss"] for line in metrics(stage_3[0])]
    same, weights = goes_on(stage_3, stage_3[0] / "checkpoints" / "step_00000003", folder / "stage_3_same", 2)
    assert same == losses[3:]
    for file, values in weights.items():
        expected = read_state_dict(stage_3[0] / file)
        assert all(torch.equal(values[name], value) for name, value in expected.items()), file
    alone, _ = goes_on(stage_3, stage_3[0] / "checkpoints" / "step_00000003", folder / "stage_3_alone", 1)
    assert alone == pytest.approx(losses[3:], rel=1e-4)
    back, others = goes_on(
        stage_3, folder / "stage_3_alone" / "checkpoints" / "step_00000006", folder / "stage_3_back", 2
    )
    assert back == pytest.approx(losses[6:], rel=1e-4)
    for file, values in weights.items():
        assert all(torch.allclose(others[file][name], value, rtol=0, atol=1e-5) for name, value in values.items()), file
    # DeepSpeed would give all groups the first one's weight decay, and count each group's steps for both.
    last = folder / "stage_3_back" / "checkpoints" / "step_00000008"
    content = torch.load(next(last.glob("*rank_1_*optim_states.pt")), weights_only=False)
    state = content["optimizer_state_dict"]["optimizer_state_dict"]
    assert [(group["name"], group["weight_decay"]) for group in state["param_groups"]] == [
        ("decay", 0.2),
        ("no_decay", 0.0),
    ]
    assert [values["step"].item() for values in state["state"].values()] == [8, 8]


def test_a_checkpoint_of_stage_3_goes_to_no_other_stage(stage_3, folder, data, plain_model):
    last = ["--resume", stage_3[0] / "checkpoints" / "step_00000003"]
    result = run_warm(*arguments(data, plain_model, folder / "stage_1", *last), log=folder / "stage_1.log")
    assert result.status == 2 and len(result.errors) == 1 and "Traceback" not in result.output, result.output
    assert "ZeRO stage was 3 in the run to resume" in result.errors[0] and "put the old stage back" in result.errors[0]
