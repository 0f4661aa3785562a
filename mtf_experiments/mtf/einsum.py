"""einsum over named dimensions: what is not in the output is contracted (paper, section 4)."""

from __future__ import annotations

import string
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from mtf_experiments.mtf import collective
from mtf_experiments.mtf.dimension import Dimension, Shape, union
from mtf_experiments.mtf.layout import LayoutError
from mtf_experiments.mtf.placement import placement
from mtf_experiments.mtf.record import recorded
from mtf_experiments.mtf.reduction import finish_sum, split_over
from mtf_experiments.mtf.tensor import NamedTensor


@recorded
def einsum(
    inputs: Sequence[NamedTensor],
    output_shape: Iterable[Dimension],
    rename: Mapping[str, str] | None = None,
    dtype: Any = None,
) -> NamedTensor:
    """Product of `inputs`, summed over all dimensions that `output_shape` lacks.

    Each processor contracts its slices; the partial results are allreduced over the mesh dimensions of the contracted
    dimensions, in `dtype` (default: the inputs' type), which is the result's. `rename` renames output dimensions on the
    way: one that becomes split over a mesh dimension contracted over is reduce-scattered. Raises LayoutError where two
    dimensions of the product (contracted ones included) are split over one mesh dimension, ShapeError for an output
    dimension in no input.
    """
    output = Shape(output_shape)
    everything = union(x.shape for x in inputs)
    for d in output:
        everything.find(d)
    try:
        placement().layout.check_shape(everything, placement().mesh)
    except LayoutError as e:
        raise LayoutError(f"einsum of {' and '.join(str(x.shape) for x in inputs)} to {output}: {e}") from None
    letters = dict(zip(everything.names, string.ascii_letters, strict=False))
    subscripts = [",".join("".join(letters[n] for n in x.shape.names) for x in inputs)]
    subscripts.append("".join(letters[n] for n in output.names))
    contracted = tuple(d for d in everything if not output.has(d))
    axes = frozenset[str]().union(*(collective.varying_axes(x.array) for x in inputs))
    # XLA accumulates bf16 in f32 by itself. Asking for an f32 result unless one is wanted would make every product of
    # the backward pass one of f32 with bf16, which accelerators run at the speed of f32.
    slices = [x.varying(axes) for x in inputs]
    with jax.named_scope(" x ".join(f"[{' '.join(x.shape.names)}]" for x in inputs)):  # read in ledgers and profiles
        local = jnp.einsum("->".join(subscripts), *slices, preferred_element_type=dtype)
    return finish_sum(local, output, split_over(contracted), rename)
