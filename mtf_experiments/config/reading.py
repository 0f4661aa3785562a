"""Building configurables, and which of the bound values that has read."""

import re
from collections.abc import Callable
from typing import TypeVar

from gin import config as gin_config

from mtf_experiments.config.files import PARAM
from mtf_experiments.config.names import MACRO, Key, did_you_mean, hint_for, nearest
from mtf_experiments.config.state import Statement, all_statements, targets_in, winners
from mtf_experiments.errors import UserError, message_of

_T = TypeVar("_T")
# How Gin reports a parameter whose default is gin.REQUIRED, and one without a default.
_REQUIRED = re.compile(r"Required bindings for `(?P<name>.*)` not provided in config: \[(?P<missing>.*)\]")
_MISSING = re.compile(
    r"No values supplied by Gin or caller for arguments: \[(?P<missing>.*)\]"
    r"(?:.|\n)*?In call to configurable '(?P<name>[^']*)'"
)
# Python's own words for parameters that can only be given by name, which Gin passes on.
_MISSING_BY_NAME = re.compile(
    r"missing \d+ required keyword-only arguments?: (?P<missing>.*)(?:.|\n)*?In call to configurable '(?P<name>[^']*)'"
)


def build(configurable: Callable[..., _T]) -> _T:
    """Call `configurable` without arguments, so that all its values come from the configuration.

    Raises:
      UserError: a parameter without a default is not bound, or a constructor refused its values.
    """
    try:
        return configurable()
    except UserError as error:
        raise UserError(message_of(error)) from None
    except (RuntimeError, TypeError) as error:
        match = next((m for p in (_REQUIRED, _MISSING, _MISSING_BY_NAME) if (m := p.search(str(error)))), None)
        if match is None:
            raise
        bindings = ", ".join(f"{match['name']}.{parameter}" for parameter in re.findall(r"'(\w+)'", match["missing"]))
        raise UserError(f"required and not set: {bindings}; set it in a Gin file or by {PARAM}") from None


def winning_scope(key: Key, scope: str, bound: dict[Key, Statement]) -> str | None:
    """Return the scope of the binding that a call in `scope` takes for `key`'s parameter, None for its default."""
    parts = scope.split("/") if scope else []
    prefixes = ("/".join(parts[:n]) for n in range(len(parts), -1, -1))
    return next((prefix for prefix in prefixes if key._replace(scope=prefix) in bound), None)


def is_read(key: Key, bound: dict[Key, Statement]) -> bool:
    """Tell whether a call took the value bound to `key`: no deeper scope and no argument of the caller hid it."""
    return any(
        selector == key.selector and key.parameter in values and winning_scope(key, scope, bound) == key.scope
        for (scope, selector), values in gin_config._OPERATIVE_CONFIG.items()
    )


def check_all_read() -> None:
    """Refuse whatever nothing read; to be called when every configurable of the program has been built.

    A value whose only reader was replaced by a later statement (another optimizer chosen on the command line) is not a
    mistake; one that was written after that statement is.

    Raises:
      UserError: lists every unread macro and binding with its place, the reason and the nearest known name.
    """
    bound = winners()
    read = {key for key in bound if is_read(key, bound)}
    unread = [
        f"{statement.where}: {key} = {statement.value!r} is never read{_why(key)}"
        for key, statement in bound.items()
        if key not in read and _hidden_by(statement, bound, read, frozenset()) <= statement.order
    ]
    if unread:
        raise UserError("\n".join(unread))


def _hidden_by(statement: Statement, bound: dict[Key, Statement], read: set[Key], seen: frozenset[int]) -> int:
    """Return the order of the last statement that took its reader from `statement`, -1 if there was none."""
    key = statement.key
    if bound[key] is not statement:
        return bound[key].order
    if key in read:
        return -1
    readers = [
        reader
        for reader in all_statements()
        if reader.order not in seen
        and any(
            target.selector == key.selector and (key.selector != MACRO or target.scope == key.scope)
            for target in targets_in(reader.value)
        )
    ]
    seen |= {statement.order}
    return max((_hidden_by(reader, bound, read, seen) for reader in readers), default=-1)


def _why(key: Key) -> str:
    """Return the reason why nothing read `key`, and the nearest name that something reads."""
    if key.selector == MACRO:
        used = {t.scope for s in all_statements() for t in targets_in(s.value) if t.selector == MACRO}
        return hint_for(key.scope, sorted(used - {key.scope}))
    operative = gin_config._OPERATIVE_CONFIG
    name = gin_config._REGISTRY.minimal_selector(key.selector)
    scopes = sorted({scope for scope, selector in operative if selector == key.selector})
    if not scopes:
        used = {selector for _, selector in operative if not selector.startswith("gin.")}
        return f": nothing uses {name}{hint_for(name, sorted(map(gin_config._REGISTRY.minimal_selector, used)))}"
    if key.scope and not any(f"{scope}/".startswith(f"{key.scope}/") for scope in scopes):
        named = [scope for scope in scopes if scope]
        known = f"it is used in {', '.join(named)}" if named else "it is only used without a scope"
        return f": {name} is never used in the scope {key.scope}; {known}{did_you_mean(nearest(key.scope, named))}"
    return ": the program passes this argument itself, or a binding in a deeper scope hides it"
