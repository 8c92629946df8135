"""The table of XLA's compilers: what a plan depends on, beside the device's formats."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["CPU", "GPU", "TPU", "Backend", "backend_of"]


class Backend(NamedTuple):
    """One of XLA's compilers.

    Attributes:
        name: "cpu", "gpu" or "tpu", or JAX's name of a platform that the table does not know.
        has_low_results: whether products are planned with 16-bit results, and fusions with 16-bit
            values that they write. On a GPU no kernel folds a cast into a product; what a TPU
            saves of float32 results stays float32.
        border_bits: whether unsigned integers carry 16-bit copies across the borders of bodies.
            XLA:CPU of jax 0.10 stores bfloat16 in a loop's state as float32. On a TPU integers
            are laid out in another way than bfloat16, and each bitcast would rewrite the array.
        splits_stacks: whether the stack of a loop's state may have another format than the state,
            and what reads it counts as reading the state. A TPU's compiler casts a stack by itself
            if all of its readers do.
        writes_windows: whether fusions write what is picked from windows, as a max pooling does.
            It is false for a v5e, which has no arithmetic in bfloat16. The gradient of two
            convolutions around a pooling takes 0.8 of by hand's cycles there, and with this 1.0.
        joins_softmax: whether one kernel computes the scores of an attention, their maximum, the
            exponentials and their sum, and writes the last two, if it need not round the scores
            before. The gradient of a decoder then takes 0.86 of the cycles that it takes with
            rounded scores on a v5e, and 0.93 on a v5p and a v6e.
        computes_again: whether an expanded function, such as an error function, is computed again
            in the kernel of the product that makes a weight's gradient. In a block of a ConvNeXt
            that kernel takes 3.7 times the cycles on a v6e, so in a program with a backward pass
            its rounded result is read from memory. A forward pass alone would take 1.04 to 1.11
            times the cycles.
        emulates_float8: whether products of float8 are widened on every device.

    Cycles are the estimates of the TPU's compiler (jax 0.12.0.1).
    """

    name: str
    has_low_results: bool = False
    border_bits: bool = True
    splits_stacks: bool = False
    writes_windows: bool = False
    joins_softmax: bool = False
    computes_again: bool = False
    emulates_float8: bool = False


CPU = Backend("cpu", emulates_float8=True)
GPU = Backend(
    "gpu", has_low_results=True, border_bits=False, splits_stacks=True, writes_windows=True
)
TPU = Backend(
    "tpu", has_low_results=True, border_bits=False, joins_softmax=True, computes_again=True
)
_BACKENDS = {"cpu": CPU, "gpu": GPU, "cuda": GPU, "rocm": GPU, "tpu": TPU}


def backend_of(platform: str) -> Backend:
    """The compiler that serves a platform, by JAX's name of it."""
    return _BACKENDS.get(platform) or Backend(platform)
