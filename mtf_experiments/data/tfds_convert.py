"""Convert a prepared TFDS data set from tfrecord to array_record form, without TensorFlow.

Records, shards and their order stay the same; the original is only read. TensorFlow Datasets reads the result like a
data set that it prepared itself.
"""

import json
import struct
from collections.abc import Iterator
from pathlib import Path

from mtf_experiments.data.text_io import open_bytes
from mtf_experiments.data.tfds_source import prepared_builder
from mtf_experiments.errors import UserError
from mtf_experiments.files import lock, write_directory

_HEADER = struct.Struct("<QI")  # length of the record, checksum of the length
_CHECKSUM = 4  # bytes behind the record


def tfrecords(path: Path) -> Iterator[bytes]:
    """The records of a tfrecord file.

    Raises:
        UserError: the file is cut off or is none; names the record (counted from 0).
    """
    size, position, number = path.stat().st_size, 0, 0
    with open_bytes(path) as file:
        while header := file.read(_HEADER.size):
            length = _HEADER.unpack(header)[0] if len(header) == _HEADER.size else size
            position += _HEADER.size + length + _CHECKSUM
            if position > size:
                raise UserError(f"{path} is cut off or damaged at record {number}")
            yield file.read(length)
            file.read(_CHECKSUM)
            number += 1


def convert(name: str, data_dir: str | Path, output_dir: str | Path) -> Path:
    """Write the array_record form of a data set under `output_dir`; its folder, which is returned, is whole or absent.

    Raises:
        UserError: no such data set, another form, a shard with a wrong number of records, or a result that exists
        already.
    """
    from array_record.python.array_record_module import ArrayRecordWriter

    info = prepared_builder(name, Path(data_dir).expanduser().absolute()).info
    source = Path(info.data_dir)
    if info.file_format is None or info.file_format.value != "tfrecord":
        raise UserError(
            f"{source} is in {info.file_format and info.file_format.value} form; only tfrecord is converted"
        )
    final = Path(output_dir).expanduser().absolute() / info.full_name
    with lock(final.with_name(final.name + ".lock")):
        if final.exists():
            raise UserError(f"{final} exists already; choose another --output_dir or delete it")
        with write_directory(final) as directory:
            for split in info.splits.values():
                for file, expected in zip(split.filepaths, split.shard_lengths, strict=True):
                    shard = Path(file)
                    target = directory / shard.name.replace(".tfrecord", ".array_record")
                    writer = ArrayRecordWriter(str(target), "group_size:1")
                    count = 0
                    for record in tfrecords(shard):
                        writer.write(record)
                        count += 1
                    writer.close()
                    if count != expected:
                        raise UserError(f"{shard} holds {count} records, not {expected}; the data set is incomplete")
            description = json.loads((source / "dataset_info.json").read_bytes())
            description["fileFormat"] = "array_record"
            (directory / "dataset_info.json").write_bytes(json.dumps(description, indent=2).encode())
            for extra in source.glob("*.json"):
                if extra.name != "dataset_info.json":
                    (directory / extra.name).write_bytes(extra.read_bytes())
    return final
