"""Features of pictures and sentences, by one process or shared out over the ranks of a job."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..data.tokenizer import tokenize
from ..errors import UserError
from ..model.transform import image_transform
from ..training.gather import gather_ranks, group_rank, group_size

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ..model.clip import RWKVCLIP


class Encoder:
    """Normalised features of a model, float32, on its device.

    device: the model's (None: that of its weights). batch_size: pictures or sentences that go through the model at
    once. threads: that decode pictures. group: the ranks that share the work, each of which must make the same calls
    and gets the whole result; None: this process alone.
    """

    def __init__(
        self,
        model: RWKVCLIP,
        device: torch.device | str | None = None,
        batch_size: int = 256,
        threads: int | None = None,
        group: ProcessGroup | None = None,
    ) -> None:
        self.model = model
        self.batch_size = batch_size
        self.threads = threads or min(8, os.cpu_count() or 1)
        self.group = group
        self.device = torch.device(device) if device is not None else model.logit_scale.device
        self.transform = image_transform(model.config)
        self.width = model.config.image.width

    def images(self, paths: Sequence[Path]) -> tuple[Tensor, dict[Path, str]]:
        """Features [N, D] and, by path, why some pictures could not be read; their rows are zeros."""
        problems: dict[Path, str] = {}

        def encode(part: Sequence[Path]) -> Iterator[Tensor]:
            with ThreadPoolExecutor(self.threads) as pool:
                for paths, pictures in _ahead(pool, self._read, part, self.batch_size):
                    problems.update((p, x) for p, x in zip(paths, pictures, strict=True) if isinstance(x, str))
                    size = self.transform.size
                    pixels = [torch.zeros(3, size, size) if isinstance(x, str) else x for x in pictures]
                    features = self.model.encode_image(torch.stack(pixels).to(self.device), normalize=True).float()
                    usable = torch.tensor([not isinstance(x, str) for x in pictures], device=self.device)
                    yield torch.cat([features * usable[:, None], usable[:, None].float()], dim=1)

        rows = self._share(paths, encode, self.width + 1)
        for i in (rows[:, -1] == 0).nonzero().flatten().tolist():
            problems.setdefault(paths[i], f"cannot read the picture {paths[i]}")
        return _finite(rows[:, :-1]), problems

    def texts(self, texts: Sequence[str]) -> Tensor:
        """Features [N, D]."""

        def encode(part: Sequence[str]) -> Iterator[Tensor]:
            for start in range(0, len(part), self.batch_size):
                tokens = tokenize(list(part[start : start + self.batch_size]), self.model.config.text.context_length)
                yield self.model.encode_text(tokens.to(self.device), normalize=True).float()

        return _finite(self._share(texts, encode, self.width))

    def _share(self, items: Sequence, encode, width: int) -> Tensor:
        """Rows [len(items), width] of `encode`, each rank working on its slice of the items."""
        if not items:
            return torch.zeros(0, width, device=self.device)
        ranks = group_size(self.group) if self.group is not None else 1
        share = -(-len(items) // ranks)
        rank = group_rank(self.group) if ranks > 1 else 0
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        try:
            with torch.inference_mode():
                parts = list(encode(items[rank * share : (rank + 1) * share]))
        finally:
            for module, mode in modes:
                module.training = mode
        rows = torch.cat(parts) if parts else torch.zeros(0, width, device=self.device)
        if ranks == 1:
            return rows
        padded = torch.zeros(share, width, device=self.device)
        padded[: len(rows)] = rows
        return gather_ranks(padded, self.group).flatten(0, 1)[: len(items)]

    def _read(self, path: Path) -> Tensor | str:
        """The picture as the model takes it, or why it cannot be read."""
        from PIL import Image

        try:
            with Image.open(path) as image:
                return self.transform(image)
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            return f"cannot read the picture {path}: {error}"


def _ahead(pool: ThreadPoolExecutor, function, items: Sequence, batch_size: int) -> Iterator[tuple[Sequence, list]]:
    """(items, results) by batch, with the next batch in work while the caller uses this one."""
    batches = [items[start : start + batch_size] for start in range(0, len(items), batch_size)]
    waiting = None
    for batch in batches:
        futures = [pool.submit(function, item) for item in batch]
        if waiting:
            yield waiting[0], [future.result() for future in waiting[1]]
        waiting = batch, futures
    if waiting:
        yield waiting[0], [future.result() for future in waiting[1]]


def _finite(features: Tensor) -> Tensor:
    if not torch.isfinite(features).all():
        raise UserError(
            "the model gives features that are not finite numbers: its weights have diverged or are damaged"
        )
    return features
