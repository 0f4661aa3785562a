import pytest

from mtf_experiments import mtf
from mtf_experiments.mtf.dimension import Shape, union
from tests.mtf.helpers import dims


def test_two_dimensions_of_one_name_are_refused_whatever_their_sizes():
    with pytest.raises(mtf.ShapeError, match=r"\[a=2, b=3, a=4\] has two dimensions named a; rename one"):
        Shape(dims("a:2 b:3 a:4"))


@pytest.mark.parametrize("name", ["", "2a", "a b", "a;b", "a:b", "a.b"])
def test_a_name_that_the_layout_grammar_could_not_hold_is_refused(name):
    with pytest.raises(mtf.ShapeError, match="not an identifier"):
        mtf.Dimension(name, 1)


def test_a_negative_size_is_refused():
    with pytest.raises(mtf.ShapeError, match="dimension a has the negative size -1"):
        mtf.Dimension("a", -1)


def test_a_dimension_of_another_size_is_not_found():
    shape = Shape(dims("a:2 b:3"))
    assert shape.axis("b") == shape.axis(mtf.Dimension("b", 3)) == 1
    with pytest.raises(mtf.ShapeError, match=r"dimension b has size 3 in \[a=2, b=3\], but 4 was meant"):
        shape.find(mtf.Dimension("b", 4))
    with pytest.raises(mtf.ShapeError, match=r"no dimension named c in \[a=2, b=3\]"):
        shape.axis("c")


def test_without_and_renamed_refuse_absent_dimensions():
    shape = Shape(dims("a:2 b:3"))
    assert shape.without("a") == Shape(dims("b:3"))
    assert shape.renamed({"a": "c"}) == Shape(dims("c:2 b:3"))
    assert shape.renamed({"a": "b", "b": "a"}) == Shape(dims("b:2 a:3"))
    with pytest.raises(mtf.ShapeError):
        shape.without("c")
    with pytest.raises(mtf.ShapeError):
        shape.renamed({"c": "d"})
    with pytest.raises(mtf.ShapeError, match="two dimensions named b"):
        shape.renamed({"a": "b"})


def test_union_keeps_the_order_of_first_appearance_and_refuses_two_sizes_of_one_name():
    assert union([Shape(dims("a:2 b:3")), Shape(dims("c:4 a:2"))]) == Shape(dims("a:2 b:3 c:4"))
    with pytest.raises(mtf.ShapeError, match="dimension a has size 2 in one tensor and 3 in another"):
        union([Shape(dims("a:2")), Shape(dims("a:3"))])


def test_elements_of_scalars_and_of_empty_tensors():
    assert Shape([]).elements == 1
    assert Shape(dims("a:0 b:3")).elements == 0
