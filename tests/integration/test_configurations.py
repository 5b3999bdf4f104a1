"""Each kind of precision and memory saving that ships, in a real job of two ranks."""

import json

import pytest
import torch
from jobs import CONFIGS, metrics, run_warm, write_evaluation
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rwkv_clip import create_model
from rwkv_clip.model.published import published_state_dict, read_state_dict, save


@pytest.fixture(scope="module")
def pretrained(folder, model):
    """Weights whose values bf16 cannot hold."""
    torch.manual_seed(3)
    path = folder / "pretrained.pt"
    save(path, published_state_dict(create_model(model)))
    return path


@pytest.fixture(scope="module")
def prepared(folder, fixtures):
    return write_evaluation(folder / "prepared", fixtures)


@pytest.fixture(scope="module")
def fine_tuned(folder, data, model, pretrained, prepared):
    """(run folder, result): bf16, ZeRO-1, checkpointing, accumulation, from weights, with a locked image tower, the
    sigmoid loss, and rates of their own."""
    output = folder / "fine_tuned"
    job = ["--model", model, "--train-data", data, "--output", output, "--epochs", 1, "--log-every", 1]
    job += ["--deepspeed_config", CONFIGS / "zero1_bf16_checkpointing.json", "--batch-size", 8, "--global-batch", 32]
    job += ["--pretrained", pretrained, "--lock-image", "--eval-data", prepared]
    job += ["--loss", "siglip", "--text-lr-factor", 0.5, "--decay-lr-factor", 2, "--ema-decay", 0.9]
    return output, run_warm(*job, log=folder / "fine_tuned.log")


def test_M7_bf16_with_zero_1_checkpointing_and_accumulation_trains(fine_tuned):
    output, result = fine_tuned
    assert result.status == 0, result.output
    assert "bf16, ZeRO stage 1, activation checkpointing" in result.output
    assert "the negatives are those of the whole global batch" in result.output
    assert [line["step"] for line in metrics(output)] == [1, 2]


def test_a_locked_tower_keeps_its_weights_to_the_bit_in_bf16(fine_tuned, pretrained):
    before, after = read_state_dict(pretrained), read_state_dict(fine_tuned[0] / "weights.pt")
    locked = [name for name in before if name.startswith("image_model.")]
    assert any(not torch.equal(before[name].bfloat16().float(), before[name].float()) for name in locked)
    assert all(torch.equal(before[name], after[name]) for name in locked)
    assert f"the image tower is locked: {len(locked)} tensors" in fine_tuned[1].output
    assert any(not torch.equal(before[name], after[name]) for name in before if name.startswith("text_model."))


def test_the_sigmoid_loss_learns_its_bias_and_keeps_it_in_what_is_loaded_and_exported(fine_tuned):
    output, result = fine_tuned
    assert "loss: siglip; negatives: of all GPUs" in result.output
    assert "--pretrained has no logit_bias" in result.output
    first, last = metrics(output)
    assert first["logit_bias"] == -10 and first["logit_scale"] == pytest.approx(10) and last["logit_bias"] != -10
    for source in (output, output / "weights_ema.pt", output / "checkpoints" / "step_00000002"):
        assert create_model(output, checkpoint=source).logit_bias.item() != -10


def test_each_group_s_rate_is_logged_and_ends_at_the_minimum(fine_tuned):
    first, last = metrics(fine_tuned[0])
    rates = {
        name.removeprefix("learning_rate"): rate for name, rate in first.items() if name.startswith("learning_rate")
    }
    base = rates[""]
    assert rates == pytest.approx({"": base, "/text": base / 2, "/text_time_decay": base})
    assert last["learning_rate"] == last["learning_rate/text"] == last["learning_rate/text_time_decay"] == 0


def test_the_log_has_one_short_score_of_each_set_and_the_metrics_have_all(fine_tuned):
    output, result = fine_tuned
    line = next(line for line in result.output.splitlines() if "evaluated step 2 in" in line)
    assert "R@5" in line and "x chance)" in line and len(line) < 200
    assert "retrieval" not in line
    last = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()][-1]
    assert sum(name.startswith(("zero_shot/", "retrieval/")) for name in last) > 20


def test_scores_and_a_picture_of_retrieved_examples_are_logged(fine_tuned):
    events = EventAccumulator(str(fine_tuned[0] / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("zero_shot/kinds/accuracy")] == [2]
    assert [event.step for event in events.Images("retrieved")] == [2]


def test_stage_3_trains_beside_a_locked_tower_and_is_scored(folder, data, model, pretrained, prepared):
    output = folder / "zero3"
    job = ["--model", model, "--train-data", data, "--output", output, "--epochs", 1, "--max-steps-per-epoch", 2]
    job += ["--deepspeed_config", CONFIGS / "zero3_bf16.json", "--batch-size", 8, "--pretrained", pretrained]
    result = run_warm(*job, "--lock-image", "--eval-data", prepared, log=folder / "zero3.log")
    assert result.status == 0 and "bf16, ZeRO stage 3" in result.output, result.output
    before, after = read_state_dict(pretrained), read_state_dict(output / "weights.pt")
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert "text_model.emb.weight" in changed and not any(name.startswith("image_model.") for name in changed)
    last = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()][-1]
    assert "zero_shot/kinds/accuracy" in last  # by one rank alone


def test_fp16_trains_or_says_that_this_machine_cannot(folder, data, model):
    output = folder / "fp16"
    job = ["--model", model, "--train-data", data, "--output", output, "--epochs", 1]
    job += ["--deepspeed_config", CONFIGS / "zero1_fp16.json", "--batch-size", 8, "--max-steps-per-epoch", 1]
    result = run_warm(*job, log=folder / "fp16.log")
    if result.status:
        assert len(result.errors) == 1 and "fp16 is enabled, but this CPU cannot compute in it" in result.errors[0]
    else:
        assert metrics(output)[0]["loss_scale"] >= 1
