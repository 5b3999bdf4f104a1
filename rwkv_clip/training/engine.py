"""The DeepSpeed engine of a run: model, optimizer, schedule and precision as the resolved configuration says."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from ..errors import UserError
from ..model.clip import RWKVCLIP
from ..model.compile import EVERYTHING
from .compilation import compile_towers
from .config import ACTIVATION_CHECKPOINTING_SWITCH, checkpoints_activations, precision_name, recomputed
from .config_keys import keys_without_effect
from .distributed import CommonError, World
from .lean_zero import leaves_no_gradients, make_lean
from .log import logger
from .masters import set_masters
from .optimizer import LRFactors, allocate_moments, build_optimizer, parameter_groups
from .partitioned import gather_mixes_whole, keep_recomputed, write

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

# DeepSpeed's own monitors write at x = samples; the run's writer takes their place.
_TENSORBOARD_OFF = {"enabled": False}
# Sections of the JSON that DeepSpeed looks at only when it makes the engine.
_JUDGED_LATE = ("optimizer", "scheduler", "data_types", "torch_autocast", "log_level", "wandb", "csv_monitor", "comet")
# What DeepSpeed's Adam and PyTorch's both know, and the key by which DeepSpeed tells Adam from AdamW.
_ADAM_PARAMS = {"lr", "betas", "eps", "weight_decay", "adam_w_mode"}


def deepspeed_form(config: dict[str, Any]) -> dict[str, Any]:
    """The resolved configuration as DeepSpeed gets it: without TensorBoard and compilation, which are done here."""
    config = copy.deepcopy(config)
    config.pop("compile", None)
    # Its throughput timer waits for the device twice per step, for lines that the run's own log replaces.
    config.setdefault("timers", {"throughput": {"enabled": False}})
    # PyTorch's fused AdamW runs on the CPU too; DeepSpeed's own would have to be compiled first.
    config["zero_force_ds_cpu_optimizer"] = False
    if "tensorboard" in config:
        config["tensorboard"] = dict(_TENSORBOARD_OFF)
    config.get("activation_checkpointing", {}).pop(ACTIVATION_CHECKPOINTING_SWITCH, None)
    return config


def check_readable(config: dict[str, Any], source: str) -> None:
    """Let DeepSpeed read a resolved configuration; `UserError` with its reason when it cannot."""
    from deepspeed import DeepSpeedConfig

    try:
        # With the TensorBoard section as it is written, so that DeepSpeed judges it too.
        DeepSpeedConfig(deepspeed_form(config) | {k: config[k] for k in ("tensorboard",) if k in config})
    except Exception as error:
        raise UserError(f"{source}: DeepSpeed refuses it: {_first_reason(error)}") from None


def validate_config(config: dict[str, Any], source: str) -> None:
    """`check_readable`, and whether this machine can compute in the precision."""
    from deepspeed.accelerator import get_accelerator

    check_readable(config, source)
    precision = precision_name(config)
    accelerator = get_accelerator()
    supported = {"bf16": accelerator.is_bf16_supported, "fp16": accelerator.is_fp16_supported, "fp32": lambda: True}
    if not supported[precision]():
        raise UserError(
            f"{source}: {precision} is enabled, but this {accelerator.device_name().upper()} cannot compute in it: "
            "choose another precision"
        )


def _first_reason(error: Exception) -> str:
    """pydantic's errors say the section, the key and the fault on three lines."""
    errors = getattr(error, "errors", None)
    if callable(errors) and errors():
        first = errors()[0]
        return f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']} (found {first.get('input')!r})"
    return " ".join(str(error).split())[:300] or type(error).__name__


def lock_towers(model: RWKVCLIP, lock_image: bool, lock_text: bool) -> None:
    """Freeze a tower's weights."""
    for locked, tower in ((lock_image, model.image_model), (lock_text, model.text_model)):
        if locked:
            tower.requires_grad_(False)


def set_training_mode(model: RWKVCLIP) -> None:
    """Training mode, with frozen towers left in evaluation mode: no drop path, no dropout."""
    model.train()
    for tower in (model.image_model, model.text_model):
        if not any(parameter.requires_grad for parameter in tower.parameters()):
            tower.eval()


def frozen_weights(model: RWKVCLIP) -> dict[str, Tensor]:
    """fp32 copies, on the CPU, of the weights that no optimizer will hold; take them before the engine casts them."""
    return {
        name: parameter.detach().to("cpu", torch.float32, copy=True)
        for name, parameter in model.named_parameters()
        if not parameter.requires_grad
    }


@torch.no_grad()
def restore_frozen(model: RWKVCLIP, weights: dict[str, Tensor]) -> None:
    """Write frozen fp32 weights into the module and its precise buffers."""
    parameters = dict(model.named_parameters())
    precise = model.precise_parameters()
    for name, value in weights.items():
        write(parameters[name], value)
        if name in precise:
            precise[name][1].copy_(value.view_as(precise[name][1]))


def build_engine(
    model: RWKVCLIP,
    config: dict[str, Any],
    args: argparse.Namespace,
    world: World,
    lr_factor: Callable[[int], float],
) -> DeepSpeedEngine:
    """Wrap a fp32 model on the CPU. The engine's masters equal the model's weights to the bit.

    config: resolved. lr_factor: factor on the peak rate by optimizer step, unless the JSON has a scheduler section.
    """
    import deepspeed
    from deepspeed.utils.logging import set_log_level_from_string

    exact = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    form = deepspeed_form(config)
    if checkpoints_activations(config):
        deepspeed.checkpointing.configure(None, deepspeed_config=form)
        model.set_activation_checkpointing(deepspeed.checkpointing.non_reentrant_checkpoint)
    if config["zero_optimization"]["stage"] == 3 and not checkpoints_activations(config):
        gather_mixes_whole(model)
    optimizer, groups = _optimizer(model, config, args)
    if world.device.type == "cpu":
        _take_pytorch_s_adamw(form.get("optimizer", {}))
    try:
        engine, *_ = deepspeed.initialize(
            args=SimpleNamespace(device_rank=world.device.index or 0),
            model=model,
            optimizer=optimizer,
            model_parameters=groups,
            lr_scheduler=None if "scheduler" in config else lambda basic: LambdaLR(basic, lr_factor),
            config=form,
        )
    except (ValueError, TypeError, AttributeError, AssertionError, KeyError, ImportError, OSError) as error:
        settings = [name for name in _JUDGED_LATE if name in config]
        if not settings:
            raise
        # A missing package or an unwritable folder may be met by one rank alone.
        kind = UserError if isinstance(error, (ImportError, OSError)) else CommonError
        raise kind(
            f"DeepSpeed cannot do what the DeepSpeed JSON says under {' or '.join(settings)}: {_first_reason(error)}"
        ) from error
    if (config.get("wall_clock_breakdown") or config.get("memory_breakdown")) and "log_level" not in config:
        set_log_level_from_string("info")  # the level at which DeepSpeed prints them
    # Its events have x = samples; the monitors themselves are used by the run's writer.
    engine.monitor.enabled = False
    if optimizer is None:
        kind = type(engine.basic_optimizer)
        logger.info("optimizer of the DeepSpeed JSON: %s of %s", kind.__name__, kind.__module__)
    make_lean(engine.optimizer)
    keep_recomputed(engine)
    for reason, keys in keys_without_effect(config, leaves_no_gradients(engine.optimizer)).items():
        logger.info("without effect in the DeepSpeed JSON: %s, since %s", ", ".join(keys), reason)
    allocate_moments(engine.basic_optimizer)
    set_masters(engine, exact)
    set_training_mode(engine.module)
    replays = args.accumulation == "global" and config["gradient_accumulation_steps"] > 1
    with_graphs = config["gradient_accumulation_steps"] == 1 and leaves_no_gradients(engine.optimizer)
    recompute = recomputed(config)
    if compile_towers(engine.module, config, world, replays, with_graphs, recompute) and recompute == EVERYTHING:
        engine.module.set_activation_checkpointing(None)
    return engine


def _take_pytorch_s_adamw(section: dict[str, Any]) -> None:
    """On a CPU let a JSON's Adam or AdamW be PyTorch's fused one, which unlike DeepSpeed's needs no compiler.

    section: the JSON's optimizer, changed in place. One that sets what PyTorch's does not know stays DeepSpeed's.
    """
    params = section.get("params", {})
    if section.get("type", "").lower() in ("adam", "adamw") and params.keys() <= _ADAM_PARAMS:
        params |= {"torch_adam": True, "fused": True}


def _optimizer(
    model: RWKVCLIP, config: dict[str, Any], args: argparse.Namespace
) -> tuple[torch.optim.Optimizer | None, list[dict[str, Any]] | None]:
    """(our optimizer, None), or (None, parameter groups) when the JSON names one for DeepSpeed to build."""
    factors = LRFactors(args.image_lr_factor, args.text_lr_factor, args.decay_lr_factor)
    if "optimizer" in config:
        params = config["optimizer"]["params"]
        return None, parameter_groups(model, params["lr"], params.get("weight_decay", 0.0), factors)
    betas = (args.beta1, args.beta2)
    return build_optimizer(model, args.lr, args.weight_decay, betas, args.eps, factors), None
