"""Finding Gin files and parsing them; every complaint names the file and the line."""

import importlib.util  # noqa: F401  (gin's resource reader uses it without importing it)
import re
import tokenize
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from gin import config_parser

from mtf_experiments.config.names import configurables, did_you_mean, hint_for
from mtf_experiments.errors import UserError

PARAM = "--gin_param"


def gin_folders() -> list[Path]:
    """Return the folders that Gin files are looked up in: that of the repository, or the one inside the wheel."""
    package = Path(__file__).resolve().parent.parent
    repository = package.parent
    folders = [repository / "gin"] if (repository / "pyproject.toml").is_file() else []
    return [folder for folder in [*folders, package / "gin"] if folder.is_dir()]


def find(name: str, beside: Path | None = None) -> Path:
    """Return the Gin file `name`: as a path (of an include: beside the including file), then in the gin folders.

    Raises:
      UserError: there is no such file; the message lists similar names.
    """
    path = Path(name).expanduser()
    candidates = [(beside or Path()) / path, *(folder / path for folder in gin_folders())]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    known = sorted(str(p.relative_to(folder)) for folder in gin_folders() for p in folder.rglob("*.gin"))
    near = get_close_matches(name, known, n=3, cutoff=0.5) or [k for k in known if Path(k).name == path.name]
    places = ", ".join(str(candidate.parent) for candidate in candidates)
    raise UserError(f"there is no Gin file {name!r} (looked in {places}){did_you_mean(near)}")


def parse(text: str, origin: str, delegate: config_parser.ParserDelegate) -> Iterator[Any]:
    """Yield the statements of `text`, turning what the parser and its delegate raise into UserErrors with a place.

    Args:
      text: Gin statements.
      origin: the file that they come from, as messages name it, or `PARAM`.
      delegate: makes the values of references and macros.
    """
    try:
        yield from config_parser.ConfigParser(text, delegate)
    except (SyntaxError, tokenize.TokenError) as error:
        line = error.lineno if isinstance(error, SyntaxError) else error.args[1][0]
        reason = _one_line(str(error.msg if isinstance(error, SyntaxError) else error.args[0]))
        if origin == PARAM:
            hint = "" if re.search(r"=\s*['\"@%(\[{]", text) else "; does a text lack its inner quotes?"
            raise UserError(f"{PARAM} {text!r} cannot be parsed: {reason}{hint}") from None
        source = "".join(text.split("\n")[line - 1 : line]).strip() if line else ""
        raise UserError(f"{origin}:{line}: syntax error: {reason}\n    {source}") from None
    except (ValueError, KeyError) as error:  # an unknown or ambiguous reference
        message = str(error)
        line = re.search(r"\n  In .*line (\d+)\n", message)
        where = f"{origin}:{line[1]}" if line and origin != PARAM else origin
        name = re.search(r"matching reference '@([\w.]+)", message)
        hint = hint_for(name[1], configurables()) if name else ""
        raise UserError(f"{where}: {_one_line(message)}{hint}") from None


def _one_line(text: str) -> str:
    """Return the first paragraph of a message of Gin's, without the place that it adds."""
    line = " ".join(text.split("\n  In ")[0].split()).strip('"').removesuffix(".")
    return re.sub(r"malformed node or string.*<ast\.\w+ object at 0x[0-9a-f]+> ", "", line)


def shown(path: Path) -> str:
    """Return `path` relative to the current directory if it lies below, else as it is."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)
