"""Averaged weights: their values, their place in the model for an evaluation, and their way through checkpoints."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from ranks import run_ranks
from tiny import make_engine, make_model, make_pairs, micro_batches

from rwkv_clip.errors import UserError
from rwkv_clip.model.averaged import file_name, read_averaged
from rwkv_clip.training.ema import WeightAverage
from rwkv_clip.training.loss import ClipLoss
from rwkv_clip.training.masters import set_masters
from rwkv_clip.training.partitioned import whole_weights
from rwkv_clip.training.step import train_step
from rwkv_clip.training.weights import gather_weights

DECAY, STEPS = 0.35, 6
ENGINES = [dict(stage=0, precision="fp32"), dict(stage=0, precision="bf16")]
ENGINES += [dict(stage=stage, precision=precision) for stage in (1, 2, 3) for precision in ("fp32", "bf16")]
for stage in (1, 3):
    section = {"stage": stage, "reduce_bucket_size": 10000, "enable_sanity_checks": True}
    section["offload_optimizer"] = {"device": "cpu"}
    offloaded = {"zero_force_ds_cpu_optimizer": False, "zero_optimization": section}
    ENGINES += [dict(stage=stage, precision="bf16", **offloaded)]


def start(options):
    model = make_model()
    model.pos_embed.requires_grad_(False)
    exact = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    engine = make_engine(model, 4, **dict(options))
    set_masters(engine, exact)
    return engine, WeightAverage(engine, DECAY), {"pos_embed": exact["pos_embed"]}


def step(engine, number):
    import torch.distributed as dist

    world_size = dist.get_world_size()
    batches = micro_batches(make_pairs(4 * world_size, seed=number), dist.get_rank(), world_size, 1)
    return train_step(engine, batches, ClipLoss(group=engine.data_parallel_group))


def states(engine):
    with whole_weights(engine):
        return [tensor.clone() for tensor in (*engine.module.parameters(), *engine.module.buffers())]


def check_one(options, folder: Path):
    """Averages in float64 beside the engine's; what the model holds inside and after an evaluation."""
    import torch.distributed as dist

    engine, average, frozen = start(options)
    wanted = {name: value.double() for name, value in gather_weights(engine, frozen).items()}
    for number in range(STEPS):
        step(engine, number)
        average.update()
        decay = min(DECAY, (2 + number) / (11 + number))
        for name, value in gather_weights(engine, frozen).items():
            wanted[name] = decay * wanted[name] + (1 - decay) * value.double()
    found = gather_weights(engine, frozen, average)
    assert len(found) == len(wanted)  # 0 on rank 1
    for name, value in wanted.items():
        torch.testing.assert_close(found[name].double(), value, rtol=1e-5, atol=1e-6, msg=f"{name} {options}")
    module = engine.module
    before = states(engine)
    with average.in_the_model():
        for name, value in found.items():
            parameter = dict(module.named_parameters())[name]
            assert torch.equal(parameter.detach(), value.to(parameter.dtype)), (name, options)
        for name, (_, buffer) in module.precise_parameters().items():
            assert not found or torch.equal(buffer, found[name]), (name, options)
    assert all(torch.equal(a, b) for a, b in zip(before, states(engine), strict=True)), options
    if dist.get_rank() == 0:
        folder.mkdir()
    dist.barrier()
    if (shard := average.shard()) is not None:
        torch.save(shard, folder / file_name(engine.global_rank))
    dist.barrier()
    read = read_averaged(folder)
    assert set(read) == set(dict(module.named_parameters())) - {"pos_embed"}
    assert all(torch.equal(read[name], value) for name, value in found.items() if name in read), options
    return {name: value.numpy() for name, value in found.items()}


def check_all(folder):
    return [check_one(options, Path(folder) / str(number)) for number, options in enumerate(ENGINES)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(folder of the saves, rank 0's averages by engine)."""
    folder = tmp_path_factory.mktemp("averages")
    return folder, run_ranks(2, check_all, str(folder))[0]


def test_the_average_follows_the_fp32_masters_and_leaves_the_model_as_it_was_in_every_engine(saved):
    assert len(saved[1]) == len(ENGINES)  # the comparisons are made on the ranks


def reload(folder, numbers):
    results = []
    for number in numbers:
        engine, average, frozen = start(ENGINES[number])
        step(engine, 100)
        average.load(Path(folder) / str(number))
        results.append((average.updates, {n: v.numpy() for n, v in gather_weights(engine, frozen, average).items()}))
    return results


@pytest.mark.parametrize("world_size", [1, 3])
def test_another_number_of_ranks_takes_the_average_on_to_the_bit(saved, world_size):
    folder, wanted = saved
    numbers = (0, 3, 7, 8)
    for number, (updates, found) in zip(numbers, run_ranks(world_size, reload, str(folder), numbers)[0], strict=True):
        assert updates == STEPS
        for name, value in wanted[number].items():
            np.testing.assert_array_equal(found[name], value, err_msg=name)


def test_a_missing_part_is_named(saved, tmp_path):
    lone = tmp_path / "lone"
    lone.mkdir()
    (lone / "ema_00001.pt").write_bytes((saved[0] / "3" / "ema_00001.pt").read_bytes())
    with pytest.raises(UserError, match="part of the averaged weights .* is missing"):
        read_averaged(lone)
    (lone / "ema_00000.pt").write_bytes(b"no")
    with pytest.raises(UserError, match="ema_00000.pt: damaged"):
        read_averaged(lone)


def test_a_decay_outside_0_to_1_is_refused():
    with pytest.raises(UserError, match="found 1.5"):
        WeightAverage(SimpleNamespace(), 1.5)
