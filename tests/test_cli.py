"""Commands refuse what they do not use, exit with the promised code, and get the devices that were asked for."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mtf_experiments import cli, errors
from mtf_experiments.errors import UserError

REPOSITORY = Path(__file__).parents[1]


def parser():
    command = cli.CommandParser("train", "Train a model.")
    command.add_gin_flags()
    command.add_model_dir()
    command.add_devices()
    return command


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in ("XLA_FLAGS", "NPROC", "JAX_PLATFORMS"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    import jax

    # Parsing --devices in this process would tell the jax of the other tests its platform, which is cpu anyway.
    assert jax.config.jax_platforms == "cpu"


def refused(*argv):
    with pytest.raises(UserError) as caught:
        parser().parse(argv)
    return str(caught.value)


COMPLETE = ("--gin_file=a.gin", "--model_dir=runs/a")


def test_flags_are_parsed_and_repeatable_ones_keep_their_order():
    args = parser().parse([*COMPLETE, "--gin_file", "b.gin", "--gin_param=x=1", "--gin_param=y = 'a=b'"])
    assert args.gin_file == ["a.gin", "b.gin"] and args.gin_param == ["x=1", "y = 'a=b'"]
    assert args.model_dir == Path("runs/a") and args.devices is None


@pytest.mark.parametrize(
    ("argument", "hint"),
    [
        ("--gin_fle=x", "unknown flag --gin_fle; did you mean --gin_file?"),
        ("--gin-param=x", "unknown flag --gin-param; did you mean --gin_param?"),
        ("--model=x", "unknown flag --model; did you mean --model_dir?"),
        ("-gin_file=x", "unknown flag -gin_file; did you mean --gin_file?"),
        ("--beam_size=4", "flags of this command: --help, --gin_file, --gin_param, --model_dir, --devices"),
        ("\u2013\u2013devices=8", "(U+2013), not with a hyphen; write --devices=8"),
        ("\u2014devices", "(U+2014), not with a hyphen; write --devices"),
        ("decode", "unexpected argument 'decode'"),
    ],
)
def test_unknown_flag_is_refused_with_the_nearest_known_one(argument, hint):
    assert hint in refused(*COMPLETE, argument)


def test_unknown_flag_is_reported_before_the_missing_one():
    assert "did you mean --gin_file?" in refused("--gin_fle=x", "--model_dir=y")
    assert "the following arguments are required: --gin_file" in refused("--model_dir=y")
    assert "the following arguments are required: --gin_file" in refused("--model_dir=y")


def test_typographic_dash_among_positional_arguments_is_not_taken_for_a_name():
    command = cli.CommandParser("report", "Report.")
    command.add_argument("runs", nargs="+")
    assert command.parse(["a", "b"]).runs == ["a", "b"]
    with pytest.raises(UserError, match="write --output=x"):
        command.parse(["a", "\u2013output=x"])


def test_flag_given_twice_is_refused_where_one_would_be_ignored():
    assert refused(*COMPLETE, "--model_dir=other") == "--model_dir is given twice; give it once"


@pytest.mark.parametrize("value", ["0", "-1", "many", "2.0", "\u0662"])
def test_bad_device_count_is_refused(value):
    assert "is not a whole number of at least 1" in refused(*COMPLETE, f"--devices={value}")


def test_devices_keep_foreign_xla_flags_and_replace_an_older_count(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=x --xla_force_host_platform_device_count=3")
    monkeypatch.setenv("NPROC", "2")
    parser().parse([*COMPLETE, "--devices=5"])
    assert os.environ["XLA_FLAGS"] == "--xla_dump_to=x --xla_force_host_platform_device_count=5"
    assert os.environ["JAX_PLATFORMS"] == "cpu" and int(os.environ["NPROC"]) >= 64


def test_environment_is_left_alone_without_devices(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=x")
    monkeypatch.setenv("NPROC", "2")
    parser().parse(COMPLETE)
    assert os.environ["XLA_FLAGS"] == "--xla_dump_to=x" and os.environ["NPROC"] == "2"


def test_wrong_device_count_is_an_error():
    assert cli.check_devices(None) == cli.check_devices(8) == 8
    with pytest.raises(UserError, match="--devices=3 was asked for, but jax has 8 cpu device"):
        cli.check_devices(3)


# --- in a process of its own -----------------------------------------------------------------------------------------

COMMAND = """
import sys
from mtf_experiments import cli
from mtf_experiments.errors import NonFiniteError, UserError

class LayoutError(ValueError):
    user_error = True

def main(argv):
{body}

cli.run(main)
"""


def run(tmp_path, body, *argv, environment=None, **options):
    script = tmp_path / "command.py"
    script.write_text(COMMAND.format(body="\n".join("    " + line for line in body.split("\n"))), encoding="utf-8")
    inherited = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "NPROC", "JAX_PLATFORMS")}
    return subprocess.run(
        [sys.executable, str(script), *argv],
        capture_output=True,
        cwd=tmp_path,
        env={**inherited, "PYTHONPATH": str(REPOSITORY), **(environment or {})},
        timeout=60,
        **options,
    )


@pytest.mark.parametrize(
    ("body", "code", "stderr"),
    [
        ("raise UserError('a.gin:3: no such thing')", 2, "error: a.gin:3: no such thing\n"),
        ("raise LayoutError('does not divide')", 2, "error: does not divide\n"),
        ("raise NonFiniteError('loss is nan at step 7')", 3, "error: loss is nan at step 7\n"),
        ("raise KeyboardInterrupt", 130, "error: interrupted\n"),
        ("return None", 0, ""),
        ("return 5", 5, ""),
    ],
)
def test_exit_codes(tmp_path, body, code, stderr):
    done = run(tmp_path, body)
    assert (done.returncode, done.stderr.decode()) == (code, stderr)


def test_fault_of_the_program_keeps_its_traceback(tmp_path):
    done = run(tmp_path, "raise ValueError('a bug')")
    assert done.returncode == 1 and b"Traceback" in done.stderr and b"ValueError: a bug" in done.stderr


def test_termination_exits_143_and_runs_clean_up(tmp_path):
    body = "import os, signal, time\ntry:\n    os.kill(os.getpid(), signal.SIGTERM)\n    time.sleep(9)\n"
    done = run(tmp_path, body + "finally:\n    print('cleaned')")
    assert (done.returncode, done.stdout) == (128 + signal.SIGTERM, b"cleaned\n")


def test_output_is_utf8_in_the_c_locale(tmp_path):
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = run(tmp_path, "print(argv[0])\nraise UserError('schön')", "größe", environment=plain)
    assert done.stdout.decode("utf-8") == "größe\n" and done.stderr.decode("utf-8") == "error: schön\n"


def test_closed_pipe_is_no_traceback(tmp_path):
    script = "for i in range(100000):\n    print(i)"
    run(tmp_path, script)  # writes the script
    done = subprocess.run(
        f"{sys.executable} command.py | head -1",
        shell=True,
        cwd=tmp_path,
        capture_output=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    assert (done.stdout, done.stderr) == (b"0\n", b"")


DEVICES = """
command = cli.CommandParser('x', 'X.')
command.add_devices()
args = command.parse(argv)
{before}
assert 'jax' not in sys.modules or {imported}
print(cli.check_devices(args.devices))
"""


def test_devices_work_whatever_the_environment_says(tmp_path):
    foreign = "--xla_cpu_enable_fast_math=false --xla_force_host_platform_device_count=2"
    body = DEVICES.format(before="pass", imported=False)
    done = run(tmp_path, body, "--devices=3", environment={"XLA_FLAGS": foreign, "JAX_PLATFORMS": "cuda", "NPROC": "1"})
    assert (done.stdout, done.returncode) == (b"3\n", 0), done.stderr


def test_devices_work_when_jax_was_imported_before(tmp_path):
    body = "import jax\n" + DEVICES.format(before="pass", imported=True)
    done = run(tmp_path, body, "--devices=3", environment={"JAX_PLATFORMS": "cuda"})
    assert (done.stdout, done.returncode) == (b"3\n", 0), done.stderr


def test_devices_after_the_backend_was_started_are_refused_and_not_ignored(tmp_path):
    body = "import jax\njax.devices()\n" + DEVICES.format(before="pass", imported=True)
    done = run(tmp_path, body, "--devices=3", environment={"JAX_PLATFORMS": "cpu"})
    assert done.returncode == 2 and b"--devices=3 was asked for, but jax has 1 cpu device" in done.stderr


def package(*argv):
    return subprocess.run(
        [sys.executable, "-m", "mtf_experiments", *argv], cwd=REPOSITORY, capture_output=True, text=True
    )


def test_package_lists_the_commands_that_exist():
    done = package()
    listed = set(re.findall(r"python -m mtf_experiments\.(\w+)  +\S", done.stdout))
    assert listed == {name for name in cli.COMMANDS if (REPOSITORY / "mtf_experiments" / f"{name}.py").exists()}
    assert done.returncode == 0


def test_calling_the_package_with_a_command_is_refused_with_the_right_way():
    done = package("train")
    assert done.returncode == 2 and "write python -m mtf_experiments.train" in done.stderr


def test_commands_can_be_imported_without_jax():
    code = "import sys, mtf_experiments.cli, mtf_experiments.config; assert 'jax' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY).returncode == 0


def test_written_paths_are_absolute(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    cli.wrote("table.md")
    assert capsys.readouterr().out == f"wrote {tmp_path.resolve() / 'table.md'}\n"


def test_call_lines_of_gin_are_no_part_of_a_message():
    text = "bad\n  In call to configurable 'Net' (<class 'a.Net'>) in scope 'enc'\n  In call to configurable 'R' (<x>)"
    assert errors.message_of(UserError(text)) == "bad"
