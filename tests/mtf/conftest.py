"""Compile time is most of what the tests of the language take; nothing here is large enough to be worth optimising."""

import jax
import pytest


@pytest.fixture(autouse=True)
def quick_compilation():
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
