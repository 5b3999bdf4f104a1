"""What a model is made of: frozen dataclasses, and the JSON files that fill them.

Three kinds of file are read: this package's own (`configs/*.json` and a run folder's `model.json`, with the sections
`image` and `text`) and the flat `model_config/*.json` of the published code.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UserError

CONFIG_FOLDER = Path(__file__).resolve().parent.parent / "configs"
NAME_PREFIX = "RWKV-CLIP-"
LARGEST = 2**20
"""Of every size: beyond it, a digit too many is likelier than such a model."""


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise UserError(f"model configuration: {what}")


def _require_positive_integers(section: str, config: Any, names: tuple[str, ...]) -> None:
    for name in names:
        value = getattr(config, name)
        is_integer = isinstance(value, int) and not isinstance(value, bool)
        _require(is_integer and value > 0, f"{section}.{name} must be a positive whole number, found {value!r}")
        _require(value <= LARGEST, f"{section}.{name} must be at most {LARGEST}, found {value}")


def _require_heads(section: str, width: int, num_heads: int) -> None:
    _require(width % num_heads == 0, f"{section}.width {width} is not a multiple of {section}.num_heads {num_heads}")
    head_size = width // num_heads
    _require(
        head_size % 4 == 0 and head_size <= 128,
        f"{section}: width {width} / num_heads {num_heads} gives head size {head_size}; the operator takes multiples "
        "of 4 up to 128",
    )


def _require_rate(section: str, name: str, value: Any) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    _require(is_number and 0.0 <= value < 1.0, f"{section}.{name} must be in [0, 1), found {value!r}")


@dataclass(frozen=True)
class ImageConfig:
    """The image tower."""

    image_size: int
    """Side of the square input, pixels."""
    patch_size: int
    """Side of a patch, pixels; divides `image_size`."""
    width: int
    """Channels of a token, also of the embedding."""
    depth: int
    """Number of blocks."""
    num_heads: int
    """Heads of the WKV6 operator; width / num_heads is the head size."""
    hidden_rate: int
    """Hidden width of the channel mix, in multiples of `width`."""
    drop_path_rate: float = 0.0
    """Share of samples whose branch is dropped in the last block; it grows linearly from 0 in the first."""
    with_cls_token: bool = False
    """Append a class token after the patches."""
    output_cls_token: bool = False
    """Take the class token as the feature instead of the mean over the patches."""

    def __post_init__(self) -> None:
        names = ("image_size", "patch_size", "width", "depth", "num_heads", "hidden_rate")
        _require_positive_integers("image", self, names)
        _require_heads("image", self.width, self.num_heads)
        _require_rate("image", "drop_path_rate", self.drop_path_rate)
        _require(
            self.image_size % self.patch_size == 0,
            f"image.image_size {self.image_size} is not a multiple of image.patch_size {self.patch_size}",
        )
        for name in ("with_cls_token", "output_cls_token"):
            value = getattr(self, name)
            _require(isinstance(value, bool), f"image.{name} must be true or false, found {value!r}")
        _require(
            self.with_cls_token or not self.output_cls_token,
            "image.output_cls_token needs image.with_cls_token, which is false; set both",
        )

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches at the configured size."""
        return self.image_size // self.patch_size, self.image_size // self.patch_size

    @property
    def head_size(self) -> int:
        return self.width // self.num_heads


@dataclass(frozen=True)
class TextConfig:
    """The text tower."""

    context_length: int
    """Most tokens of a caption, start and end token included."""
    vocab_size: int
    """Rows of the embedding."""
    width: int
    """Channels of a token, also of the embedding."""
    depth: int
    """Number of blocks."""
    num_heads: int
    """Heads of the WKV6 operator; width / num_heads is the head size."""
    ffn_width: int
    """Hidden width of the channel mix."""
    dropout: float = 0.0
    """Dropout after the embedding and after each half of a block."""
    head_size_divisor: int = 8
    """The group norm's eps is 1e-5 times its square."""

    def __post_init__(self) -> None:
        names = ("context_length", "vocab_size", "width", "depth", "num_heads", "ffn_width", "head_size_divisor")
        _require_positive_integers("text", self, names)
        _require_heads("text", self.width, self.num_heads)
        _require_rate("text", "dropout", self.dropout)

    @property
    def head_size(self) -> int:
        return self.width // self.num_heads


@dataclass(frozen=True)
class ModelConfig:
    """A whole model; `to_dict` and `from_dict` are the format of this package's JSON files."""

    name: str
    image: ImageConfig
    text: TextConfig
    initialize_text: bool = True
    """Give fresh text weights the published scheme (orthogonal, outputs zero); otherwise PyTorch's defaults."""

    def __post_init__(self) -> None:
        _require(
            self.image.width == self.text.width,
            f"image.width {self.image.width} and text.width {self.text.width} differ; the towers share one embedding",
        )
        _require(
            isinstance(self.initialize_text, bool),
            f"initialize_text must be true or false, found {self.initialize_text!r}",
        )

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any], source: str = "model configuration") -> ModelConfig:
        """Build from `to_dict`'s form; `UserError` names a missing or unknown key and `source`."""
        values = dict(values)
        image = _section(ImageConfig, values.pop("image", None), f"{source}, section image")
        text = _section(TextConfig, values.pop("text", None), f"{source}, section text")
        values.setdefault("name", "unnamed")
        return _section(cls, {**values, "image": image, "text": text}, source)


def _section(kind: type, values: Any, source: str) -> Any:
    """`kind(**values)`, with one clear line for a missing or an unknown key."""
    if not isinstance(values, dict):
        raise UserError(f"{source}: expected a JSON object, found {type(values).__name__}")
    fields = {field.name: field for field in dataclasses.fields(kind)}
    unknown = sorted(set(values) - set(fields))
    if unknown:
        near = difflib.get_close_matches(unknown[0], fields, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; known keys: {', '.join(fields)}"
        raise UserError(f"{source}: unknown key {unknown[0]!r}{hint}")
    missing = [name for name, f in fields.items() if f.default is dataclasses.MISSING and name not in values]
    if missing:
        raise UserError(f"{source}: missing key {missing[0]!r}; add it")
    return kind(**values)


def _from_published(values: dict[str, Any], name: str, source: str) -> ModelConfig:
    """Read the published code's flat form: one dict of the image, text and (ignored) run settings."""

    def take(key: str) -> Any:
        if key not in values:
            raise UserError(f"{source}: missing key {key!r}; add it")
        return values[key]

    def take_integer(key: str, default: int | None = None) -> int:
        value = take(key) if default is None else values.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise UserError(f"{source}: {key} must be a whole number, found {value!r}")
        return value

    for key, what in (
        ("pos_emb", "position embeddings"),
        ("head_qk", "a query-key head"),
        ("tiny_att_dim", "attention"),
    ):
        if take_integer(key, 0) > 0:
            raise UserError(f"{source}: {key} = {values[key]} ({what} in the text tower) is not supported; set it to 0")
    width, head_size = take_integer("n_embd"), take_integer("head_size")
    attention_width = take_integer("dim_att", 0)
    if attention_width > 0 and attention_width != width:
        raise UserError(f"{source}: dim_att {attention_width} differs from n_embd {width}; only equal widths work")
    if head_size <= 0 or width % head_size:
        raise UserError(f"{source}: n_embd {width} is not a multiple of head_size {head_size}")
    ffn_width = take_integer("dim_ffn", 0)
    return ModelConfig(
        name=name,
        image=ImageConfig(
            image_size=take("input_size"),
            patch_size=take("image_patch_size"),
            width=take("image_embed_dims"),
            depth=take("image_depth"),
            num_heads=take("image_num_heads"),
            hidden_rate=take("image_hidden_rate"),
            drop_path_rate=values.get("drop_path_rate", 0.0),
            with_cls_token=_flag(values.get("image_with_cls_token", False)),
            output_cls_token=_flag(values.get("image_output_cls_token", False)),
        ),
        text=TextConfig(
            context_length=take("ctx_len"),
            vocab_size=take("vocab_size"),
            width=width,
            depth=take("n_layer"),
            num_heads=width // head_size,
            ffn_width=ffn_width if ffn_width > 0 else int(width * 3.5) // 32 * 32,
            dropout=values.get("dropout", 0.0),
            head_size_divisor=values.get("head_size_divisor", 8),
        ),
        initialize_text=_flag(values.get("text_initialization", True)),
    )


def _flag(value: Any) -> Any:
    """The published scripts write booleans as the strings "True" and "False"."""
    return {"True": True, "False": False}.get(value, value) if isinstance(value, str) else value


def list_models() -> list[str]:
    """Names of the models that come with the package, sorted."""
    return sorted(path.stem for path in CONFIG_FOLDER.glob("*.json"))


def load_config(name_or_path: str | Path | ModelConfig) -> ModelConfig:
    """The configuration of a model.

    Args:
        name_or_path: a name from `list_models()` (in any case, with or without "RWKV-CLIP-"), a JSON file (this
            package's form or the published flat one), or a run folder, whose `model.json` is read.

    Raises:
        UserError: no such model or file, unreadable JSON, or a value that no model can have.
    """
    if isinstance(name_or_path, ModelConfig):
        return name_or_path
    path = Path(name_or_path)
    if path.is_dir():
        path = path / "model.json"
        if not path.is_file():
            raise UserError(f"{name_or_path}: no model.json in this folder; give a run folder, a JSON file or a name")
    elif path.suffix != ".json" or not path.exists():
        path = _packaged(str(name_or_path))
    try:
        values = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_unique)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not a readable JSON file ({error})") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: expected a JSON object, found {type(values).__name__}")
    if "image_embed_dims" in values:
        return _from_published(values, path.stem, str(path))
    return ModelConfig.from_dict({"name": path.stem, **values}, str(path))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; of a key that is there twice, JSON would silently take the last."""
    values = dict(pairs)
    if len(values) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key '{next(name for name in names if names.count(name) > 1)}' is there twice")
    return values


def _packaged(name: str) -> Path:
    """The file of a packaged model; `UserError` lists the near names."""
    by_key: dict[str, str] = {}
    for known in list_models():
        by_key[known.lower()] = known
        by_key[known.removeprefix(NAME_PREFIX).lower()] = known
    key = name.lower()
    if key in by_key:
        return CONFIG_FOLDER / f"{by_key[key]}.json"
    if name.endswith(".json") or "/" in name:
        raise UserError(f"model file {name} does not exist; give a JSON file, a run folder or one of {list_models()}")
    near = dict.fromkeys(by_key[match] for match in difflib.get_close_matches(key, by_key, n=4, cutoff=0.5))
    hint = f"near names: {', '.join(near)}" if near else f"models: {', '.join(list_models())}"
    raise UserError(f"unknown model {name!r}; {hint}; or give a JSON file")
