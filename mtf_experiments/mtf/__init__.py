"""The language: tensors with named dimensions, laid out over a named mesh of processors (Shazeer et al. 2018).

    batch, io, hidden = mtf.Dimension("batch", 64), mtf.Dimension("io", 512), mtf.Dimension("hidden", 2048)

    def two_layers(x, w, v):
        h = mtf.relu(mtf.einsum([x, w], [batch, hidden]))
        return mtf.einsum([h, v], [batch, io])

    y = mtf.spmd(two_layers, mtf.make_mesh("rows:2;cols:2"), "batch:rows;hidden:cols")(x, w, v)

The layout decides placement and communication, never the result; outside `spmd` the same functions run on one device.
"""

from mtf_experiments.mtf.control import full, scan, vary_over, while_loop, zeros, zeros_like
from mtf_experiments.mtf.dimension import Dimension, Shape, ShapeError
from mtf_experiments.mtf.einsum import einsum
from mtf_experiments.mtf.elementwise import (
    absolute,
    add,
    broadcast,
    cast,
    cos,
    divide,
    equal,
    exp,
    gelu,
    greater,
    greater_equal,
    is_finite,
    less,
    less_equal,
    log,
    logical_and,
    logical_not,
    logical_or,
    maximum,
    minimum,
    multiply,
    not_equal,
    power,
    relu,
    rsqrt,
    sigmoid,
    sign,
    silu,
    sin,
    sqrt,
    square,
    stop_gradient,
    subtract,
    tanh,
    where,
)
from mtf_experiments.mtf.indexing import arange, cumsum, gather, index, one_hot, shift, slice_dimension, update_slice
from mtf_experiments.mtf.layout import Layout, LayoutError, MeshShape
from mtf_experiments.mtf.ledger import Collective, Ledger, Product, ledger, ledger_of, trace, trace_ledger
from mtf_experiments.mtf.placement import placement
from mtf_experiments.mtf.program import (
    abstract_mesh,
    check_program,
    make_mesh,
    mesh_shape_of,
    partition_spec,
    place,
    sharding,
    spmd,
)
from mtf_experiments.mtf.random import Random, dropout
from mtf_experiments.mtf.record import Operation, Record, Recorder, Tensor, record
from mtf_experiments.mtf.reduction import (
    reduce_all,
    reduce_any,
    reduce_logsumexp,
    reduce_max,
    reduce_mean,
    reduce_min,
    reduce_sum,
)
from mtf_experiments.mtf.reshape import concat, rename, reshape, stack, transpose, unstack
from mtf_experiments.mtf.selection import argmax, top_k
from mtf_experiments.mtf.softmax import (
    log_softmax,
    smoothed,
    softmax,
    softmax_cross_entropy,
    softmax_cross_entropy_and_uniform,
)
from mtf_experiments.mtf.tensor import NamedTensor, canonical, is_named
