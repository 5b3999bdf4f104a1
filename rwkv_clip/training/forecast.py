"""`rwkv-clip plan`: what a run would need before it is started: memory of each GPU, steps, and hours."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import sys
from collections.abc import Iterator

from ..errors import UserError
from ..model.config import load_config
from .arguments import COUNT, COUNT_OR_ZERO, parse_arguments, positive_number
from .config import read_config, resolve_config
from .engine import check_readable
from .log import duration
from .memory import StepMemory, step_memory

GIB = 2**30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="model name, JSON file or run folder")
    parser.add_argument(
        "--batch", "--batch-size", type=COUNT, help="pairs per GPU and forward pass, unless the JSON says it"
    )
    parser.add_argument("--config", metavar="JSON", help="DeepSpeed configuration file, as for training")
    parser.add_argument("--gpus", type=COUNT, default=1, help="of all machines together (default: %(default)s)")
    parser.add_argument("--gradient-accumulation", type=COUNT, help="forward passes per step, unless the JSON says it")
    parser.add_argument("--loss-chunk", type=COUNT_OR_ZERO, default=0, help="as for training")
    parser.add_argument("--ema-decay", metavar="DECAY", help="as for training: averaged weights take memory too")
    parser.add_argument("--lock-image", action="store_true", help="as for training: a tower that does not learn")
    parser.add_argument("--lock-text", action="store_true", help="likewise")
    parser.add_argument("--data", metavar="PATH", help="packed data set: adds the steps of an epoch")
    parser.add_argument(
        "--rate",
        type=positive_number,
        metavar="PAIRS",
        help="pairs per second and GPU, as a run's log states them: adds the time of an epoch",
    )
    parser.add_argument("--epochs", type=COUNT, default=32, help="for the time of the whole run (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")


def run(args: argparse.Namespace) -> int:
    figures = forecast(args)
    if args.json:
        print(json.dumps(figures, indent=1))
        return 0
    print("\n".join(lines(figures)))
    return 0


def forecast(args: argparse.Namespace) -> dict:
    """The figures, bytes and seconds, by name. `UserError` for whatever training would refuse."""
    if args.rate and not args.data:
        raise UserError("--rate gives the time of an epoch, for which --data must say how many pairs it has")
    words = ["--model", args.model, "--train-data", args.data or "-", "--output", "-"]
    for flag, value in (
        ("--deepspeed_config", args.config),
        ("--batch-size", args.batch),
        ("--gradient-accumulation", args.gradient_accumulation),
        ("--ema-decay", args.ema_decay),
    ):
        words += [flag, str(value)] if value is not None else []
    words += ["--lock-image"] * args.lock_image + ["--lock-text"] * args.lock_text
    training = parse_arguments(words)
    model_config = load_config(args.model)
    config, sizes = resolve_config(read_config(args.config), training, args.gpus)
    # Without the product of all sizes, which DeepSpeed would compare with the processes that are here.
    alone = {name: value for name, value in config.items() if name != "train_batch_size"}
    with _without_words_about_this_machine():
        check_readable(alone, str(args.config or "the DeepSpeed JSON"))
    averaged = training.ema_decay is not None
    try:
        memory = step_memory(model_config, config, sizes, args.loss_chunk, averaged, args.lock_image, args.lock_text)
    except RuntimeError as error:
        if "overflow" not in str(error):
            raise
        raise UserError(
            f"a batch of {sizes.micro} per GPU makes tensors of more bytes than 64 bits count: lower it"
        ) from None
    figures = {
        "model": model_config.name,
        "config": args.config,
        "gpus": args.gpus,
        "global_batch": str(sizes),
        # What the compiler keeps by itself differs from version to version.
        "is_upper_bound": config.get("compile", {}).get("recompute") == "automatic",
        **{name: getattr(memory, name) for name in StepMemory.__dataclass_fields__},
        "peak": memory.peak,
    }
    if args.data:
        from ..data.dataset import open_dataset

        records = len(open_dataset(args.data))
        if sizes.all_ranks > records:
            raise UserError(f"a global batch of {sizes} needs as many records, but {args.data} holds {records}")
        figures |= {"records": records, "steps_per_epoch": records // sizes.all_ranks}
        if args.rate:
            seconds = figures["steps_per_epoch"] * sizes.all_ranks / (args.rate * args.gpus)
            figures |= {"epoch_seconds": seconds, "epochs": args.epochs, "run_seconds": seconds * args.epochs}
    return figures


@contextlib.contextmanager
def _without_words_about_this_machine() -> Iterator[None]:
    """DeepSpeed, imported for the first time, warns of a machine without a GPU, and logs to what stdout is then."""
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        logging.disable(logging.NOTSET)


def lines(figures: dict) -> list[str]:
    """The figures for people."""

    def gib(name: str) -> str:
        return f"{figures[name] / GIB:8.2f} GiB"

    text = [
        f"{figures['model']}, {figures['config'] or 'fp32 without ZeRO'}, {figures['gpus']} GPU(s), global batch "
        f"{figures['global_batch']}",
        f"  weights                            {gib('weights')}",
        f"  fp32 masters and AdamW's moments   {gib('masters_and_moments')}",
        *([f"  averaged weights                   {gib('averages')}"] if figures["averages"] else []),
        f"  activations, at their most         {gib('activations')}",
        f"  gradients, in the optimizer's step {gib('gradients')}",
        f"peak memory per GPU                  {gib('peak')}{' at most' if figures['is_upper_bound'] else ''}",
        "  as torch.cuda.max_memory_allocated and the log count it; CUDA itself, DALI's buffers and what the allocator",
        "  keeps in reserve come on top",
    ]
    if "records" in figures:
        text.append(
            f"steps per epoch                      {figures['steps_per_epoch']:,} ({figures['records']:,} records)"
        )
    if "epoch_seconds" in figures:
        text.append(
            f"time per epoch                       {duration(figures['epoch_seconds'])}; {figures['epochs']} epochs "
            f"{duration(figures['run_seconds'])}"
        )
    return text
