"""RWKV-CLIP: image-text models without attention, trained with DeepSpeed.

    model = rwkv_clip.create_model("RWKV-CLIP-B-32", checkpoint="weights.pt")
    images = rwkv_clip.image_transform(model)(picture)[None]
    tokens = rwkv_clip.tokenize(["a cat", "a dog"], model.context_length)
    image_features, text_features, logit_scale = model(images, tokens)

Nothing is imported until it is used: `import rwkv_clip` needs no package, the model needs torch alone.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .version import __version__

if TYPE_CHECKING:
    from . import ops
    from .data.tokenizer import tokenize
    from .model.clip import create_model
    from .model.config import list_models
    from .model.transform import image_transform

_HOMES = {
    "create_model": "rwkv_clip.model.clip",
    "list_models": "rwkv_clip.model.config",
    "image_transform": "rwkv_clip.model.transform",
    "tokenize": "rwkv_clip.data.tokenizer",
    "ops": "rwkv_clip.ops",
}

__all__ = ["__version__", "create_model", "image_transform", "list_models", "ops", "tokenize"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = importlib.import_module(_HOMES[name])
    value = home if home.__name__ == f"{__name__}.{name}" else getattr(home, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
