"""Of what kind the values in the DeepSpeed JSON must be, where DeepSpeed itself does not look."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from ..errors import UserError

AUTO = "auto"
_SUBSECTIONS = (
    ("optimizer", "params"),
    ("scheduler", "params"),
    ("zero_optimization", "offload_optimizer"),
    ("zero_optimization", "offload_param"),
)
_LOG_LEVELS = ("debug", "info", "warning", "error", "critical")


def _is_number(value: Any, kinds: type | tuple = (int, float)) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


Kind = tuple[str, Callable[[Any], bool]]
_SWITCH: Kind = ("true or false", lambda value: isinstance(value, bool))
_COUNT: Kind = ("a whole number, 1 or more", lambda value: _is_number(value, int) and value >= 1)
_POSITIVE: Kind = ("a number above 0", lambda value: _is_number(value) and value > 0)
_BUCKET: Kind = (
    'a number of elements, 1 or more, or "auto"',
    lambda value: value == AUTO or _is_number(value) and value >= 1,
)
# Values that DeepSpeed takes as they are, to fail at the first step or misread them, or, where they are "auto", leaves
# out in silence.
KINDS: dict[str, Kind] = {
    "zero_allow_untested_optimizer": _SWITCH,
    "prescale_gradients": _SWITCH,
    "wall_clock_breakdown": _SWITCH,
    "memory_breakdown": _SWITCH,
    "dump_state": _SWITCH,
    "disable_python_gc": _SWITCH,
    "gradient_predivide_factor": _POSITIVE,
    "steps_per_print": _POSITIVE,
    "log_level": (f"one of {', '.join(_LOG_LEVELS)}", lambda value: str(value).lower() in _LOG_LEVELS),
    "torch_autocast.enabled": _SWITCH,
    "activation_checkpointing.enabled": _SWITCH,
    "activation_checkpointing.cpu_checkpointing": _SWITCH,
    "activation_checkpointing.synchronize_checkpoint_boundary": _SWITCH,
    "activation_checkpointing.profile": _SWITCH,
    "flops_profiler.enabled": _SWITCH,
    "flops_profiler.detailed": _SWITCH,
    "flops_profiler.profile_step": _COUNT,
    "flops_profiler.top_modules": _COUNT,
    "flops_profiler.module_depth": ("a whole number, -1 for all", lambda value: _is_number(value, int) and value >= -1),
    "flops_profiler.recompute_fwd_factor": ("a number, 0 or more", lambda value: _is_number(value) and value >= 0),
    "flops_profiler.output_file": ("a path or null", lambda value: value is None or isinstance(value, str)),
    "zero_optimization.reduce_bucket_size": _BUCKET,
    "zero_optimization.allgather_bucket_size": _BUCKET,
    "zero_optimization.offload_optimizer.device": ('"cpu" or "none"', lambda value: value in ("cpu", "none", "nvme")),
}


def check_kinds(values: dict[str, Any], source: str) -> None:
    """`UserError` for a value of the wrong kind. source: what to call the JSON, whose sections are sections."""
    for key, name in _SUBSECTIONS:
        section = values.get(key, {}).get(name, {})
        if not isinstance(section, dict):
            raise UserError(f"{source}: '{key}.{name}' must be a section {{...}}, found {section!r}")
    for key, (expected, fits) in KINDS.items():
        *above, last = key.split(".")
        holder = values
        for part in above:
            holder = holder.get(part, {})
        if last in holder and not fits(holder[last]):
            raise UserError(f"{source}: '{key}' must be {expected}, found {holder[last]!r}")
