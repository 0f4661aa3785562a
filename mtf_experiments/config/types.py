"""Does a configured value fit the annotation of the parameter that it is bound to?

Annotations are the ones that configuration uses: plain types, Literal, Optional and unions, tuple, list, Sequence,
dict, Callable, classes and protocols.  What cannot be judged (Any, type variables, names that do not resolve) fits all.
"""

import collections.abc
import inspect
import sys
import types
import typing
from collections.abc import Callable
from typing import Any, Literal, Union, get_args, get_origin

_SEQUENCES = (collections.abc.Sequence, collections.abc.Iterable, collections.abc.Collection)


class Reference(typing.NamedTuple):
    """A Gin reference: `@Name()` builds an instance of `target` (or calls it), `@Name` passes `target` itself."""

    target: Callable[..., Any]
    evaluate: bool


def annotations_of(configurable: Callable[..., Any]) -> dict[str, Any]:
    """Return the resolved annotations of a function's, or a class's constructor's, parameters."""
    function = configurable
    names: dict[str, Any] = {}
    if inspect.isclass(configurable):
        function = configurable.__init__ if configurable.__init__ is not object.__init__ else configurable.__new__
        for base in reversed(configurable.__mro__):  # a dataclass inherits annotations written in other modules
            names |= vars(sys.modules[base.__module__])
    function = inspect.unwrap(function)
    names = names or getattr(function, "__globals__", {})
    result = {}
    for name, annotation in getattr(function, "__annotations__", {}).items():
        try:
            result[name] = _resolve(annotation, names)
        except (NameError, AttributeError, TypeError, SyntaxError):
            result[name] = Any
    return result


def _resolve(annotation: Any, names: dict[str, Any]) -> Any:
    holder = types.SimpleNamespace(__annotations__={"x": annotation})
    return typing.get_type_hints(holder, names)["x"]


def conforms(value: Any, annotation: Any) -> bool:
    """Tell whether `value`, a Gin literal or a `Reference` (or containers of them), fits `annotation`.

    An int fits float; a bool fits neither int nor float; a list does not fit tuple, for nothing converts it.
    """
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation is Any or annotation is inspect.Parameter.empty or annotation is object:
        return True
    if isinstance(annotation, typing.TypeVar) or (isinstance(annotation, type) and _is_opaque_protocol(annotation)):
        return True
    if origin in (Union, types.UnionType):
        return any(conforms(value, argument) for argument in arguments)
    if origin is typing.Annotated:
        return conforms(value, arguments[0])
    if isinstance(annotation, typing.NewType):
        return conforms(value, annotation.__supertype__)
    if isinstance(value, Reference):
        return _reference_conforms(value, annotation, origin)
    if annotation is None or annotation is type(None):
        return value is None
    if origin is Literal:
        return any(type(value) is type(choice) and value == choice for choice in arguments)
    if origin is not None:
        return _container_conforms(value, origin, arguments)
    if annotation is float:
        return type(value) in (int, float)
    if annotation in (int, bool, str, bytes, complex):
        return type(value) is annotation
    if annotation is collections.abc.Callable or annotation is typing.Callable:
        return callable(value)
    if annotation in _SEQUENCES:
        return isinstance(value, (list, tuple))
    return not isinstance(annotation, type) or isinstance(value, annotation)


def _is_opaque_protocol(annotation: type) -> bool:
    return getattr(annotation, "_is_protocol", False) and not getattr(annotation, "_is_runtime_protocol", False)


def _reference_conforms(reference: Reference, annotation: Any, origin: Any) -> bool:
    target = reference.target
    if not reference.evaluate:
        if origin is type or annotation is type:
            return inspect.isclass(target)
        return (origin or annotation) in (collections.abc.Callable, typing.Callable)
    made = target if inspect.isclass(target) else annotations_of(target).get("return", Any)
    wanted = origin or annotation
    if made is Any:
        return True
    if isinstance(made, type) and isinstance(wanted, type):
        if wanted is float:
            return issubclass(made, (int, float)) and made is not bool
        try:
            return issubclass(made, wanted)
        except TypeError:  # protocols with data members
            return True
    return wanted is not Literal


def _container_conforms(value: Any, origin: Any, arguments: tuple[Any, ...]) -> bool:
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return all(conforms(item, arguments[0]) for item in value)
        return len(value) == len(arguments) and all(map(conforms, value, arguments))
    if origin is list or origin in _SEQUENCES:
        kinds = (list,) if origin is list else (list, tuple)
        return isinstance(value, kinds) and all(conforms(item, arguments[0]) for item in value)
    if isinstance(origin, type) and issubclass(origin, collections.abc.Mapping):
        return isinstance(value, dict) and all(
            conforms(key, arguments[0]) and conforms(item, arguments[1]) for key, item in value.items()
        )
    if origin is collections.abc.Callable:
        return callable(value)
    if origin is type:
        return isinstance(value, type)
    return not isinstance(origin, type) or isinstance(value, origin)


def describe(annotation: Any) -> str:
    """Return `annotation` as a user reads it: `int | None`, `Literal['a', 'b']`, `tuple[int, ...]`."""
    if annotation is None or annotation is type(None):
        return "None"
    if isinstance(annotation, type) and get_origin(annotation) is None:
        return annotation.__name__
    if get_origin(annotation) in (Union, types.UnionType):
        return " | ".join(describe(argument) for argument in get_args(annotation))
    return str(annotation).replace("typing.", "").replace("collections.abc.", "")
