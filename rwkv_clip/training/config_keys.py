"""Which keys of the DeepSpeed JSON act here, and why each of the others is refused.

The tables cover every key that DeepSpeed 0.19.8 reads; a test compares them with DeepSpeed's own lists.
"""

from __future__ import annotations

import difflib
from typing import Any

from ..errors import UserError

# Top-level keys that act here, those that hold a section first.
SECTIONS = {
    "optimizer",
    "scheduler",
    "bf16",
    "fp16",
    "torch_autocast",
    "data_types",
    "zero_optimization",
    "activation_checkpointing",
    "compile",
    "checkpoint",
    "tensorboard",
    "wandb",
    "csv_monitor",
    "comet",
    "flops_profiler",
    "comms_logger",
    "timers",
}
KNOWN_KEYS = SECTIONS | {
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "zero_allow_untested_optimizer",
    "communication_data_type",
    "prescale_gradients",
    "gradient_predivide_factor",
    "wall_clock_breakdown",
    "memory_breakdown",
    "steps_per_print",
    "log_level",
    "dump_state",
    "disable_python_gc",
}
_OWN_SAMPLER = "batches come from this project's own seeded sampler"
_ONE_GPU = "each GPU holds the whole model; only data parallelism is used"
NO_NVME = "no model here needs it: the masters and moments of the largest take 1.8 GB"
# Keys that people carry over from other projects, with why they are refused.
REFUSED_KEYS = {
    "elasticity": "DeepSpeed has removed elastic training; resume with another number of GPUs instead (--resume auto)",
    "amp": "DeepSpeed has removed it; use 'bf16' or 'fp16'",
    "bfloat16": "write 'bf16'",
    "sparse_gradients": "DeepSpeed has removed it",
    "progressive_layer_drop": "DeepSpeed has removed it; the image tower has --drop-path-rate",
    "curriculum_learning": "DeepSpeed has removed it",
    "sparse_attention": "DeepSpeed has removed it, and this model has no attention",
    "compression_training": "DeepSpeed has removed it",
    "nebula": "DeepSpeed has removed it",
    "quantize_training": "DeepSpeed has removed it",
    "eigenvalue": "DeepSpeed has removed it",
    "graph_harvesting": "DeepSpeed has removed it",
    "data_efficiency": _OWN_SAMPLER,
    "data_sampling": _OWN_SAMPLER,
    "dataloader_drop_last": _OWN_SAMPLER,
    "vocabulary_size": "it is part of the model's configuration",
    "pipeline": _ONE_GPU,
    "tensor_parallel": _ONE_GPU,
    "sequence_parallel_size": _ONE_GPU,
    "seq_parallel_communication_data_type": _ONE_GPU,
    "expert_parallel": "the model has no experts",
    "use_data_before_expert_parallelism": "the model has no experts",
    "hybrid_engine": "it serves text generation",
    "weight_quantization": "it serves inference",
    "autotuning": "it changes the micro batch, which for a contrastive loss changes the task",
    "managed_gradient_accumulation": "the training loop sets the accumulation boundaries itself",
    "gradient_allreduce_op": "gradients are averaged over the ranks, as the loss expects",
    "disable_allgather": "DeepSpeed ignores it",
    "aio": f"it serves offloading to nvme, and {NO_NVME}",
    "datastates_ckpt": "checkpoints are written by this project's own rules",
    "zero_force_ds_cpu_optimizer": "an offloaded optimizer is PyTorch's fused AdamW, which needs no compiler",
}

# Keys of "zero_optimization" that act with stage 3 alone; DeepSpeed knows most under two names.
STAGE_3_KEYS = {
    "sub_group_size",
    "stage3_prefetch_bucket_size",
    "prefetch_bucket_size",
    "stage3_param_persistence_threshold",
    "param_persistence_threshold",
    "stage3_model_persistence_threshold",
    "model_persistence_threshold",
    "stage3_max_live_parameters",
    "max_live_parameters",
    "stage3_max_reuse_distance",
    "max_reuse_distance",
    "stage3_use_all_reduce_for_fetch_params",
    "use_all_reduce_for_fetch_params",
    "stage3_allgather_sequential",
    "allgather_sequential",
    "memory_efficient_linear",
    "log_trace_cache_warnings",
}
_OFFLOADED_WEIGHTS = (
    "with ZeRO stage 3 a GPU keeps its part of the weights, the least of what it holds; offload_optimizer moves the "
    "masters and moments, six times as much"
)
_OWN_EXPORT = "the run itself writes its whole weights in fp32, as weights.pt"
_BY_BLOCK = "the weights are gathered as each layer needs them"
_ALL_RANKS = "weights and masters are divided over all ranks alike, and gathered as they are"
_MADE_WHOLE = "the model is made whole and then divided"
_CPU_ADAM = "it serves DeepSpeed's CPU Adam; an offloaded optimizer is PyTorch's fused AdamW, which needs no compiler"
_FP32_MASTERS = "masters and moments stay fp32, as the temperature and the decays need"
_DEPRECATED_OFFLOAD = 'write "offload_optimizer": {"device": "cpu"}'
_NVME = f"it serves offloading to nvme, and {NO_NVME}"
_CAST_BY_SECTION = "the sections 'bf16' and 'fp16' decide; what must stay fp32 in them does"
# section -> key -> why it is refused. In the sections of `SECTION_KEYS` all keys but those are refused as well.
REFUSED_IN_SECTION = {
    "zero_optimization": {
        **dict.fromkeys(("offload_param", "cpu_offload_param"), _OFFLOADED_WEIGHTS),
        **dict.fromkeys(
            (
                "stage3_gather_16bit_weights_on_model_save",
                "gather_16bit_weights_on_model_save",
                "stage3_gather_fp16_weights_on_model_save",
            ),
            _OWN_EXPORT,
        ),
        **dict.fromkeys(
            ("stage3_module_granularity_threshold", "module_granularity_threshold", "leaf_module"), _BY_BLOCK
        ),
        **dict.fromkeys(
            (
                "zero_hpz_partition_size",
                "zero_quantized_weights",
                "zero_quantized_nontrainable_weights",
                "zero_quantized_gradients",
                "mics_shard_size",
                "mics_hierarchical_params_gather",
            ),
            _ALL_RANKS,
        ),
        "override_module_apply": _MADE_WHOLE,
        "pipeline_loading_checkpoint": "each rank reads its own files alone",
        "cpu_offload": _DEPRECATED_OFFLOAD,
        "cpu_offload_use_pin_memory": _DEPRECATED_OFFLOAD,
        "compute_grad_norm": "clipping, the log and the guard against NaN gradients need the norm",
        "elastic_checkpoint": "checkpoints are divided anew when the number of GPUs changes (--resume auto)",
        "load_from_fp32_weights": "the fp32 masters are always loaded",
        "legacy_stage1": "DeepSpeed has removed it",
        "zenflow": "its updates are delayed, and differ from AdamW's",
        "save_muon_momentum_buffer_in_memory": "the optimizer is not Muon",
    },
    "bf16": {"bf16_master_weights_and_grads": _FP32_MASTERS, "bf16_optimizer_states": _FP32_MASTERS},
    "fp16": {
        "auto_cast": "the model casts its images itself",
        "fp16_master_weights_and_grads": _FP32_MASTERS,
    },
    "data_types": dict.fromkeys(("param_dtype", "buffer_dtype", "keep_in_fp32_modules"), _CAST_BY_SECTION),
    "checkpoint": {
        "load_universal": "a checkpoint is converted on resume when that is needed",
        "use_node_local_storage": "all ranks write into the run folder",
        "parallel_write": "it serves pipeline stages",
        "writer": "a thread of each rank writes checkpoints",
        "checkpoint_serialization": "checkpoints are written in PyTorch's zip format",
    },
    "activation_checkpointing": {
        "partition_activations": "it needs tensor parallelism",
        "contiguous_memory_optimization": "it needs tensor parallelism",
        "number_checkpoints": "it serves contiguous_memory_optimization, which needs tensor parallelism",
    },
}
OFFLOAD_KEYS = {"device", "pin_memory"}
REFUSED_IN_OFFLOAD = {
    **dict.fromkeys(("nvme_path", "buffer_count", "pipeline_read", "pipeline_write", "pipeline", "fast_init"), _NVME),
    **dict.fromkeys(("ratio", "super_offload", "cpuadam_cores_perc"), _CPU_ADAM),
}
# Sections whose unknown keys DeepSpeed itself would ignore in silence, with the keys that act.
SECTION_KEYS = {
    "data_types": {"grad_accum_dtype"},
    "checkpoint": {"tag_validation"},
    "activation_checkpointing": {
        "enabled",  # not DeepSpeed's; the section's presence switches it on unless this says false
        "cpu_checkpointing",
        "synchronize_checkpoint_boundary",
        "profile",
    },
    "optimizer": {"type", "params", "legacy_fusion"},
    "scheduler": {"type", "params"},
    "torch_autocast": {"enabled", "dtype", "lower_precision_safe_modules"},
    "flops_profiler": {
        "enabled",
        "recompute_fwd_factor",
        "profile_step",
        "module_depth",
        "top_modules",
        "detailed",
        "output_file",
    },
    "comms_logger": {"enabled", "prof_all", "prof_ops", "verbose", "debug"},
}

# Keys that act with some settings only, with the others' reason why they do not.
_IN_NO_STAGE = ("allgather_bucket_size", "allgather_partitions")
_NOT_IN_STAGE_3 = ("use_multi_rank_bucket_allreduce", "round_robin_gradients", "parameter_alignment")
_WITH_OFFLOAD = ("ignore_unused_parameters",)
_OF_DEEPSPEED_S_REDUCTION = ("reduce_bucket_size", "use_multi_rank_bucket_allreduce", "contiguous_gradients")
_SCALING = ("prescale_gradients", "gradient_predivide_factor")
_AT_ONCE = (
    "with ZeRO stage 1 the gradients of a parameter group are averaged over the ranks at once, after the backward pass"
)


def keys_without_effect(values: dict[str, Any], reduces_at_once: bool) -> dict[str, list[str]]:
    """Keys that are written in a JSON that is not refused, and do nothing beside its other settings, by the reason.

    values: the JSON, resolved or not. reduces_at_once: whether gradients are reduced by lean_zero.py instead of
    DeepSpeed.
    """
    section = values.get("zero_optimization", {})
    stage = section.get("stage", 0)
    if stage == 0:
        keys = [key for key in section if key not in ("stage", "offload_optimizer")]
        return {"they serve ZeRO, and zero_optimization.stage is 0": keys} if keys else {}
    offloads = section.get("offload_optimizer", {}).get("device", "none") != "none"
    reasons: dict[str, list[str]] = {}
    for keys, reason in (
        (_OF_DEEPSPEED_S_REDUCTION if reduces_at_once else (), _AT_ONCE),
        (_IN_NO_STAGE, "after a step each group's weights are gathered at once" if stage < 3 else _BY_BLOCK),
        (_NOT_IN_STAGE_3 if stage == 3 else (), "ZeRO stage 3 divides each gradient like its weight"),
        (
            () if offloads and stage < 3 else _WITH_OFFLOAD,
            "a parameter without a gradient counts as one whose gradient is zero",
        ),
    ):
        if found := [key for key in section if key in keys]:
            reasons[reason] = found
    if reduces_at_once and (found := [key for key in values if key in _SCALING]):
        reasons[_AT_ONCE] = reasons.get(_AT_ONCE, []) + found
    return reasons


def check_scaling(config: dict[str, Any], source: str) -> None:
    """`UserError` for a resolved JSON that scales gradients as DeepSpeed's stages 2 and 3 cannot."""
    section = config["zero_optimization"]
    if section["stage"] not in (2, 3) or not section.get("reduce_scatter", True):
        return
    for key, neutral in zip(_SCALING, (False, 1.0), strict=True):
        if config.get(key, neutral) != neutral:
            raise UserError(
                f"{source}: '{key}' does not go with ZeRO stage {section['stage']}, which averages by itself: remove it"
            )


def check_stage(config: dict[str, Any], source: str) -> None:
    """`UserError` for a resolved JSON with keys of ZeRO stage 3 in another, or with what does not go with stage 3."""
    section = config["zero_optimization"]
    if section["stage"] != 3:
        for key, value in section.items():
            if key in STAGE_3_KEYS and value is not False:
                raise UserError(
                    f"{source}: 'zero_optimization.{key}' is not used here: it serves ZeRO stage 3, and the stage is "
                    f"{section['stage']}; remove it"
                )
    elif config.get("compile", {}).get("enabled", False):
        raise UserError(
            f"{source}: 'compile' does not go with ZeRO stage 3, which gathers weights between the steps of a block "
            "that compiling would make one: remove it, or set zero_optimization.stage to 1 or 2"
        )


def check_keys(values: dict[str, Any], source: str) -> None:
    """`UserError` for a key that would have no effect here. source: what to call the JSON."""
    for key, value in values.items():
        _check(source, key, key, KNOWN_KEYS, REFUSED_KEYS)
        if key in SECTIONS and not isinstance(value, dict):
            raise UserError(f"{source}: '{key}' must be a section {{...}}, found {value!r}")
    for name in SECTIONS & values.keys():
        for key, value in values[name].items():
            refused = REFUSED_IN_SECTION.get(name, {})
            if value is False and key in refused:
                continue  # switched off, as in many examples
            _check(source, key, f"{name}.{key}", SECTION_KEYS.get(name), refused)
    offload = values.get("zero_optimization", {}).get("offload_optimizer", {})
    for key in offload if isinstance(offload, dict) else ():
        _check(source, key, f"zero_optimization.offload_optimizer.{key}", OFFLOAD_KEYS, REFUSED_IN_OFFLOAD)


def _check(source: str, key: str, full: str, known: set[str] | None, refused: dict[str, str]) -> None:
    """known: None where DeepSpeed itself refuses what it does not know."""
    if key in refused:
        raise UserError(f"{source}: '{full}' is not used here: {refused[key]}; remove it")
    if known is not None and key not in known:
        near = difflib.get_close_matches(key, known, n=1)
        raise UserError(f"{source}: unknown key '{full}'" + (f"; did you mean '{near[0]}'?" if near else "; remove it"))
