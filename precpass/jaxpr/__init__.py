"""All contact with JAX's IR: reading jaxprs, tracing it and building it anew.

Every difference between JAX releases lives here, beside the release that made it.
"""

from precpass.jaxpr.binding import (
    DIFFERENTIATED as DIFFERENTIATED,
    Call as Call,
    as_operand as as_operand,
    bind as bind,
    bind_shard_map as bind_shard_map,
    convert as convert,
    evaluate as evaluate,
    is_differentiated as is_differentiated,
    is_tracing as is_tracing,
    is_valid as is_valid,
    jit_is_disabled as jit_is_disabled,
    one_by_one as one_by_one,
    outer_value as outer_value,
    retyped as retyped,
    run as run,
    trace as trace,
    trace_call as trace_call,
)
from precpass.jaxpr.bodies import (
    COMBINERS as COMBINERS,
    ENTERED as ENTERED,
    OPAQUE as OPAQUE,
    Body as Body,
    all_avals as all_avals,
    all_eqns as all_eqns,
    all_eqns_of as all_eqns_of,
    all_held_eqns as all_held_eqns,
    bodies as bodies,
    called_alone as called_alone,
    hidden_jaxprs as hidden_jaxprs,
    is_array as is_array,
    is_ref as is_ref,
    jax_function_name as jax_function_name,
    keeps_border as keeps_border,
    loop_rows as loop_rows,
    name_of as name_of,
    placed_avals as placed_avals,
    why_opaque as why_opaque,
    with_bodies as with_bodies,
)
from precpass.jaxpr.border_copies import (
    border_copy_aval as border_copy_aval,
    crossing as crossing,
    takes_border_copies as takes_border_copies,
    with_border_copies_in_order as with_border_copies_in_order,
)
from precpass.jaxpr.building import (
    Builder as Builder,
    Templates as Templates,
    alike as alike,
    literal as literal,
    new_variable as new_variable,
    with_dtype as with_dtype,
    with_results_in as with_results_in,
)
from precpass.jaxpr.call_sites import (
    Made as Made,
    called_path as called_path,
    made_in as made_in,
)
from precpass.jaxpr.collectives import in_parts as in_parts, part_dim as part_dim
from precpass.jaxpr.custom_rules import (
    Rewrite as Rewrite,
    has_rules as has_rules,
    with_rewritten_rules as with_rewritten_rules,
)
from precpass.jaxpr.dequantizing import (
    dequantized_inside as dequantized_inside,
)
from precpass.jaxpr.direct import (
    Direct as Direct,
)
from precpass.jaxpr.dots import (
    dot_numbers as dot_numbers,
    exchanged as exchanged,
    exchanged_order as exchanged_order,
    moves_whole as moves_whole,
    multiplied_in as multiplied_in,
    permutation as permutation,
    reordered as reordered,
    transposes as transposes,
    with_operand as with_operand,
)
from precpass.jaxpr.exact import (
    constant_operands as constant_operands,
    exact as exact,
    is_rounded_type as is_rounded_type,
    note_exact as note_exact,
    with_float64 as with_float64,
)
from precpass.jaxpr.instrument import (
    Look as Look,
    Place as Place,
    Ran as Ran,
)
from precpass.jaxpr.instrument_bodies import watched as watched
from precpass.jaxpr.loops import (
    UNBOUNDED as UNBOUNDED,
    has_loops as has_loops,
    with_bounded_loops as with_bounded_loops,
)
from precpass.jaxpr.opaque import Contents as Contents, contents_of as contents_of
from precpass.jaxpr.primitives.carrier import (
    Form as Form,
    carry as carry,
    detach as detach,
    is_detach as is_detach,
    pin as pin,
)
from precpass.jaxpr.primitives.dequantized import (
    QuantizedArray as QuantizedArray,
    dequantized_from as dequantized_from,
)
from precpass.jaxpr.primitives.float64 import (
    float64 as float64,
    in_x64 as in_x64,
    is_float64 as is_float64,
)
from precpass.jaxpr.primitives.identities import (
    is_identity_of_first_operand as is_identity_of_first_operand,
    is_rounded as is_rounded,
    wide_operand as wide_operand,
)
from precpass.jaxpr.primitives.low_derivative import (
    function_of as function_of,
)
from precpass.jaxpr.primitives.masking import (
    guarded as guarded,
    masked as masked,
    selected as selected,
)
from precpass.jaxpr.primitives.rounded import (
    WIDENS_STACKS as WIDENS_STACKS,
    bits as bits,
    in_place_of as in_place_of,
    recalled as recalled,
)
from precpass.jaxpr.primitives.scaling import (
    Arithmetic as Arithmetic,
    rounds_operand as rounds_operand,
    scaling as scaling,
)
from precpass.jaxpr.primitives.undifferentiated import (
    undifferentiated as undifferentiated,
)
from precpass.jaxpr.printing import (
    texts as texts,
)
from precpass.jaxpr.promoted import (
    with_promoted_operands as with_promoted_operands,
)
from precpass.jaxpr.reading import (
    Source as Source,
    applies_function as applies_function,
    asked_precision as asked_precision,
    axis_size as axis_size,
    called_from as called_from,
    cast_formats as cast_formats,
    casts as casts,
    consts_of as consts_of,
    dtype_in as dtype_in,
    effects_of as effects_of,
    exponent as exponent,
    fill_of as fill_of,
    has_algorithm as has_algorithm,
    has_complex as has_complex,
    in_avals as in_avals,
    in_users_code as in_users_code,
    iota_size as iota_size,
    is_checkpoint as is_checkpoint,
    is_foreign as is_foreign,
    is_inexact as is_inexact,
    is_integer as is_integer,
    is_literal as is_literal,
    is_plain_cast as is_plain_cast,
    is_sampler as is_sampler,
    keeps_bits as keeps_bits,
    kernel_features as kernel_features,
    lhs_dilation as lhs_dilation,
    open_jaxpr as open_jaxpr,
    out_avals as out_avals,
    parts_of as parts_of,
    picks_from_apart_windows as picks_from_apart_windows,
    precision_of as precision_of,
    reduced_axes as reduced_axes,
    reduced_sizes as reduced_sizes,
    scope_of as scope_of,
    sorted_params as sorted_params,
    source_of as source_of,
    summed_and_batch as summed_and_batch,
    symbol_in as symbol_in,
    user_order as user_order,
    widening as widening,
    without_consts as without_consts,
)
from precpass.jaxpr.seeds import (
    takes_plain_gradient as takes_plain_gradient,
)
from precpass.jaxpr.shardings import (
    holds_terms as holds_terms,
    is_reduced as is_reduced,
    is_sharded_by_type as is_sharded_by_type,
    is_unreduced as is_unreduced,
    resharded_along as resharded_along,
    sharding_before as sharding_before,
    sharding_under_vmap as sharding_under_vmap,
    shards as shards,
    summed_up as summed_up,
    with_sizes as with_sizes,
    without_reduced as without_reduced,
)
from precpass.jaxpr.types import (
    Atom as Atom,
    Aval as Aval,
    Eqn as Eqn,
    Jaxpr as Jaxpr,
    Var as Var,
)
