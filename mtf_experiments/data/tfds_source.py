"""Text out of data sets that TensorFlow Datasets prepared, read without TensorFlow and without any download.

Only the array_record form can be read like that; `tfds_convert` makes it of the tfrecord form.
"""

import hashlib
import importlib.util  # noqa: F401  (gin uses importlib.util without importing it)
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gin

from mtf_experiments.data.sources import SPLITS, Part, Pins, SourceInfo, check_pins
from mtf_experiments.data.text_io import one_line
from mtf_experiments.errors import UserError

_BLOCK = 1000  # records read at once; single reads are fifty times slower


@gin.configurable
@dataclass(frozen=True)
class TfdsSource:
    """The text feature of a prepared TFDS data set; one example is one line (line ends inside it become spaces).

    Attributes:
        name: name of the data set, with configuration and version if wanted: "lm1b", "wikipedia/20230601.en:1.0.0".
        data_dir: the folder that TFDS data sets lie in; only read.
        train, validation, test: TFDS splits, slices allowed. TFDS calls all 50 held-out shards of One Billion Word
            "test", in an order of its own; by default development uses 2 % of them, about as much as one shard.
        text_key: the feature that holds the text.
        expected: pinned counts, see `TextSource`.
    """

    name: str = "lm1b"
    data_dir: str = "~/tensorflow_datasets"
    train: str = "train"
    validation: str = "test[:2%]"
    test: str | None = None
    text_key: str = "text"
    expected: Pins | None = None

    @property
    def splits(self) -> tuple[str, ...]:
        """Those splits that are set."""
        return tuple(split for split in SPLITS if getattr(self, split))

    def parts(self, split: str) -> Iterator[Part]:
        """One part per shard, named by its file and, if only a part of it is used, the records."""
        for shard in self._shards(split):
            whole = shard.take == shard.examples_in_shard
            records = "" if whole else f"[{shard.skip}:{shard.skip + shard.take}]"
            yield Path(shard.filename).name + records, self._lines(Path(shard.filename), shard.skip, shard.take)

    def signature(self, split: str) -> str:
        """Hash of the names, sizes and modification times of the shards and of the records used."""
        listed = []
        for shard in self._shards(split):
            stat = Path(shard.filename).stat()
            listed.append((str(shard.filename), shard.skip, shard.take, stat.st_size, stat.st_mtime_ns))
        return hashlib.sha256(json.dumps([self.text_key, listed]).encode()).hexdigest()

    def check_content(self, info: SourceInfo) -> None:
        """Compare with `expected`."""
        check_pins(self, info, self.expected, f"TFDS data set {self.name}")

    def _shards(self, split: str) -> list[Any]:
        """The records of a split as TFDS "file instructions": filename, skip, take, examples_in_shard."""
        wanted = getattr(self, split)
        if not wanted:
            raise UserError(f"TfdsSource has no {split} split; set TfdsSource.{split}")
        folder = Path(self.data_dir).expanduser().absolute()
        info = prepared_builder(self.name, folder).info
        form = info.file_format.value if info.file_format else None
        if form != "array_record":
            raise UserError(
                f"{info.data_dir} is in {form} form, which cannot be read without TensorFlow; let "
                "python -m mtf_experiments.prepare --gin_file=... --convert_tfds_to=DIR convert it, and set "
                "TfdsSource.data_dir to DIR"
            )
        try:
            shards = list(info.splits[wanted].file_instructions)
        except ValueError as error:
            raise UserError(f"TfdsSource.{split} = {wanted!r} for {self.name}: {error}") from error
        for shard in shards:
            if not Path(shard.filename).is_file():
                raise UserError(f"{shard.filename} is missing; the data set is incomplete, prepare it again")
        if not shards:
            raise UserError(f"TfdsSource.{split} = {wanted!r} for {self.name} is empty")
        return shards

    def _lines(self, file: Path, skip: int, take: int) -> Iterator[str]:
        from array_record.python.array_record_module import ArrayRecordReader
        from tensorflow_datasets.proto import tf_example_pb2

        example: Any = tf_example_pb2.Example  # pyright: ignore[reportAttributeAccessIssue]
        reader = ArrayRecordReader(str(file))
        try:
            if reader.num_records() < skip + take:
                raise UserError(f"{file} holds {reader.num_records()} records, not {skip + take}; it is incomplete")
            for first in range(skip, skip + take, _BLOCK):
                for offset, record in enumerate(reader.read(first, min(first + _BLOCK, skip + take))):
                    feature = example.FromString(record).features.feature
                    if self.text_key not in feature or not feature[self.text_key].bytes_list.value:
                        raise UserError(f"{file} has no text feature {self.text_key!r}; it has {', '.join(feature)}")
                    try:
                        yield one_line(feature[self.text_key].bytes_list.value[0].decode("utf-8"))
                    except UnicodeDecodeError as error:
                        raise UserError(f"{file}, record {first + offset}: not UTF-8 ({error.reason})") from error
        finally:
            reader.close()


def prepared_builder(name: str, folder: Path) -> Any:
    """The TFDS builder of a data set that was prepared in `folder`.

    Raises:
        UserError: TFDS does not know it or it is not there, with how to prepare it.
    """
    import tensorflow_datasets as tfds

    try:
        builder = tfds.builder(name, data_dir=folder)
    except Exception as error:  # DatasetNotFoundError, AssertionError for a version, ...: all mean the same here
        reason = str(error).partition("\n")[0]
        raise UserError(f"no TFDS data set {name} in {folder}: {reason}") from error
    if not builder.info.splits:
        raise UserError(
            f"TFDS data set {name} is not prepared in {folder}. With tensorflow-cpu installed, prepare it by: "
            f"tfds build {name} --data_dir={folder} --file_format=array_record"
        )
    return builder
