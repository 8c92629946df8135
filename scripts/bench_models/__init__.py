"""The models of the benchmark: as users write them, and by hand in bfloat16 as experts would."""

from collections.abc import Callable, Mapping
from functools import partial

from bench_models import cnn, foreign, foreign_graphs, lstm, mlp, moe, physics, transformer
from bench_models.model import SIZES, Model

__all__ = ["FOREIGN", "MODELS", "SIZES", "Model"]

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

FOREIGN: Mapping[str, Callable[[str], Model]] = {
    "resnet50": foreign.resnet50,
    "efficientnet": partial(foreign.keras_model, "EfficientNetB0"),
    "convnext": partial(foreign.keras_model, "ConvNeXtTiny"),
    "flax-decoder": foreign.flax_decoder,
    "equinox-decoder": foreign.equinox_decoder,
    "jraph": foreign_graphs.graph_network,
    "neural-ode": foreign_graphs.neural_ode,
}
"""Models whose code nobody here wrote, from libraries that only they need."""
