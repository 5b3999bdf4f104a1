"""One rank of a job that loads published weights into bf16 engines and saves checkpoints without a step.

torchrun --standalone --nproc-per-node 2 save_checkpoints.py CONFIG WEIGHTS OUT
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import deepspeed
import torch

import rwkv_clip
from rwkv_clip.model.averaged import file_name
from rwkv_clip.model.published import read_state_dict
from rwkv_clip.training.ema import WeightAverage
from rwkv_clip.training.masters import set_masters

ENGINES = {
    "zero1": {"zero_optimization": {"stage": 1}},
    "zero2": {"zero_optimization": {"stage": 2}},
    "bf16_optimizer": {"zero_optimization": {"stage": 1}, "data_types": {"grad_accum_dtype": "fp32"}},
    "zero3": {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 100}},
    "locked": {"zero_optimization": {"stage": 1}},
}


def main(config: str, weights: str, out: Path) -> None:
    # Gloo alone: DeepSpeed would first compile its shared-memory collective, for a minute.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", verbose=False)
    exact = {name: value.float() for name, value in read_state_dict(weights).items()}
    for name, settings in ENGINES.items():
        model = rwkv_clip.create_model(config, checkpoint=weights).train()
        if name == "locked":
            model.image_model.requires_grad_(False)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        engine = deepspeed.initialize(
            model=model,
            optimizer=torch.optim.AdamW(trained, lr=1e-3),
            config={"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, **settings},
        )[0]
        set_masters(engine, exact)
        engine.save_checkpoint(str(out / name / "checkpoints"), tag="step_00000001")
        if name == "locked":
            shard = WeightAverage(engine, decay=0.99).shard()
            torch.save(shard, out / name / "checkpoints" / "step_00000001" / file_name(engine.global_rank))
        if name == "locked" and engine.global_rank == 0:
            frozen = {key: exact[key] for key, p in model.named_parameters() if not p.requires_grad}
            torch.save(frozen, out / name / "checkpoints" / "step_00000001" / "frozen.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
