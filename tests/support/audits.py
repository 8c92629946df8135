"""Shared by the tests of audits."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import precpass as pp
from tests.support.passes import quiet

bf16, f16, f32 = jnp.bfloat16, jnp.float16, jnp.float32


def of(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def audited(fn: Callable[..., Any], *args: Any, policy: Any = None) -> pp.report.Audit:
    """The audit without the package's warnings; as it is written where no policy is given."""
    with quiet(), pp.use_policy(policy):
        return pp.audit(fn)(*args)


def kinds(found: pp.report.Audit) -> list[str]:
    return [finding.kind for finding in found.findings]


def factor_dtypes(hlo: str) -> list[tuple[str, str]]:
    """The element types of each product's operands, by searching the text alone."""
    pairs = re.findall(r" (?:dot|convolution)\(%(\S+), %(\S+)\)", hlo)
    pairs += re.findall(r' custom-call\(%([^,)]+), %([^,)]+)[^"]*"__onednn\$(?:matmul|conv)', hlo)
    return [
        tuple(re.search(rf"%{re.escape(name)} = (\w+)\[", hlo)[1] for name in pair)
        for pair in pairs
    ]
