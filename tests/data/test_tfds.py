"""Prepared TFDS sets are read without TensorFlow, completely, and never downloaded."""

import json
import struct
import sys

import pytest

from mtf_experiments.data.sources import check_readable, describe, lines
from mtf_experiments.data.tfds_convert import convert, tfrecords
from mtf_experiments.data.tfds_source import TfdsSource
from mtf_experiments.errors import UserError

TRAIN = [f"training sentence {i} é\u2028x" for i in range(2500)]
TEST = [f"held-out sentence {i}" for i in range(100)]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """The registered lm1b builder over two small text files: real names, parser and layout on disk."""
    import tensorflow_datasets as tfds

    folder = tmp_path_factory.mktemp("tfds")
    files = {}
    for split, text in (("train", TRAIN), ("test", TEST)):
        files[split] = folder / f"{split}.txt"
        files[split].write_bytes("".join(line + "\n" for line in text).encode())
    builder = tfds.builder("lm1b", data_dir=folder / "data")
    builder._split_generators = lambda dl_manager, **unused: [
        tfds.core.SplitGenerator(name=split, gen_kwargs={"files": [str(file)]}) for split, file in files.items()
    ]
    builder.download_and_prepare(
        file_format="array_record",
        download_config=tfds.download.DownloadConfig(try_download_gcs=False, num_shards=2),
    )
    return folder / "data"


def as_tfrecord(source, target):
    """The same data set in tfrecord form, written by hand."""
    from array_record.python.array_record_module import ArrayRecordReader

    target.mkdir(parents=True)
    for shard in source.glob("*.array_record-*"):
        reader = ArrayRecordReader(str(shard))
        records = reader.read_all()
        data = b"".join(struct.pack("<QI", len(record), 0) + record + bytes(4) for record in records)
        (target / shard.name.replace("array_record", "tfrecord")).write_bytes(data)
    info = json.loads((source / "dataset_info.json").read_bytes())
    (target / "dataset_info.json").write_text(json.dumps(info | {"fileFormat": "tfrecord"}))
    (target / "features.json").write_bytes((source / "features.json").read_bytes())


@pytest.fixture(scope="module")
def records(prepared, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tfrecord")
    as_tfrecord(prepared / "lm1b" / "1.1.0", folder / "lm1b" / "1.1.0")
    return folder


def test_every_example_is_read_once_without_tensorflow(prepared):
    source = TfdsSource(data_dir=str(prepared), test="test")
    check_readable(source)
    assert sorted(lines(source, "train")) == sorted(line for line in TRAIN)
    assert sorted(lines(source, "test")) == sorted(TEST)
    assert "tensorflow" not in sys.modules
    info = describe(source, "train")
    assert [file.counts.lines for file in info.files] == [1250, 1250]
    assert info.files[0].name == "lm1b-train.array_record-00000-of-00002"


def test_slices_of_splits_are_the_records_that_tfds_reads(prepared):
    import tensorflow_datasets as tfds

    source = TfdsSource(data_dir=str(prepared), train="train[5%:]", validation="test[40:70]")
    for split in ("train", "validation"):
        expected = tfds.data_source("lm1b", split=getattr(source, split), data_dir=prepared, download=False)
        assert list(lines(source, split)) == [example["text"].decode() for example in expected]
    assert [name for name, _ in source.parts("validation")] == [
        "lm1b-test.array_record-00000-of-00002[40:50]",
        "lm1b-test.array_record-00001-of-00002[0:20]",
    ]
    assert source.signature("validation") != TfdsSource(data_dir=str(prepared)).signature("validation")


def test_set_that_is_not_prepared_is_refused_with_how_to_prepare_it(tmp_path):
    with pytest.raises(UserError, match=r"lm1b is not prepared in .*tfds build lm1b"):
        check_readable(TfdsSource(data_dir=str(tmp_path)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "no_such_set"}, "no TFDS data set no_such_set"),
        ({"name": "lm1b:9.9.9"}, "9.9.9"),
        ({"validation": "dev"}, "TfdsSource.validation = 'dev' for lm1b: Unknown split"),
        ({"text_key": "words"}, "no text feature 'words'; it has text"),
        ({"validation": "test[0:0]"}, "is empty"),
    ],
)
def test_settings_that_name_nothing_are_refused(prepared, settings, message):
    with pytest.raises(UserError, match=message):
        check_readable(TfdsSource(**({"data_dir": str(prepared)} | settings)))


def test_tfrecord_form_is_refused_with_how_to_convert_it(records):
    with pytest.raises(UserError, match="is in tfrecord form.*prepare --gin_file=... --convert_tfds_to=DIR"):
        check_readable(TfdsSource(data_dir=str(records)))


def test_converted_set_is_the_natively_prepared_one(prepared, records, tmp_path):
    import tensorflow_datasets as tfds

    assert convert("lm1b", records, tmp_path) == tmp_path / "lm1b" / "1.1.0"
    for split in ("train", "test"):
        native, converted = (
            tfds.data_source("lm1b", split=split, data_dir=d, download=False) for d in (prepared, tmp_path)
        )
        assert list(native) == list(converted)
    a, b = (describe(TfdsSource(data_dir=str(d)), "train") for d in (prepared, tmp_path))
    assert a == b
    with pytest.raises(UserError, match="exists already"):
        convert("lm1b", records, tmp_path)
    with pytest.raises(UserError, match="is in array_record form; only tfrecord is converted"):
        convert("lm1b", prepared, tmp_path / "other")


def test_cut_off_record_file_is_refused_and_leaves_no_converted_set(records, tmp_path):
    broken = tmp_path / "in" / "lm1b" / "1.1.0"
    broken.mkdir(parents=True)
    for file in (records / "lm1b" / "1.1.0").iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    shard = broken / "lm1b-train.tfrecord-00001-of-00002"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-7])
    with pytest.raises(UserError, match="cut off or damaged at record 1249"):
        convert("lm1b", tmp_path / "in", tmp_path / "out")
    last = len(list(tfrecords(records / "lm1b" / "1.1.0" / shard.name))[-1]) + 16
    shard.write_bytes(whole[:-last])
    with pytest.raises(UserError, match="holds 1249 records, not 1250"):
        convert("lm1b", tmp_path / "in", tmp_path / "out")
    assert [p.name for p in (tmp_path / "out" / "lm1b").iterdir()] == ["1.1.0.lock"]
