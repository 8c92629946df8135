"""What a `shard_map` saves for its backward pass crosses its border in 16 bits."""

import jax

import precpass as pp
from tests.support.jaxprs import named
from tests.support.sharded_programs import PROGRAMS, value


def test_a_ring_attention_passes_16_bits_to_its_backward_pass():
    program = PROGRAMS["ring_attention"](jax.devices()[:4], 32)
    traced = pp.auto_mixed(jax.grad(program.loss)).trace(*program.arguments(value))
    forward, backward = named(traced.jaxpr, "shard_map")
    copies = [v for v in forward.outvars if v.aval.dtype.itemsize == 2]
    assert copies and any(v in copies for v in backward.invars)
