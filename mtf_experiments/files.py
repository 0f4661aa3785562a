"""Files and directories that appear whole or not at all.

Everything is written under a temporary name in the same directory, forced to disk and renamed. A process killed at
any moment leaves either the old state or the new one, and perhaps a temporary file that the next run removes.
"""

import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from mtf_experiments.errors import UserError


def file_sha256(path: Path) -> str:
    """Hexadecimal SHA-256 of the bytes of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def write_atomically(path: str | Path) -> Iterator[BinaryIO]:
    """A binary file to write to; when the block ends without an exception it is renamed to `path`, otherwise removed.

    Raises:
        UserError: the file cannot be written (no permission, disk full, ...); names the path.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync_directory(path.parent)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            temporary.unlink()


def write_text(path: str | Path, text: str) -> None:
    """Write `text` (UTF-8) as `write_atomically` does."""
    with write_atomically(path) as file:
        file.write(text.encode("utf-8"))


@contextmanager
def lock(path: Path) -> Iterator[None]:
    """Hold the exclusive lock named `path`; waits for whoever holds it. The system frees it when its holder dies."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("ab")
    except OSError as error:
        raise UserError(f"cannot write {path.parent}: {error.strerror or error}") from error
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def write_directory(final: Path) -> Iterator[Path]:
    """A fresh directory to fill; when the block ends without an exception it is renamed to `final`, otherwise removed.

    The caller holds a lock for `final`, so that what an earlier, killed run left under the temporary name can be
    thrown away.
    """
    temporary = final.with_name(f"{final.name}.partial")
    try:
        if temporary.exists():
            shutil.rmtree(temporary)
        temporary.mkdir(parents=True)
        try:
            yield temporary
            for file in sorted(temporary.iterdir()):
                with file.open("rb") as handle:
                    os.fsync(handle.fileno())
            _sync_directory(temporary)
            os.rename(temporary, final)
            _sync_directory(final.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        raise UserError(f"cannot write {final}: {error.strerror or error}") from error


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
