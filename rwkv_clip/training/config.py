"""The DeepSpeed JSON of a run: reading it, filling it from flags, and refusing what would have no effect.

The JSON is the one place for batch size, accumulation, precision, ZeRO stage, clipping, activation checkpointing,
TensorBoard and profiling. A flag fills a key that is absent or "auto". When both are given and differ, the error names
both.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import UserError
from ..model.compile import EVERYTHING
from .compilation import check_section as check_compile_section
from .config_keys import NO_NVME, check_keys, check_scaling, check_stage
from .config_values import AUTO, check_kinds

# Not from the DeepSpeed JSON's own vocabulary, but people write it; the section's presence is what switches it on.
ACTIVATION_CHECKPOINTING_SWITCH = "enabled"


@dataclass(frozen=True)
class BatchSizes:
    """Pairs per forward pass and GPU, forward passes per step, GPUs, and pairs per step over all of them."""

    micro: int
    accumulation: int
    world_size: int

    @property
    def all_ranks(self) -> int:
        """The global batch."""
        return self.micro * self.accumulation * self.world_size

    def __str__(self) -> str:
        return f"{self.all_ranks} ({self.micro} x {self.accumulation} accumulated x {self.world_size} GPUs)"


def read_config(path: str | Path | None) -> dict[str, Any]:
    """The JSON (comments allowed, as DeepSpeed allows them) as it is written; {} without a file."""
    if path is None:
        return {}
    if not Path(path).is_file():
        raise UserError(f"--deepspeed_config {path}: no such file; the ready ones are in ds_configs/")
    import hjson  # DeepSpeed's own reader

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise UserError(f"{path}: the key '{twice}' is there twice; remove one")
        return values

    try:
        values = hjson.loads(Path(path).read_text(encoding="utf-8"), object_pairs_hook=unique)
    except (hjson.HjsonDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not a JSON file ({error})") from None
    if not isinstance(values, dict) or not values:
        raise UserError(f"{path}: expected a JSON object with keys, found {values!r}")
    return json.loads(json.dumps(values))


class _Filler:
    """Fills keys of the JSON from flags and remembers nothing else."""

    def __init__(self, values: dict[str, Any], source: str) -> None:
        self.values = values
        self.source = source

    def fill(self, key: str, flag: str, given: Any, default: Any = None) -> Any:
        """Settle `key` ("section.name") between the JSON and a flag; returns the value, None when nobody gives one."""
        *sections, name = key.split(".")
        section = self.values
        for part in sections:
            section = section.setdefault(part, {})
        written = section.get(name, AUTO)
        if written == AUTO:
            value = default if given is None else given
            section.pop(name, None)
            if value is not None:
                section[name] = value
            return value
        if given is not None and given != written:
            raise UserError(
                f"{self.source} says {key} = {json.dumps(written)} but {flag} says {json.dumps(given)}: remove one of "
                f'them, or write "auto" in the file'
            )
        return written


def resolve_config(
    values: dict[str, Any], args: argparse.Namespace, world_size: int, saved_global_batch: int | None = None
) -> tuple[dict[str, Any], BatchSizes]:
    """The complete configuration and its batch sizes, from the JSON's values and the flags.

    saved_global_batch: the global batch of the run that is resumed. With an accumulation that nobody fixed, it is kept
    when the number of GPUs changes.
    """
    source = str(args.deepspeed_config or "the DeepSpeed JSON")
    check_keys(values, source)
    check_compile_section(values.get("compile", {}), source)
    check_kinds(values, source)
    config = copy.deepcopy(values)
    filler = _Filler(config, source)
    sizes = _resolve_batch(filler, args, world_size, saved_global_batch)
    _resolve_precision(filler, args)
    clipping = filler.fill("gradient_clipping", "--grad-clip", args.grad_clip, default=0.0)
    _number(filler, "gradient_clipping", clipping)
    stage = filler.fill("zero_optimization.stage", "--zero-stage", args.zero_stage, default=0)
    if stage not in (0, 1, 2, 3) or isinstance(stage, bool):
        raise UserError(f"{source}: zero_optimization.stage must be 0, 1, 2 or 3, found {stage!r}")
    offload = config["zero_optimization"].get("offload_optimizer", {}).get("device", "none")
    if offload == "nvme":
        raise UserError(f'{source}: offload_optimizer to nvme is refused, as {NO_NVME}; use "cpu"')
    if offload == "cpu" and stage == 0:
        raise UserError(f"{source}: offload_optimizer needs ZeRO: set zero_optimization.stage to 1, 2 or 3")
    check_stage(config, source)
    check_scaling(config, source)
    if "optimizer" in config:
        _resolve_optimizer(filler, args)
    if "scheduler" in config:
        _check_scheduler(config, args, source)
    return config, sizes


def _positive(filler: _Filler, key: str, value: Any) -> None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise UserError(f"{filler.source}: {key} must be a positive whole number, found {value!r}")


def _number(filler: _Filler, key: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise UserError(f"{filler.source}: {key} must be a number, 0 or more, found {value!r}")


def _resolve_batch(
    filler: _Filler, args: argparse.Namespace, world_size: int, saved_global_batch: int | None
) -> BatchSizes:
    keys = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
    micro = filler.fill(keys[0], "--batch-size", args.batch_size)
    accumulation = filler.fill(keys[1], "--gradient-accumulation", args.gradient_accumulation)
    total = filler.fill(keys[2], "--global-batch", args.global_batch)
    for key, value in zip(keys, (micro, accumulation, total), strict=True):
        _positive(filler, key, value)
    if total is None and accumulation is None:
        total = saved_global_batch
        if total is not None and micro is not None and total % (micro * world_size):
            raise UserError(
                f"the run to resume has a global batch of {total}, which {world_size} GPUs with micro batches of "
                f"{micro} cannot make: choose a --batch-size that divides {total} / {world_size}"
            )
    if micro is None and total is None:
        raise UserError(
            f"no batch size: give --batch-size (pairs per GPU), or train_micro_batch_size_per_gpu in {filler.source}"
        )
    if micro is None:
        per_rank = total / (world_size * (accumulation or 1))
        if not per_rank.is_integer():
            raise UserError(
                f"a global batch of {total} cannot be split over {world_size} GPUs"
                + (f" and {accumulation} accumulation steps" if accumulation else "")
                + ": choose a multiple"
            )
        micro = int(per_rank)
    if accumulation is None:
        accumulation, rest = divmod(total or micro * world_size, micro * world_size)
        if rest or accumulation < 1:
            raise UserError(
                f"a global batch of {total} cannot be made of micro batches of {micro} on {world_size} GPUs: choose a "
                f"multiple of {micro * world_size}"
            )
    sizes = BatchSizes(micro, accumulation, world_size)
    if total is not None and total != sizes.all_ranks:
        raise UserError(
            f"train_batch_size is {total}, but train_micro_batch_size_per_gpu {micro} x gradient_accumulation_steps "
            f"{accumulation} x {world_size} GPUs make {sizes.all_ranks}: leave one of them out"
        )
    filler.values.update(zip(keys, (micro, accumulation, sizes.all_ranks), strict=True))
    return sizes


def _resolve_precision(filler: _Filler, args: argparse.Namespace) -> None:
    """bf16.enabled and fp16.enabled from --precision; conflicts name both."""
    for section in ("bf16", "fp16"):
        given = None if args.precision is None else args.precision == section
        enabled = filler.fill(f"{section}.enabled", f"--precision {args.precision}", given, default=False)
        if not isinstance(enabled, bool):
            raise UserError(f"{filler.source}: {section}.enabled must be true or false, found {enabled!r}")
    if filler.values["bf16"]["enabled"] and filler.values["fp16"]["enabled"]:
        raise UserError(f"{filler.source}: bf16 and fp16 are both enabled: choose one")


def _resolve_optimizer(filler: _Filler, args: argparse.Namespace) -> None:
    """The optimizer section from --lr, --beta1, --beta2, --eps and --weight-decay."""
    kind = filler.values["optimizer"].get("type")
    if not isinstance(kind, str):
        raise UserError(f'{filler.source}: optimizer.type is missing, for instance "AdamW"')
    params = filler.values["optimizer"].setdefault("params", {})
    flags = {
        "lr": (("lr",), args.lr),
        "weight_decay": (("weight_decay",), args.weight_decay),
        "betas": (("beta1", "beta2"), [args.beta1, args.beta2]),
        "eps": (("eps",), args.eps),
    }
    for name, (arguments, value) in flags.items():
        given = not args.given.isdisjoint(arguments)
        # Other optimizers may have no betas and no eps.
        if given or name in params or name in ("lr", "weight_decay") or kind.lower() in ("adam", "adamw"):
            flag = " ".join("--" + argument.replace("_", "-") for argument in arguments)
            settled = filler.fill(f"optimizer.params.{name}", flag, value if given else None, default=value)
            if name == "betas":
                if not isinstance(settled, list) or len(settled) != 2:
                    raise UserError(
                        f"{filler.source}: optimizer.params.betas must be two numbers [beta1, beta2], found {settled!r}"
                    )
                for beta in settled:
                    _number(filler, "each of optimizer.params.betas", beta)
                    if beta >= 1:
                        raise UserError(
                            f"{filler.source}: each of optimizer.params.betas must be below 1, found {beta!r}"
                        )
            else:
                _number(filler, f"optimizer.params.{name}", settled)


def _check_scheduler(config: dict[str, Any], args: argparse.Namespace, source: str) -> None:
    """A scheduler section replaces the schedule's flags."""
    for name in ("lr_schedule", "warmup", "lr_minimum", "image_lr_factor", "text_lr_factor", "decay_lr_factor"):
        if name in args.given:
            raise UserError(
                f"{source} has a 'scheduler' section and --{name.replace('_', '-')} is given as well: remove one"
            )
    if not isinstance(config["scheduler"].get("type"), str):
        raise UserError(f'{source}: scheduler.type is missing, for instance "WarmupCosineLR"')


def fill_scheduler(config: dict[str, Any], total_steps: int, warmup_steps: int, lr: float) -> None:
    """Settle the "auto" values of a scheduler section once the length of the run is known, in place."""
    section = config.get("scheduler")
    if section is None:
        return
    params = section.setdefault("params", {})
    known = {
        "total_num_steps": total_steps,
        "warmup_num_steps": max(warmup_steps, 1),  # DeepSpeed takes no 0
        "warmup_max_lr": lr,
        "warmup_min_lr": 0.0,
    }
    if section["type"] in ("WarmupDecayLR", "WarmupCosineLR"):
        params.setdefault("total_num_steps", AUTO)
        params.setdefault("warmup_num_steps", AUTO)
    for name, value in params.items():
        if value == AUTO:
            if name not in known:
                raise UserError(f'scheduler.params.{name} is "auto", which only {", ".join(known)} may be')
            params[name] = known[name]


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""What the weights and the images are in, by `precision_name`."""


def precision_name(config: dict[str, Any]) -> str:
    """ "bf16", "fp16" or "fp32" of a resolved configuration."""
    return next((name for name in ("bf16", "fp16") if config[name]["enabled"]), "fp32")


def checkpoints_activations(config: dict[str, Any]) -> bool:
    """Whether a resolved configuration asks for activation checkpointing: its section is there and not switched off."""
    section = config.get("activation_checkpointing")
    return section is not None and section.get(ACTIVATION_CHECKPOINTING_SWITCH, True)


def recomputed(config: dict[str, Any]) -> str:
    """What compiled blocks compute again in the backward pass, a key of `RECOMPUTE`, of a resolved configuration.

    Asked to checkpoint activations they do it themselves, unless an option asks for what DeepSpeed's function alone
    can do, such as moving what is kept to the CPU.
    """
    options = config.get("activation_checkpointing", {}).items()
    plain = not any(value for name, value in options if name != ACTIVATION_CHECKPOINTING_SWITCH)
    own = EVERYTHING if checkpoints_activations(config) and plain else "elementwise"
    return config.get("compile", {}).get("recompute", own)
