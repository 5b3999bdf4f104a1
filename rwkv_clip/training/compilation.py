"""Compiling the towers' blocks at the start of a run, and going on without when that does not work here.

Nothing is compiled later: the blocks are called with these shapes alone, and no rank ever compiles while others wait
for it in a collective, which has a time limit.
"""

from __future__ import annotations

import contextlib
import copy
import os
import threading
import time
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UserError
from ..model.clip import RWKVCLIP
from ..model.compile import RECOMPUTE, compiled_forward
from .distributed import World, available_cores
from .log import logger

# Set to true, each key does what it says; "force" compiles on the CPU too.
KEYS = {"enabled": bool, "force": bool, "recompute": str, "options": dict}

# Largest difference of a compiled gradient, as a share of the eager one's norm and of the largest norm of all. Rounding
# in bf16 stays far below, a wrong kernel does not.
_OWN_SHARE, _LARGEST_SHARE = 0.2, 0.02
CUDA_GRAPHS = "triton.cudagraphs"
"""Inductor's option that records the launches of compiled code and replays them."""
ALIGNMENT = 16
"""Bytes that compiled kernels load at once, from multiples of that."""
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
    """Compile the blocks as the resolved configuration's "compile" section says; True if they now run compiled.

    Each tower's block is tried on made-up activations of the run's shape first, forward and backward, against the plain
    block. When that fails on any rank, all go on without, after one warning.

    with_replay: also for passes without gradients, which accumulation over the global batch makes.
    with_graphs: whether CUDA graphs may be used, if the section asks for them. They write a step's gradients where the
        last step's lie, so each step must leave no `.grad` behind.
    recompute: what the backward pass computes again, a key of RECOMPUTE.
    """
    section = config.get("compile", {})
    if not section.get("enabled", False):
        return False
    if world.device.type != "cuda" and not section.get("force", False):
        logger.info('the blocks are not compiled on a CPU (unless "compile" says "force": true)')
        return False
    started = time.monotonic()
    options = dict(section.get("options", {}))
    if not with_graphs and options.pop(CUDA_GRAPHS, False):
        logger.info("no CUDA graphs: they need ZeRO stage 1 on the GPU, without overlap_comm and without accumulation")
    # It is said once at the second block, while the first one's backward pass is still to come, as it must be.
    warnings.filterwarnings("ignore", message="Unable to hit fast path of CUDAGraphs")
    # Errors in what the user wrote end the run; those of the compiler do not.
    forward = compiled_forward(recompute, options)
    logger.info("compiling the blocks, which takes a minute or two without what an earlier run left in %s", _cache())
    problem = ""
    with _first_on_its_machine_compiles(world), _reminders(started):
        try:
            _check_addresses(model)
            with torch.random.fork_rng([world.device] if world.device.type == "cuda" else []):
                for tower, block, arguments in _examples(model, config["train_micro_batch_size_per_gpu"]):
                    began = time.monotonic()
                    _try(tower, block, arguments, forward, with_replay)
                    logger.info("the %s tower's block is compiled: %.1f s", tower, time.monotonic() - began)
        except Exception as error:  # whatever a compiler, its tools or its kernels raise
            problem = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    if world.device.type == "cuda":  # the trial's activations are no part of what the run needs
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(world.device)
    problems = [text for text in world.gather(problem) if text]
    if problems:
        logger.warning(
            "compiling the blocks failed after %.1f s (%s); training goes on without, slower. Without 'compile' in the "
            "DeepSpeed JSON it is not tried",
            time.monotonic() - started,
            problems[0],
        )
        return False
    for tower in (model.image_model, model.text_model):
        tower.block_runner.compiled_forward = forward
    logger.info("the blocks run compiled: %.1f s", time.monotonic() - started)
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


def _examples(model: RWKVCLIP, batch: int) -> list[tuple[str, nn.Module, tuple[Any, ...]]]:
    """(tower's name, one of its blocks, arguments as in training) for both towers."""
    image, text = model.image_model, model.text_model

    def activations(tower: nn.Module, tokens: int) -> Tensor:
        weight = next(tower.parameters())
        learns = any(parameter.requires_grad for parameter in tower.parameters())
        shape = (batch, tokens, tower.config.width)
        return torch.randn(shape, device=weight.device, dtype=weight.dtype, requires_grad=learns)

    grid = image.config.grid
    x = activations(image, grid[0] * grid[1] + image.config.with_cls_token)
    examples = [("image", image.layers[-1], (x, grid, image.branch_scales(x)[-1]))]
    examples.append(("text", text.blocks[-1], (activations(text, text.config.context_length),)))
    return examples


def _check_addresses(model: RWKVCLIP) -> None:
    """Raise unless the blocks' weights and buffers lie where compiled kernels can load them.

    The compiler takes for granted that those of all blocks lie like those of the block that it saw, and looks at no
    address again; a GPU ends the process at the first misaligned load. DeepSpeed's flat buffers put a weight anywhere.
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        past = tensor.data_ptr() % ALIGNMENT
        if past and name.startswith(("image_model.layers.", "text_model.blocks.")):
            raise ValueError(
                f"{name} starts {past} bytes past a multiple of {ALIGNMENT}, from which compiled kernels load: is a "
                "tower's width no multiple of 8?"
            )


def _try(tower: str, block: nn.Module, arguments: tuple[Any, ...], forward: Any, with_replay: bool) -> None:
    """Raise unless the compiled block gives the plain one's gradients."""
    block = copy.deepcopy(block)  # its gradients reach no optimizer
    x = arguments[0]
    if with_replay or not x.requires_grad:
        with torch.no_grad():
            forward(block, *arguments)
    if not x.requires_grad:
        forward(block, *arguments)
        return
    direction = torch.randn_like(x)
    names, inputs = ["input"], [x]
    for name, parameter in block.named_parameters():
        if parameter.requires_grad and not name.startswith("ln0"):
            names.append(name)
            inputs.append(parameter)
    found = torch.autograd.grad(forward(block, *arguments), inputs, direction)
    if getattr(block, "dropout", 0.0) > 0:
        return  # compiled code draws other random numbers
    expected = torch.autograd.grad(block(*arguments), inputs, direction)
    differences = [(a.float() - b.float()).norm().item() for a, b in zip(found, expected, strict=True)]
    norms = [gradient.float().norm().item() for gradient in expected]
    for name, difference, norm in zip(names, differences, norms, strict=True):
        if not difference <= _OWN_SHARE * norm + _LARGEST_SHARE * max(norms):
            raise ArithmeticError(
                f"{tower} block: the gradient of {name} is off by {difference:.3g}, its norm is {norm:.3g}"
            )
