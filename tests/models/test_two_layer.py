"""Table 1 of the paper, term by term and with the constants that it drops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtf_experiments import mtf
from mtf_experiments.models import two_layer

# All distinct and no product of two equal to another, so that a term in the wrong place changes a number.
B, D, H = 16, 24, 40
SHAPES = two_layer.shapes(B, D, H)

# n = 8 processors in every mesh: rows r, columns c, planes p.
ONE_D, TWO_D, THREE_D = "all:8", "rows:4;cols:2", "rows:2;cols:2;planes:2"
MESHES = {
    two_layer.EMPTY: ONE_D,
    two_layer.DATA_PARALLEL: ONE_D,
    two_layer.MODEL_PARALLEL: ONE_D,
    two_layer.MIXED: TWO_D,
    two_layer.THREE_DIMENSIONAL: THREE_D,
}


def abstract(*names: str) -> list[mtf.NamedTensor]:
    return [mtf.NamedTensor(jax.ShapeDtypeStruct(SHAPES[n].sizes, jnp.float32), SHAPES[n]) for n in names]


def abstract_arguments() -> tuple[dict[str, mtf.NamedTensor], mtf.NamedTensor, mtf.NamedTensor]:
    w, bias, v, x, targets = abstract("w", "bias", "v", "x", "targets")
    return {"w": w, "bias": bias, "v": v}, x, targets


def ledger_of(function, layout):
    return mtf.ledger(function, mtf.abstract_mesh(MESHES[layout]), layout, *abstract_arguments())


# Elements that one processor allreduces in forward and backward pass, by mesh dimensions. The table's terms are those
# of order b d, b h and d h; "+ H" is the gradient of the bias, "+ 1" the loss.
COMMUNICATION = {
    # Nothing is split.
    two_layer.EMPTY: {},
    # Table: dh. Both weights are whole everywhere; their gradients, d h each, are summed over the parts of the batch.
    two_layer.DATA_PARALLEL: {("all",): 2 * D * H + H + 1},
    # Table: bd. Forward, y is a sum over hidden; backward, so is the gradient by x. The loss is the same everywhere.
    two_layer.MODEL_PARALLEL: {("all",): 2 * B * D},
    # Table: bd/r + dh/c. Over cols as model parallel, for b/r rows; over rows as data parallel, for h/c hidden units.
    two_layer.MIXED: {("cols",): 2 * B * D // 4, ("rows",): (2 * D * H + H) // 2 + 1},
    # Table: bd/rp + bh/rc + dh/cp. The new term: x w is a sum over io, and so is the gradient by h. The loss is a sum
    # over batch and io at once.
    two_layer.THREE_DIMENSIONAL: {
        ("cols",): 2 * B * D // (2 * 2),
        ("planes",): 2 * B * H // (2 * 2),
        ("rows",): 2 * D * H // (2 * 2) + H // 2,
        ("rows", "planes"): 1,
    },
}

# What of it is the gradient by x, a sum over hidden.
BY_INPUT = {
    two_layer.MODEL_PARALLEL: {("all",): B * D},
    two_layer.MIXED: {("cols",): B * D // 4},
    two_layer.THREE_DIMENSIONAL: {("cols",): B * D // (2 * 2)},
}


@pytest.mark.parametrize("layout", MESHES)
def test_communication_is_that_of_table_1(layout):
    ledger = ledger_of(two_layer.loss_and_gradients, layout)
    assert ledger.elements_by_mesh_dimension() == COMMUNICATION[layout]
    assert set(ledger.by_kind()) <= {"allreduce"}
    assert ledger.total_bytes == 4 * sum(COMMUNICATION[layout].values())


@pytest.mark.parametrize("layout", MESHES)
def test_first_layer_of_a_network_needs_no_gradient_by_its_input(layout):
    less = BY_INPUT.get(layout, {})
    expected = {axes: n - less.get(axes, 0) for axes, n in COMMUNICATION[layout].items()}
    assert ledger_of(two_layer.training_step, layout).elements_by_mesh_dimension() == expected


@pytest.mark.parametrize("layout", MESHES)
def test_computation_is_divided_by_the_number_of_processors(layout):
    # Six products of b, d and h: y and h forward; the gradients by v, h, w and x backward. 2 FLOPs per multiply-add.
    n = 1 if layout == two_layer.EMPTY else 8
    assert ledger_of(two_layer.loss_and_gradients, layout).flops == 6 * 2 * B * D * H // n


@pytest.mark.parametrize(
    ("layout", "io", "hidden", "weights"),
    [
        # The table's memory terms in elements: bd (x, y), bh (h), dh (w, v), each over the processors that share it.
        (two_layer.EMPTY, B * D, B * H, D * H),
        (two_layer.DATA_PARALLEL, B * D / 8, B * H / 8, D * H),
        (two_layer.MODEL_PARALLEL, B * D, B * H / 8, D * H / 8),
        (two_layer.MIXED, B * D / 4, B * H / 8, D * H / 2),
        (two_layer.THREE_DIMENSIONAL, B * D / 4, B * H / 4, D * H / 4),
    ],
)
def test_memory_per_processor_is_that_of_table_1(layout, io, hidden, weights):
    mesh = mtf.MeshShape(MESHES[layout])
    held = {n: int(np.prod(mtf.Layout(layout).local_sizes(s, mesh))) for n, s in SHAPES.items()}
    assert (held["x"], held["h"], held["w"]) == (io, hidden, weights)
    assert (held["y"], held["v"]) == (io, weights)


@pytest.mark.parametrize("layout", MESHES)
def test_loss_and_gradients_are_those_of_numpy_under_every_layout(layout):
    rng = np.random.default_rng(0)
    x, w, bias, v, targets = (
        rng.standard_normal(SHAPES[n].sizes, dtype=np.float32) for n in ("x", "w", "bias", "v", "targets")
    )
    h = np.maximum(x @ w + bias, 0)
    error = h @ v - targets
    by_y = 2 * error / error.size
    by_h = by_y @ v.T * (h > 0)
    expected = {"w": x.T @ by_h, "bias": by_h.sum(0), "v": h.T @ by_y}

    named = {n: mtf.NamedTensor(a, SHAPES[n]) for n, a in {"w": w, "bias": bias, "v": v}.items()}
    program = mtf.spmd(two_layer.loss_and_gradients, mtf.make_mesh(MESHES[layout]), layout)
    loss, by_params, by_x = program(named, mtf.NamedTensor(x, SHAPES["x"]), mtf.NamedTensor(targets, SHAPES["targets"]))
    np.testing.assert_allclose(loss.array, np.mean(error**2), rtol=1e-5)
    np.testing.assert_allclose(by_x.array, by_h @ w.T, rtol=1e-4, atol=1e-4)
    for name, gradient in expected.items():
        np.testing.assert_allclose(by_params[name].array, gradient, rtol=1e-4, atol=1e-4, err_msg=name)


def test_training_step_descends_the_gradient():
    rng = np.random.default_rng(1)
    params = {
        n: mtf.NamedTensor(rng.standard_normal(SHAPES[n].sizes, np.float32), SHAPES[n]) for n in ("w", "bias", "v")
    }
    x, targets = (
        mtf.NamedTensor(rng.standard_normal(SHAPES[n].sizes, np.float32), SHAPES[n]) for n in ("x", "targets")
    )
    before, by_params, _ = two_layer.loss_and_gradients(params, x, targets)
    loss, after = two_layer.training_step(params, x, targets, 1e-4)
    assert loss.array == before.array
    assert two_layer.loss(after, x, targets).array < before.array
    for n in params:
        np.testing.assert_allclose(after[n].array, params[n].array - 1e-4 * by_params[n].array, rtol=1e-6)
