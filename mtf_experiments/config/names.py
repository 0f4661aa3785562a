"""Names of configurables, parameters and macros: looking them up, and suggesting what was meant."""

import inspect
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple

from gin import config as gin_config
from gin import config_parser

from mtf_experiments.errors import UserError

MACRO, CONSTANT = "gin.macro", "gin.constant"
# Old name -> new name of macros ("d_model"), configurables ("Adafactor") and parameters ("Adafactor.decay_rate") that a
# version of the schema changed; an empty new name says that the setting is gone.
RENAMED: dict[str, str] = {}


class Key(NamedTuple):
    """What a statement binds: a parameter of a configurable in a scope; a macro `m` is `(m, "gin.macro", "value")`."""

    scope: str
    selector: str
    parameter: str

    def __str__(self) -> str:
        if self.selector == MACRO:
            return self.scope
        name = f"{gin_config._REGISTRY.minimal_selector(self.selector)}.{self.parameter}"
        return f"{self.scope}/{name}" if self.scope else name


def configurables() -> list[str]:
    """Return the names of all configurables, as short as is unambiguous, without Gin's own."""
    registry = gin_config._REGISTRY
    return sorted(registry.minimal_selector(name) for name, _ in registry.items() if not name.startswith("gin."))


def function_of(selector: str) -> Callable[..., Any]:
    """Return the function or class that is registered under the complete name `selector`."""
    return gin_config._REGISTRY[selector].wrapped  # type: ignore[union-attr]


def complete_selector(name: str, where: str) -> str:
    """Return the complete name of the one configurable that `name` means.

    Raises:
      UserError: none or several; with the nearest known name.
    """
    matches = gin_config._REGISTRY.matching_selectors(name)
    if len(matches) > 1:
        raise UserError(f"{where}: {name!r} is ambiguous, it may mean {' or '.join(sorted(matches))}")
    if not matches:
        raise UserError(f"{where}: unknown configurable {name!r}{hint_for(name, configurables())}")
    return matches[0]


def key_of(statement: config_parser.BindingStatement, where: str) -> Key:
    """Return what `statement` binds.

    Raises:
      UserError: the configurable or its parameter is unknown.
    """
    if not statement.arg_name:
        return Key("/".join(filter(None, [statement.scope, statement.selector])), MACRO, "value")
    selector = complete_selector(statement.selector, where)
    parameters = inspect.signature(function_of(selector)).parameters
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    if statement.arg_name not in parameters and not takes_any:
        name, parameter = statement.selector, statement.arg_name
        hint = _renamed(f"{name}.{parameter}") or did_you_mean(nearest(parameter, list(parameters)))
        raise UserError(f"{where}: {name} has no parameter {parameter!r}{hint} (it has {', '.join(parameters)})")
    return Key(statement.scope, selector, statement.arg_name)


def nearest(name: str, known: Sequence[str]) -> list[str]:
    """Return the one of `known` that `name` is probably meant to be, whatever its case, or nothing."""
    folded = {candidate.lower(): candidate for candidate in known}
    return [folded[match] for match in get_close_matches(name.lower(), folded, n=1)]


def did_you_mean(names: Sequence[str]) -> str:
    """Return the end of a message that suggests `names`, "" if there are none."""
    return f"; did you mean {' or '.join(names)}?" if names else ""


def hint_for(name: str, known: Sequence[str]) -> str:
    """Return the end of a message about the unknown `name`: its new name, or the nearest of `known`, or ""."""
    return _renamed(name) or did_you_mean(nearest(name, known))


def _renamed(name: str) -> str:
    if name not in RENAMED:
        return ""
    return f"; it is now called {RENAMED[name]}" if RENAMED[name] else "; this setting no longer exists"
