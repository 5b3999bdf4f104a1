"""The whole job on one rank: plan, op, model, engine, resume, loop, final weights."""

from __future__ import annotations

import argparse
import json
import socket
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ..model.clip import RWKVCLIP
from ..model.published import LOGIT_BIAS, SCALARS, published_state_dict, save
from ..version import __version__
from .checkpoint import Checkpoints
from .config import checkpoints_activations, precision_name
from .distributed import World
from .ema import WeightAverage
from .engine import build_engine, frozen_weights, lock_towers, restore_frozen
from .left_out import LeftOutSteps
from .log import log_to_file, logger, phase
from .loop import Loop, Parts
from .loss import ClipLoss
from .masters import sync_precise
from .metrics import Interval, MetricWriter
from .optimizer import follow_schedule
from .plan import Plan, make_plan
from .profile import StepProfiler
from .sigmoid_loss import SigmoidLoss
from .signals import StopRequest
from .spikes import LossSpikes
from .validation import Evaluator
from .weights import gather_weights

LOSSES = {"clip": ClipLoss, "siglip": SigmoidLoss}
NEGATIVES = {"global": "of all GPUs", "local": "each GPU's own"}


def run_job(args: argparse.Namespace, world: World, stop: StopRequest) -> bool:
    """Train as the arguments say; every rank of `world` calls it. Whether the run is complete, and was not stopped."""
    started = time.monotonic()
    with stop.interruptible():
        plan = make_plan(args, world)
        with world.together():
            if world.is_first:
                log_to_file(plan.run.log)
        _introduce(plan, world)
        engine, frozen, loop = _prepare(plan, world, stop)
        stop.training_began = True
    logger.info("training begins %.1f s after the start", time.monotonic() - started)
    completed = loop.run()
    _finish(plan, world, engine, loop, frozen, completed, stop)
    return completed


def _prepare(plan: Plan, world: World, stop: StopRequest) -> tuple[Any, dict, Loop]:
    """(engine, weights that it does not train, loop at the position to go on from)."""
    args = plan.args
    with world.together(), phase("preparing the WKV6 op"):
        from ..ops import prepare

        implementation = prepare(world.device.type)
    logger.info("WKV6 runs on: %s", implementation)
    with phase("building the model"):
        model = _build_model(plan)
    frozen = frozen_weights(model)
    if frozen:
        tower = "image" if args.lock_image else "text"
        parameters = sum(weight.numel() for weight in frozen.values())
        logger.info("the %s tower is locked: %d tensors, %s parameters", tower, len(frozen), f"{parameters:,}")
    with phase("building the engine"):
        engine = build_engine(model, plan.config, args, world, plan.lr_factor())
    # Drop path and dropout differ between ranks; the weights were drawn alike.
    torch.manual_seed(args.seed + 1 + world.rank)
    checkpoints = Checkpoints(world, plan.run.checkpoints, args.keep_last, args.keep_every)
    with world.together():
        if world.is_first:
            checkpoints.prepare(plan.resume_from)
    return engine, frozen, _assemble(plan, world, stop, engine, checkpoints, frozen)


def _introduce(plan: Plan, world: World) -> None:
    config = plan.config
    logger.info(
        "rwkv-clip %s: %s on %d x %s (%s), %s, ZeRO stage %d%s",
        __version__,
        plan.model_config.name,
        world.world_size,
        torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "CPU",
        socket.gethostname(),
        precision_name(config),
        config["zero_optimization"]["stage"],
        ", activation checkpointing" if checkpoints_activations(config) else "",
    )
    logger.info(
        "%s records in %d shard(s), %d captions each; global batch %s; %d steps per epoch, %d epochs, %d steps",
        f"{len(plan.data):,}",
        len(plan.data.shard_sizes),
        plan.data.num_captions,
        plan.sizes,
        plan.sampler.steps_per_epoch,
        plan.args.epochs,
        plan.total_steps,
    )
    logger.info("loss: %s; negatives: %s", plan.args.loss, NEGATIVES[plan.args.negatives])
    if plan.args.ema_decay is not None:
        logger.info("averaged weights: decay %g; evaluations use them", plan.args.ema_decay)
    if plan.sizes.accumulation > 1:
        negatives = "the whole global batch" if plan.args.accumulation == "global" else "each micro batch alone"
        logger.info("gradient accumulation: the negatives are those of %s", negatives)


def _build_model(plan: Plan) -> RWKVCLIP:
    """The fp32 model on the CPU, with fresh or pretrained weights."""
    torch.manual_seed(plan.args.seed)
    model = RWKVCLIP(plan.model_config)
    if plan.args.loss == "siglip":
        model.add_logit_bias()
    if plan.pretrained is not None:
        load_pretrained(model, plan.pretrained)
        plan.pretrained = None
    lock_towers(model, plan.args.lock_image, plan.args.lock_text)
    return model


def load_pretrained(model: RWKVCLIP, weights: dict[str, Tensor]) -> None:
    """Weights that fit the model, though they may come from a run with the other loss."""
    if model.logit_bias is None:
        weights.pop(LOGIT_BIAS, None)
    elif LOGIT_BIAS not in weights:
        logger.info("--pretrained has no %s: it and the temperature start where a sigmoid loss starts", LOGIT_BIAS)
        weights |= {name: getattr(model, name).detach() for name in SCALARS}
    model.load_state_dict(weights)


def _assemble(plan: Plan, world: World, stop: StopRequest, engine: Any, checkpoints: Checkpoints, frozen: dict) -> Loop:
    """Load the checkpoint to go on from, write the run's description, and put the loop together."""
    args, state = plan.args, plan.resume_state
    # The data are shared out as the engine shares out the gradients.
    rank, world_size = dist.get_rank(engine.data_parallel_group), engine.dp_world_size
    loader = plan.loader(rank, world_size, world.device)
    val_loader = plan.val_loader(rank, world_size, world.device)
    average = None if args.ema_decay is None else WeightAverage(engine, args.ema_decay)
    if plan.resume_from is not None:
        with phase("loading the checkpoint"):
            kept = checkpoints.load(engine, plan.resume_from, state, average)
            frozen.update(kept)
            restore_frozen(engine.module, kept)
            sync_precise(engine)
            follow_schedule(engine.lr_scheduler)
        loader.load_state_dicts(state["loaders"])
        logger.info("going on from %s (step %d)", plan.resume_from, plan.position.step)
        if plan.resume_from.parent.resolve() != plan.run.checkpoints.resolve():
            checkpoints.saved_step = None  # this run has none of its own yet
    elif frozen:
        restore_frozen(engine.module, frozen)
    metrics = None
    with world.together():
        if world.is_first:
            plan.run.describe(_plain(args), plan.model_config.to_dict(), plan.config)
            metrics = _metric_writer(plan, engine)
    parts = Parts(
        world=world,
        engine=engine,
        loader=loader,
        loss=LOSSES[args.loss](engine.data_parallel_group, args.negatives, args.loss_chunk),
        checkpoints=checkpoints,
        describe=lambda: plan.description() | {"loaders": _loader_states(world, loader)},
        frozen=frozen,
        average=average,
        evaluator=Evaluator(world, val_loader, _scorer(plan, world), stop),
        metrics=metrics,
        interval=Interval(world.device, plan.sizes.all_ranks, world.world_size, plan.data.caption_names),
        spikes=LossSpikes(state and state.get("loss_spikes")),
        left_out=LeftOutSteps(state and state.get("left_out")),
        profiler=StepProfiler(args.profile, plan.run.tensorboard if world.is_first else None, world.device),
        stop=stop,
    )
    due = bool(state and state["evaluation_due"]) and not (
        metrics is not None and metrics.evaluated(plan.position.step)
    )
    due = bool(world.from_first(due))
    return Loop(parts, args, plan.position, evaluation_due=due and parts.evaluator.has_work)


def _plain(args: argparse.Namespace) -> dict[str, Any]:
    return {
        name: value for name, value in sorted(vars(args).items()) if name not in ("given", "local_rank", "deepspeed")
    }


def _loader_states(world: World, loader: Any) -> list[dict[str, Any]]:
    return [json.loads(text) for text in world.gather(json.dumps(loader.state_dict()))]


def _metric_writer(plan: Plan, engine: Any) -> MetricWriter:
    section = plan.config.get("tensorboard", {})
    folder: Path | None = plan.run.tensorboard
    if not section.get("enabled", True):
        folder = None
    elif section.get("output_path"):
        folder = Path(section["output_path"]) / section.get("job_name", plan.run.path.name)
    others = (
        engine.monitor.write_events
        if any(plan.config.get(name) for name in ("wandb", "csv_monitor", "comet"))
        else None
    )
    return MetricWriter(plan.run.metrics, folder, plan.position.step, others)


def _scorer(plan: Plan, world: World) -> Any:
    """model -> (zero-shot and retrieval scores of --eval-data, picture of retrieved examples)."""
    if plan.args.eval_data is None:
        return None
    from ..evaluation.evaluate import evaluate

    def score(model: RWKVCLIP) -> tuple[dict[str, float], np.ndarray | None]:
        batch_size = max(plan.sizes.micro, 32)
        result = evaluate(model, plan.args.eval_data, world.device, batch_size=batch_size, with_picture=True)
        for name, problem in result.problems.items():
            logger.warning("%s was not scored: %s", name, problem)
        return result.scores, result.picture

    return score


def _finish(
    plan: Plan, world: World, engine: Any, loop: Loop, frozen: dict, completed: bool, stop: StopRequest
) -> None:
    step = loop.position.step
    if completed:
        final = {plan.run.weights: gather_weights(engine, frozen)}
        if loop.average is not None:
            final[plan.run.weights_ema] = gather_weights(engine, frozen, loop.average)
        if world.is_first:
            for path, weights in final.items():
                save(path, published_state_dict(weights))
            logger.info("the run is complete after %d steps: weights in %s", step, " and ".join(map(str, final)))
    else:
        # The stop may be agreed before this rank hears by what.
        reasons = world.gather(stop.reason or "")
        stop.reason = stop.reason or next(filter(None, reasons), "a signal to another process")
        logger.info("stopped by %s after step %d, saved; go on with --resume auto", stop.reason, step)
    loop.close()
