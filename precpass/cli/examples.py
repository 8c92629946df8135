"""The examples in the help of each command, which the tests run in this order."""

from __future__ import annotations

__all__ = ["ABOUT", "EXAMPLES"]

_SHAPES = '--args "f32[64,32], f32[128,64]"'

ABOUT = """\
examples, where model.py has loss(w, x), and arguments(), which returns (w, x):
"""
"""What stands above the examples."""

EXAMPLES: dict[str, tuple[str, ...]] = {
    "explain": (
        f"precpass explain model.py:loss {_SHAPES}",
        "precpass explain model.py:loss --example arguments --target h100",
    ),
    "diff": (
        f"precpass diff model.py:loss {_SHAPES} --level lines",
        "precpass diff model:loss --example arguments --between AutoMixedF16",
    ),
    "compare": (
        'precpass compare model.py:loss --example arguments --policies "c=bf16; c=f16"',
        f"precpass compare model.py:loss {_SHAPES} --rounds 0",
        "precpass compare model.py:loss --example arguments --columns flops,temp,moved",
    ),
    "audit": (
        f"precpass audit model.py:loss {_SHAPES}",
        "precpass audit model.py:loss --example arguments --output audit.txt",
    ),
    "bisect": ("precpass bisect model.py:loss --example arguments --tolerance 1e-4",),
    "draw": ("precpass draw model.py:loss --example arguments --output loss.svg",),
    "lock": (
        "precpass lock model.py:loss --example arguments",
        "precpass lock model.py:loss --example arguments --output loss.json",
    ),
    "check": (
        "precpass check model.py:loss --example arguments --plan loss.json",
        "precpass check model.py:loss --example arguments --expect dot_general=bf16",
    ),
}
"""Command lines by the command."""
