"""What tasks keep on disk: vocabularies, and the names of everything that is made once."""

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from mtf_experiments.data.token_store import FORMAT
from mtf_experiments.data.tokenizer import Tokenizer, Vocabulary
from mtf_experiments.errors import UserError
from mtf_experiments.files import file_sha256, lock, write_directory


class Cached:
    """What tasks share that keep things in `cache_dir`."""

    cache_dir: str

    @property
    def cache(self) -> Path:
        """`cache_dir` as an absolute path."""
        return Path(self.cache_dir).expanduser().absolute()


def cache_key(*parts: object) -> str:
    """A short name for what follows from `parts` (JSON values)."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def check_name(name: str, parameter: str) -> None:
    """Raises UserError if `name`, the value of `parameter`, cannot be a part of file names."""
    if not re.fullmatch(r"[A-Za-z0-9_.]+", name):
        raise UserError(f"{parameter} is {name!r}; letters, digits, _ and . are possible")


def check_splits(splits: Sequence[str], name: str) -> None:
    """Raises UserError if a task cannot be trained and evaluated on these splits."""
    for split in ("train", "validation"):
        if split not in splits:
            raise UserError(f"task {name} has no {split} split; its source has {', '.join(splits)}")


def kept_vocabulary(
    folder: Path, name: str, vocabulary: Vocabulary, signatures: list[str], text: Iterable[str]
) -> Tokenizer:
    """The vocabulary that `text` (whose `signatures` change with it) gives, made now if `folder` does not hold it yet.

    Raises UserError for impossible settings and for a vocabulary on disk that is damaged.
    """
    settings = asdict(vocabulary)
    signature = signatures[0] if len(signatures) == 1 else signatures
    path = folder / f"{name}-{cache_key(signature, settings, FORMAT)}"
    model, manifest = path / "tokenizer.model", path / "manifest.json"
    with lock(path.with_name(path.name + ".lock")):
        if not path.exists():
            made = vocabulary.train(text)
            with write_directory(path) as directory:
                (directory / model.name).write_bytes(made.model)
                description = {
                    "settings": settings,
                    "fingerprint": made.fingerprint,
                    "sha256": file_sha256(directory / model.name),
                }
                (directory / manifest.name).write_text(json.dumps(description, indent=1) + "\n", "utf-8")
        try:
            expected = json.loads(manifest.read_bytes())["sha256"]
            if file_sha256(model) != expected:
                raise ValueError("sha256 differs")
        except (OSError, ValueError, KeyError) as error:
            raise UserError(
                f"{model} does not match its manifest ({error}); delete {path} to have it made again"
            ) from error
    return Tokenizer(model.read_bytes(), str(model))
