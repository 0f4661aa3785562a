"""The schema version that every resolved configuration carries."""

import re

from mtf_experiments.errors import UserError

SCHEMA_VERSION = 1
_HEADER = "# mtf_experiments config, schema version"


def header() -> str:
    """Return the comment line that states the version."""
    return f"{_HEADER} {SCHEMA_VERSION}"


def check_version(text: str, where: str) -> None:
    """Refuse a text that states a version newer than `SCHEMA_VERSION`.

    Raises:
      UserError: names `where` and both versions.
    """
    match = re.search(rf"^{re.escape(_HEADER)} (\d+)", text, re.MULTILINE)
    if match and int(match[1]) > SCHEMA_VERSION:
        raise UserError(
            f"{where} has schema version {match[1]}, written by a newer release of mtf_experiments; "
            f"this one reads versions up to {SCHEMA_VERSION}"
        )
