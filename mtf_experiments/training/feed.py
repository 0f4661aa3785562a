"""From the host's rows to arrays on the devices: each process makes the rows that its own devices need, and no others."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from mtf_experiments import mtf


def device_batch(
    make_rows: Callable[[np.ndarray], Mapping[str, np.ndarray]],
    shapes: Mapping[str, mtf.Shape],
    sharding: Callable[[mtf.Shape], Any],
) -> dict[str, mtf.NamedTensor]:
    """A batch of features of `shapes` (`[..., length]`; rows in row-major order are the rows of the batch), each placed by
    `sharding(shape)`.

    `make_rows(numbers)` gives the features `[len(numbers), length]` of the numbered rows of the batch: a pure function, so
    any number of processes makes one and the same batch.
    """
    placements = {feature: sharding(shape) for feature, shape in shapes.items()}
    leading = next(iter(shapes.values())).sizes[:-1]
    numbers = np.arange(math.prod(leading)).reshape(leading)
    needed = np.unique(
        [
            number
            for feature, placement in placements.items()
            for index in placement.addressable_devices_indices_map(shapes[feature].sizes).values()
            for number in numbers[index[:-1]].ravel()
        ]
    )
    rows = make_rows(needed)
    batch = {}
    for feature, shape in shapes.items():
        whole = np.zeros((numbers.size, shape[-1].size), np.int32)
        whole[needed] = rows[feature]
        batch[feature] = place_rows(whole.reshape(shape.sizes), shape, lambda _, f=feature: placements[f])
    return batch


def place_rows(whole: np.ndarray, shape: mtf.Shape, sharding: Callable[[mtf.Shape], Any]) -> mtf.NamedTensor:
    """The array of `shape` on the devices; of `whole` every process needs to know only its own devices' part."""
    array = jax.make_array_from_callback(shape.sizes, sharding(shape), lambda index: whole[index])
    return mtf.NamedTensor(array, shape)


def to_host(tensor: mtf.NamedTensor) -> np.ndarray:
    """The whole of `tensor` as a numpy array on every process."""
    if tensor.array.is_fully_addressable:
        return np.asarray(tensor.array)
    from jax.experimental import multihost_utils

    gathered: Any = multihost_utils.process_allgather(tensor.array, tiled=True)
    return np.asarray(jax.device_get(gathered))
