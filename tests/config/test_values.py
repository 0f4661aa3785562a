"""Strict Gin: values have the types that are asked for, and the resolved configuration repeats itself."""

import logging
import math
from collections.abc import Callable
from typing import Any, Literal

import pytest

from mtf_experiments import config
from mtf_experiments.config.types import Reference, conforms
from tests.config.configurables import (
    Net,
    built,
    refused,
)

# --- types -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "got", "wanted"),
    [
        ("Root.steps = 1.5", "float 1.5", "int"),
        ("Root.steps = True", "bool True", "int"),
        ("Root.steps = None", "NoneType None", "int"),
        ("Adam.rate = 'x'", "str 'x'", "float"),
        ("Adam.rate = False", "bool False", "float"),
        ("Adam.betas = [0.9]", "list [0.9]", "tuple[float, ...]"),
        ("Adam.betas = (0.9, 'x')", "tuple (0.9, 'x')", "tuple[float, ...]"),
        ("Sgd.momentum = 'x'", "str 'x'", "float | None"),
        ("Net.activation = 'rleu'", "str 'rleu'", "Literal['relu', 'gelu']"),
        ("Net.bias = 1", "int 1", "bool"),
        ("Net.sizes = 'abc'", "str 'abc'", "Sequence[int]"),
        ("Root.encoder = @Adam()", "@Adam", "Net | None"),
        ("Root.encoder = @Net", "@Net", "Net | None"),
    ],
)
def test_wrong_type_names_place_value_and_wanted_type(write, line, got, wanted):
    write("a.gin", f"\n{line}\n")
    config.load(["a.gin"])
    assert refused(config.check_types) == f"a.gin:2: {line.split(' =')[0]} got {got}, wanted {wanted}"


def test_wrong_type_of_a_macro_names_both_places(write):
    write("a.gin", "steps = 2\nRoot.steps = %steps\n")
    config.load(["a.gin"], ["steps = 'many'"])
    message = refused(config.check_types)
    assert message == "a.gin:2: Root.steps got str 'many' (%steps is set at --gin_param), wanted int"


@pytest.mark.parametrize(
    "line",
    [
        "Adam.rate = 1",
        "Sgd.momentum = None",
        "Adam.betas = ()",
        "Net.sizes = [1, 2]",
        "Net.sizes = (1, 2)",
        "Net.activation = 'gelu'",
        "Root.optimizer = @Sgd()",
        "Root.make = @Net",
        "Root.steps = @required_function()",
    ],
)
def test_right_types_are_accepted(line):
    config.load([], [line])
    config.check_types()


@pytest.mark.parametrize(
    ("value", "annotation", "fits"),
    [
        ({"a": 1}, dict[str, int], True),
        ({"a": "b"}, dict[str, int], False),
        ((1, "a"), tuple[int, str], True),
        ((1,), tuple[int, str], False),
        (True, Literal[1], False),
        ([(1, 2.0)], list[tuple[int, float]], True),
        ("x", Any, True),
        ("x", Callable[[], int], False),
        (Reference(Net, False), type[Net], True),
        (Reference(len, True), int, True),
        (3, "not resolvable", True),
    ],
)
def test_annotations_of_containers_and_references(value, annotation, fits):
    assert conforms(value, annotation) is fits


# --- resolved text ---------------------------------------------------------------------------------------------------


def test_resolved_configuration_has_every_value_and_reloads_to_itself(write):
    write("base.gin", "width = 4\nenc/Net.width = %width\nRoot.encoder = @enc/Net()\nRoot.decoder = @Net()\n")
    write("run.gin", "include 'base.gin'\nRoot.steps = 1\nRoot.steps = 2\nRoot.optimizer = @Sgd()\n")
    first = built("Root.optimizer = @Adam()", "Root.name = 'ümläut\\n'", files=["run.gin"])
    text = config.resolved()
    assert text.split("\n") == [
        "# mtf_experiments config, schema version 1",
        "width = 4",
        "",
        "Adam.betas = (0.9, 0.98)",
        "Adam.rate = 0.1",
        "Net.activation = 'relu'",
        "Net.bias = False",
        "Net.sizes = ()",
        "Net.width = 8",
        "Root.decoder = @Net()",
        "Root.encoder = @enc/Net()",
        "Root.make = None",
        "Root.name = 'ümläut\\n'",
        "Root.optimizer = @Adam()",
        "Root.steps = 2",
        "enc/Net.width = %width",
        "",
    ]
    write("config.gin", text)
    assert built(files=["config.gin"]) == first
    config.check_all_read()
    assert config.resolved() == text


def test_resolved_configuration_can_be_overridden_where_it_is_read(write):
    built("Root.steps = 1", "Root.encoder = @enc/Net()", "Net.width = 2")
    write("config.gin", config.resolved())
    assert built("Net.width = 6", "Net.bias = True", files=["config.gin"]).encoder == Net(width=6, bias=True)
    config.check_all_read()


def test_infinite_values_survive(write):
    built("Root.steps = 1", "Root.optimizer = @Sgd()", "Sgd.rate = 1e999", "Sgd.momentum = -1e999")
    write("config.gin", config.resolved())
    assert "# Sgd.clip = 1e999" in config.resolved()
    again = built(files=["config.gin"]).optimizer
    assert (again.rate, again.momentum, again.clip) == (math.inf, -math.inf, math.inf)


def test_newer_schema_is_refused_and_the_own_one_is_read(write):
    write("a.gin", "Root.steps = 1\n# mtf_experiments config, schema version 999\n")
    assert "a.gin has schema version 999, written by a newer release" in refused(config.load, ["a.gin"])
    write("b.gin", "# mtf_experiments config, schema version 1\nRoot.steps = 1\n")
    assert built(files=["b.gin"]).steps == 1


def test_difference_of_two_configurations_names_changed_values():
    a = "# comment\nwidth = 4\nNet.width = %width\nenc/Net.bias = True\nRoot.encoder = @enc/Net()\n"
    b = "width = 8\nNet.width = %width\nRoot.encoder = @Net()\nNever.registered = 'x'\n"
    assert config.diff(a, b).split("\n") == [
        "Never.registered: (not set) -> 'x'",
        "Root.encoder: @enc/Net() -> @Net()",
        "enc/Net.bias: True -> (not set)",
        "width: 4 -> 8",
    ]
    assert config.diff(a, a) == ""


def test_configuration_in_a_with_block_is_gone_afterwards():
    with config.loaded(gin_params=["Net.width = 2"]):
        assert Net().width == 2
    assert Net().width == 8


def test_root_logger_is_left_alone(caplog, write):
    write("a.gin", "include 'b.gin'")
    write("b.gin", "")
    with caplog.at_level(logging.DEBUG):
        config.load(["a.gin"])
    assert not caplog.records
