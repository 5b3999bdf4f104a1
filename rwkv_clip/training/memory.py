"""How much GPU memory a training step takes, worked out without a GPU.

Activations are not estimated from a formula: the model's own forward and backward pass run on PyTorch's meta device,
where tensors have shapes and no contents, and every storage is counted from the operation that makes it until it is
freed. Compiled blocks keep what the compiler's own division of the two passes says, for which each tower's block is
traced once. The optimizer's states follow from DeepSpeed's layout.
"""

from __future__ import annotations

import dataclasses
import weakref
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from ..model.clip import RWKVCLIP
from ..model.compile import EVERYTHING, compiled_forward
from ..model.config import ModelConfig
from .config import DTYPES, BatchSizes, checkpoints_activations, precision_name, recomputed
from .config_values import AUTO
from .engine import lock_towers, set_training_mode
from .loss import ClipLoss
from .partitioned import MIXES

# The allocator hands out whole blocks of so many bytes.
_BLOCK = 512
# fp32 matrices of logits that the loss's backward pass holds at once.
_LOGIT_COPIES = 4
# Tensors [B, T, C] that the backward pass of one compiled block holds at once, beside what the forward pass kept and
# what is computed again. Fused code materialises few.
_COMPILED_WORK = 8


@dataclasses.dataclass(frozen=True)
class StepMemory:
    """Bytes on one GPU at the two moments where a step can be fullest."""

    weights: int
    """With ZeRO stage 3 this rank's part of them, and those that are whole beside it, at their most."""
    masters_and_moments: int
    averages: int
    """Averaged weights, if there are any."""
    gradients: int
    """Of the weights, at the step's end; with accumulation also while activations are held. With ZeRO stage 3 this
    rank's part of them, held at all times."""
    activations: int
    """Most that the forward and backward pass hold, gradients included as they come."""
    backward: int
    """Everything, in the backward pass."""
    step: int
    """Everything, in the optimizer's step."""

    @property
    def peak(self) -> int:
        """Bytes of `torch.cuda.max_memory_allocated`."""
        return max(self.backward, self.step)


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages that operations make while it is active: `now`, and `peak`."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # A view of a weight or of another tensor from outside holds nothing new.
        given = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata not in given:
                self._add(leaf.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._sizes:
            return
        self._sizes[key] = -(-storage.nbytes() // _BLOCK) * _BLOCK
        self.now += self._sizes[key]
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._drop, key)

    def _drop(self, key: int) -> None:
        self.now -= self._sizes.pop(key)


def step_memory(
    model_config: ModelConfig,
    config: dict[str, Any],
    sizes: BatchSizes,
    loss_chunk: int = 0,
    averaged: bool = False,
    lock_image: bool = False,
    lock_text: bool = False,
) -> StepMemory:
    """Memory of one GPU under a resolved DeepSpeed configuration.

    averaged: whether averages of the weights are kept (--ema-decay). lock_image, lock_text: towers that do not learn.
    """
    precision = precision_name(config)
    with torch.device("meta"):
        model = RWKVCLIP(model_config)
    lock_towers(model, lock_image, lock_text)
    count = sum(parameter.numel() for parameter in model.parameters())
    learned = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    set_training_mode(model.to(DTYPES[precision]))
    width = DTYPES[precision].itemsize
    recompute = recomputed(config) if config.get("compile", {}).get("enabled", False) else None
    activations = activation_bytes(model, sizes.micro, checkpoints_activations(config), recompute, loss_chunk)
    rows = min(loss_chunk, sizes.micro) if loss_chunk else sizes.micro
    activations += _LOGIT_COPIES * 4 * rows * sizes.micro * (sizes.world_size - 1)
    states, averages, buffers, temporary = _states(config, learned, width, sizes.world_size)
    averages *= averaged
    weights, gradients = count * width, learned * width
    gathered = gathered_in_step = 0
    is_divided = config["zero_optimization"]["stage"] == 3
    if is_divided:
        weights = -(-count // sizes.world_size) * width
        # Added up in the dtype of the weights, or as the JSON says. Offloaded ones lie beside the masters.
        summed = 4 if config.get("data_types", {}).get("grad_accum_dtype") == "fp32" else width
        gradients = -(-learned // sizes.world_size) * summed if states else 0
        if sizes.world_size > 1:  # alone, a rank takes its part for the whole
            gathered, gathered_in_step = (elements * width for elements in _gathered(config, model))
    images = sizes.micro * 3 * model_config.image.image_size**2 * width
    fixed = weights + states + averages + buffers + images
    return StepMemory(
        weights=weights + gathered,
        masters_and_moments=states,
        averages=averages,
        gradients=gradients,
        activations=activations,
        backward=fixed + gathered + activations + (gradients if is_divided or sizes.accumulation > 1 else 0),
        step=fixed + gathered_in_step + gradients + temporary,
    )


def _states(config: dict[str, Any], count: int, width: int, world_size: int) -> tuple[int, int, int, int]:
    """What `count` learned weights take on one rank, in bytes.

    (masters and moments, averages of the masters, DeepSpeed's buffers, what its step needs beside the gradients)
    """
    section = config["zero_optimization"]
    stage = section["stage"]
    if stage == 0:
        return (8 if width == 4 else 12) * count, 4 * count, 0, 0 if width == 4 else 4 * count
    offloaded = section.get("offload_optimizer", {}).get("device", "none") == "cpu"
    share = -(-count // world_size)
    if stage == 3:
        # The bucket of gradients is laid out for as many as the JSON says, however few the model has. fp32 weights are
        # their own masters. Like stage 2's, the gradients of a pass are counted as if all of them were held at its end.
        size = section.get("reduce_bucket_size", AUTO)
        bucket = (500_000_000 if size == AUTO else int(size)) * width * section.get("contiguous_gradients", True)
        return (
            (0, 0, bucket, 0)
            if offloaded
            else ((8 if width == 4 else 12) * share, 4 * share, bucket, (width + 4) * share)
        )
    # Stage 2 reduces gradients while the backward pass goes on, through one or two buffers.
    size = section.get("reduce_bucket_size", AUTO)
    bucket = min(500_000_000 if size == AUTO else int(size), count) * width
    buffers = bucket * (2 if section.get("overlap_comm") else 1) if stage == 2 or section.get("overlap_comm") else 0
    if config.get("data_types", {}).get("grad_accum_dtype") == "fp32" and width == 2 and stage == 1:
        buffers += 4 * count  # BF16_Optimizer keeps fp32 gradients of all weights
    if offloaded:
        return 0, 0, buffers, bucket  # averages lie beside the masters
    return 12 * share, 4 * share, buffers, (width + 4) * share


def _gathered(config: dict[str, Any], model: nn.Module) -> tuple[int, int]:
    """Elements of weights that ZeRO stage 3 has whole on each rank beside its part: (in the passes, between them).

    In the passes: the small ones that stay, those that are fetched in advance or kept for their next use, as many as
    the JSON allows, and the largest one or mixing layer, which is fetched whatever the limit.
    """
    section = config["zero_optimization"]

    def limit(name: str, default: int) -> int:
        value = section.get(f"stage3_{name}", section.get(name, AUTO))
        return default if value == AUTO else int(value)

    sizes = [parameter.numel() for parameter in model.parameters()]
    mixes = [module for module in model.modules() if isinstance(module, MIXES)]
    largest = max(sizes + [sum(parameter.numel() for parameter in mix.parameters()) for mix in mixes])
    stay = sum(size for size in sizes if size <= limit("param_persistence_threshold", 100_000))
    stay = min(stay, limit("model_persistence_threshold", stay))
    fetched = max(limit("max_live_parameters", 10**9), limit("max_reuse_distance", 10**9)) + largest
    return min(stay + fetched, sum(sizes)), stay


def activation_bytes(
    model: RWKVCLIP, batch: int, checkpointed: bool = False, recompute: str | None = None, loss_chunk: int = 0
) -> int:
    """Most bytes that one forward and backward pass holds beside the weights, their gradients included as they come.

    model: on the meta device, in the dtype and mode of training; it is changed. recompute: of compiled blocks, None
    for plain ones. What the compiler would keep by "automatic" differs from version to version: it is counted as plain
    blocks, of which it stays below.
    """
    checkpointed = checkpointed or recompute == EVERYTHING
    if recompute in (None, "automatic"):
        if checkpointed:
            model.set_activation_checkpointing(partial(checkpoint, use_reentrant=False, preserve_rng_state=False))
        return _run(model, batch, loss_chunk)
    held = work = 0
    for tower, tokens in (
        (model.image_model, image_tokens(model)),
        (model.text_model, model.config.text.context_length),
    ):
        weight = next(tower.parameters())
        unit = batch * tokens * tower.config.width * weight.element_size()
        tower.block_runner = _Compiled()
        if weight.requires_grad:
            # Of what most blocks would keep one block at a time has all, the rest computed again; "everything" keeps a
            # block's input alone.
            is_image = tower is model.image_model
            most = batch * kept_by_compiled_block(model.config, is_image, "elementwise", weight.dtype)
            kept = unit if checkpointed else most
            if not checkpointed and recompute != "elementwise":
                kept = batch * kept_by_compiled_block(model.config, is_image, recompute, weight.dtype)
            held += tower.config.depth * kept
            # The text tower's last block is the first to need more, when everything else is still held.
            work = _COMPILED_WORK * unit + most - (0 if checkpointed else kept)
        else:  # a locked tower keeps nothing; its blocks need room to work in, one after the other
            work = max(work, _COMPILED_WORK * unit)
    return _run(model, batch, loss_chunk) + held + work


def image_tokens(model: RWKVCLIP) -> int:
    """Tokens of one image."""
    grid = model.config.image.grid
    return grid[0] * grid[1] + model.config.image.with_cls_token


class _Compiled:
    """Stands for a tower's `BlockRunner` with compiled code: blocks, counted elsewhere, and a pool that keep nothing.

    The compiled pool computes from its input, which the last block has made, all that its backward pass needs.
    """

    def __call__(self, _block: nn.Module, x: Tensor, *_: Any) -> Tensor:
        return x

    def end(self, tower: nn.Module, name: str, x: Tensor) -> Tensor:
        return x.mean(dim=1, dtype=torch.float32) if name == "pool" else getattr(tower, name)(x)


def _run(model: RWKVCLIP, batch: int, loss_chunk: int) -> int:
    """Most bytes held in one forward and backward pass of a model on the meta device."""
    image, text = model.config.image, model.config.text
    images = torch.empty(batch, 3, image.image_size, image.image_size, device="meta")
    tokens = torch.empty(batch, text.context_length, dtype=torch.int64, device="meta")
    with LiveBytes() as live:
        ClipLoss(chunk=loss_chunk)(*model(images, tokens)).loss.backward()
    return live.peak


def kept_by_compiled_block(config: ModelConfig, is_image: bool, recompute: str, dtype: torch.dtype) -> int:
    """Bytes per sample that a compiled block keeps for its backward pass, from a trace of it with two samples.

    The trace divides the work between the passes as the compiler of kernels does, without compiling any.
    """
    samples = 2
    image = dataclasses.replace(config.image, depth=2)
    with torch.device("meta"):
        model = RWKVCLIP(dataclasses.replace(config, image=image, text=dataclasses.replace(config.text, depth=2)))
    model.to(dtype)
    tower = model.image_model if is_image else model.text_model
    block = (tower.layers if is_image else tower.blocks)[1].train()
    tokens = image_tokens(model) if is_image else config.text.context_length
    x = torch.empty(samples, tokens, tower.config.width, dtype=dtype, device="meta", requires_grad=True)
    arguments = (image.grid, torch.empty(2, samples, 1, 1, dtype=dtype, device="meta")) if is_image else ()
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    forward = compiled_forward(recompute, backend="aot_eager_decomp_partition")
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = forward(block, x, *arguments)
    constant = [*block.parameters(), *block.buffers(), *arguments[1:]]
    for tensor in constant:
        kept.pop(tensor.untyped_storage()._cdata, None)
    del result
    return sum(storage.nbytes() for storage in kept.values()) // samples
