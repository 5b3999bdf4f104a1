"""Exact masters, precise buffers and the bounds of the temperature, in every kind of engine."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from ranks import run_ranks
from tiny import make_engine, make_model, make_pairs, micro_batches

from rwkv_clip.training.engine import restore_frozen
from rwkv_clip.training.loss import ClipLoss, LossOutput
from rwkv_clip.training.masters import master_parts, set_masters, sync_precise
from rwkv_clip.training.partitioned import whole_shape, whole_weights
from rwkv_clip.training.step import train_step

ENGINES = [
    dict(stage=0, precision="fp32"),
    dict(stage=1, precision="fp32"),
    dict(stage=0, precision="bf16"),
    dict(stage=1, precision="bf16"),
    dict(stage=2, precision="bf16"),
    dict(stage=1, precision="bf16", data_types={"grad_accum_dtype": "fp32"}),  # DeepSpeed's BF16_Optimizer
    dict(stage=0, precision="fp16"),
    dict(stage=1, precision="fp16"),
    dict(stage=2, precision="fp16"),
    dict(stage=3, precision="fp32"),
    dict(stage=3, precision="bf16"),
    dict(stage=3, precision="bf16", data_types={"grad_accum_dtype": "fp32"}),
    dict(stage=3, precision="fp16"),
]


def whole_masters(engine, names=None):
    """Masters by name (default: all), put together from the ranks' parts."""
    import torch.distributed as dist

    parts = master_parts(engine)
    masters = {}
    for name, parameter in engine.module.named_parameters():
        if names and name not in names:
            continue
        shape = whole_shape(parameter)
        value, seen = torch.zeros(shape.numel()), torch.zeros(shape.numel())
        if name in parts:
            part = parts[name]
            value[part.start : part.start + part.count] = part.value
            seen[part.start : part.start + part.count] = 1
        dist.all_reduce(value)
        dist.all_reduce(seen)
        masters[name] = (value / seen).view(shape)  # nan where no rank has a part
    return masters


def exactness_run(options):
    """Differences after set_masters and after each of three steps."""
    import torch.distributed as dist

    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = make_model()
    # Others than those that the engine is made of.
    exact = {name: parameter.detach() for name, parameter in make_model(seed=1).named_parameters()}
    exact["logit_scale"] = exact["logit_scale"].reshape(())  # as published files hold it
    engine = make_engine(model, 4, **options)
    for buffer in (buffer for _, buffer in model.precise_parameters().values()):
        buffer.zero_()
    set_masters(engine, exact)
    masters = whole_masters(engine)
    assert all(torch.equal(masters[name], value.view_as(masters[name])) for name, value in exact.items())
    with whole_weights(engine):
        assert all(torch.equal(p.detach(), masters[name].to(p.dtype)) for name, p in model.named_parameters())
    used = []
    for step in range(3):
        for name, (_, buffer) in model.precise_parameters().items():
            assert torch.equal(buffer, masters[name]), name
        pairs = make_pairs(4 * world_size, seed=step)
        batches = micro_batches(pairs, rank, world_size, 1)
        result = train_step(engine, batches, ClipLoss(group=engine.data_parallel_group))
        used.append(result.logit_scale.item())
        masters = whole_masters(engine)
        with whole_weights(engine):
            assert all(torch.equal(p.detach(), masters[name].to(p.dtype)) for name, p in model.named_parameters())
        if result.applied:
            assert not torch.equal(masters["time_decay"].flatten(), exact["time_decay"].flatten())
    return used, {name: value.numpy() for name, value in masters.items()}


def exactness_runs():
    from deepspeed.accelerator import get_accelerator

    # DeepSpeed refuses fp16 on a CPU without fp16 units, where PyTorch is merely slow.
    get_accelerator().is_fp16_supported = lambda: True
    return [exactness_run(dict(options)) for options in ENGINES]


@pytest.fixture(scope="module")
def exactness():
    return run_ranks(2, exactness_runs)[0]


def test_masters_and_precise_buffers_hold_the_exact_weights_in_every_engine(exactness):
    assert len(exactness) == len(ENGINES)  # the comparisons are made on the ranks


def test_every_engine_takes_the_first_steps_of_the_fp32_one(exactness):
    plain_scale, plain = exactness[0]
    for options, (scale, masters) in zip(ENGINES, exactness, strict=True):
        assert scale == pytest.approx(plain_scale, rel=1e-4 if options["precision"] != "fp16" else 0.05), options
        if options["precision"] == "bf16":
            for name, value in plain.items():
                assert np.median(np.abs(masters[name] - value)) < 1e-3, (options, name)


class Push:
    """A loss whose gradient of the raw temperature is -1 or 1, with what train_step reads of a loss."""

    direction = -1.0

    def __call__(self, image_features, text_features, logit_scale):
        loss = self.direction * logit_scale.log() + 0 * (image_features.sum() + text_features.sum())
        zero, rows = torch.zeros(()), torch.zeros(len(image_features))
        return LossOutput(loss.reshape(()), zero, zero, zero, rows, rows)


def pushed_run(options, start: float):
    """The scales used and the masters over 50 steps up and 5 down (or the reverse) from `start`."""
    model = make_model()
    torch.nn.init.constant_(model.logit_scale, start)
    exact = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    engine = make_engine(model, 4, lr=0.01, **options)
    set_masters(engine, exact)
    push = Push()
    push.direction = -1.0 if start > 2 else 1.0
    used, masters = [], []
    for step in range(55):
        if step == 50:
            push.direction = -push.direction
        used.append(train_step(engine, [make_pairs(4)], push).logit_scale.item())
        masters.append(whole_masters(engine, ["logit_scale"])["logit_scale"].item())
    return used, masters, model.precise_parameters()["logit_scale"][1].item()


def pushed_runs():
    """The temperature's master on one of the ranks, as a copy on each, and the parameter itself."""
    engines = [dict(stage=1, precision="bf16"), dict(stage=0, precision="bf16"), dict(stage=0, precision="fp32")]
    engines += [dict(stage=3, precision="bf16"), dict(stage=3, precision="fp32")]
    return [pushed_run(options, 4.5) for options in engines], pushed_run(engines[0], 0.1)


@pytest.fixture(scope="module")
def pushed():
    return run_ranks(2, pushed_runs)


def test_O3_the_temperature_stays_within_its_bounds_and_falls_at_once_when_the_gradient_turns(pushed):
    for upwards, _ in pushed:
        for used, masters, last in upwards:
            assert masters[48] == masters[49] == np.float32(math.log(100))
            assert max(masters) <= np.float32(math.log(100))
            assert max(used) <= 100.001
            assert masters[50] < masters[49] - 1e-4
            assert all(later < earlier for earlier, later in zip(masters[49:], masters[50:], strict=False))
            assert used[51] == pytest.approx(math.exp(masters[50]), rel=1e-6)
            assert last == np.float32(masters[-1])


def test_O3_the_lower_bound_is_zero_and_the_temperature_rises_at_once(pushed):
    for _, (used, masters, _) in pushed:
        assert masters[49] == 0.0 == min(masters)
        assert min(used) >= 1.0
        assert masters[50] > 1e-4


def count_collectives(stage: int, precision: str) -> int:
    """Collectives of one sync_precise."""
    import torch.distributed as dist

    engine = make_engine(make_model(), 4, stage=stage, precision=precision)
    calls = []
    original = dist.all_reduce
    dist.all_reduce = lambda *args, **kwargs: (calls.append(args[0].numel()), original(*args, **kwargs))[1]
    try:
        sync_precise(engine)
    finally:
        dist.all_reduce = original
    return len(calls)


def collective_counts():
    return [count_collectives(*engine) for engine in ((1, "bf16"), (3, "fp32"), (0, "bf16"), (1, "fp32"))]


def test_one_collective_where_masters_are_spread_over_ranks_and_none_elsewhere():
    assert run_ranks(2, collective_counts) == [[1, 1, 0, 0]] * 2
    assert run_ranks(1, collective_counts) == [[0, 0, 0, 0]]


def reloaded_run(folder, stage=1):
    """Masters, precise buffers and the next loss of an engine, and those of a fresh one that loads its checkpoint."""
    import torch.distributed as dist

    def next_loss(engine):
        batches = micro_batches(make_pairs(8, seed=9), dist.get_rank(), dist.get_world_size(), 1)
        return train_step(engine, batches, ClipLoss(group=engine.data_parallel_group)).loss.item()

    found = []
    for seed in (0, 1):
        model = make_model(seed=seed)
        exact = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        engine = make_engine(model, 4, stage=stage, precision="bf16")
        set_masters(engine, exact)
        if seed == 0:
            next_loss(engine)
            engine.save_checkpoint(folder, "saved")
        else:
            engine.load_checkpoint(folder, "saved")
            sync_precise(engine)
        masters = whole_masters(engine)
        assert all(torch.equal(buffer, masters[name]) for name, (_, buffer) in model.precise_parameters().items())
        weights = {name: value.numpy() for name, value in masters.items()}
        found.append((weights, next_loss(engine), {name: m.numpy() for name, m in whole_masters(engine).items()}))
    return found


def reloaded_runs(folder):
    return [reloaded_run(f"{folder}/{stage}", stage) for stage in (1, 3)]


def test_masters_and_buffers_come_back_from_a_checkpoint(tmp_path):
    ranks = run_ranks(2, reloaded_runs, str(tmp_path))
    for (weights, loss, after), (loaded, loaded_loss, loaded_after) in [pair for pairs in ranks for pair in pairs]:
        assert loss == loaded_loss
        for name, value in weights.items():
            np.testing.assert_array_equal(loaded[name], value, err_msg=name)
            np.testing.assert_array_equal(loaded_after[name], after[name], err_msg=name)


def frozen_run(stage):
    import torch.distributed as dist

    model = make_model()
    model.image_model.requires_grad_(False)
    model.time_decay.requires_grad_(False)
    exact = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    engine = make_engine(model, 2, 2, stage=stage, precision="bf16")
    set_masters(engine, exact)
    loaded = exact["image_model.0.weight"] + 1
    restore_frozen(model, {"image_model.0.weight": loaded})
    parts = master_parts(engine)
    batches = micro_batches(make_pairs(8), dist.get_rank(), dist.get_world_size(), 2)
    assert train_step(engine, batches, ClipLoss(group=engine.data_parallel_group)).applied
    frozen = torch.equal(model.precise_parameters()["time_decay"][1], exact["time_decay"])
    with whole_weights(engine):
        image = torch.equal(model.image_model[0].weight, loaded.bfloat16())
    learns = not torch.equal(model.precise_parameters()["logit_scale"][1], exact["logit_scale"])
    return frozen, image, learns, sorted(name for name in parts if name.startswith("image_model") or "decay" in name)


@pytest.mark.parametrize("stage", [1, 3])
def test_frozen_parameters_have_no_master_and_keep_their_precise_value(stage):
    for frozen, image, learns, parts in run_ranks(2, frozen_run, stage):
        assert frozen and image and learns and not parts


def test_a_missing_or_misshapen_value_is_named():
    model = make_model()
    engine = SimpleNamespace(module=model, optimizer=None, basic_optimizer=SimpleNamespace(param_groups=[], state={}))
    exact = {name: parameter.detach() for name, parameter in model.named_parameters()}
    with pytest.raises(ValueError, match="time_decay"):
        set_masters(engine, {name: value for name, value in exact.items() if name != "time_decay"})
    with pytest.raises(ValueError, match=r"pos_embed.*\(1, 12\).*\(3,\)"):
        set_masters(engine, exact | {"pos_embed": torch.zeros(3)})
