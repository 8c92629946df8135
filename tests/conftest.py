import os

# XLA reads its flags once, when jax starts its backend; the last mention of a flag wins.
os.environ["XLA_FLAGS"] = " ".join(
    (
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=4",
        # XLA's own passes and kernels are as always; LLVM's optimizations of the loops between
        # them are a quarter of the time that the tests take
        "--xla_backend_optimization_level=0",
    )
)

import hypothesis
import jax

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# An example's first run compiles, so its time says nothing about the property.
hypothesis.settings.register_profile("precpass", deadline=None)
hypothesis.settings.load_profile("precpass")
