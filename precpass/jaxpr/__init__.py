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
)
from precpass.jaxpr.bodies import (
    Body,
    all_avals,
    all_eqns,
    all_eqns_of,
    bodies,
    hidden_jaxprs,
    name_of,
    scan_split,
    with_bodies,
)
from precpass.jaxpr.carrier import Form, carry, detach, is_carrier, is_detach
from precpass.jaxpr.custom_rules import with_rewritten_rules
from precpass.jaxpr.reading import (
    Source,
    consts_of,
    in_avals,
    is_literal,
    open_jaxpr,
    out_avals,
    precision_of,
    scope_of,
    source_of,
    user_order,
    widening,
)

__all__ = [
    "Body",
    "Form",
    "Source",
    "all_avals",
    "all_eqns",
    "all_eqns_of",
    "bind",
    "bind_shard_map",
    "bodies",
    "carry",
    "consts_of",
    "context_of",
    "convert",
    "detach",
    "evaluate",
    "hidden_jaxprs",
    "in_avals",
    "is_carrier",
    "is_detach",
    "is_literal",
    "name_of",
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
    "user_order",
    "widening",
    "with_bodies",
    "with_rewritten_rules",
]
