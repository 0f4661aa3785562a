"""Settings that must stand before jax is imported anywhere: eight virtual CPU devices for every test."""

import os
import re

DEVICES = 8

# XLA takes the size of its CPU thread pool from NPROC; with fewer threads than devices, collectives can deadlock.
os.environ["NPROC"] = "64"
os.environ["JAX_PLATFORMS"] = "cpu"
_foreign = re.sub(r"--xla_force_host_platform_device_count=\S*", "", os.environ.get("XLA_FLAGS", "")).split()
os.environ["XLA_FLAGS"] = " ".join([*_foreign, f"--xla_force_host_platform_device_count={DEVICES}"])

import pytest  # noqa: E402

from mtf_experiments import config  # noqa: E402


@pytest.fixture(autouse=True, scope="module")
def no_configuration_left_behind():
    """Gin's bindings are global and act on direct calls too: none may outlive the tests that loaded it."""
    yield
    config.clear()
