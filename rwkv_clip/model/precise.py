"""Parameters that act with float32 values in a bf16 or fp16 model.

bf16 has 8 bits: near -6 it changes exp(decay) by 1.6 %, and near ln 100 the temperature moves in steps of 3 %. Such a
parameter keeps a float32 buffer beside it. The forward pass uses the buffer's value and sends the gradient to the
parameter. The trainer copies the optimizer's float32 masters into the buffers; loading weights fills them as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

SUFFIX = "_fp32"


def precise_value(parameter: Tensor, buffer: Tensor) -> Tensor:
    """float32 value of a parameter: itself if it is float32, else the buffer's value with the parameter's gradient."""
    if parameter.dtype == torch.float32:
        return parameter
    return buffer + (parameter - parameter.detach())


class PreciseModule(nn.Module):
    """A module with parameters that act with float32 values (see the head of this file).

    The buffers are not part of the state dict, and stay float32 when the module is cast. A cast from float32 fills them
    first and a cast back to float32 restores their values, so neither way loses bits.
    """

    def __init__(self) -> None:
        super().__init__()
        self._precise_names: tuple[str, ...] = ()

    def register_precise(self, name: str, value: Tensor) -> None:
        """Add the parameter `name` with this value, and its float32 buffer."""
        self.register_parameter(name, nn.Parameter(value))
        self.register_buffer(name + SUFFIX, value.detach().float().clone(), persistent=False)
        self._precise_names += (name,)

    def precise_items(self) -> Iterator[tuple[str, nn.Parameter, Tensor]]:
        """(name, parameter, buffer) of this module alone."""
        for name in self._precise_names:
            yield name, getattr(self, name), getattr(self, name + SUFFIX)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PreciseModule:
        with torch.no_grad():
            exact = {}
            for name, parameter, buffer in self.precise_items():
                is_exact = parameter.dtype == torch.float32 and not parameter.is_meta
                exact[name] = parameter.detach().clone() if is_exact else buffer
        super()._apply(fn, recurse)
        with torch.no_grad():
            for name, parameter, buffer in self.precise_items():
                if parameter.is_meta or exact[name].is_meta:  # to_empty(), or still without values
                    continue
                setattr(self, name + SUFFIX, exact[name].to(device=buffer.device, dtype=torch.float32))
                if parameter.dtype == torch.float32:
                    parameter.copy_(exact[name])
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        with torch.no_grad():
            for name, _, buffer in self.precise_items():
                value = state_dict.get(prefix + name)
                if value is not None and value.numel() == buffer.numel():  # none, where ZeRO has divided it
                    buffer.copy_(value.reshape(buffer.shape))


def precise_parameters(model: nn.Module) -> dict[str, tuple[nn.Parameter, Tensor]]:
    """Full name -> (parameter, float32 buffer) of every precise parameter in `model`."""
    found = {}
    for prefix, module in model.named_modules():
        if isinstance(module, PreciseModule):
            for name, parameter, buffer in module.precise_items():
                found[f"{prefix}.{name}" if prefix else name] = (parameter, buffer)
    return found
