import os

# XLA reads its flags once, when jax starts its backend; the last mention of a flag wins.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
).strip()

import hypothesis
import jax

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# An example's first run compiles, so its time says nothing about the property.
hypothesis.settings.register_profile("precpass", deadline=None)
hypothesis.settings.load_profile("precpass")
