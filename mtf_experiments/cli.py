"""What all commands share: flags that are never ignored, virtual devices, exit codes.

A command is a module with `main(argv) -> int | None` that ends in `cli.run(main)`.  Exit codes: 0 done, 2 a mistake of
the user's, 3 the training diverged, 130 interrupted, 143 terminated; anything else is a fault of the program and shows
its traceback.  Nothing here imports jax: `--devices` has to act before jax looks at the environment.
"""

import argparse
import ast
import contextlib
import difflib
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from mtf_experiments.errors import NonFiniteError, UserError, is_user_error, message_of

COMMANDS = ("train", "evaluate", "decode", "score", "plan", "sweep", "report", "prepare")
_DEVICE_FLAG = "--xla_force_host_platform_device_count"
# Hyphens, dashes and the minus sign that word processors put in the place of "-".
_DASHES = "\u2010\u2011\u2012\u2013\u2014\u2015\u2212"


class _StoreOnce(argparse.Action):
    """Store a value; the same flag a second time is an error, for one of the two would be ignored."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        seen = namespace.__dict__.setdefault("_seen", set())
        if option_string is not None and self.dest in seen:
            raise UserError(f"{option_string} is given twice; give it once")
        seen.add(self.dest)
        setattr(namespace, self.dest, values)


class CommandParser(argparse.ArgumentParser):
    """An argument parser that refuses whatever it does not use and names the nearest flag that it knows."""

    def __init__(self, command: str, description: str) -> None:
        super().__init__(prog=f"python -m mtf_experiments.{command}", description=description, allow_abbrev=False)
        self.register("action", None, _StoreOnce)
        self.register("action", "store", _StoreOnce)

    def error(self, message: str) -> NoReturn:
        """Raise UserError where argparse would print its usage and exit."""
        raise UserError(f"{message}\n{self.format_usage().strip()}")

    def add_gin_flags(self, required: bool = True) -> None:
        """Add `--gin_file` and `--gin_param`, both repeatable; the later one wins."""
        self.add_argument(
            "--gin_file",
            action="append",
            default=[],
            required=required,
            metavar="FILE",
            help="Gin file: a path, or a name in the project's gin/ folder; repeatable, later wins",
        )
        self.add_argument(
            "--gin_param",
            action="append",
            default=[],
            metavar="BINDING",
            help="one binding, e.g. \"mesh_shape='rows:4;cols:2'\"; repeatable, wins over files",
        )

    def add_model_dir(self, required: bool = True) -> None:
        """Add `--model_dir`, the run directory."""
        self.add_argument("--model_dir", type=_path, required=required, metavar="DIR", help="the run directory")

    def add_devices(self) -> None:
        """Add `--devices`."""
        self.add_argument("--devices", type=positive, metavar="N", help="run on N virtual CPU devices")

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse `argv`; arrange the virtual devices if `--devices` is given.

        Raises:
          UserError: an unknown, repeated or missing flag, or a bad value.
        """
        # An unknown flag is reported before a missing one: it usually is the missing one, misspelt.
        required = [action for action in self._actions if action.required and action.option_strings]
        for action in required:
            action.required = False
        try:
            args, unknown = self.parse_known_args(argv)
        finally:
            for action in required:
                action.required = True
        args.__dict__.pop("_seen", None)
        for action in self._actions:
            value = getattr(args, action.dest, None)
            values = value if isinstance(value, list) else [value]
            if not action.option_strings:
                unknown += [str(v) for v in values if _has_typographic_dash(v)]
        if unknown:
            raise UserError("\n".join(self._unknown(argument) for argument in unknown))
        missing = [action.option_strings[0] for action in required if not getattr(args, action.dest)]
        if missing:
            self.error(f"the following arguments are required: {', '.join(missing)}")
        set_device_environment(getattr(args, "devices", None))
        return args

    def _unknown(self, argument: str) -> str:
        flags = [flag for action in self._actions for flag in action.option_strings if flag.startswith("--")]
        if _has_typographic_dash(argument):
            dash = argument[0]
            corrected = "--" + argument.lstrip(_DASHES + "-")
            return f"{argument!r} starts with {dash!r} (U+{ord(dash):04X}), not with a hyphen; write {corrected}"
        if not argument.startswith("-"):
            return f"unexpected argument {argument!r}; {self.format_usage().strip()}"
        name = argument.split("=")[0]
        near = difflib.get_close_matches("--" + name.lstrip("-").replace("-", "_"), flags, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        return f"unknown flag {name}{hint} (flags of this command: {', '.join(flags)})"


def _has_typographic_dash(argument: Any) -> bool:
    return isinstance(argument, str) and re.match(rf"[{_DASHES}][{_DASHES}-]*[A-Za-z_]+(=|$)", argument) is not None


def _path(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("it is empty; name a directory")
    return Path(text)


def positive(text: str) -> int:
    """A whole number of at least 1, as the type of a flag."""
    if not re.fullmatch(r"[0-9]+", text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def set_device_environment(devices: int | None) -> None:
    """Ask XLA for `devices` virtual CPU devices (None: leave the choice alone), keeping all other XLA_FLAGS.

    XLA takes the size of its CPU thread pool from NPROC; with fewer threads than devices its collectives can deadlock.
    """
    flags = os.environ.get("XLA_FLAGS", "").split()
    if devices is not None:
        flags = [flag for flag in flags if not flag.startswith(_DEVICE_FLAG)] + [f"{_DEVICE_FLAG}={devices}"]
        os.environ["XLA_FLAGS"] = " ".join(flags)
        os.environ["JAX_PLATFORMS"] = "cpu"
        if "jax" in sys.modules:  # jax read JAX_PLATFORMS when it was imported, XLA reads its flags later
            sys.modules["jax"].config.update("jax_platforms", "cpu")
    if devices is not None or any(flag.startswith(_DEVICE_FLAG) for flag in flags):
        given = os.environ.get("NPROC", "")
        os.environ["NPROC"] = str(max(64, 2 * (devices or 0), int(given) if given.isdigit() else 0))


def check_devices(devices: int | None) -> int:
    """Return the number of devices that jax sees, after comparing it with `--devices` (None: any number).

    Raises:
      UserError: jax has another number of devices than asked for.
    """
    import jax

    found = jax.devices()
    if devices is not None and (len(found) != devices or found[0].platform != "cpu"):
        raise UserError(
            f"--devices={devices} was asked for, but jax has {len(found)} {found[0].platform} device(s); "
            f"its backend was started before the flag was read (XLA_FLAGS is {os.environ.get('XLA_FLAGS')!r})"
        )
    return len(found)


@contextlib.contextmanager
def context(what: str) -> Iterator[None]:
    """Mistakes of the user's in the body are told with `what` before them."""
    try:
        yield
    except Exception as error:
        if not is_user_error(error):
            raise
        raise UserError(f"{what}: {message_of(error)}") from error


def wrote(path: str | os.PathLike[str]) -> None:
    """Tell the user the absolute path of something that the command wrote."""
    print(f"wrote {Path(path).resolve()}", flush=True)


def run(main: Callable[[list[str]], int | None], argv: Sequence[str] | None = None) -> NoReturn:
    """Run `main(argv)` and exit: user mistakes become `error: ...` and a code, other exceptions stay tracebacks."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # text with umlauts must not die of the C locale
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")  # type: ignore[union-attr]
    if argv is None:
        argv = [os.fsencode(argument).decode("utf-8", "surrogateescape") for argument in sys.argv[1:]]
    signal.signal(signal.SIGTERM, _terminated)
    try:
        code = main(list(argv)) or 0
        sys.stdout.flush()
    except KeyboardInterrupt:
        _fail("interrupted", 130)
    except NonFiniteError as error:
        _fail(message_of(error), 3)
    except BrokenPipeError:
        # The reader of our output is gone (`... | head`); keep the interpreter from complaining while it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except Exception as error:
        if not is_user_error(error):
            raise
        _fail(message_of(error), 2)
    sys.exit(code)


def _terminated(signum: int, frame: object) -> None:
    sys.exit(128 + signum)


def _fail(message: str, code: int) -> NoReturn:
    sys.stdout.flush()
    print(f"error: {message}", file=sys.stderr, flush=True)
    sys.exit(code)


def list_commands() -> str:
    """Return one line per command of the package: how to call it and what it does (its docstring's first line)."""
    lines = ["Commands (each answers --help):"]
    for name in COMMANDS:
        path = Path(__file__).with_name(f"{name}.py")
        if path.exists():
            summary = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split("\n")[0]
            lines.append(f"  python -m mtf_experiments.{name:<9} {summary}")
    return "\n".join(lines)
