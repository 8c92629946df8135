import os
from importlib.metadata import version

# XLA reads its flags once, when jax starts its backend; the last mention of a flag wins.
os.environ["XLA_FLAGS"] = " ".join(
    (
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=4",
        # XLA's own passes and kernels are as always; LLVM's optimizations of the loops between
        # them are a quarter of the time that the tests take
        "--xla_backend_optimization_level=0",
        # each worker of pytest has a core of its own
        "--xla_cpu_parallel_codegen_split_count=1",
        # The older way to write a fusion's loop compiles in a third of the time; 0.12 has the
        # newer alone.
        "--xla_cpu_use_fusion_emitters=false" if version("jaxlib").startswith("0.10.") else "",
    )
)

# Texts are compared unwrapped; the tests of widths set their own.
os.environ["COLUMNS"] = "1000"

import gc
import re
from pathlib import Path
from typing import Any

import hypothesis
import jax
import pytest

from tests.support.compiled_programs import CompiledPrograms
from tests.support.sampling import left_for_a_release

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Many tests trace different functions to equal programs. `jax.jit` compiles each of them anew, but
# JAX's persistent cache compares the programs: it saves a fifth of the tests' time, and more where
# the tests ran before.
compiled_programs = None
if jax.config.jax_compilation_cache_dir is None:
    compiled_programs = CompiledPrograms()
    jax.config.update("jax_compilation_cache_dir", str(compiled_programs.folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.config.update("jax_persistent_cache_enable_xla_caches", "none")

# An example's first run compiles, so its time says nothing about the property.
hypothesis.settings.register_profile("precpass", deadline=None)
hypothesis.settings.load_profile("precpass")


@pytest.fixture(autouse=True, scope="session")
def the_users_cache_is_left_alone(tmp_path_factory: pytest.TempPathFactory):
    """No test reads or writes the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PRECPASS_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


def pytest_collection_finish():
    """What was imported and collected stays: no collection of garbage walks over it again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


@pytest.fixture
def jax_leaks_too():
    """Without the check for leaks, for programs in which plain JAX leaves tracers behind."""
    with jax.check_tracer_leaks(False):
        yield


def pytest_unconfigure():
    if compiled_programs is not None:
        compiled_programs.close()


def pytest_addoption(parser: pytest.Parser):
    parser.addoption(
        "--whole", action="store_true", help="every case, not a sample, and the tests of a release"
    )
    parser.addoption(
        "--update-snapshots", action="store_true", help="write tests/data/pages anew, to look at"
    )


GROUPS = re.compile(r"(^pytestmark = )?pytest\.mark\.(programs|targets)\b", re.MULTILINE)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config):
    """Leaves out files without a test of the group that -m names, to save their imports."""
    if collection_path.suffix != ".py":
        return None
    found = GROUPS.findall(collection_path.read_text(encoding="utf-8"))
    if config.option.markexpr in ("programs", "targets"):
        return config.option.markexpr not in {group for _, group in found} or None
    if config.option.markexpr == "not programs and not targets":
        return any(whole for whole, _ in found) or None
    return None


@pytest.hookimpl(trylast=True)  # behind -m and -k, so that the sample is of what they select
def pytest_collection_modifyitems(config: pytest.Config, items: list[Any]):
    if not config.getoption("--whole") and not any("::" in argument for argument in config.args):
        left = left_for_a_release(items)
        config.hook.pytest_deselected(items=[items[i] for i in left])
        items[:] = [item for i, item in enumerate(items) if i not in left]
    # From 0.12 on, plain JAX leaves the operands of every linear_call behind in its transpose.
    if jax.__version_info__ >= (0, 12):
        for item in items:
            if "linear_call" in item.name:
                item.fixturenames.insert(0, "jax_leaks_too")
