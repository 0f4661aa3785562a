"""From the host's rows to arrays on the devices: each process makes the rows that its own devices need, and no others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from mtf_experiments import mtf
from mtf_experiments.training.step import FEATURES


def device_batch(
    make_rows: Callable[[np.ndarray], Mapping[str, np.ndarray]], shape: mtf.Shape, sharding: Any
) -> dict[str, mtf.NamedTensor]:
    """A batch of `shape` (`[..., length]`; its rows in row-major order are the rows of the batch) placed by `sharding`.

    `make_rows(numbers)` gives the features `[len(numbers), length]` of the numbered rows of the batch: a pure function, so
    any number of processes makes one and the same batch.
    """
    numbers = np.arange(shape.elements // shape[-1].size).reshape(shape.sizes[:-1])
    indices = sharding.addressable_devices_indices_map(shape.sizes).values()
    needed = np.unique(np.concatenate([numbers[index[:-1]].ravel() for index in indices]))
    rows = make_rows(needed)
    batch = {}
    for feature in FEATURES:
        whole = np.zeros((numbers.size, shape[-1].size), np.int32)
        whole[needed] = rows[feature]
        whole = whole.reshape(shape.sizes)
        array = jax.make_array_from_callback(shape.sizes, sharding, lambda index, whole=whole: whole[index])
        batch[feature] = mtf.NamedTensor(array, shape)
    return batch
