"""All contact with JAX's IR: reading jaxprs, re-tracing and re-binding them.

Every difference between JAX releases lives here, beside the release that made it.
"""

from precpass.jaxpr.binding import (
    bind,
    bind_shard_map,
    context_of,
    convert,
    evaluate,
    platform,
    retrace,
    trace,
    trace_shaped,
    transpose,
)
from precpass.jaxpr.bodies import (
    Body,
    all_avals,
    all_eqns,
    all_eqns_of,
    bodies,
    hidden_jaxprs,
    scan_split,
    with_bodies,
)
from precpass.jaxpr.custom_rules import with_rewritten_rules
from precpass.jaxpr.reading import (
    CARRIER,
    Source,
    consts_of,
    in_avals,
    is_carrier,
    is_literal,
    open_jaxpr,
    out_avals,
    precision_of,
    scope_of,
    source_of,
    user_order,
)

__all__ = [
    "CARRIER",
    "Body",
    "Source",
    "all_avals",
    "all_eqns",
    "all_eqns_of",
    "bind",
    "bind_shard_map",
    "bodies",
    "consts_of",
    "context_of",
    "convert",
    "evaluate",
    "hidden_jaxprs",
    "in_avals",
    "is_carrier",
    "is_literal",
    "open_jaxpr",
    "out_avals",
    "platform",
    "precision_of",
    "retrace",
    "scan_split",
    "scope_of",
    "source_of",
    "trace",
    "trace_shaped",
    "transpose",
    "user_order",
    "with_bodies",
    "with_rewritten_rules",
]
