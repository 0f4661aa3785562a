"""Strict Gin: what is misspelt, missing or never read is refused with its file and line."""

import subprocess
import sys

import gin
import pytest

from mtf_experiments import config
from tests.config.configurables import ByName, Net, Root, built, refused, required_function

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

    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}


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
