"""Randomness that does not depend on the layout: an element's bits are a function of the key and its *global* position.

Bits, uniforms and normals are those of `jax.random` on the whole tensor (partitionable threefry), bit for bit.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import jax
import jax.extend.random
import jax.numpy as jnp
import numpy as np
from jax import lax

from mtf_experiments.mtf import collective
from mtf_experiments.mtf.dimension import Dimension, Shape
from mtf_experiments.mtf.placement import placement
from mtf_experiments.mtf.record import recorded
from mtf_experiments.mtf.tensor import NamedTensor

Window = tuple[int | jax.Array, int]


@dataclass(frozen=True)
class Random:
    """A key and the functions that draw named tensors from it. Equal keys draw equal tensors: `fold` before each use.

    `windows` maps a dimension's name to (start, total): shapes that have it are drawn as the part, from `start` on, of
    a tensor in which the dimension has size `total`. So a microbatch draws the same noise as its rows of the batch.
    """

    key: jax.Array
    windows: Mapping[str, Window] = field(default_factory=dict)

    def fold(self, what: str | int | jax.Array) -> Random:
        """An independent source for the name or number `what`."""
        return replace(
            self, key=jax.random.fold_in(self.key, zlib.crc32(what.encode()) if isinstance(what, str) else what)
        )

    def window(self, dim: str, start: int | jax.Array, total: int) -> Random:
        """The same source with shapes' dimension `dim` taken as a part of a larger one."""
        return replace(self, windows={**self.windows, dim: (start, total)})

    def bits(self, shape: Iterable[Dimension]) -> NamedTensor:
        """Uniform 32-bit integers."""
        shape = Shape(shape)
        high, low = self._positions(shape)
        words = jax.random.key_data(self.key)
        if words.shape != (2,):
            raise ValueError(f"the key {self.key} is not one threefry2x32 key, which alone gives layout-free bits")
        a, b = jax.extend.random.threefry2x32_p.bind(words[0], words[1], high, low)
        return NamedTensor(jnp.bitwise_xor(a, b), shape)

    def uniform(self, shape: Iterable[Dimension], low: float = 0.0, high: float = 1.0) -> NamedTensor:
        """f32 uniform in [low, high)."""
        bits = self.bits(shape)
        one = np.float32(1.0).view(np.uint32)
        unit = lax.bitcast_convert_type(lax.shift_right_logical(bits.array, jnp.uint32(9)) | one, jnp.float32) - 1.0
        low32, high32 = np.float32(low), np.float32(high)
        return NamedTensor(jnp.maximum(low32, unit * (high32 - low32) + low32), bits.shape)

    def normal(self, shape: Iterable[Dimension], stddev: float = 1.0) -> NamedTensor:
        """f32 normal with mean 0."""
        unit = self.uniform(shape, float(np.nextafter(np.float32(-1), np.float32(0))), 1.0)
        # One factor: of two, the compiler might make one, and the last bit would depend on what surrounds this.
        return NamedTensor(lax.erf_inv(unit.array) * np.float32(np.sqrt(2) * stddev), unit.shape)

    def _positions(self, shape: Shape) -> tuple[jax.Array, jax.Array]:
        """Each local element's position in the whole tensor, row-major, as two 32-bit words (high, low)."""
        sizes = placement().local_sizes(shape)
        high = low = jnp.zeros((1,) * len(shape), jnp.uint32)
        for i, (d, size, axis) in enumerate(zip(shape, sizes, placement().axes(shape), strict=True)):
            start, total = self.windows.get(d.name, (0, d.size))
            here = jnp.asarray(start + collective.global_start(axis, size)).astype(jnp.uint32)
            here = (here + jnp.arange(size, dtype=jnp.uint32)).reshape([-1 if j == i else 1 for j in range(len(shape))])
            high, low = _multiply_add(high, low, total, here)
        return jnp.broadcast_to(high, sizes), jnp.broadcast_to(low, sizes)


def _multiply_add(high: jax.Array, low: jax.Array, factor: int, term: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(high, low) * factor + term in 64 bits, made of 32-bit words: 64-bit integers are off by default in JAX."""
    f0, f1 = jnp.uint32(factor & 0xFFFF), jnp.uint32(factor >> 16)
    l0, l1 = low & 0xFFFF, low >> 16
    middle = l1 * f0 + ((l0 * f0) >> 16)
    middle2 = l0 * f1 + (middle & 0xFFFF)
    carry = l1 * f1 + (middle >> 16) + (middle2 >> 16)
    product = low * jnp.uint32(factor & 0xFFFFFFFF)
    total = product + term
    return high * jnp.uint32(factor & 0xFFFFFFFF) + carry + (total < product).astype(jnp.uint32), total


@recorded
def dropout(x: NamedTensor, rate: float, random: Random, shared: Iterable[str] = ()) -> NamedTensor:
    """`x` with elements zeroed with probability `rate` and the others scaled by 1/(1-rate).

    The noise is one for all positions along the dimensions named in `shared`, and the same under every layout.
    """
    if not 0.0 <= rate < 1.0:
        raise ValueError(f"dropout rate {rate}: legal are 0 <= rate < 1")
    if rate == 0.0:
        return x
    shared = set(shared)
    noise = random.uniform(d for d in x.shape if d.name not in shared)
    keep = NamedTensor(jnp.where(noise.array < 1.0 - rate, 1.0 / (1.0 - rate), 0.0).astype(x.dtype), noise.shape)
    return x * keep
