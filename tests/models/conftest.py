"""The models' tests compile many steps and run few: let the compiler take it easy."""

import jax
import pytest


@pytest.fixture(autouse=True, scope="package")
def _unoptimized():
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
