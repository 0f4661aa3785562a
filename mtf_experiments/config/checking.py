"""Comparing every bound value with the annotation of the parameter that it is bound to."""

from typing import Any

from gin import config as gin_config

from mtf_experiments.config.names import CONSTANT, MACRO, Key, function_of
from mtf_experiments.config.state import Statement, target_of, targets_in, winners
from mtf_experiments.config.types import Reference, annotations_of, conforms, describe
from mtf_experiments.errors import UserError


def check_types() -> None:
    """Compare every bound value with the annotation of its parameter.

    Raises:
      UserError: lists each misfit: binding, place, what it got, what it wanted.
    """
    bound = winners()
    wrong = []
    for key, statement in bound.items():
        if key.selector == MACRO:
            continue
        wanted = annotations_of(function_of(key.selector)).get(key.parameter, Any)
        value = _static(statement.value, bound)
        if not conforms(value, wanted):
            got = f"@{value.target.__name__}" if isinstance(value, Reference) else f"{type(value).__name__} {value!r}"
            macros = [bound[target] for target in targets_in(statement.value) if target in bound]
            origin = "".join(f" (%{macro.key} is set at {macro.where})" for macro in macros)
            wrong.append(f"{statement.where}: {key} got {got}{origin}, wanted {describe(wanted)}")
    if wrong:
        raise UserError("\n".join(wrong))


def _static(value: Any, bound: dict[Key, Statement]) -> Any:
    """Replace macros by their values and other references by `Reference`, without calling anything."""
    if isinstance(value, gin_config.ConfigurableReference):
        target = target_of(value)
        if target.selector == MACRO:
            return _static(bound[target].value, bound)
        if target.selector == CONSTANT:
            return value.scoped_configurable_fn()
        return Reference(function_of(target.selector), value.evaluate)
    if isinstance(value, dict):
        return {_static(k, bound): _static(v, bound) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_static(item, bound) for item in value)
    return value
