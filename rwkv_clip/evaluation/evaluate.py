"""`rwkv-clip evaluate`: zero-shot and retrieval scores of a model on a prepared folder, each beside chance."""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..errors import UserError, report
from .datasets import RetrievalSet, ZeroShotSet, find_sets
from .features import Encoder
from .picture import retrieval_picture
from .retrieval import recall
from .table import score_table
from .zero_shot import classifier_weights, prompts, zero_shot_scores

if TYPE_CHECKING:
    import numpy as np
    from torch.distributed import ProcessGroup

    from ..model.clip import RWKVCLIP

logger = logging.getLogger(__name__)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Evaluation:
    """Scores of one model on the sets of a folder."""

    scores: dict[str, float] = field(default_factory=dict)
    """Shares from 0 to 1: "zero_shot/NAME/accuracy", ".../mean_per_class", ".../chance", ".../largest_class",
    "retrieval/NAME/R5", ".../image_to_text_R5", ".../R5_chance", ... (see retrieval.py). A set with several caption
    columns has "retrieval/NAME/COLUMN/R5", ... for each of them, and without the column those of all together."""
    sizes: dict[str, tuple[int, int]] = field(default_factory=dict)
    """"zero_shot/NAME": (pictures, classes), "retrieval/NAME" and "retrieval/NAME/COLUMN": (pictures, captions)."""
    problems: dict[str, str] = field(default_factory=dict)
    """Why a set has no scores, by "zero_shot/NAME" or "retrieval/NAME"."""
    picture: np.ndarray | None = None
    """uint8 [H, W, 3], pictures retrieved in the first retrieval set, when asked for and there is one."""


def evaluate(
    model: RWKVCLIP,
    folder: Path | str,
    device: torch.device | str | None = None,
    batch_size: int = 256,
    names: Sequence[str] = (),
    limit: int = 0,
    threads: int | None = None,
    group: ProcessGroup | None = None,
    with_picture: bool = False,
) -> Evaluation:
    """Score a model, in eval mode, on every set of a prepared folder; a set that cannot be used stops no other.

    names, limit: see `find_sets`. device, batch_size, threads, group: see `Encoder`; with a group, every rank must call
    this and gets the same scores. Each picture and sentence goes through the model once, however many sets it is in.
    Raises UserError for a folder without sets and for a model whose features are not finite.
    """
    result = Evaluation()
    sets: dict[str, ZeroShotSet | RetrievalSet] = {}
    for each in find_sets(folder, names, limit):
        try:
            sets[f"{each.kind}/{each.name}"] = each.read()
        except UserError as error:
            result.problems[f"{each.kind}/{each.name}"] = str(error)
    encoder = Encoder(model, device, batch_size, threads, group)
    paths = list(dict.fromkeys(path for each in sets.values() for path in each.images))
    texts = list(dict.fromkeys(text for each in sets.values() for text in _texts(each)))
    images, unreadable = encoder.images(paths)
    sentences = encoder.texts(texts)
    image_row = {path: row for row, path in enumerate(paths)}
    text_row = {text: row for row, text in enumerate(texts)}
    for key, each in sets.items():
        missing = [path for path in each.images if path in unreadable]
        if missing:
            more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
            result.problems[key] = unreadable[missing[0]] + more
            continue
        image_features = images[[image_row[path] for path in each.images]]
        if isinstance(each, ZeroShotSet):
            weights = classifier_weights(
                lambda wanted: sentences[[text_row[text] for text in wanted]], each.classes, each.templates
            )
            labels = torch.tensor(each.labels, device=weights.device)
            result.scores.update(_prefixed(key, zero_shot_scores(image_features, weights, labels)))
            result.sizes[key] = (len(each.images), len(each.classes))
            continue
        text_features = sentences[[text_row[text] for text in each.captions]]
        _score_retrieval(result, key, each, image_features, text_features)
        if with_picture and result.picture is None:
            result.picture = retrieval_picture(each, image_features, text_features)
    return result


def evaluate_folder(
    model: RWKVCLIP, folder: Path | str, device: torch.device | str | None = None, batch_size: int = 256
) -> dict[str, float]:
    """The scores of `evaluate` alone; a set without one is named in the log."""
    result = evaluate(model, folder, device, batch_size)
    for key, problem in result.problems.items():
        logger.warning("%s was not scored: %s", key, problem)
    return result.scores


def _score_retrieval(result: Evaluation, key: str, dataset: RetrievalSet, images, texts) -> None:
    image_of = torch.tensor(dataset.image_of_caption, device=images.device)
    columns = dataset.columns if len(dataset.columns) > 1 else []
    for column in [None, *columns]:
        rows = [i for i, name in enumerate(dataset.column_of_caption) if column in (None, name)]
        # Pictures without a caption in this column still stand among those to be found.
        part = f"{key}/{column}" if column else key
        result.scores.update(_prefixed(part, recall(images, texts[rows], image_of[rows])))
        result.sizes[part] = (len(images), len(rows))


def _texts(dataset: ZeroShotSet | RetrievalSet) -> list[str]:
    if isinstance(dataset, RetrievalSet):
        return dataset.captions
    return prompts(dataset.classes, dataset.templates)


def _prefixed(prefix: str, scores: dict[str, float]) -> dict[str, float]:
    return {f"{prefix}/{name}": value for name, value in scores.items()}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("weights", metavar="MODEL", type=Path, help="run folder, checkpoint folder or weights file")
    parser.add_argument("--model", help="for a weights file: the model's name or JSON file")
    parser.add_argument("--ema", action="store_true", help="the averaged weights of a run with --ema-decay")
    parser.add_argument("--data", type=Path, required=True, help="prepared folder with zs_*.json and retrieval_*.tsv")
    parser.add_argument("--set", dest="names", action="append", default=[], help="only this set; may be repeated")
    parser.add_argument("--limit", type=int, default=0, help="at most so many pictures a set, always the same ones")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--threads", type=int, help="threads that decode pictures (default: as many as cores, up to 8)")
    parser.add_argument("--device", help="cpu, cuda or cuda:N (default: a GPU if there is one)")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="of the weights (default: fp32)")
    parser.add_argument("--json", type=Path, help="write the scores here as well")
    parser.add_argument("--picture", type=Path, help="write a picture of retrieved examples here (.png)")


def run(args: argparse.Namespace) -> int:
    """Print the scores as a table; 2 when a set could not be scored, 0 otherwise."""
    for name in ("batch_size", "threads"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} must be at least 1, found {value}")
    find_sets(args.data, args.names)  # before the model is built
    model = load_model(args.weights, args.model, choose_device(args.device), DTYPES[args.dtype], args.ema)
    result = evaluate(
        model,
        args.data,
        batch_size=args.batch_size,
        names=args.names,
        limit=args.limit,
        threads=args.threads,
        with_picture=args.picture is not None,
    )
    if result.scores:
        print(score_table(result.scores, result.sizes))
    if args.json:
        content = {"model": str(args.weights), "data": str(args.data), "scores": result.scores}
        _write(args.json, json.dumps(content | {"problems": result.problems}, indent=1) + "\n")
    if args.picture and result.picture is not None:
        _save_picture(args.picture, result.picture)
    for key, problem in result.problems.items():
        report(UserError(f"{key} was not scored: {problem}"))
    return 2 if result.problems else 0


def load_model(
    weights: Path, name: str | None, device: torch.device, dtype: torch.dtype, ema: bool = False
) -> RWKVCLIP:
    """The model of a run, a checkpoint or a weights file, in eval mode.

    name: a model's name or JSON file; needed for a file on its own, and otherwise taken from the run's model.json.
    ema: of a run or a checkpoint, the averaged weights.
    """
    from .. import create_model
    from ..model.export import find_model_json
    from ..ops import prepare

    description = name or find_model_json(weights)
    if description is None:
        if not weights.exists():
            raise UserError(f"{weights} does not exist: give a run folder, a checkpoint folder or a weights file")
        raise UserError(f"{weights} does not say which model it is: add --model NAME or --model CONFIG.json")
    model = create_model(description, device=device, dtype=dtype, checkpoint=weights, ema=ema)
    prepare(device.type)
    return model


def choose_device(name: str | None) -> torch.device:
    """The device of that name; without one a GPU if there is one, else the CPU."""
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        raise UserError(f"unknown --device '{name}': give cpu, cuda or cuda:N") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"--device {name}: this machine has {torch.cuda.device_count()} GPUs that PyTorch can use")
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"--device {name}: give cpu, cuda or cuda:N")
    return device


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error}") from None


def _save_picture(path: Path, pixels: np.ndarray) -> None:
    from PIL import Image

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot write {path}: {error}") from None
