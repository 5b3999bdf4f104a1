import json
from pathlib import Path

import pytest

from rwkv_clip.errors import UserError
from rwkv_clip.training.arguments import build_parser, parse_arguments
from rwkv_clip.training.config import (
    checkpoints_activations,
    fill_scheduler,
    precision_name,
    read_config,
    resolve_config,
)
from rwkv_clip.training.config_keys import (
    KNOWN_KEYS,
    OFFLOAD_KEYS,
    REFUSED_IN_OFFLOAD,
    REFUSED_IN_SECTION,
    REFUSED_KEYS,
    STAGE_3_KEYS,
)
from rwkv_clip.training.engine import deepspeed_form, validate_config

SHIPPED = sorted((Path(__file__).parents[2] / "ds_configs").glob("*.json"))


def arguments(*words: str):
    return parse_arguments(["--model", "m", "--train-data", "d", "--output", "o", *words])


def resolve(values: dict, *words: str, world_size: int = 2, saved: int | None = None):
    return resolve_config(values, arguments(*words), world_size, saved)


def refusal(values: dict, *words: str, **options) -> str:
    with pytest.raises(UserError) as caught:
        resolve(values, *words, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("values", [{}, {"train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto"}])
def test_a_flag_fills_a_key_that_is_absent_or_auto(values):
    config, sizes = resolve(values, "--batch-size", "8", "--grad-clip", "1", "--zero-stage", "1")
    assert config["train_micro_batch_size_per_gpu"] == 8 and config["train_batch_size"] == 16
    assert config["gradient_accumulation_steps"] == 1
    assert config["gradient_clipping"] == 1.0 and config["zero_optimization"]["stage"] == 1
    assert sizes.all_ranks == 16


@pytest.mark.parametrize(
    ("values", "flag", "value"),
    [
        ({"train_micro_batch_size_per_gpu": 8}, "--batch-size", "16"),
        ({"gradient_accumulation_steps": 2}, "--gradient-accumulation", "4"),
        ({"train_batch_size": 64}, "--global-batch", "32"),
        ({"gradient_clipping": 0.5}, "--grad-clip", "1.0"),
        ({"zero_optimization": {"stage": 1}}, "--zero-stage", "2"),
        ({"bf16": {"enabled": True}}, "--precision", "fp32"),
        ({"fp16": {"enabled": True}}, "--precision", "bf16"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}, "--lr", "0.001"),
        ({"optimizer": {"type": "AdamW", "params": {"betas": [0.9, 0.999]}}}, "--beta2", "0.98"),
    ],
)
def test_a_key_and_a_flag_that_differ_are_an_error_that_names_both(values, flag, value):
    sizes = {} if "batch" in flag else {"train_micro_batch_size_per_gpu": 8}
    message = refusal({**sizes, **values}, flag, value)
    key = next(iter(values))
    assert key in message and flag in message and '"auto"' in message


def test_the_help_states_what_holds_when_neither_flag_nor_json_says_it():
    config, sizes = resolve({}, "--batch-size", "8")
    text = " ".join(build_parser().format_help().split())
    assert f"bf16.enabled, fp16.enabled, or neither (default: {precision_name(config)})" in text
    assert f"zero_optimization.stage (default: {config['zero_optimization']['stage']})" in text
    assert f"0 for no limit (default: {config['gradient_clipping']:g})" in text
    assert f"else {sizes.accumulation})" in text
    assert "no batch size: give --batch-size" in refusal({}) and "no default: give this or --global-batch" in text


def test_a_precision_that_differs_reads_as_one_sentence():
    message = refusal({"train_micro_batch_size_per_gpu": 8, "bf16": {"enabled": True}}, "--precision", "fp32")
    assert "says bf16.enabled = true but --precision fp32 says false: remove one of them" in message


def test_a_key_and_a_flag_that_agree_are_fine():
    config, _ = resolve(
        {"train_micro_batch_size_per_gpu": 8, "bf16": {"enabled": True}}, "--batch-size", "8", "--precision", "bf16"
    )
    assert precision_name(config) == "bf16"


@pytest.mark.parametrize(
    ("values", "words", "expected"),
    [
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 8}, [], (8, 4)),
        ({"train_batch_size": 64, "gradient_accumulation_steps": 4}, [], (8, 4)),
        ({"train_batch_size": 64}, [], (32, 1)),
        ({"train_micro_batch_size_per_gpu": 8}, ["--global-batch", "32"], (8, 2)),
        ({"gradient_accumulation_steps": 3}, ["--batch-size", "5"], (5, 3)),
    ],
)
def test_the_third_batch_size_follows_from_two(values, words, expected):
    _, sizes = resolve(values, *words)
    assert (sizes.micro, sizes.accumulation) == expected


@pytest.mark.parametrize(
    ("values", "part"),
    [
        ({}, "no batch size"),
        ({"train_batch_size": 65}, "65"),
        ({"train_batch_size": 24, "train_micro_batch_size_per_gpu": 8}, "multiple of 16"),
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 2}, "make 32"),
        ({"train_micro_batch_size_per_gpu": 0}, "found 0"),
        ({"train_micro_batch_size_per_gpu": "8"}, "found '8'"),
    ],
)
def test_batch_sizes_that_do_not_add_up_are_refused(values, part):
    assert part in refusal(values)


def test_another_number_of_gpus_keeps_the_resumed_run_s_global_batch():
    _, sizes = resolve({"train_micro_batch_size_per_gpu": 8}, world_size=1, saved=32)
    assert (sizes.micro, sizes.accumulation, sizes.all_ranks) == (8, 4, 32)
    assert "32" in refusal({"train_micro_batch_size_per_gpu": 8}, world_size=3, saved=32)


@pytest.mark.parametrize("key", REFUSED_KEYS)
def test_a_key_without_effect_is_refused_with_the_reason(key):
    message = refusal({key: {}, "train_micro_batch_size_per_gpu": 8})
    assert f"'{key}'" in message and REFUSED_KEYS[key] in message


class _Spy(dict):
    """A dictionary that remembers which keys are asked for."""

    asked: set[str] = set()

    def __contains__(self, key):
        self.asked.add(key)
        return super().__contains__(key)

    def get(self, key, default=None):
        return self[key] if key in self else default

    def keys(self):
        return self


def test_every_key_that_deepspeed_reads_acts_here_or_is_refused_with_a_reason():
    from deepspeed import DeepSpeedConfig

    DeepSpeedConfig(_Spy({"train_micro_batch_size_per_gpu": 8}))
    assert len(_Spy.asked) > 40
    assert _Spy.asked - KNOWN_KEYS - REFUSED_KEYS.keys() == set()


# The keys of sections that act here at stages 1 to 3; all other fields of DeepSpeed's have to be refused.
ACTING = {
    "zero_optimization": {
        "stage",
        "contiguous_gradients",
        "reduce_scatter",
        "reduce_bucket_size",
        "use_multi_rank_bucket_allreduce",
        "allgather_partitions",
        "allgather_bucket_size",
        "overlap_comm",
        "offload_optimizer",
        "ignore_unused_parameters",
        "round_robin_gradients",
        "parameter_alignment",
        "enable_sanity_checks",
        *STAGE_3_KEYS,
    },
    "bf16": {"enabled", "check_grad_overflow", "immediate_grad_update"},
    "fp16": {
        "enabled",
        "loss_scale",
        "initial_scale_power",
        "loss_scale_window",
        "hysteresis",
        "consecutive_hysteresis",
        "min_loss_scale",
    },
}


@pytest.mark.parametrize("section", [*ACTING, "offload_optimizer"])
def test_every_field_of_deepspeed_s_sections_acts_here_or_is_refused(section):
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig

    model = {
        "zero_optimization": DeepSpeedZeroConfig,
        "bf16": DeepSpeedBF16Config,
        "fp16": DeepSpeedFP16Config,
        "offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
    }[section]
    names = set()
    for name, field in model.model_fields.items():
        names |= {name, *filter(None, [field.alias])}
    refused = REFUSED_IN_OFFLOAD if section == "offload_optimizer" else REFUSED_IN_SECTION[section]
    acting = OFFLOAD_KEYS if section == "offload_optimizer" else ACTING[section]
    assert names - refused.keys() == acting


@pytest.mark.parametrize(
    ("values", "part"),
    [
        ({"zero_optimization": {"stage": 2, "stage3_max_live_parameters": 1}}, "'zero_optimization.stage3_max_live"),
        ({"zero_optimization": {"prefetch_bucket_size": 1}}, "serves ZeRO stage 3, and the stage is 0; remove it"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}, "the least of what it holds"),
        ({"zero_optimization": {"stage": 3, "gather_16bit_weights_on_model_save": True}}, "as weights.pt; remove it"),
        ({"zero_optimization": {"stage": 3, "zero_quantized_weights": True}}, "over all ranks alike"),
        ({"zero_optimization": {"stage": 3}, "compile": {"enabled": True}}, "'compile' does not go with ZeRO stage 3"),
        ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}}, 'use "cpu"'),
        ({"zero_optimization": {"stage": 3}, "prescale_gradients": True}, "'prescale_gradients' does not go with"),
        ({"zero_optimization": {"stage": 2, "cpu_offload": True}}, 'write "offload_optimizer"'),
        (
            {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu", "nvme_path": "/x"}}},
            "'zero_optimization.offload_optimizer.nvme_path'",
        ),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, "offload_optimizer needs ZeRO"),
        ({"zero_optimization": {"stage": 2}, "prescale_gradients": True}, "'prescale_gradients' does not go with"),
        ({"zero_optimization": {"stage": 2}, "gradient_predivide_factor": 2}, "'gradient_predivide_factor' does not"),
        ({"bf16": {"enabled": True, "bf16_optimizer_states": True}}, "masters and moments stay fp32"),
        ({"fp16": {"enabled": True, "auto_cast": True}}, "the model casts its images itself"),
        ({"data_types": {"grad_acum_dtype": "fp32"}}, "did you mean 'grad_accum_dtype'"),
        ({"checkpoint": {"load_universal": True}}, "converted on resume"),
        ({"checkpoint": {"writer": {"type": "mock"}}}, "a thread of each rank writes"),
        ({"flops_profiler": {"enabled": True, "profile_steps": 5}}, "did you mean 'profile_step'"),
        ({"optimizer": {"type": "AdamW", "parameters": {}}}, "unknown key 'optimizer.parameters'"),
    ],
)
def test_a_key_of_a_section_without_effect_is_refused_with_the_reason(values, part):
    assert part in refusal({"train_micro_batch_size_per_gpu": 8, **values})


@pytest.mark.parametrize(
    ("values", "part"),
    [
        ({"gradient_cliping": 1.0}, "did you mean 'gradient_clipping'"),
        ({"zero_optimization": 1}, "section"),
        ({"activation_checkpointing": {"partition_activations": True}}, "partition_activations"),
        ({"activation_checkpointing": {"cpu_checkpoint": True}}, "activation_checkpointing.cpu_checkpoint"),
        ({"zero_optimization": {"stage": 4}}, "must be 0, 1, 2 or 3, found 4"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "both enabled"),
        ({"optimizer": {}}, "optimizer.type"),
    ],
)
def test_a_section_that_cannot_work_is_refused(values, part):
    assert part in refusal({"train_micro_batch_size_per_gpu": 8, **values})


def test_deepspeed_s_own_refusal_becomes_one_line():
    config, _ = resolve(
        {"train_micro_batch_size_per_gpu": 8, "zero_optimization": {"reduce_bucket_sise": 5}}, world_size=1
    )
    with pytest.raises(UserError, match="reduce_bucket_sise") as caught:
        validate_config(config, "my.json")
    assert "\n" not in str(caught.value) and "my.json" in str(caught.value)


def test_an_optimizer_section_takes_its_values_from_the_flags():
    values = {"train_micro_batch_size_per_gpu": 8, "optimizer": {"type": "AdamW", "params": {"eps": "auto"}}}
    config, _ = resolve(values, "--lr", "2e-4", "--beta1", "0.8")
    assert config["optimizer"]["params"] == {"lr": 2e-4, "weight_decay": 0.2, "betas": [0.8, 0.98], "eps": 1e-8}


def test_a_scheduler_section_excludes_the_schedule_s_flags_and_learns_the_run_s_length():
    values = {"train_micro_batch_size_per_gpu": 8, "scheduler": {"type": "WarmupCosineLR"}}
    assert "--warmup" in refusal(values, "--warmup", "0.2")
    assert "--image-lr-factor" in refusal(values, "--image-lr-factor", "0.2")
    config, _ = resolve(values)
    fill_scheduler(config, total_steps=100, warmup_steps=10, lr=1e-3)
    assert config["scheduler"]["params"] == {"total_num_steps": 100, "warmup_num_steps": 10}


def test_activation_checkpointing_is_on_when_its_section_is_there_and_not_switched_off():
    batch = {"train_micro_batch_size_per_gpu": 8}
    for section, expected in (({}, True), ({"enabled": True}, True), ({"enabled": False}, False)):
        config, _ = resolve({**batch, "activation_checkpointing": section})
        assert checkpoints_activations(config) is expected
        assert "enabled" not in deepspeed_form(config)["activation_checkpointing"]
    assert not checkpoints_activations(resolve(batch)[0])


def test_deepspeed_s_own_tensorboard_is_switched_off():
    config, _ = resolve({"train_micro_batch_size_per_gpu": 8, "tensorboard": {"enabled": True, "output_path": "tb"}})
    assert deepspeed_form(config)["tensorboard"] == {"enabled": False}
    assert config["tensorboard"]["output_path"] == "tb"


def test_a_file_may_hold_comments_but_no_key_twice(tmp_path):
    path = tmp_path / "c.json"
    path.write_text('{\n  # pairs per GPU\n  "train_micro_batch_size_per_gpu": 8\n}')
    assert read_config(path) == {"train_micro_batch_size_per_gpu": 8}
    path.write_text('{"steps_per_print": 1, "steps_per_print": 2}')
    with pytest.raises(UserError, match="'steps_per_print' is there twice"):
        read_config(path)


@pytest.mark.parametrize("content", ["", "[1]", '{"a": '])
def test_a_broken_file_is_refused_by_name(tmp_path, content):
    path = tmp_path / "c.json"
    path.write_text(content)
    with pytest.raises(UserError, match="c.json"):
        read_config(path)


def test_a_missing_file_is_refused_by_name(tmp_path):
    with pytest.raises(UserError, match="none.json: no such file"):
        read_config(tmp_path / "none.json")


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_file_resolves_and_deepspeed_reads_it(path):
    config, _ = resolve(read_config(path), "--batch-size", "8", "--grad-clip", "1", world_size=1)
    deepspeed = json.loads(json.dumps(config))
    if precision_name(config) != "fp16":  # not every CPU computes in fp16
        validate_config(deepspeed, path.name)


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"gradient_clipping": -1}, "gradient_clipping"),
        ({"gradient_clipping": "x"}, "gradient_clipping"),
        ({"zero_optimization": {"stage": True}}, "zero_optimization.stage"),
        ({"zero_optimization": {"stage": 1, "offload_optimizer": "cpu"}}, "zero_optimization.offload_optimizer"),
        ({"optimizer": {"type": "AdamW", "params": []}}, "optimizer.params"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": "x"}}}, "optimizer.params.lr"),
        ({"optimizer": {"type": "AdamW", "params": {"betas": 3}}}, "optimizer.params.betas"),
        ({"scheduler": {"type": "WarmupLR", "params": 3}}, "scheduler.params"),
        ({"activation_checkpointing": {"enabled": "no"}}, "activation_checkpointing.enabled"),
        ({"prescale_gradients": "x"}, "prescale_gradients"),
        ({"gradient_predivide_factor": 0}, "gradient_predivide_factor"),
        ({"steps_per_print": "x"}, "steps_per_print"),
        ({"optimizer": {"type": "AdamW", "params": {"betas": [5, 7]}}}, "optimizer.params.betas"),
        ({"flops_profiler": {"enabled": True, "profile_step": "x"}}, "flops_profiler.profile_step"),
        ({"flops_profiler": {"enabled": True, "top_modules": -1}}, "flops_profiler.top_modules"),
        ({"flops_profiler": {"enabled": True, "module_depth": None}}, "flops_profiler.module_depth"),
        ({"torch_autocast": {"enabled": "x"}}, "torch_autocast.enabled"),
        ({"timers": "x"}, "timers"),
        ({"log_level": {"a": 1}}, "log_level"),
        ({"zero_optimization": {"stage": 1, "allgather_bucket_size": 0}}, "zero_optimization.allgather_bucket_size"),
        ({"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "auto"}}}, "offload_optimizer.device"),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_with_its_key(values, key):
    assert key in refusal({"train_micro_batch_size_per_gpu": 8, **values})


def test_a_tensorboard_section_is_checked_although_deepspeed_does_not_write_it():
    config, _ = resolve({"train_micro_batch_size_per_gpu": 8, "tensorboard": {"enabled": "x"}}, world_size=1)
    with pytest.raises(UserError, match="enabled"):
        validate_config(config, "ds.json")
