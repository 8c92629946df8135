"""Weights in 8 bits, and the scales of matrix products in 8 bits, kept from step to step."""

from __future__ import annotations

from precpass.numerics.delayed_records import LostValues
from precpass.numerics.delayed_scaling import DelayedScales, DelayedScaling, delayed_scaling
from precpass.numerics.quantized import QuantizedArray, quantized

__all__ = [
    "DelayedScales",
    "DelayedScaling",
    "LostValues",
    "QuantizedArray",
    "delayed_scaling",
    "quantized",
]
