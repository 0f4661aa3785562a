"""What the compiler makes of a program communicates what the ledger says, and HLO text of every form is understood."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from mtf_experiments import mtf
from mtf_experiments.models import two_layer
from mtf_experiments.planning.hlo import hlo_ledger, replica_groups

BATCH, IO, HIDDEN = mtf.Dimension("batch", 16), mtf.Dimension("io", 24), mtf.Dimension("hidden", 40)
LAYERS = mtf.Dimension("layers", 5)
MIXED_MESH, CUBE = "rows:4;cols:2", "rows:2;cols:2;planes:2"


def abstract(*dimensions, dtype=jnp.float32):
    return mtf.NamedTensor(jax.ShapeDtypeStruct(tuple(d.size for d in dimensions), dtype), dimensions)


X, W, V = abstract(BATCH, IO), abstract(IO, HIDDEN), abstract(HIDDEN, IO)
PARAMS = {"w": W, "bias": abstract(HIDDEN), "v": V}
STACKED = {name: abstract(LAYERS, *x.shape) for name, x in PARAMS.items()}


def both(function, mesh, layout, *arguments):
    """The ledger of the program and that of its compiled HLO."""
    mesh = mtf.make_mesh(mesh)
    text = mtf.spmd(function, mesh, layout).lower(*arguments).compile().as_text()
    return mtf.ledger(function, mesh, layout, *arguments), hlo_ledger(text, mtf.mesh_shape_of(mesh))


def assert_agree(written, compiled):
    assert compiled.elements() == written.elements()
    assert compiled.total_bytes == written.total_bytes
    assert compiled.flops == written.flops
    assert compiled.at_least == written.at_least


@pytest.mark.parametrize(
    ("mesh", "layout"),
    [
        ("all:8", two_layer.EMPTY),
        ("all:8", two_layer.DATA_PARALLEL),
        ("all:8", two_layer.MODEL_PARALLEL),
        (MIXED_MESH, two_layer.MIXED),
        (CUBE, two_layer.THREE_DIMENSIONAL),
    ],
)
def test_two_layers_compile_to_what_the_ledger_says(mesh, layout):
    assert_agree(*both(two_layer.loss_and_gradients, mesh, layout, PARAMS, X, X))


@pytest.mark.parametrize("remat", [False, True], ids=["saved", "recomputed"])
@pytest.mark.parametrize(("mesh", "layout"), [(MIXED_MESH, two_layer.MIXED), (CUBE, two_layer.THREE_DIMENSIONAL)])
def test_collectives_in_scanned_layers_are_counted_once_per_step(mesh, layout, remat):
    def program(params, x):
        def block(x, layer):
            return x + two_layer.two_layers(layer, x)

        def loss(params):
            body = jax.checkpoint(block) if remat else block
            y, _ = mtf.scan(lambda x, layer: (body(x, layer), None), x, params, LAYERS)
            return mtf.reduce_mean(mtf.square(y)).array

        return jax.value_and_grad(loss)(params)

    written, compiled = both(program, mesh, layout, STACKED, X)
    assert_agree(written, compiled)
    # Per layer y forward and the gradient by x backward, the loss aside: so the loops really were multiplied.
    assert compiled.elements()["allreduce", ("cols",)] == 5 * 2 * 16 * 24 // 4


def reduce_scattered(x, w):
    return mtf.einsum([x, w], [BATCH, HIDDEN], rename={"hidden": "scattered"})


@pytest.mark.parametrize(
    ("function", "mesh", "layout", "kind"),
    [
        (reduce_scattered, "all:8", "io:all;scattered:all", "reduce_scatter"),
        (reduce_scattered, "rows:2;cols:4", "io:cols;scattered:cols;batch:rows", "reduce_scatter"),
        (lambda x, w: mtf.rename(x, io="whole"), "rows:2;cols:4", "batch:rows;io:cols", "allgather"),
        (lambda x, w: mtf.rename(x, batch="whole", io="split"), "all:8", "batch:all;split:all", "alltoall"),
        (lambda x, w: mtf.rename(x, batch="whole", io="split"), "rows:2;cols:4", "batch:cols;split:cols", "alltoall"),
        (lambda x, w: mtf.shift(x, 1, "batch"), "rows:2;cols:4", "batch:rows;io:cols", "exchange"),
        (lambda x, w: mtf.reduce_max(x, "io"), "rows:2;cols:4", "batch:rows;io:cols", "allreduce"),
    ],
)
def test_every_kind_compiles_to_itself_forward_and_backward(function, mesh, layout, kind):
    def gradient(x, w):
        return jax.grad(lambda x, w: mtf.reduce_sum(mtf.square(function(x, w))).array, (0, 1))(x, w)

    written, compiled = both(gradient, mesh, layout, X, W)
    assert kind in compiled.by_kind()
    assert_agree(written, compiled)


def test_kind_of_reduction_is_read():
    _, compiled = both(lambda x: mtf.reduce_max(x, "io"), "all:8", "io:all", X)
    assert [c.reduction for c in compiled.collectives] == ["max"]


def test_while_loop_of_unknown_length_is_counted_once_and_marked():
    def program(x):
        def body(total):
            return total + mtf.reduce_sum(x * mtf.NamedTensor(total, [])).array

        return lax.while_loop(lambda total: total < 100, body, jnp.ones(()))

    written, compiled = both(program, "all:8", "batch:all", X)
    assert_agree(written, compiled)
    assert compiled.at_least


def test_of_branches_the_dearest_is_counted():
    def program(x, p):
        return lax.cond(
            p > 0,
            lambda: mtf.reduce_sum(x, "batch").array,
            lambda: (mtf.reduce_sum(mtf.square(x), "batch") + mtf.reduce_sum(mtf.exp(x), "batch")).array,
        )

    assert_agree(*both(program, "all:8", "batch:all", X, jax.ShapeDtypeStruct((), jnp.float32)))


def test_cpu_widens_bf16_sums_elements_stay():
    written, compiled = both(
        lambda x: mtf.reduce_sum(x, "batch"), "all:8", "batch:all", abstract(BATCH, IO, dtype=jnp.bfloat16)
    )
    assert compiled.elements() == written.elements()
    assert compiled.total_bytes == 2 * written.total_bytes


@pytest.mark.parametrize(
    ("program", "written_elements"),
    [
        # The same value twice: the compiler shares it.
        (lambda x: mtf.reduce_sum(x, "batch") + mtf.square(mtf.reduce_sum(x, "batch")), 2 * 24),
        # The same value in every step: moved out of the loop.
        (
            lambda x: mtf.scan(
                lambda c, _: (c + mtf.reduce_sum(x, "batch"), None), mtf.zeros([IO]), None, mtf.Dimension("steps", 5)
            )[0],
            5 * 24,
        ),
        # A constant: multiplied.
        (
            lambda x: mtf.reduce_sum(mtf.full([BATCH, IO], 1.0), "batch") + mtf.reduce_sum(x, "batch"),
            2 * 24,
        ),
    ],
    ids=["shared", "moved out of the loop", "constant"],
)
def test_the_compiler_only_ever_saves(program, written_elements):
    written, compiled = both(program, "all:8", "batch:all", X)
    assert written.total_elements == written_elements
    assert compiled.total_elements == 24


MODULE = """HloModule example, is_scheduled=true, num_partitions=8

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%condition (state: (s32[], f32[4,6])) -> pred[] {
  %state = (s32[], f32[4,6]{1,0}) parameter(0)
  %bound = s32[] constant(7)
  %counter = s32[] get-tuple-element(%state), index=0
  ROOT %less = pred[] compare(%counter, %bound), direction=LT
}

%body (state.1: (s32[], f32[4,6])) -> (s32[], f32[4,6]) {
  %state.1 = (s32[], f32[4,6]{1,0:T(8,128)S(1)}) parameter(0)
  %i = s32[] get-tuple-element(%state.1), index=0
  %value = f32[4,6]{1,0} get-tuple-element(%state.1), index=1
  %in_loop = f32[4,6]{1,0} all-reduce(%value), channel_id=3, replica_groups=[2,4]<=[4,2]T(1,0), to_apply=%add
  ROOT %next = (s32[], f32[4,6]{1,0}) tuple(%i, %in_loop)
}

%wrapped (p: f32[16,6]) -> f32[4,6] {
  %p = f32[16,6]{1,0} parameter(0)
  ROOT %scattered = f32[4,6]{1,0} reduce-scatter(%p), replica_groups={{0,2,4,6},{1,3,5,7}}, to_apply=%add
}

ENTRY %main (x: f32[4,6], y: bf16[16,6]) -> f32[4,6] {
  %x = f32[4,6]{1,0} parameter(0)
  %y = bf16[16,6]{1,0} parameter(1)
  %big = f32[16,6]{1,0} convert(%y)
  %start = (f32[4,6]{1,0}, f32[8,6]{1,0}) all-gather-start(%x), channel_id=1, replica_groups=[4,2]<=[8], dimensions={0}
  %done = f32[8,6]{1,0} all-gather-done(%start)
  %both = (f32[4,6]{1,0}, /*index=1*/bf16[16,6]{1,0}) all-reduce-start(%x, %y), replica_groups={}, to_apply=%add
  %both.done = (f32[4,6]{1,0}, bf16[16,6]{1,0}) all-reduce-done(%both)
  %rs = ((f32[16,6]), f32[4,6]) async-start(%big), calls=%wrapped
  %rs.update = ((f32[16,6]), f32[4,6]) async-update(%rs), calls=%wrapped
  %rs.done = f32[4,6]{1,0} async-done(%rs.update), calls=%wrapped
  %alone = f32[4,6]{1,0} all-reduce(%x), replica_groups=[8,1]<=[8], to_apply=%add
  %cp = (f32[4,6], f32[4,6], u32[], u32[]) collective-permute-start(%x), source_target_pairs={{0,2},{2,4},{4,6}}
  %cp.done = f32[4,6]{1,0} collective-permute-done(%cp)
  %zero = s32[] constant(0)
  %initial = (s32[], f32[4,6]{1,0}) tuple(%zero, %x)
  %loop = (s32[], f32[4,6]{1,0}) while(%initial), condition=%condition, body=%body, metadata={op_name="a/while"}CONFIG
  ROOT %out = f32[4,6]{1,0} get-tuple-element(%loop), index=1
}
"""


@pytest.mark.parametrize(
    ("config", "trips"),
    [
        ("", 7),  # from the constant that the counter is compared with
        (', backend_config={"known_trip_count":{"n":"3"},"other":[{"a":"}"}]}', 3),
    ],
)
def test_asynchronous_combined_and_iota_forms_are_read(config, trips):
    ledger = hlo_ledger(MODULE.replace("CONFIG", config), {"rows": 4, "cols": 2})
    assert ledger.elements() == {
        ("allgather", ("cols",)): 8 * 6,
        ("allreduce", ("rows", "cols")): 4 * 6 + 16 * 6,
        ("reduce_scatter", ("rows",)): 16 * 6,
        ("exchange", ("rows",)): 4 * 6,
        # [2,4]<=[4,2]T(1,0): columns of the 4 x 2 array 0..7, so over rows
        ("allreduce", ("rows",)): trips * 4 * 6,
    }
    assert ledger.bytes_by_mesh_dimension()["rows", "cols"] == 4 * 4 * 6 + 2 * 16 * 6


def test_loop_without_a_bound_is_counted_once_and_marked():
    ledger = hlo_ledger(MODULE.replace("CONFIG", "").replace("direction=LT", "direction=NE"), {"rows": 4, "cols": 2})
    assert ledger.elements()["allreduce", ("rows",)] == 4 * 6
    assert ledger.at_least


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("{{0,1},{2,3}}", [(0, 1), (2, 3)]),
        ("{}", [(0, 1, 2, 3, 4, 5, 6, 7)]),
        ("[2,4]<=[8]", [(0, 1, 2, 3), (4, 5, 6, 7)]),
        ("[4,2]<=[2,4]T(1,0)", [(0, 4), (1, 5), (2, 6), (3, 7)]),
        ("[4,2]<=[2,2,2]T(0,2,1)", [(0, 2), (1, 3), (4, 6), (5, 7)]),
    ],
)
def test_replica_groups_of_every_form(text, groups):
    assert replica_groups(text, 8) == groups


def test_groups_across_mesh_dimensions_are_refused():
    module = MODULE.replace("CONFIG", "").replace("[4,2]<=[8]", "{{0,3},{1,2},{4,7},{5,6}}")
    with pytest.raises(ValueError, match="start.*mesh.*rows"):
        hlo_ledger(module, {"rows": 4, "cols": 2})


@pytest.mark.parametrize("text", ["", "module @jit_f { func.func public @main() }"])
def test_text_that_is_no_hlo_is_refused(text):
    with pytest.raises(ValueError, match="ENTRY"):
        hlo_ledger(text, {"all": 8})


def test_unknown_replica_groups_are_refused():
    with pytest.raises(ValueError, match="unknown form"):
        replica_groups("@mesh", 8)
