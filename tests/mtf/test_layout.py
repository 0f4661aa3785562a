import re

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtf_experiments import mtf
from tests.mtf.helpers import dims, mesh_of, tensor

BATCH, IO, HIDDEN = dims("batch:12 io:8 hidden:16")


def two_layers(x, w, v):
    h = mtf.relu(mtf.einsum([x, w], [BATCH, HIDDEN]))
    return mtf.einsum([h, v], [BATCH, IO])


ARGUMENTS = (tensor([BATCH, IO]), tensor([IO, HIDDEN], 1), tensor([HIDDEN, IO], 2))


def refused(mesh, layout, function=two_layers, arguments=ARGUMENTS):
    """The message with which a layout is refused: alike on devices, before anything is compiled, and without them."""
    messages = []
    for m in (mesh_of(mesh), mtf.abstract_mesh(mesh)):
        with pytest.raises(mtf.LayoutError) as error:
            jax.make_jaxpr(mtf.spmd(function, m, layout))(*arguments)
        messages.append(str(error.value))
    assert messages[0] == messages[1]
    return messages[0]


@pytest.mark.parametrize(
    "text", ["rows:2;cols:4", "rows:2,cols:4", "rows:2.cols:4", "rows:2 cols:4", " rows:2 ;, cols:4;"]
)
def test_every_separator_of_the_grammar_is_read(text):
    assert dict(mtf.MeshShape(text)) == {"rows": 2, "cols": 4}
    assert str(mtf.MeshShape(text)) == "rows:2;cols:4"


@pytest.mark.parametrize(
    "text", ["rows", "rows:", ":2", "rows=2", "rows:2:3", "rows:x", "rows:0", "rows:-2", "rows:2.5", "2:2"]
)
def test_a_malformed_mesh_is_refused_with_the_offending_part(text):
    with pytest.raises(mtf.LayoutError, match=re.escape(repr(text))):
        mtf.MeshShape(text)


def test_a_mesh_dimension_named_twice_is_refused():
    with pytest.raises(mtf.LayoutError, match="names rows twice"):
        mtf.MeshShape("rows:2;rows:4")


def test_the_open_size_is_what_is_left_of_the_devices():
    assert dict(mtf.MeshShape("rows:2;cols:-1").resolve(8)) == {"rows": 2, "cols": 4}
    assert mtf.make_mesh("rows:-1").axis_sizes == (8,)
    with pytest.raises(mtf.LayoutError, match="more than one size open"):
        mtf.MeshShape("rows:-1;cols:-1")
    with pytest.raises(mtf.LayoutError, match="product of 3, but there are 8 devices"):
        mtf.MeshShape("rows:3;cols:-1").resolve(8)


@pytest.mark.parametrize("text, product", [("a:4,b:4", 16), ("a:4", 4), ("a:1", 1), ("a:3;b:3", 9)])
def test_a_mesh_of_another_product_than_the_devices_is_refused_even_if_it_divides_them(text, product):
    with pytest.raises(mtf.LayoutError, match=f"product of {product}, but there are 8 devices"):
        mtf.make_mesh(text)


@pytest.mark.parametrize("sizes", [{"rows": 0}, {"rows": -3}])
def test_a_mesh_made_from_a_mapping_is_checked_too(sizes):
    with pytest.raises(mtf.LayoutError, match="want a positive integer or -1"):
        mtf.MeshShape(sizes)


def test_a_second_rule_for_one_dimension_is_refused():
    for text in ("heads:rows;heads:cols", "heads:rows;heads:rows", "heads:rows;heads?:rows"):
        with pytest.raises(mtf.LayoutError, match="names heads twice"):
            mtf.Layout(text)


@given(
    st.dictionaries(
        st.from_regex(r"[a-z_][a-z0-9_]{0,6}", fullmatch=True),
        st.tuples(st.sampled_from(["rows", "cols", "all"]), st.booleans()),
        max_size=5,
    )
)
@settings(max_examples=30, deadline=None, derandomize=True)
def test_a_layout_survives_being_written_and_read(rules):
    layout = mtf.Layout({name + "?" * optional: mesh for name, (mesh, optional) in rules.items()})
    assert mtf.Layout(str(layout)) == layout
    assert hash(mtf.Layout(str(layout))) == hash(layout)
    assert dict(layout) == {name: mesh for name, (mesh, _) in rules.items()}


def test_empty_layouts_and_meshes_survive_being_written_and_read():
    assert mtf.Layout(str(mtf.Layout(""))) == mtf.Layout("")
    assert dict(mtf.MeshShape(str(mtf.MeshShape("")))) == {}
    assert repr(mtf.Layout("")) == "(empty)"


def test_a_rule_for_an_unknown_mesh_dimension_is_refused_with_the_nearest_one():
    message = refused("rows:2;cols:4", "batch:row")
    assert "batch:row" in message and "did you mean rows?" in message and "rows, cols" in message
    with pytest.raises(mtf.LayoutError, match="no dimension row"):
        mtf.place(ARGUMENTS[0], mesh_of("rows:2"), "batch:row")


def test_a_rule_that_matches_no_dimension_is_refused_with_the_nearest_one_unless_optional():
    message = refused("rows:2;cols:4", "batch:rows;hiden:cols")
    assert "hiden:cols" in message and "did you mean hidden?" in message and "batch, hidden, io" in message
    assert "hiden?:cols" in message
    mesh = mtf.abstract_mesh("rows:2;cols:4")
    assert jax.eval_shape(mtf.spmd(two_layers, mesh, "batch:rows;hiden?:cols"), *ARGUMENTS).shape == (BATCH, IO)


@pytest.mark.parametrize(
    "mesh, layout, dimension, size, axis, ways",
    [
        ("rows:8", "batch:rows", "batch", 12, "rows", 8),
        ("rows:2;cols:3", "hidden:cols;batch:rows", "hidden", 16, "cols", 3),
    ],
)
def test_a_size_that_does_not_divide_is_refused_naming_tensor_dimension_sizes_and_what_would_be_legal(
    mesh, layout, dimension, size, axis, ways
):
    def program(params, x):
        return two_layers(x, params["wi"], params["wo"])

    arguments = ({"wi": ARGUMENTS[1], "wo": ARGUMENTS[2]}, ARGUMENTS[0])
    message = refused(mesh, layout, program, arguments)
    assert ("tensor wi" if dimension == "hidden" else "tensor argument 1") in message
    assert f"{dimension}={size}" in message and f"{dimension}:{axis}" in message and f" {ways} processors" in message
    assert f"multiple of {ways}" in message
    assert ("1, 2, 3, 4, 6, 12" if size == 12 else "1, 2, 4, 8, 16") in message


def test_a_size_that_does_not_divide_inside_the_program_is_refused_too():
    def program(x):
        return mtf.rename(mtf.slice_dimension(x, "io", 0, 6), io="part")

    message = refused("rows:4", "part:rows", program, ARGUMENTS[:1])
    assert "part=6" in message and "4 processors" in message


def test_two_dimensions_of_one_tensor_on_one_mesh_dimension_are_refused_naming_both():
    message = refused("rows:2;cols:4", "batch:cols;hidden:cols")
    assert "batch and hidden" in message and "mesh dimension cols" in message


def test_two_dimensions_of_a_contraction_on_one_mesh_dimension_are_refused_although_no_tensor_has_both():
    x, w = tensor("a:4 b:4"), tensor("b:4 c:4")

    def program(x, w):
        return mtf.reduce_sum(mtf.einsum([mtf.reduce_sum(x, "b"), mtf.reduce_sum(w, "b")], dims("a:4")), "a")

    message = refused("rows:2", "a:rows;c:rows", program, (x, w))
    assert "einsum" in message and "a and c" in message


def test_heads_and_feed_forward_may_share_a_mesh_dimension_while_no_tensor_has_both():
    x, w, v = tensor("b:2 m:4"), tensor("m:4 heads:4"), tensor("m:4 d_ff:8")

    def program(x, w, v):
        a, f = mtf.einsum([x, w], dims("b:2 heads:4")), mtf.einsum([x, v], dims("b:2 d_ff:8"))
        return mtf.reduce_sum(a, "heads") + mtf.reduce_sum(f, "d_ff")

    traced = mtf.spmd(program, mtf.abstract_mesh("model:4"), "heads:model;d_ff:model")
    assert jax.eval_shape(traced, x, w, v).shape == tuple(dims("b:2"))


def test_mesh_dimensions_of_one_processor_split_nothing_and_forbid_nothing():
    layout = "batch:rows;io:rows;hidden:cols"
    np.testing.assert_allclose(
        mtf.spmd(two_layers, mesh_of("rows:1;cols:2"), layout)(*ARGUMENTS).array,
        two_layers(*ARGUMENTS).array,
        rtol=1e-5,
    )


def test_a_mesh_without_devices_needs_the_open_size_to_be_resolved():
    assert mtf.abstract_mesh("rows:2;cols:-1", 512).axis_sizes == (2, 256)
    with pytest.raises(mtf.LayoutError):
        mtf.abstract_mesh("rows:2;cols:-1")
