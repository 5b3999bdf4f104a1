"""The package `op_builder`, if it is this project's: DeepSpeed's source tree has one of the same name at its root."""

from __future__ import annotations

from pathlib import Path

from ..errors import UserError


def check_op_builder() -> None:
    """`UserError` when Python finds another package under the name than the one beside rwkv_clip, or none."""
    beside = Path(__file__).resolve().parents[2]
    try:
        import op_builder

        found = Path(next(iter(op_builder.__path__))).resolve().parent
    except ImportError:
        found = None
    if found != beside:
        where = f"the one in {found}, perhaps DeepSpeed's source tree" if found else "none"
        raise UserError(
            f"rwkv_clip in {beside} needs the package op_builder beside it, and Python finds {where}: put {beside} "
            "first in PYTHONPATH, or start in another folder"
        )
