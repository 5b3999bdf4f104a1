"""The WKV6 operator and the choice of what computes it. Imports torch alone."""

from __future__ import annotations

from .implementation import prepare
from .wkv6 import wkv6
from .wkv6_reference import wkv6_reference

__all__ = ["prepare", "wkv6", "wkv6_reference"]
