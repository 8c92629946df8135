"""Weights in 8 bits."""

from __future__ import annotations

from typing import Any

from precpass.moved import absent
from precpass.numerics.quantized import QuantizedArray, quantized

__all__ = ["QuantizedArray", "quantized"]


def __getattr__(name: str) -> Any:
    raise absent(__name__, name)
