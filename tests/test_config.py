"""Strict Gin: misspelt, unread, mistyped, undefined or missing things are refused with their file and line."""

import dataclasses
import logging
import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import gin
import pytest

from mtf_experiments import config
from mtf_experiments.config.types import Reference, conforms
from mtf_experiments.errors import UserError


@gin.configurable(module="config_test")
@dataclasses.dataclass(frozen=True, kw_only=True)
class ByName:
    width: int
    depth: int


class Optimizer(Protocol):
    def update(self) -> None: ...


@gin.configurable(module="config_test")
@dataclasses.dataclass
class Sgd:
    rate: float = 0.5
    momentum: float | None = None
    clip: float = math.inf

    def update(self) -> None: ...


@gin.configurable(module="config_test")
@dataclasses.dataclass
class Adam:
    rate: float = 0.1
    betas: tuple[float, ...] = (0.9, 0.98)

    def update(self) -> None: ...


@gin.configurable(module="config_test")
@dataclasses.dataclass
class Net:
    width: int = 8
    activation: Literal["relu", "gelu"] = "relu"
    bias: bool = False
    sizes: Sequence[int] = ()

    def __post_init__(self) -> None:
        if self.width % 2:
            raise UserError(f"width must be even, got {self.width}")


@gin.configurable(module="config_test")
@dataclasses.dataclass
class Root:
    steps: int
    optimizer: Optimizer | None = None
    encoder: Net | None = None
    decoder: Net | None = None
    name: str = "root"
    make: Callable[..., Any] | None = None


@gin.configurable(module="config_test")
@dataclasses.dataclass
class Unused:
    x: int = 0


@gin.configurable(module="config_test")
def required_function(size: int = gin.REQUIRED) -> int:
    return size


@pytest.fixture(autouse=True)
def clean():
    config.clear()
    yield
    config.clear()


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write_file(name, text):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return name

    return write_file


def refused(action, *arguments):
    with pytest.raises(UserError) as caught:
        action(*arguments)
    return str(caught.value)


def built(*gin_params, files=()):
    config.load(files, gin_params)
    config.check_types()
    return config.build(Root)


# --- files -----------------------------------------------------------------------------------------------------------


def test_later_files_and_parameters_win(write):
    write("a.gin", "Root.steps = 1\nRoot.name = 'a'\n")
    write("b.gin", "Root.steps = 2\n")
    root = built("Root.name = 'p'", "Root.name = 'q'", files=["a.gin", "b.gin"])
    assert (root.steps, root.name) == (2, "q")
    assert config.locate("Root.steps") == "b.gin:1"
    assert config.locate("Root.name") == "--gin_param"
    assert config.locate("Root.optimizer") is None


def test_include_is_found_beside_the_including_file_and_in_the_gin_folder(write, monkeypatch, tmp_path):
    monkeypatch.setattr("mtf_experiments.config.files.gin_folders", lambda: [tmp_path / "shipped"])
    write("shipped/base/net.gin", "Net.width = 4\n")
    write("shipped/run.gin", "include 'base/net.gin'\nRoot.encoder = @Net()\n")
    write("mine/part.gin", "Root.steps = 3\n")
    write("mine/run.gin", "include 'part.gin'\ninclude 'run_of_mine.gin'\n")
    write("mine/run_of_mine.gin", "include 'base/net.gin'\nRoot.encoder = @Net()\n")
    assert built(files=["mine/run.gin"]).encoder.width == 4
    assert built("Root.steps = 1", files=["run.gin"]).encoder.width == 4
    assert config.locate("Net.width") == "shipped/base/net.gin:1"


def test_missing_file_lists_close_names(write, monkeypatch, tmp_path):
    monkeypatch.setattr("mtf_experiments.config.files.gin_folders", lambda: [tmp_path / "shipped"])
    write("shipped/lm_tiny.gin", "")
    assert "did you mean lm_tiny.gin?" in refused(config.load, ["lm_tyni.gin"])
    write("run.gin", "\ninclude 'lm_tinny.gin'\n")
    message = refused(config.load, ["run.gin"])
    assert message.startswith("run.gin:2: there is no Gin file 'lm_tinny.gin'") and "lm_tiny.gin?" in message


def test_including_oneself_is_refused(write):
    write("a.gin", "include 'b.gin'")
    write("b.gin", "include 'a.gin'")
    assert "a.gin includes itself" in refused(config.load, ["a.gin"])


def test_import_statement_is_refused(write):
    write("a.gin", "Root.steps = 1\nimport os\n")
    assert refused(config.load, ["a.gin"]).startswith("a.gin:2: import statements are not supported")


def test_text_that_is_not_utf8_is_refused(tmp_path):
    path = tmp_path / "a.gin"
    path.write_bytes(b"Root.name = '\xff'")
    assert "a.gin" in refused(config.load, [path]) and "utf-8" in refused(config.load, [path])


def test_nothing_is_logged_and_no_import_of_importlib_util_is_needed(tmp_path):
    (tmp_path / "a.gin").write_text("include 'b.gin'\n")
    (tmp_path / "b.gin").write_text("")
    code = "from mtf_experiments import config; config.load(['a.gin'])"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, env=_env())
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def _env():
    import os
    from pathlib import Path

    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}


@pytest.mark.parametrize("text", ["Root.steps = 2*3", "Root.steps = (1,", "Root.steps =", "Root steps = 1", "x = $"])
def test_syntax_error_names_file_and_line(write, text):
    write("a.gin", f"Root.name = 'x'\n{text}\n")
    assert refused(config.load, ["a.gin"]).startswith(("a.gin:2: syntax error", "a.gin:3: syntax error"))


def test_unquoted_text_on_the_command_line_gets_a_hint():
    message = refused(config.load, [], ["Root.name=rows:4"])
    assert "--gin_param 'Root.name=rows:4'" in message and "quotes" in message


# --- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("Adm.rate = 1.0", "unknown configurable 'Adm'; did you mean Adam?"),
        ("Adam.raet = 1.0", "Adam has no parameter 'raet'; did you mean rate? (it has rate, betas)"),
        ("Root.optimizer = @Adm()", "No configurable matching reference '@Adm()'; did you mean Adam?"),
        ("Root.steps = %stesp", "Root.steps uses the undefined macro %stesp; did you mean steps?"),
        ("Root.steps = (1, [%nothing_like_it])", "uses the undefined macro %nothing_like_it"),
        ("loop = %loop", "the macros %loop -> %loop go round in a circle"),
        ("Adm:\n  rate = 1.0", "unknown configurable 'Adm'"),
    ],
)
def test_unknown_name_is_refused_with_place_and_nearest_name(write, line, hint):
    write("a.gin", f"steps = 5\n\n{line}\n")
    message = refused(config.load, ["a.gin"])
    assert message.startswith("a.gin:3: ") and hint in message


def test_renamed_setting_names_its_new_name(monkeypatch):
    monkeypatch.setitem(config.RENAMED, "Adam.learning_rate", "Adam.rate")
    monkeypatch.setitem(config.RENAMED, "Adadelta", "")
    monkeypatch.setitem(config.RENAMED, "n_steps", "steps")
    assert "it is now called Adam.rate" in refused(config.load, [], ["Adam.learning_rate = 1.0"])
    assert "no longer exists" in refused(config.load, [], ["Adadelta.rate = 1.0"])
    built("Root.steps = 1", "n_steps = 2")
    assert "it is now called steps" in refused(config.check_all_read)


def test_required_value_that_is_not_set_is_refused(write):
    write("a.gin", "steps = %gin.REQUIRED\nRoot.steps = %steps\n")
    assert refused(config.load, ["a.gin"]).startswith("a.gin:1: steps is required and not set")
    assert built("steps = 3", files=["a.gin"]).steps == 3
    config.load([])
    assert refused(config.build, Root) == "required and not set: Root.steps; set it in a Gin file or by --gin_param"
    assert "required and not set: required_function.size" in refused(config.build, required_function)
    config.load([])
    message = "required and not set: ByName.width, ByName.depth; set it"
    assert refused(config.build, ByName).startswith(message)


def test_error_of_a_constructor_reaches_the_user_without_gins_call_lines():
    config.load([], ["Root.steps = 1", "Root.encoder = @Net()", "Net.width = 3"])
    assert refused(config.build, Root) == "width must be even, got 3"


def test_type_error_inside_a_constructor_stays_a_traceback():
    @gin.configurable(module="config_test")
    def broken(x: int = 1) -> int:
        return x + "1"  # type: ignore[operator]

    config.load([])
    with pytest.raises(TypeError):
        config.build(broken)


# --- everything is read ----------------------------------------------------------------------------------------------


def test_unread_macro_is_refused(write):
    write("a.gin", "d_model = 4\nNet.width = %d_model\nRoot.encoder = @Net()\n\nD_MODLE = 5\n")
    built("Root.steps = 1", files=["a.gin"])
    assert refused(config.check_all_read) == "a.gin:5: D_MODLE = 5 is never read; did you mean d_model?"


def test_macro_that_only_an_unread_macro_uses_is_refused():
    built("Root.steps = 1", "a = 1", "b = %a")
    assert "a = 1 is never read" in refused(config.check_all_read)


def test_unread_parameter_is_refused():
    built("Root.steps = 1", "Unused.x = 1")
    assert refused(config.check_all_read).startswith("--gin_param: Unused.x = 1 is never read: nothing uses Unused")


def test_binding_in_a_scope_that_never_runs_is_refused():
    built("Root.steps = 1", "Root.encoder = @enc/Net()", "enc/Net.width = 2", "encc/Net.width = 4")
    message = refused(config.check_all_read)
    assert "encc/Net.width = 4 is never read: Net is never used in the scope encc" in message
    assert "did you mean enc?" in message and "\n" not in message


def test_binding_hidden_by_every_scope_is_refused():
    params = ["Root.steps = 1", "Root.encoder = @enc/Net()", "enc/Net.width = 2", "Net.width = 4"]
    built(*params)
    assert "Net.width = 4 is never read: the program passes" in refused(config.check_all_read)
    built(*params, "Root.decoder = @Net()")
    config.check_all_read()


def test_argument_that_the_program_passes_itself_makes_its_binding_unread():
    config.load([], ["Net.width = 4"])
    assert Net(width=2).width == 2
    assert "Net.width = 4 is never read" in refused(config.check_all_read)


def test_settings_of_a_part_that_a_later_statement_replaced_are_no_mistake(write):
    write("base.gin", "rate = 0.3\nSgd.rate = %rate\nRoot.optimizer = @Sgd()\nRoot.steps = 1\n")
    built("Root.optimizer = @Adam()", files=["base.gin"])
    config.check_all_read()
    built("Sgd.rate = 0.7", files=["base.gin"])  # takes its only reader from the macro
    config.check_all_read()


def test_settings_written_after_their_part_was_replaced_are_a_mistake(write):
    write("base.gin", "rate = 0.3\nSgd.rate = %rate\nRoot.optimizer = @Sgd()\nRoot.steps = 1\n")
    built("Root.optimizer = @Adam()", "Sgd.momentum = 0.9", "rate = 0.5", files=["base.gin"])
    message = refused(config.check_all_read)
    assert "Sgd.momentum = 0.9 is never read: nothing uses Sgd" in message and "rate = 0.5 is never read" in message
    assert "base.gin" not in message


def test_all_unread_lines_are_listed_at_once():
    built("Root.steps = 1", "x = 1", "y = 2")
    assert len(refused(config.check_all_read).split("\n")) == 2


def test_loading_forgets_what_was_read_before():
    built("Root.steps = 1", "Root.encoder = @Net()", "Net.width = 2")
    config.check_all_read()
    built("Root.steps = 1", "Net.width = 2")
    assert "Net.width" in refused(config.check_all_read)


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
