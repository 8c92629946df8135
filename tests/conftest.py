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
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# An example's first run compiles, so its time says nothing about the property.
hypothesis.settings.register_profile("precpass", deadline=None)
hypothesis.settings.load_profile("precpass")


@pytest.fixture(autouse=True, scope="session")
def nothing_is_measured(tmp_path_factory: pytest.TempPathFactory):
    """No test reads or writes the user's cache, or hangs on how fast the machine is.

    The one that measures for all that takes the patch back (`test_profitability`).
    """

    def measures(*_args: object, **_kwargs: object) -> None:
        raise AssertionError("a test times products: give it a probe or rounds of its own")

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PRECPASS_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        patch.setattr("precpass.probe._rounds", measures)
        yield
