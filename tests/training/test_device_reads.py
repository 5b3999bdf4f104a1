"""A training step reads nothing from the device that it works on: it would make the GPU wait for Python."""

from __future__ import annotations

import traceback

import torch
from ranks import run_ranks
from tiny import make_engine, make_model, make_pairs, micro_batches
from torch.utils._python_dispatch import TorchDispatchMode

from rwkv_clip.training.lean_zero import make_lean
from rwkv_clip.training.loss import ClipLoss
from rwkv_clip.training.masters import set_masters
from rwkv_clip.training.metrics import Interval
from rwkv_clip.training.step import train_step

STEPS = 3


class Reads(TorchDispatchMode):
    """Remembers the lines of code that turn a tensor into a Python number: `item()`, `bool()`, `float()`, `if x:`."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            frames = [frame for frame in traceback.extract_stack() if "/torch/" not in frame.filename]
            self.places.append(f"{frames[-2].filename}:{frames[-2].lineno}: {frames[-2].line}")
        return func(*args, **(kwargs or {}))


def reads_of_a_step(precision: str, stage: int, clip: float) -> list[str]:
    model = make_model()
    exact = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    engine = make_engine(
        model, 4, stage=stage, precision=precision, gradient_clipping=clip, timers={"throughput": {"enabled": False}}
    )
    assert make_lean(engine.optimizer)
    set_masters(engine, exact)
    interval = Interval(torch.device("cpu"), 4, 1, ["raw", "synthetic"])
    loss = ClipLoss(group=engine.data_parallel_group)
    for step in range(STEPS):
        batches = micro_batches(make_pairs(4, seed=step), 0, 1, 1)
        with Reads() as reads:
            result = train_step(engine, batches, loss)
            interval.add(step + 1, result, {"learning_rate": 1e-3}, 0.0, torch.zeros(4, dtype=torch.int64))
            interval.close()
    return reads.places  # of the last step: the first one makes the optimizer's state


def reads() -> list[list[str]]:
    from deepspeed.accelerator import get_accelerator

    # DeepSpeed refuses fp16 on a CPU without fp16 units, where PyTorch is merely slow.
    get_accelerator().is_fp16_supported = lambda: True
    return [reads_of_a_step(*setting) for setting in (("bf16", 1, 1.0), ("bf16", 2, 0.0), ("fp16", 1, 1.0))]


def test_a_step_with_its_metrics_reads_nothing_in_bf16_and_otherwise_whether_the_norm_is_finite() -> None:
    plain, stage_2, fp16 = run_ranks(1, reads)[0]
    assert not plain and not stage_2, "\n".join(plain + stage_2)
    assert len(fp16) == 1 and "lean_zero" in fp16[0], "\n".join(fp16)
