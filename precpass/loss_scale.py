"""Loss scaling, for gradients in float16: scales, scaled gradients and scaled optimizers.

Small cotangents become zero in float16. These multiply the loss before the gradient is taken, and
divide the gradient after it. bfloat16 needs no loss scale.
"""

from __future__ import annotations

from precpass.numerics.loss_scale import (
    DynamicLossScale,
    LossScale,
    MasterState,
    NoOpLossScale,
    ScaledState,
    StaticLossScale,
    all_finite,
    master_copies,
    scaled_optimizer,
    scaled_value_and_grad,
    skip_nonfinite,
)

__all__ = [
    "DynamicLossScale",
    "LossScale",
    "MasterState",
    "NoOpLossScale",
    "ScaledState",
    "StaticLossScale",
    "all_finite",
    "master_copies",
    "scaled_optimizer",
    "scaled_value_and_grad",
    "skip_nonfinite",
]
