"""The command line of `launch/train.py`.

What the DeepSpeed JSON decides (batch size, accumulation, precision, ZeRO stage, clipping, ...) has flags here too, all
without a default: such a flag fills a key that the JSON leaves out or sets to "auto" (see config.py).
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from ..errors import UserError, check_flags
from .optimizer import LR_FACTORS
from .other_flags import OTHER_FLAGS
from .profile import step_range
from .schedule import SCHEDULES
from .step import ACCUMULATIONS


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """States the defaults that there are."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default is None or action.default is False else super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """argparse that raises one-line `UserError`s instead of printing the usage and leaving."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see --help")

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> argparse.Namespace:  # type: ignore[override]
        # First of all: who types --name and --logs has no --output, and is to hear why it is missing.
        for word in sys.argv[1:] if args is None else args:
            flag = word.split("=")[0]
            if instead := OTHER_FLAGS.get(flag.replace("_", "-")):
                raise UserError(f"{flag} is not used here: {instead}")
        check_flags(sys.argv[1:] if args is None else args, self._option_string_actions)
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            raise UserError(f"unknown argument '{unknown[0]}'; see --help")
        return parsed


# What the libraries below take as an int in C; no count and no seed needs more.
LARGEST = 2**31 - 1


def _number(kind: Callable, low: float, high: float = LARGEST, exclusive: bool = False) -> Callable[[str], Any]:
    """A converter for argparse that checks a range, `low` left out when `exclusive`."""

    def convert(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected a {'whole ' * (kind is int)}number, found '{text}'") from None
        if not (low < value if exclusive else low <= value) or not value <= high:
            bound = f"above {low:g}" if exclusive else f"at least {low:g}"
            raise argparse.ArgumentTypeError(f"must be {bound} and at most {high:.10g}, found {text}")
        return value

    return convert


def _path(text: str) -> str:
    """A converter for argparse; an empty path would mean the working folder."""
    if not text.strip():
        raise argparse.ArgumentTypeError("is empty: give a path (or is a shell variable not set?)")
    return text


COUNT = _number(int, 1)
COUNT_OR_ZERO = _number(int, 0)
positive_number = _number(float, 0, exclusive=True)


def caption_weights(text: str | None, names: Sequence[str]) -> list[float] | None:
    """`raw=1,synthetic=1,generated=2`, or one number per caption, as weights in the order of `names`."""
    if text is None:
        return None
    parts = [part.partition("=") for part in text.split(",")]
    named = {name.strip(): value for name, sign, value in parts if sign}
    unknown = [name for name in named if name not in names]
    if unknown:
        raise UserError(f"--caption-weights: the data have no caption '{unknown[0]}', only {', '.join(names)}")
    try:
        if named and len(named) == len(parts):
            weights = [float(named.get(name, 0)) for name in names]
        else:
            weights = [float(value) for value, _, _ in parts]
    except ValueError:
        raise UserError(
            f"--caption-weights {text}: expected {'=1,'.join(names)}=1 or one number for each of them"
        ) from None
    if len(weights) != len(names) or min(weights) < 0 or not 0 < sum(weights) < math.inf:
        raise UserError(
            f"--caption-weights {text}: expected {len(names)} numbers, 0 or more and not all 0, for {', '.join(names)}"
        )
    return weights


def build_parser() -> Parser:
    parser = Parser(
        prog="train.py",
        description="Train RWKV-CLIP with DeepSpeed. Start it with deepspeed, torchrun, srun, or alone.",
        allow_abbrev=False,
        formatter_class=_Help,
    )
    add = parser.add_argument_group("what to train").add_argument
    add(
        "--model",
        required=True,
        type=_path,
        help="model name, JSON file or run folder (names: rwkv_clip.list_models())",
    )
    add(
        "--train-data",
        required=True,
        type=_path,
        metavar="PATH",
        help="packed data set: a folder, or the prefix of a .rec/.idx pair",
    )
    add("--output", required=True, type=_path, metavar="FOLDER", help="run folder to create")
    add(
        "--resume",
        type=_path,
        metavar="auto|PATH",
        help="go on from the newest complete checkpoint of --output, or from PATH",
    )
    add(
        "--pretrained",
        type=_path,
        metavar="FILE",
        help="start a new run from these weights (published format or a run folder)",
    )
    add("--lock-image", action="store_true", help="keep the image tower as it is")
    add("--lock-text", action="store_true", help="keep the text tower as it is")
    add("--drop-path-rate", type=_number(float, 0, 0.99), help="replaces the model's own rate")
    add("--input-size", type=COUNT, help="expected image size in pixels; an error if the model has another one")

    add = parser.add_argument_group(
        "fill the DeepSpeed JSON where it leaves out a key or says 'auto'",
        "A default holds where neither the flag nor the JSON gives a value.",
    ).add_argument
    add("--deepspeed_config", "--deepspeed-config", type=_path, metavar="JSON", help="DeepSpeed configuration file")
    add(
        "--batch-size",
        type=COUNT,
        help="train_micro_batch_size_per_gpu: pairs per GPU and forward pass (no default: give this or --global-batch)",
    )
    add(
        "--gradient-accumulation",
        type=COUNT,
        help="gradient_accumulation_steps (default: what --global-batch needs, else 1)",
    )
    add(
        "--global-batch",
        type=COUNT,
        help="train_batch_size: pairs per optimizer step over all GPUs (default: --batch-size x accumulation x GPUs)",
    )
    add("--precision", choices=("bf16", "fp16", "fp32"), help="bf16.enabled, fp16.enabled, or neither (default: fp32)")
    add("--zero-stage", type=int, choices=(0, 1, 2, 3), help="zero_optimization.stage (default: 0)")
    add(
        "--grad-clip",
        type=_number(float, 0),
        help="gradient_clipping: largest gradient norm, 0 for no limit (default: 0)",
    )

    add = parser.add_argument_group("optimization").add_argument
    add("--epochs", type=COUNT, default=32, help="passes over the data")
    add("--lr", type=positive_number, default=1e-3, help="peak learning rate")
    add("--beta1", type=_number(float, 0, 0.9999), default=0.9, help="AdamW's first beta")
    add("--beta2", type=_number(float, 0, 0.99999), default=0.98, help="AdamW's second beta")
    add("--eps", type=positive_number, default=1e-8, help="AdamW's eps")
    add("--weight-decay", type=_number(float, 0), default=0.2, help="on matrices; norms, biases and time_* have none")
    add("--lr-schedule", choices=SCHEDULES, default="cosine", help="after the warm-up, by optimizer step")
    add("--warmup", type=_number(float, 0), default=0.1, help="share of the run (below 1) or number of steps")
    add("--lr-minimum", type=_number(float, 0, 1), default=0.0, help="last rate of cosine and linear, as share of --lr")
    add("--seed", type=COUNT_OR_ZERO, default=1467, help="of the weights, the data order, crops and captions")
    add(
        "--loss",
        choices=("clip", "siglip"),
        default="clip",
        help="softmax over the batch, or a sigmoid per pair with a learned bias, captions passed round the GPUs",
    )
    add("--negatives", choices=("global", "local"), default="global", help="of all GPUs, or of each GPU's own pairs")
    add(
        "--accumulation",
        choices=ACCUMULATIONS,
        default="global",
        help="with gradient accumulation: negatives from the whole batch, or from each micro batch",
    )
    for flag, what in LR_FACTORS.items():
        add(
            flag,
            type=_number(float, 0, 1000, exclusive=True),
            default=1.0,
            metavar="F",
            help=f"--lr times F for {what}",
        )
    add("--loss-chunk", type=COUNT_OR_ZERO, default=0, help="rows of logits held at once; 0: all")
    add(
        "--ema-decay",
        type=_number(float, 0.5, 0.999999),
        help="keep an average of the weights (EMA) with this decay, such as 0.9999; evaluations use it",
    )
    add("--max-skipped", type=COUNT, default=50, help="stop after so many steps in a row with NaN or Inf gradients")

    add = parser.add_argument_group("data").add_argument
    add(
        "--workers",
        type=_number(int, 1, 1024),
        help="decoding threads per GPU (default: the cores divided by the GPUs, at most 10)",
    )
    add("--shuffle-window", type=COUNT, default=16384, help="records among which the order is shuffled")
    add(
        "--caption-weights", metavar="NAME=W,...", help="how often each caption is taken: raw=1,synthetic=1,generated=2"
    )
    add(
        "--on-bad-record", choices=("raise", "skip"), default="raise", help="what a picture that cannot be decoded does"
    )
    add(
        "--prefetch",
        type=_number(int, 1, 256),
        default=3,
        help="batches made ahead of the step: evens out slow reads, each takes about 600 KB of GPU memory a picture",
    )
    add(
        "--hw-decoder-load",
        type=_number(float, 0, 1),
        default=1.0,
        help="share of JPEGs for the GPU's JPEG engine (default: all); the rest takes time of training's own kernels",
    )
    add(
        "--decoder-padding",
        type=_number(float, 0),
        default=1.0,
        help="memory set aside for large pictures: 1 is 211 MB of GPU and 281 MB of page-locked memory per decoding "
        "thread, as published; 0 saves it and allocates in mid-run",
    )
    add("--train-num-samples", type=COUNT, help="expected number of records; an error if the data hold another number")
    add("--max-steps-per-epoch", type=COUNT, help="optimizer steps after which an epoch ends early")
    add("--val-data", type=_path, metavar="PATH", help="packed data set for a validation loss")
    add(
        "--eval-data",
        type=_path,
        metavar="FOLDER",
        help="prepared folder with zs_*.json and retrieval_*.tsv, scored while training",
    )
    add("--eval-every", type=COUNT, help="optimizer steps between evaluations (default: at the end of each epoch)")

    add = parser.add_argument_group("checkpoints and log").add_argument
    add("--save-every", type=COUNT, help="optimizer steps between checkpoints (default: at the end of each epoch)")
    add("--save-minutes", type=positive_number, help="also save after so many minutes without a save")
    add("--keep-last", type=COUNT, default=3, help="checkpoints to keep")
    add("--keep-every", type=COUNT, help="keep also each checkpoint at a multiple of so many steps")
    add("--log-every", type=COUNT, default=10, help="optimizer steps between two lines of the log")
    add(
        "--profile",
        type=step_range,
        metavar="START:STOP",
        help="trace the steps START to STOP - 1 into tensorboard/ of the run folder",
    )

    add = parser.add_argument_group("launch").add_argument
    add("--expect-world-size", type=COUNT, metavar="N", help="an error unless N processes take part")
    add("--start-timeout", type=COUNT, default=50, metavar="S", help="seconds to wait for all processes to appear")
    add("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)  # passed by the deepspeed launcher
    add("--deepspeed", action="store_true", help=argparse.SUPPRESS)  # DeepSpeed scripts are used to having it
    return parser


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse and cross-check the command line (default: the process's own); `UserError` for a mistake in it.

    `given` in the result holds the names of the arguments that the command line gives.
    """
    args = build_parser().parse_args(argv)
    args.given = _given(argv)
    if args.pretrained and args.resume and args.resume != "auto":
        raise UserError(
            f"--pretrained {args.pretrained} starts a new run and --resume {args.resume} goes on with one: give one"
        )
    if args.lock_image and args.lock_text:
        raise UserError("--lock-image and --lock-text together leave only the temperature to learn: give one of them")
    for tower in ("image", "text"):
        if vars(args)[f"lock_{tower}"] and f"{tower}_lr_factor" in args.given:
            raise UserError(f"--lock-{tower} keeps the tower that --{tower}-lr-factor is for: give one of them")
    if args.eval_every and not (args.val_data or args.eval_data):
        raise UserError("--eval-every needs something to evaluate on: give --val-data or --eval-data")
    return args


def _given(argv: Sequence[str] | None) -> set[str]:
    parser = build_parser()
    for action in parser._actions:
        action.default = argparse.SUPPRESS
    return set(vars(parser.parse_args(argv)))
