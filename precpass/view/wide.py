"""The matrix products that a policy leaves in float32."""

from __future__ import annotations

import dataclasses

from precpass.jaxpr import Source
from precpass.plan.eqn_info import Site

__all__ = ["Wide"]


@dataclasses.dataclass(frozen=True)
class Wide:
    """Equal matrix products that a policy leaves in float32.

    Attributes:
        source: your source line.
        scope: the name scopes around them; "layer_*" for several that differ only in their numbers.
        what: primitive, operands and results.
        reason: why they stay in float32.
        remedy: how to change it.
        times: the number of equations.
        flops: the floating-point operations of all of them in one run.
        site: where you find them: their module, and the line that calls it.
    """

    source: Source
    scope: str
    what: str
    reason: str
    remedy: str
    times: int
    flops: float
    site: Site
