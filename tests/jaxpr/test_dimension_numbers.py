"""The dimension numbers of a product's derivatives and vmaps, against JAX's own rules."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from precpass.jaxpr.dimension_numbers import batched
from tests.support.values import normal_array

DOTS = {
    "matmul": ((((1,), (0,)), ((), ())), (3, 4), (4, 5)),
    "batch": ((((2,), (1,)), ((0,), (0,))), (2, 3, 4), (2, 4, 5)),
    "four free": ((((2,), (0,)), ((), ())), (3, 6, 4), (4, 5, 7)),
    "summed first": ((((0, 1), (1, 2)), ((), ())), (4, 2, 3), (5, 4, 2)),
}


@pytest.mark.parametrize("where", ["lhs", "rhs", "both"])
@pytest.mark.parametrize("name", DOTS)
def test_a_batched_dot_is_that_of_each_element(name: str, where: str):
    numbers, *shapes = DOTS[name]
    has = [where != "rhs", where != "lhs"]
    for at in range(3):
        dims = [min(at, len(s)) if of else None for s, of in zip(shapes, has, strict=True)]
        operands = [
            normal_array(i, *s) if d is None else normal_array(i, *s[:d], 9, *s[d:])
            for i, (s, d) in enumerate(zip(shapes, dims, strict=True))
        ]
        wanted = jax.vmap(lambda a, b: lax.dot_general(a, b, numbers), dims)(*operands)
        new, out = batched(numbers, [x.ndim for x in operands], dims)
        found = jnp.moveaxis(lax.dot_general(*operands, new), out, 0)
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
