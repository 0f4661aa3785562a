"""The loaded configuration: which statement bound what, and where it was written."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gin
from gin import config as gin_config
from gin import config_parser

from mtf_experiments.config.files import PARAM, find, parse, shown
from mtf_experiments.config.names import CONSTANT, MACRO, Key, complete_selector, hint_for, key_of
from mtf_experiments.config.version import check_version
from mtf_experiments.errors import UserError


@dataclass(frozen=True)
class Statement:
    """One parsed binding: the `order`-th, written at `where` ("file:line" or "--gin_param")."""

    key: Key
    value: Any
    where: str
    order: int


_statements: list[Statement] = []


def load(gin_files: Sequence[str | Path], gin_params: Sequence[str] = ()) -> None:
    """Replace the configuration by that of `gin_files`, then `gin_params`; later statements win.

    The modules that define the configurables must be imported before.

    Raises:
      UserError: a missing file, bad syntax, an unknown configurable, parameter, reference or macro, a required value
        that is not set, or a file written by a newer version.
    """
    clear()
    for name in gin_files:
        _read_file(find(str(name)), [])
    for param in gin_params:
        _read_text(param, PARAM, None, [])
    _check_macros()


def clear() -> None:
    """Forget all bindings, and what was read of them; configurables stay registered."""
    gin.clear_config()
    _statements.clear()


@contextmanager
def loaded(gin_files: Sequence[str | Path] = (), gin_params: Sequence[str] = ()) -> Iterator[None]:
    """Hold a configuration for a `with` block (for tests); afterwards none is loaded."""
    load(gin_files, gin_params)
    try:
        yield
    finally:
        clear()


def _read_file(path: Path, including: list[Path]) -> None:
    origin, resolved = shown(path), path.resolve()
    if resolved in including:
        raise UserError(f"{origin} includes itself, by way of {', '.join(map(shown, including))}")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {origin}: {error}") from None
    check_version(text, origin)
    _read_text(text, origin, path.parent, [*including, resolved])


def _read_text(text: str, origin: str, folder: Path | None, including: list[Path]) -> None:
    for statement in parse(text, origin, gin_config.ParserDelegate()):
        where = PARAM if origin == PARAM else f"{origin}:{statement.location.line_num}"
        if isinstance(statement, config_parser.IncludeStatement):
            try:
                file = find(statement.filename, folder)
            except UserError as error:
                raise UserError(f"{where}: {error}") from None
            _read_file(file, including)
        elif isinstance(statement, config_parser.ImportStatement):
            raise UserError(f"{where}: import statements are not supported; all configurables are known without them")
        elif isinstance(statement, config_parser.BlockDeclaration):
            complete_selector(statement.selector, where)
        else:
            key = key_of(statement, where)
            try:
                gin.bind_parameter(tuple(key), statement.value)
            except ValueError as error:  # a parameter on a configurable's deny list
                raise UserError(f"{where}: {error}") from None
            _statements.append(Statement(key, statement.value, where, len(_statements)))


def all_statements() -> list[Statement]:
    """Return every statement in the order in which they were read."""
    return _statements


def winners() -> dict[Key, Statement]:
    """Return, for every key, the statement that won."""
    return {statement.key: statement for statement in _statements}


def references_in(value: Any) -> Iterator[gin_config.ConfigurableReference]:
    """Yield the references and macros in a value, however deep in lists, tuples and dicts."""
    yield from gin_config.iterate_references([value])


def targets_in(value: Any) -> Iterator[Key]:
    """Yield the macros that a value reads, and the configurables that it calls (with parameter "")."""
    for reference in references_in(value):
        yield target_of(reference)


def target_of(reference: gin_config.ConfigurableReference) -> Key:
    """Return the macro that `reference` reads, or the configurable that it calls (with parameter "")."""
    selector = reference.config_key[1]
    return Key("/".join(reference.scopes), selector, "value" if selector == MACRO else "")


def locate(binding_name: str) -> str | None:
    """Return where the macro or `[scope/]Name.parameter` got its value: "path:line", "--gin_param", or None."""
    return next((s.where for s in reversed(_statements) if str(s.key) == binding_name), None)


def _check_macros() -> None:
    """Refuse undefined macros, macros in a circle, and values that a file requires and nobody set."""
    bound = winners()
    defined = [key.scope for key in bound if key.selector == MACRO]
    for key, statement in bound.items():
        for target in targets_in(statement.value):
            if target.selector == CONSTANT and target.scope == "gin.REQUIRED":
                remedy = f'set it in a Gin file or by {PARAM}="{key}=..."'
                raise UserError(f"{statement.where}: {key} is required and not set; {remedy}")
            if target.selector == MACRO and target not in bound:
                hint = hint_for(target.scope, defined)
                raise UserError(f"{statement.where}: {key} uses the undefined macro %{target.scope}{hint}")
    for key in bound:
        _check_circle(key, bound, [])


def _check_circle(key: Key, bound: dict[Key, Statement], path: list[Key]) -> None:
    if key in path:
        circle = " -> ".join(f"%{k.scope}" for k in [*path[path.index(key) :], key])
        raise UserError(f"{bound[key].where}: the macros {circle} go round in a circle")
    for target in targets_in(bound[key].value):
        if target.selector == MACRO:
            _check_circle(target, bound, [*path, key])
