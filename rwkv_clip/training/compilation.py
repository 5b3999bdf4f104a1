"""Compiling the towers at the start of a run, and going on without when that does not work here.

Nothing is compiled later: blocks, stems and pools are called with these shapes alone, and no rank ever compiles while
others wait for it in a collective, which has a time limit.
"""

from __future__ import annotations

import contextlib
import copy
import os
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UserError
from ..model.clip import RWKVCLIP
from ..model.compile import CUDA_GRAPHS, RECOMPUTE, compiled_end, compiled_forward
from .distributed import World, available_cores
from .log import logger

# Set to true, each key does what it says; "force" compiles on the CPU too.
KEYS = {"enabled": bool, "force": bool, "recompute": str, "options": dict}

# Largest difference of a compiled gradient, as a share of the eager one's norm and of the largest norm of all. Rounding
# in bf16 stays far below, a wrong kernel does not.
_OWN_SHARE, _LARGEST_SHARE = 0.2, 0.02
ALIGNMENT = 16
"""Bytes that compiled kernels load at once, from multiples of that."""
ENDS = ("stem", "pool")
"""A tower's methods that are compiled beside its blocks."""
REMINDER = 30.0
"""Seconds between two lines of the log while the compiler works."""


def check_section(section: dict[str, Any], source: str) -> None:
    """`UserError` unless the "compile" section of the DeepSpeed JSON is one that acts here."""
    for key, value in section.items():
        if key not in KEYS:
            raise UserError(f"{source}: unknown key 'compile.{key}'; known are {', '.join(KEYS)}")
        if not isinstance(value, KEYS[key]):
            raise UserError(f"{source}: compile.{key} must be a {KEYS[key].__name__}, found {value!r}")
    if section.get("recompute", "elementwise") not in RECOMPUTE:
        raise UserError(
            f"{source}: compile.recompute must be one of {', '.join(RECOMPUTE)}, found {section['recompute']!r}"
        )


def compile_towers(
    model: RWKVCLIP,
    config: dict[str, Any],
    world: World,
    with_replay: bool,
    with_graphs: bool = False,
    recompute: str = "elementwise",
) -> bool:
    """Compile the towers as the resolved configuration's "compile" section says; True if they now run compiled.

    Each tower's block, its stem and its pool are tried on made-up input of the run's shape first, forward and backward,
    against the plain ones. When that fails on any rank, all go on without, after one warning.

    with_replay: also for passes without gradients, which accumulation over the global batch makes.
    with_graphs: whether CUDA graphs may be used, if the section asks for them. They write a step's gradients where the
        last step's lie, so each step must leave no `.grad` behind.
    recompute: what the backward pass computes again, a key of RECOMPUTE.
    """
    section = config.get("compile", {})
    if not section.get("enabled", False):
        return False
    if world.device.type != "cuda" and not section.get("force", False):
        logger.info('nothing is compiled on a CPU (unless "compile" says "force": true)')
        return False
    started = time.monotonic()
    options = dict(section.get("options", {}))
    if not with_graphs and options.pop(CUDA_GRAPHS, False):
        logger.info("no CUDA graphs: they need ZeRO stage 1 on the GPU, without overlap_comm and without accumulation")
    # It is said once at the second block, while the first one's backward pass is still to come, as it must be.
    warnings.filterwarnings("ignore", message="Unable to hit fast path of CUDAGraphs")
    # Errors in what the user wrote end the run; those of the compiler do not.
    forward = compiled_forward(recompute, options)
    ends = {name: compiled_end(name, options) for name in ENDS}
    logger.info("compiling, which takes a minute or two without what an earlier run left in %s", _cache())
    problem = ""
    with _first_on_its_machine_compiles(world), _reminders(started):
        try:
            _check_addresses(model)
            with torch.random.fork_rng([world.device] if world.device.type == "cuda" else []):
                for example in _examples(model, config["train_micro_batch_size_per_gpu"]):
                    began = time.monotonic()
                    _try(example, ends.get(example.method, forward), with_replay)
                    logger.info("%s is compiled: %.1f s", example.name, time.monotonic() - began)
        except Exception as error:  # whatever a compiler, its tools or its kernels raise
            problem = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    if world.device.type == "cuda":  # the trial's activations are no part of what the run needs
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(world.device)
    problems = [text for text in world.gather(problem) if text]
    if problems:
        logger.warning(
            "compiling failed after %.1f s (%s); training goes on without, slower. Without 'compile' in the "
            "DeepSpeed JSON it is not tried",
            time.monotonic() - started,
            problems[0],
        )
        return False
    for tower in (model.image_model, model.text_model):
        tower.block_runner.compiled_forward, tower.block_runner.compiled_ends = forward, ends
    logger.info("the towers run compiled: %.1f s", time.monotonic() - started)
    return True


def _cache() -> str:
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return cache_dir()


@contextlib.contextmanager
def _first_on_its_machine_compiles(world: World) -> Iterator[None]:
    """The others wait, and then take the compiled code from its cache on the disk.

    All at once would do the same work many times over, on the same cores. They wait at the store, not in a collective,
    so no time limit ends a slow compiler.
    """
    from torch._inductor import config

    first = world.place.local_rank == 0
    if "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ:
        ranks = 1 if first else world.place.local_world_size
        config.compile_threads = max(1, min(32, available_cores() // ranks))
    if not first:
        world.wait()
    yield
    if first:
        world.wait()


@contextlib.contextmanager
def _reminders(started: float) -> Iterator[None]:
    """A line now and then, as a silent start looks like one that hangs."""
    ended = threading.Event()

    def remind() -> None:
        while not ended.wait(REMINDER):
            logger.info("still compiling, after %.0f s", time.monotonic() - started)

    thread = threading.Thread(target=remind, name="compile reminders", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@dataclass(frozen=True)
class _Example:
    """A part of the model, and what it is called with in training."""

    name: str
    module: nn.Module
    method: str
    arguments: tuple[Any, ...]

    def plain(self, module: nn.Module, *arguments: Any) -> Tensor:
        return getattr(module, self.method)(*arguments)


def _examples(model: RWKVCLIP, batch: int) -> list[_Example]:
    """A block, the stem and the pool of both towers."""
    image, text = model.image_model, model.text_model

    def activations(tower: nn.Module, tokens: int) -> Tensor:
        weight = next(tower.parameters())
        learns = any(parameter.requires_grad for parameter in tower.parameters())
        shape = (batch, tokens, tower.config.width)
        return torch.randn(shape, device=weight.device, dtype=weight.dtype, requires_grad=learns)

    grid = image.config.grid
    x = activations(image, grid[0] * grid[1] + image.config.with_cls_token)
    images = torch.randn(batch, 3, image.config.image_size, image.config.image_size, device=x.device, dtype=x.dtype)
    examples = [
        _Example("the image tower's block", image.layers[-1], "forward", (x, grid, image.branch_scales(x)[-1])),
        _Example("the image tower's stem", image, "stem", (images,)),
        _Example("the image tower's pool", image, "pool", (x,)),
    ]
    x = activations(text, text.config.context_length)
    return examples + [
        _Example("the text tower's block", text.blocks[-1], "forward", (x,)),
        _Example("the text tower's stem", text, "stem", (x,)),
        _Example("the text tower's pool", text, "pool", (x,)),
    ]


def _check_addresses(model: RWKVCLIP) -> None:
    """Raise unless the towers' weights and buffers lie where compiled kernels can load them.

    The compiler takes for granted that those of all blocks lie like those of the block that it saw, and looks at no
    address again; a GPU ends the process at the first misaligned load. DeepSpeed's flat buffers put a weight anywhere.
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        past = tensor.data_ptr() % ALIGNMENT
        if past and name.startswith(("image_model.", "text_model.")):
            raise ValueError(
                f"{name} starts {past} bytes past a multiple of {ALIGNMENT}, from which compiled kernels load: is a "
                "tower's width no multiple of 8?"
            )


def _try(example: _Example, compiled: Any, with_replay: bool) -> None:
    """Raise unless the compiled part gives the plain one's gradients."""
    module = copy.deepcopy(example.module)  # its gradients reach no optimizer
    arguments = example.arguments
    learns = any(parameter.requires_grad for parameter in module.parameters())
    if with_replay or not learns:
        with torch.no_grad():
            compiled(module, *arguments)
    output = compiled(module, *arguments)
    if not learns:
        return
    direction = torch.randn_like(output)
    learned = {"input": arguments[0], **dict(module.named_parameters())}
    learned = {name: tensor for name, tensor in learned.items() if tensor.requires_grad}
    inputs = list(learned.values())
    found = torch.autograd.grad(output, inputs, direction, allow_unused=True)
    if getattr(module, "dropout", 0.0) > 0:
        return  # compiled code draws other random numbers
    expected = torch.autograd.grad(example.plain(module, *arguments), inputs, direction, allow_unused=True)
    pairs = {name: pair for name, *pair in zip(learned, found, expected, strict=True) if pair[1] is not None}
    differences = {name: (a.float() - b.float()).norm().item() for name, (a, b) in pairs.items()}
    norms = {name: b.float().norm().item() for name, (_, b) in pairs.items()}
    for name, difference in differences.items():
        if not difference <= _OWN_SHARE * norms[name] + _LARGEST_SHARE * max(norms.values()):
            raise ArithmeticError(
                f"{example.name}: the gradient of {name} is off by {difference:.3g}, its norm is {norms[name]:.3g}"
            )
