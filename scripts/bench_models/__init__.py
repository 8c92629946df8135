"""The models of the benchmark: as users write them, and by hand in bfloat16 as experts would."""

from bench_models import cnn, lstm, mlp, moe, physics, transformer
from bench_models.model import SIZES, Model

__all__ = ["MODELS", "SIZES", "Model"]

MODELS = {
    "transformer": transformer.scanned,
    "unrolled": transformer.unrolled,
    "cnn": cnn.make,
    "lstm": lstm.make,
    "moe": moe.make,
    "physics": physics.make,
    "mlp": mlp.make,
}
"""Name -> what makes the model, given one of `SIZES`."""
