"""Everything about a job that can be wrong, found before a model is built: paths, data, sizes, settings, resume.

Each step is passed by all ranks together, so that a mistake seen by one of them ends all with the same line.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..data.bad_records import decode_faults
from ..data.dataset import Dataset, open_dataset
from ..data.loader import Loader, check_input_size
from ..data.pipeline import DecoderSettings
from ..data.sampler import Sampler
from ..data.tokenizer import VOCABULARY_SIZE
from ..errors import UserError
from ..model.clip import RWKVCLIP
from ..model.config import ModelConfig, load_config
from ..model.published import check_fit, read_state_dict
from ..version import __version__
from .arguments import build_parser, caption_weights
from .checkpoint import Position
from .config import DTYPES, BatchSizes, fill_scheduler, precision_name, read_config, resolve_config
from .distributed import World, available_cores
from .engine import validate_config
from .log import logger, phase
from .loop import total_steps
from .resume import find_checkpoint
from .run_folder import RunFolder
from .schedule import lr_lambda, warmup_steps

# Flags that a resumed run must not change, since the run would silently become another one.
FIXED_FLAGS = (
    "lr",
    "beta1",
    "beta2",
    "eps",
    "weight_decay",
    "lr_schedule",
    "warmup",
    "lr_minimum",
    "seed",
    "negatives",
    "accumulation",
    "loss",
    "image_lr_factor",
    "text_lr_factor",
    "decay_lr_factor",
    "ema_decay",
    "shuffle_window",
    "caption_weights",
    "max_steps_per_epoch",
    "lock_image",
    "lock_text",
)
# Likewise the parts of the DeepSpeed JSON that a checkpoint carries with it.
FIXED_SECTIONS = ("bf16", "fp16", "optimizer", "scheduler", "data_types", "gradient_clipping")


@dataclass
class Plan:
    """A job that can be started."""

    args: argparse.Namespace
    run: RunFolder
    model_config: ModelConfig
    pretrained: dict[str, Tensor] | None
    config: dict[str, Any]
    """The resolved DeepSpeed JSON."""
    sizes: BatchSizes
    data: Dataset
    val_data: Dataset | None
    sampler: Sampler
    resume_from: Path | None
    resume_state: dict[str, Any] | None
    """state.json of the checkpoint."""
    position: Position

    @property
    def total_steps(self) -> int:
        return total_steps(self.position, self.args.epochs, self.sampler.steps_per_epoch, self.sizes.all_ranks)

    def lr_factor(self):
        """The schedule of the flags."""
        steps = self.total_steps
        warmup = warmup_steps(self.args.warmup, steps)
        return lr_lambda(self.args.lr_schedule, steps, warmup, self.args.lr_minimum)

    def loader(self, rank: int, world_size: int, device: torch.device) -> Loader:
        """Training batches of one data-parallel rank."""
        return Loader(
            self.data,
            self.sampler,
            seed=self.args.seed,
            accumulation_steps=self.sizes.accumulation,
            caption_weights=caption_weights(self.args.caption_weights, self.data.caption_names),
            on_bad_record=self.args.on_bad_record,
            **self._loader_settings(rank, world_size, device),
        )

    def val_loader(self, rank: int, world_size: int, device: torch.device) -> Loader | None:
        """Validation batches of one data-parallel rank."""
        if self.val_data is None:
            return None
        return Loader(self.val_data, None, train=False, **self._loader_settings(rank, world_size, device))

    def _loader_settings(self, rank: int, world_size: int, device: torch.device) -> dict[str, Any]:
        local = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        threads = self.args.workers or min(10, max(1, available_cores() // local))
        return {
            "rank": rank,
            "world_size": world_size,
            "micro_batch_size": self.sizes.micro,
            "image_size": self.model_config.image.image_size,
            "context_length": self.model_config.text.context_length,
            "device": device,
            "dtype": DTYPES[precision_name(self.config)],
            "settings": DecoderSettings(
                num_threads=threads,
                prefetch=self.args.prefetch,
                hw_decoder_load=self.args.hw_decoder_load,
                memory_padding=self.args.decoder_padding,
            ),
        }

    def description(self) -> dict[str, Any]:
        """What a checkpoint says about the run beside its position."""
        return {
            "version": __version__,
            "world_size": self.sizes.world_size,
            "global_batch": self.sizes.all_ranks,
            "micro_batch": self.sizes.micro,
            "zero_stage": self.config["zero_optimization"]["stage"],
            "precision": precision_name(self.config),
            "data": self.data.fingerprint,
            "steps_per_epoch": self.sampler.steps_per_epoch,
            "epochs": self.args.epochs,
            "model": self.model_config.to_dict(),
            "flags": {name: getattr(self.args, name) for name in FIXED_FLAGS},
            "deepspeed": {name: self.config.get(name) for name in FIXED_SECTIONS}
            # How stage 3 divides the optimizer's state.
            | {"zero_optimization.sub_group_size": self.config["zero_optimization"].get("sub_group_size")},
        }


def make_plan(args: argparse.Namespace, world: World) -> Plan:
    """Check everything and open the data; `CommonError` on all ranks for a mistake that any of them sees."""
    run = RunFolder(args.output)
    with world.together():
        run.check_free(args.resume)
        model_config = load_config(args.model)
        if args.drop_path_rate is not None:
            image = dataclasses.replace(model_config.image, drop_path_rate=args.drop_path_rate)
            model_config = dataclasses.replace(model_config, image=image)
        check_input_size(args.input_size, model_config.image.image_size, model_config.name)
        values = read_config(args.deepspeed_config)
        _check_evaluation_folder(args.eval_data)
    resume_from, resume_state = _find_resume(args, run, world)
    with world.together():
        saved_batch = resume_state["global_batch"] if resume_state else None
        config, sizes = resolve_config(values, args, world.world_size, saved_batch)
        validate_config(config, str(args.deepspeed_config or "the DeepSpeed JSON"))
    with world.together(), phase("opening the data"):
        data = open_dataset(args.train_data)
        _check_count(args, data)
        _check_vocabulary(model_config)
        sampler = Sampler(
            data.shard_sizes,
            args.seed,
            sizes.all_ranks,
            window=args.shuffle_window,
            max_steps_per_epoch=args.max_steps_per_epoch,
            world_size=world.world_size,
        )
        val_data = open_dataset(args.val_data) if args.val_data else None
    position = Position(**resume_state["position"]) if resume_state else Position()
    plan = Plan(
        args, run, model_config, None, config, sizes, data, val_data, sampler, resume_from, resume_state, position
    )
    with world.together():
        if resume_state is not None:
            _check_resume(plan, resume_state)
            if world.is_first:
                _warn_of_changes(plan.description(), resume_state)
        fill_scheduler(config, plan.total_steps, warmup_steps(args.warmup, plan.total_steps), args.lr)
        plan.lr_factor()
        # The loaders check their settings; the ones that serve are made when the engine knows its ranks.
        plan.loader(0, world.world_size, world.device).close()
        if val_data is not None:
            plan.val_loader(0, world.world_size, world.device).close()
    with world.together(), phase("reading the pretrained weights"):
        if args.pretrained and resume_from is None:
            plan.pretrained = _read_pretrained(args.pretrained, model_config)
    with world.together():
        if world.is_first:
            run.create(args.resume)
    with world.together(), phase("checking the data"):
        if world.is_first:
            _check_data(data, run)
            if val_data is not None:
                _check_data(val_data, run)
    return plan


def _find_resume(args: argparse.Namespace, run: RunFolder, world: World) -> tuple[Path | None, dict[str, Any] | None]:
    """The checkpoint to go on from, and its state; None twice for a new run."""
    if args.resume is None:
        return None, None
    found = find_checkpoint(args.resume, run.checkpoints, world)
    if found is None:
        logger.info("--resume auto: no checkpoint in %s, starting a new run", run.checkpoints)
    return found or (None, None)


def _check_count(args: argparse.Namespace, data: Dataset) -> None:
    if args.train_num_samples not in (None, len(data)):
        raise UserError(
            f"--train-num-samples is {args.train_num_samples} but {args.train_data} holds {len(data)} records: correct "
            "it or leave it out"
        )


def _check_vocabulary(model_config: ModelConfig) -> None:
    """The embedding would be read beyond its end: an IndexError on a CPU, a device-side assertion on a GPU."""
    if model_config.text.vocab_size < VOCABULARY_SIZE:
        raise UserError(
            f"the model's text.vocab_size is {model_config.text.vocab_size}, but the tokenizer of the data has "
            f"{VOCABULARY_SIZE} tokens: set it to {VOCABULARY_SIZE}"
        )


def _check_evaluation_folder(folder: str | None) -> None:
    if folder is not None:
        from ..evaluation.datasets import find_sets

        find_sets(folder)


def _check_resume(plan: Plan, state: dict[str, Any]) -> None:
    """`UserError` for whatever would make the resumed run another run."""
    now, source = plan.description(), plan.resume_from
    parser = build_parser()
    for name, given in now["flags"].items():
        then = state["flags"].get(name, parser.get_default(name))  # an older version may not have had the flag
        if given != then:
            flag = "--" + name.replace("_", "-")
            raise UserError(
                f"{flag} was {then} in the run to resume ({source}) and is {given}: give the old value, or start a "
                "new run with --pretrained"
            )
    for name, flag in (("model", "--model"), ("data", "--train-data")):
        if now[name] != state[name]:
            raise UserError(
                f"{flag} is not what the run to resume ({source}) used: give the same one, or start a new run with "
                "--pretrained"
            )
    if now["global_batch"] != state["global_batch"]:
        raise UserError(
            f"the global batch was {state['global_batch']} on {state['world_size']} GPUs in the run to resume "
            f"({source}) and is {plan.sizes}: choose sizes that make {state['global_batch']}, or leave "
            'gradient_accumulation_steps at "auto"'
        )
    for name, then in state["deepspeed"].items():
        found = now["deepspeed"].get(name)
        if found != then:
            was, is_now = ("not set" if value is None else value for value in (then, found))
            advice = "remove it" if then is None else "put the old value back"
            raise UserError(
                f"'{name}' in the DeepSpeed JSON was {was} in the run to resume ({source}) and is {is_now}: {advice}"
            )
    if now["zero_stage"] != state["zero_stage"] and not {now["zero_stage"], state["zero_stage"]} <= {1, 2}:
        raise UserError(
            f"ZeRO stage was {state['zero_stage']} in the run to resume ({source}) and is {now['zero_stage']}: a "
            "checkpoint goes between stages 1 and 2 alone; put the old stage back"
        )
    if state["epochs"] != now["epochs"] and plan.position.epoch >= now["epochs"]:
        raise UserError(
            f"--epochs is {now['epochs']} but the run to resume ({source}) has done {plan.position.epoch} already: "
            "give more, or another --output"
        )
    if state["steps_per_epoch"] != now["steps_per_epoch"]:
        raise UserError(
            f"an epoch had {state['steps_per_epoch']} steps in the run to resume and has another number now"
        )


def _warn_of_changes(now: dict[str, Any], then: dict[str, Any]) -> None:
    """Say what a resume may change and does."""
    if now["epochs"] != then["epochs"]:
        logger.warning(
            "--epochs was %d and is %d: from here on the rate is that of a run of %d epochs at the same step",
            then["epochs"],
            now["epochs"],
            now["epochs"],
        )
    if "micro_batch" in then and pairs_compared(now) != pairs_compared(then):
        logger.warning(
            "each pair was compared with %d pairs, itself included, and from here on with %d, as --accumulation %s "
            "and --negatives %s depend on the GPUs and the batch size: losses before and after do not compare",
            pairs_compared(then),
            pairs_compared(now),
            now["flags"]["accumulation"],
            now["flags"]["negatives"],
        )


def pairs_compared(description: dict[str, Any]) -> int:
    """Pairs among which the loss looks for one pair's counterpart, from `Plan.description` or a checkpoint's state."""
    flags, world_size = description["flags"], description["world_size"]
    whole = flags["accumulation"] == "global"
    pairs = description["global_batch"] if whole else description["micro_batch"] * world_size
    return pairs // world_size if flags["negatives"] == "local" else pairs


def _read_pretrained(path: str, model_config: ModelConfig) -> dict[str, Tensor]:
    weights = read_state_dict(path)
    with torch.device("meta"):
        model = RWKVCLIP(model_config)
    check_fit(model, weights, path)
    broken = [name for name, value in weights.items() if not value.isfinite().all()]
    if broken:
        raise UserError(f"--pretrained {path}: '{broken[0]}' holds NaN or Inf; take an earlier checkpoint")
    return weights


def _check_data(data: Dataset, run: RunFolder) -> None:
    """The start-up checks; their result is kept beside the data, or in the run folder where that cannot be written."""
    beside = data.path if data.path.is_dir() else data.path.parent
    cache = beside if os.access(beside, os.W_OK) else run.path
    # The packer has decoded every picture of its own data.
    threads = max(1, available_cores() - 1)
    decode = partial(decode_faults, num_threads=threads) if data.manifest is None else None
    report = data.check(decode=decode, cache_folder=cache, log=logger.info)
    for note in report.notes if report.from_cache else []:
        logger.info("%s", note)
