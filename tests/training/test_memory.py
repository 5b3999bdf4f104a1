"""`rwkv-clip plan`: the memory that it predicts is what runs were measured to take, and its sums are right."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from rwkv_clip.cli import main
from rwkv_clip.model import mixing
from rwkv_clip.model.clip import RWKVCLIP
from rwkv_clip.model.config import load_config
from rwkv_clip.ops import lerp
from rwkv_clip.training import memory
from rwkv_clip.training.engine import lock_towers, set_training_mode
from rwkv_clip.training.loss import ClipLoss
from rwkv_clip.training.memory import LiveBytes, activation_bytes, kept_by_compiled_block

CONFIGS = Path(__file__).parents[2] / "ds_configs"
GIB = 2**30


def plan(capsys, *words: object) -> dict:
    assert main(["plan", "--json", *(str(word) for word in words)]) == 0
    return json.loads(capsys.readouterr().out)


def on_meta(config, dtype=torch.float32) -> RWKVCLIP:
    with torch.device("meta"):
        model = RWKVCLIP(config)
    return model.to(dtype).train()


def without_kernels(monkeypatch) -> None:
    """Predict for interpolations in plain PyTorch, as they run where `lerp.usable` says no.

    On a CPU, which has none, let a squared ReLU keep what it keeps on a GPU.
    """
    monkeypatch.setattr(mixing, "_roots_are_slow", lambda x: False)
    monkeypatch.setattr(lerp, "usable", lambda x, layout: False)


# Peaks of the real job on H200s with torch 2.11, bf16; the compiled ones with CUDA graphs, but for ZeRO-2.
@pytest.mark.parametrize(
    ("model", "config", "batch", "gpus", "measured"),
    [
        ("B-32", "zero1_bf16", 512, 1, 22.1),
        ("B-32", "zero2_bf16", 512, 1, 22.3),
        ("B-32", "zero1_bf16_compile", 512, 1, 16.6),
        ("B-32", "zero1_bf16_compile", 512, 2, 15.8),
        ("B-32", "zero1_bf16_compile", 256, 1, 9.4),
        ("B-32", "zero1_bf16_selective", 512, 1, 5.6),
        ("B-32", "zero1_bf16_checkpointing", 512, 1, 4.6),
        ("B-16", "zero1_bf16_compile", 512, 1, 40.1),
    ],
)
def test_the_predicted_peak_is_within_10_percent_of_what_an_h200_took(capsys, model, config, batch, gpus, measured):
    words = ["--model", model, "--batch", batch, "--gpus", gpus, "--config", CONFIGS / f"{config}.json"]
    assert plan(capsys, *words)["peak"] / GIB == pytest.approx(measured, rel=0.1)


def test_without_the_kernels_too(capsys, monkeypatch):
    without_kernels(monkeypatch)
    figures = plan(capsys, "--model", "B-32", "--batch", 512, "--config", CONFIGS / "zero1_bf16_compile.json")
    # Measured in a loop without an engine, whose weights and states took 1.0 GiB.
    assert figures["activations"] / GIB + 1.0 == pytest.approx(10.9, rel=0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_pass_on_the_meta_device_counts_what_a_real_one_holds(checkpointed, dtype, monkeypatch):
    without_kernels(monkeypatch)  # which a CPU does not have
    nano = load_config("Nano")
    text = dataclasses.replace(nano.text, vocab_size=50)
    config = dataclasses.replace(nano, image=dataclasses.replace(nano.image, drop_path_rate=0.1), text=text)
    model = RWKVCLIP(config).to(dtype).train()
    if checkpointed:
        model.set_activation_checkpointing(lambda function, *args: checkpoint(function, *args, use_reentrant=False))
    images, tokens = torch.randn(8, 3, 48, 48), torch.randint(50, (8, 40))
    with LiveBytes() as live:
        ClipLoss()(*model(images, tokens)).loss.backward()
    predicted = activation_bytes(on_meta(config, dtype), 8, checkpointed)
    assert predicted == pytest.approx(live.peak, rel=0.02)
    gradients = sum(dtype.itemsize * parameter.numel() for parameter in model.parameters())
    assert gradients <= live.now <= 1.02 * gradients + 2**18  # everything else was freed


def test_the_interpolations_results_are_counted():
    batch, tokens, width = 8, 36, 128
    layout = (6, 32, 4, False)
    with torch.device("meta"):
        x = torch.empty(batch, tokens, width, dtype=torch.bfloat16, requires_grad=True)
        shares = [torch.empty(1, 1, width, dtype=torch.bfloat16) for _ in range(5)]
        w1, w2 = (torch.empty(shape, dtype=torch.bfloat16) for shape in ((width, 160), (5, 32, width)))
    assert lerp.usable(x, layout)
    small = 2**14  # the shares in fp32
    with LiveBytes() as live:
        results = lerp.lerp(x, shares[:2], layout)
        assert len(results) == 2 and 0 <= live.now - 2 * x.nbytes <= small
        del results
        results = lerp.time_mix_inputs(x, shares[0], w1, w2, shares, layout)
        kept = x.nbytes + 2 * batch * tokens * w1.shape[1]  # for the backward pass: the mixture in w1's product, hidden
        assert len(results) == 5 and 0 <= live.now - 5 * x.nbytes - kept <= small


def test_the_interpolation_kernels_hold_less_than_plain_interpolation(monkeypatch):
    nano = load_config("Nano")
    fused = activation_bytes(on_meta(nano, torch.bfloat16), 64)
    without_kernels(monkeypatch)
    assert fused < 0.95 * activation_bytes(on_meta(nano, torch.bfloat16), 64)


@pytest.mark.parametrize(("recompute", "results"), [("elementwise", 8), ("wide", 0)])
def test_a_compiled_block_counts_the_interpolations_results_that_it_keeps(monkeypatch, recompute, results):
    nano = load_config("Nano")

    def kept() -> int:
        return kept_by_compiled_block(nano, True, recompute, torch.bfloat16)

    fused = kept()
    without_kernels(monkeypatch)
    grid = nano.image.grid
    assert fused - kept() == results * 2 * grid[0] * grid[1] * nano.image.width


def test_more_recomputing_and_checkpointing_take_less():
    nano = load_config("Nano")
    sizes = [activation_bytes(on_meta(nano, torch.bfloat16), 64, *how) for how in [(), (False, "products"), (True,)]]
    assert sizes[0] > 2 * max(sizes[1:])


def test_states_are_divided_over_the_gpus_and_offloading_takes_them_away(capsys):
    def states(config: str, gpus: int) -> int:
        words = ["--model", "Nano", "--batch", 8, "--gpus", gpus, "--config", CONFIGS / f"{config}.json"]
        return plan(capsys, *words)["masters_and_moments"]

    count = sum(parameter.numel() for parameter in on_meta(load_config("Nano")).parameters())
    assert states("zero1_bf16", 1) == 12 * count
    assert states("zero1_bf16", 8) == states("zero2_bf16", 8) == 12 * -(-count // 8)
    assert states("zero3_bf16", 8) == 12 * -(-count // 8)
    assert states("zero1_bf16_offload", 8) == 0


def test_stage_3_divides_weights_and_gradients_and_counts_the_weights_that_are_whole_meanwhile(capsys, tmp_path):
    def figures(gpus: int, **keys: int) -> dict:
        path = tmp_path / "zero3.json"
        path.write_text(json.dumps({"bf16": {"enabled": True}, "zero_optimization": {"stage": 3, **keys}}))
        return plan(capsys, "--model", "Nano", "--batch", 8, "--gpus", gpus, "--config", path)

    sizes = [parameter.numel() for parameter in on_meta(load_config("Nano")).parameters()]
    count, small = sum(sizes), sum(size for size in sizes if size <= 100)
    alone, default = figures(1), figures(8)
    assert alone["weights"] == alone["gradients"] == 2 * count
    assert default["gradients"] == 2 * -(-count // 8) and default["weights"] == default["gradients"] + 2 * count
    least = {"stage3_max_live_parameters": 0, "max_reuse_distance": 0, "param_persistence_threshold": 100}
    little = figures(8, **least)
    assert little["weights"] == 2 * (-(-count // 8) + small + max(sizes))
    assert default["peak"] - little["peak"] == default["weights"] - little["weights"]
    # DeepSpeed lays out the whole bucket, whatever the model's size.
    assert default["peak"] - figures(8, reduce_bucket_size=10**6)["peak"] == 2 * (5 * 10**8 - 10**6)


def test_averaged_weights_take_a_copy_of_the_masters(capsys):
    def figures(config: str, *words: object) -> dict:
        return plan(capsys, "--model", "Nano", "--batch", 8, "--config", CONFIGS / f"{config}.json", *words)

    count = sum(parameter.numel() for parameter in on_meta(load_config("Nano")).parameters())
    for config, gpus, bytes_each in (("zero1_bf16", 1, 4), ("zero1_bf16", 8, 0.5), ("zero1_bf16_offload", 1, 0)):
        without = figures(config, "--gpus", gpus)
        averaged = figures(config, "--gpus", gpus, "--ema-decay", 0.999)
        assert without["averages"] == 0 and averaged["averages"] == pytest.approx(bytes_each * count, abs=4)
        assert averaged["peak"] - without["peak"] == averaged["averages"]


@pytest.mark.parametrize("tower", ["image", "text"])
def test_a_locked_tower_has_weights_and_nothing_else(capsys, tower):
    words = ["--model", "Nano", "--batch", 64, "--config", CONFIGS / "zero1_bf16.json", "--ema-decay", 0.999]
    free, locked = plan(capsys, *words), plan(capsys, *words, f"--lock-{tower}")
    model = on_meta(load_config("Nano"))
    frozen = sum(parameter.numel() for parameter in getattr(model, f"{tower}_model").parameters())
    learned = sum(parameter.numel() for parameter in model.parameters()) - frozen
    assert locked["weights"] == free["weights"]
    assert locked["masters_and_moments"] == 12 * learned and locked["averages"] == 4 * learned
    assert locked["gradients"] == 2 * learned and locked["activations"] < 0.8 * free["activations"]


@pytest.mark.parametrize("tower", ["image", "text"])
def test_compiled_blocks_of_a_locked_tower_keep_nothing(monkeypatch, tower):
    kept = 10**6
    monkeypatch.setattr(memory, "kept_by_compiled_block", lambda *_: kept)
    model, locked = on_meta(load_config("Nano"), torch.bfloat16), on_meta(load_config("Nano"), torch.bfloat16)
    lock_towers(locked, tower == "image", tower == "text")
    less = activation_bytes(model, 64, recompute="elementwise") - activation_bytes(locked, 64, recompute="elementwise")
    assert less >= 64 * 4 * kept  # in four blocks


def test_a_pass_with_a_locked_tower_counts_what_a_real_one_holds(monkeypatch):
    without_kernels(monkeypatch)
    nano = load_config("Nano")
    config = dataclasses.replace(nano, text=dataclasses.replace(nano.text, vocab_size=50))
    models = [RWKVCLIP(config), on_meta(config)]
    for model in models:
        lock_towers(model, True, False)
        set_training_mode(model)
    with LiveBytes() as live:
        ClipLoss()(*models[0](torch.randn(8, 3, 48, 48), torch.randint(50, (8, 40)))).loss.backward()
    assert activation_bytes(models[1], 8) == pytest.approx(live.peak, rel=0.02)


def test_logits_of_all_gpus_count_unless_they_are_chunked(capsys):
    def peak(*words: object) -> int:
        return plan(capsys, "--model", "Nano", "--batch", 256, "--config", CONFIGS / "zero2_bf16.json", *words)[
            "activations"
        ]

    more = peak("--gpus", 65) - peak("--gpus", 1)
    assert more == memory._LOGIT_COPIES * 4 * 256 * 256 * 64
    assert peak("--gpus", 65, "--loss-chunk", 32) < peak("--gpus", 65) - more / 2


def test_steps_and_times_follow_from_the_data_and_the_rate(capsys, tmp_path):
    import numpy as np

    from rwkv_clip.data.recordio import RecordWriter

    with RecordWriter(tmp_path / "d") as writer:
        for key in range(50):
            writer.write(key, np.zeros(231, np.float32), b"x" * 8)
    words = ["--model", "Nano", "--batch", 4, "--gpus", 2, "--data", tmp_path / "d", "--rate", 10, "--epochs", 3]
    figures = plan(capsys, *words, "--config", CONFIGS / "fp32.json")
    assert figures["steps_per_epoch"] == 6
    assert figures["epoch_seconds"] == pytest.approx(48 / 20) and figures["run_seconds"] == pytest.approx(3 * 48 / 20)
    assert main(["plan", *(str(word) for word in words), "--config", str(CONFIGS / "fp32.json")]) == 0
    text = capsys.readouterr().out
    assert "steps per epoch" in text and "peak memory per GPU" in text


def test_a_bucket_size_left_to_deepspeed_is_its_default(capsys, tmp_path):
    config = {"zero_optimization": {"stage": 2}}
    peaks = []
    for size in ({}, {"reduce_bucket_size": "auto"}):
        path = tmp_path / "ds.json"
        path.write_text(json.dumps({"zero_optimization": config["zero_optimization"] | size}))
        peaks.append(plan(capsys, "--model", "Nano", "--batch", 4, "--config", path)["peak"])
    assert peaks[0] == peaks[1]


@pytest.mark.parametrize(
    ("zero_optimization", "message"),
    [
        ({"stage": 3, "stage3_max_live_parameters": [1]}, "stage3_max_live_parameters: Input should be a valid"),
        ({"stage": 2, "contiguous_gradients": None}, "contiguous_gradients: Input should be a valid boolean"),
        ({"stage": 3, "stage3_foo": 1}, "stage3_foo: Extra inputs are not permitted"),
    ],
)
def test_what_deepspeed_refuses_is_refused_here_too(capsys, tmp_path, zero_optimization, message):
    path = tmp_path / "odd.json"
    path.write_text(json.dumps({"zero_optimization": zero_optimization}))
    assert main(["plan", "--model", "Nano", "--batch", "8", "--gpus", "3", "--config", str(path)]) != 0
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--batch", "8", "--rate", "5"], "--rate gives the time of an epoch"),
        ([], "no batch size: give --batch-size"),
        (["--batch", "8", "--config", "none.json"], "none.json: no such file"),
        (["--batch", "0"], "--batch-size: must be at least 1"),
        (["--batch", "2000000000"], "lower it"),
        (["--batch", "8", "--loss", "4"], "--loss"),
        (["--batch", "8", "--ema-decay", "2"], "--ema-decay: must be at least 0.5"),
        (["--batch", "8", "--lock-image", "--lock-text"], "--lock-image and --lock-text together"),
    ],
)
def test_a_mistake_is_answered_in_one_line(capsys, words, message):
    assert main(["plan", "--model", "Nano", *words]) != 0
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
