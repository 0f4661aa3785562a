"""Configurations as text: the resolved configuration of a run, and what differs between two of them."""

import ast
import inspect
import math
import re
from typing import Any

from gin import config as gin_config
from gin import config_parser

from mtf_experiments.config.files import parse
from mtf_experiments.config.names import MACRO, Key, function_of
from mtf_experiments.config.reading import is_read, winning_scope
from mtf_experiments.config.state import winners
from mtf_experiments.config.version import header


def resolved() -> str:
    """Return everything that took effect as one Gin text: macros and bindings that were read, defaults that were used.

    To be called when all configurables have been built.  The text is sorted, has no includes, and loading it gives the
    same text again.  A scope keeps only what was bound in it, so that overriding an unscoped value still reaches it.
    A float default of inf appears as a comment.
    """
    bound = winners()
    read = {key: statement.value for key, statement in bound.items() if is_read(key, bound)}
    macros = [f"{key} = {_required_literal(key, value)}" for key, value in read.items() if key.selector == MACRO]
    lines = {f"{key} = {_required_literal(key, value)}" for key, value in read.items() if key.selector != MACRO}
    for (scope, selector), operative in gin_config._OPERATIVE_CONFIG.items():
        if selector.startswith("gin."):
            continue
        for name, parameter in inspect.signature(function_of(selector)).parameters.items():
            key, text = Key("", selector, name), literal(parameter.default)
            if text is not None and winning_scope(key, scope, bound) is None:
                # Gin does not record a default that it cannot write.
                lines.add(f"{key} = {text}" if name in operative else f"# {key} = {text}")
    return "\n".join([header(), *sorted(macros), "", *sorted(lines, key=lambda line: line.removeprefix("# "))]) + "\n"


def _required_literal(key: Key, value: Any) -> str:
    text = literal(value)
    if text is None:
        raise ValueError(f"{key} has a value that Gin cannot write: {value!r}")
    return text


def literal(value: Any) -> str | None:
    """Return `value` as Gin reads it back, None if there is no way to write it."""
    if isinstance(value, float) and math.isinf(value):
        return "1e999" if value > 0 else "-1e999"
    if isinstance(value, float) and math.isnan(value):
        return None
    if value is None or type(value) in (bool, int, float, str, bytes):
        return repr(value)
    if isinstance(value, gin_config.ConfigurableReference):
        return repr(value)
    if isinstance(value, dict):
        parts = [part for key, item in value.items() for part in (literal(key), literal(item))]
        if any(part is None for part in parts):
            return None
        return "{" + ", ".join(f"{parts[i]}: {parts[i + 1]}" for i in range(0, len(parts), 2)) + "}"
    if isinstance(value, (list, tuple)):
        items = [literal(item) for item in value]
        if any(item is None for item in items):
            return None
        inner = ", ".join(item for item in items if item is not None)
        return f"[{inner}]" if isinstance(value, list) else f"({inner},)" if len(items) == 1 else f"({inner})"
    return None


class _Verbatim(str):
    """A reference that is kept as it was written."""

    def __repr__(self) -> str:
        return str(self)


class _TextDelegate(config_parser.ParserDelegate):
    """Keeps references as text, so that a configuration can be read without its configurables."""

    def configurable_reference(self, scoped_configurable_name: str, evaluate: bool) -> Any:
        return _Verbatim(f"@{scoped_configurable_name}{'()' if evaluate else ''}")

    def macro(self, macro_name: str) -> Any:
        return _Verbatim(f"%{macro_name}")


def flatten(text: str) -> dict[str, str]:
    """Return the bindings of a resolved configuration, name -> value as text; needs no configurable to exist.

    Raises:
      UserError: the text does not parse.
    """
    values = {}
    for statement in parse(text, "configuration", _TextDelegate()):
        if isinstance(statement, config_parser.BindingStatement):
            name = re.sub(r"^/|\.$", "", f"{statement.scope}/{statement.selector}.{statement.arg_name}")
            values[name] = repr(statement.value)
    return values


def macros() -> dict[str, str | float]:
    """Return the macros of the loaded configuration that are numbers or texts, and their values."""
    found = {}
    for name, text in flatten(resolved()).items():
        if "." not in name:
            value = ast.literal_eval(text) if re.match(r"[-'\"0-9]", text) else None
            if isinstance(value, str | int | float):
                found[name] = value
    return found


def diff(before: str, after: str) -> str:
    """Return one line per value that differs between two resolved configurations; "" if they agree."""
    a, b = flatten(before), flatten(after)
    absent = "(not set)"
    names = sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name))
    return "\n".join(f"{name}: {a.get(name, absent)} -> {b.get(name, absent)}" for name in names)
