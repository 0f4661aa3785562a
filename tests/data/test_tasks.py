"""Preparing a task: everything counted, reused, refused when wrong, and the loss of a perfect model known."""

import json
import math
import shutil
from dataclasses import replace

import gin
import numpy as np
import pytest

from mtf_experiments.data.sources import ListSource, TextSource
from mtf_experiments.data.synthetic import SyntheticSource
from mtf_experiments.data.tasks import LanguageModelTask
from mtf_experiments.data.tokenizer import Vocabulary
from mtf_experiments.errors import UserError
from tests.data_location import real_text

WORDS = Vocabulary(size=500, kind="word")


@pytest.fixture
def task(tmp_path):
    source = SyntheticSource(train_lines=2000, validation_lines=300)
    return LanguageModelTask(source, WORDS, name="toy", row_length=64, cache_dir=str(tmp_path / "cache"))


def test_prepared_task_counts_everything(task):
    prepared = task.prepare()
    assert list(prepared.stores) == ["train", "validation"]
    counts = prepared.counts("train")
    assert counts["sentences"] == counts["lines"] == counts["eos"] == 2000
    assert counts["words"] == counts["pieces"] == counts["tokens"] - 2000 and counts["unknown"] == 0
    assert "validation: 300 sentences (0 blank)" in prepared.summary()[2] and "0 unknown" in prepared.summary()[2]
    assert prepared.unknown_share == {"train": 0.0, "validation": 0.0}
    assert json.loads(json.dumps(prepared.fingerprints())) == prepared.fingerprints()


def test_second_preparation_reads_the_first_one(task, tmp_path):
    first = task.prepare()
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*.npy")}
    second = task.prepare()
    assert len(files) == 4 and {path: path.stat().st_mtime_ns for path in files} == files
    assert first.fingerprints() == second.fingerprints()
    assert first.tokenizer.model == second.tokenizer.model


def test_preparation_elsewhere_gives_the_same_hashes(task, tmp_path):
    elsewhere = replace(task, cache_dir=str(tmp_path / "other"), threads=2)
    assert task.prepare().fingerprints() == elsewhere.prepare().fingerprints()


@pytest.mark.parametrize(
    "change", [{"vocabulary": Vocabulary(size=100, kind="word")}, {"source": SyntheticSource(1, 2000, 300)}]
)
def test_other_settings_do_not_reuse_what_is_there(task, change):
    other = replace(task, unknown_limit=1.0, **change).prepare()
    assert (
        other.fingerprints()["splits"]["train"]["tokens_sha256"]
        != (task.prepare().fingerprints()["splits"]["train"]["tokens_sha256"])
    )


def test_damaged_vocabulary_is_refused_by_name(task, tmp_path):
    task.prepare()
    (model,) = (tmp_path / "cache" / "vocabularies").rglob("tokenizer.model")
    model.write_bytes(model.read_bytes()[:-1])
    with pytest.raises(UserError, match="tokenizer.model does not match its manifest"):
        task.prepare()
    shutil.rmtree(model.parent)
    task.prepare()


def test_perfect_model_reaches_the_known_loss_on_the_rows(task):
    prepared = task.prepare()
    rows = prepared.eval_rows("validation", 4, 512)
    grammar = task.source.grammar
    nats = 0.0
    for batch in rows:
        for targets, segments in zip(batch["targets"], batch["segments"], strict=True):
            for segment in range(1, segments.max() + 1):
                nats -= grammar.log_prob(prepared.tokenizer.decode([targets[segments == segment]])[0])
    expected, tokens = task.source.source_nll("validation")
    assert rows.tokens == tokens and math.isclose(nats, expected, rel_tol=1e-12)


def test_first_batch_has_one_end_of_sentence_per_example(task):
    batch = task.prepare().train_rows(8, 0, 512).batch(0)
    assert (batch["targets"] == 1).sum() == batch["segments"].max(axis=1).sum()
    assert np.array_equal(batch["inputs"] == 0, (batch["positions"] == 0))


def test_empty_validation_is_found_by_the_quick_check(tmp_path):
    (tmp_path / "train").write_bytes(b"a b\n")
    (tmp_path / "dev").write_bytes(b"")
    source = TextSource(str(tmp_path), "train", "dev")
    with pytest.raises(UserError, match="dev is empty"):
        LanguageModelTask(source, WORDS, cache_dir=str(tmp_path)).check()


@pytest.mark.parametrize(("text", "ends"), [(b"\n\n \n", 3), (b"a b\n", 1), (b"a b", 1), (b"\n", 1)])
def test_validation_of_blank_lines_or_one_line_is_counted(tmp_path, text, ends):
    (tmp_path / "train").write_bytes(b"a b\nb a\n")
    (tmp_path / "dev").write_bytes(text)
    source = TextSource(str(tmp_path), "train", "dev")
    prepared = LanguageModelTask(source, WORDS, row_length=8, cache_dir=str(tmp_path / "cache")).prepare()
    assert prepared.counts("validation")["eos"] == ends
    assert prepared.eval_rows("validation", 2, 64).tokens == ends + prepared.counts("validation")["pieces"]


def test_text_that_is_not_the_pinned_one_is_refused_also_when_already_tokenised(tmp_path):
    (tmp_path / "train").write_bytes(b"a b\nb a\n")
    (tmp_path / "dev").write_bytes(b"a\n")
    source = TextSource(str(tmp_path), "train", "dev")
    task = LanguageModelTask(source, WORDS, row_length=8, cache_dir=str(tmp_path / "cache"))
    task.prepare()
    pinned = replace(task, source=replace(source, expected={"validation": {"lines": 2}}))
    with pytest.raises(UserError, match="lines is 1, expected 2"):
        pinned.prepare()


def test_validation_that_the_vocabulary_does_not_know_is_refused(tmp_path):
    source = ListSource({"train": ["a b c"] * 5, "validation": ["x y z"]})
    task = LanguageModelTask(source, WORDS, cache_dir=str(tmp_path))
    with pytest.raises(UserError, match="of the validation split of lm are unknown"):
        task.prepare()


def test_missing_splits_and_bad_settings_are_refused(tmp_path, task):
    with pytest.raises(UserError, match="has no validation split"):
        LanguageModelTask(ListSource({"train": ["a"]}), WORDS, cache_dir=str(tmp_path)).check()
    with pytest.raises(UserError, match="has no test split; it has train, validation"):
        task.prepare().eval_rows("test", 1, 512)
    for settings, message in (({"name": "../up"}, "name"), ({"row_length": 1}, "row_length")):
        with pytest.raises(UserError, match=message):
            replace(task, **settings)


def test_read_only_text_folder_is_enough(tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    for name in ("train", "dev"):
        (data / name).write_bytes(b"a b\n")
    before = sorted(path.name for path in data.iterdir())
    LanguageModelTask(TextSource(str(data), "train", "dev"), WORDS, cache_dir=str(tmp_path / "c")).prepare()
    assert sorted(path.name for path in data.iterdir()) == before


def test_a_gin_file_describes_a_task(tmp_path):
    try:
        gin.parse_config(
            f"""
            LanguageModelTask.source = @SyntheticSource()
            LanguageModelTask.vocabulary = @Vocabulary()
            LanguageModelTask.cache_dir = '{tmp_path}'
            SyntheticSource.train_lines = 500
            SyntheticSource.validation_lines = 20
            Vocabulary.kind = 'word'
            """
        )
        assert LanguageModelTask().prepare().counts("train")["sentences"] == 500
    finally:
        gin.clear_config()


def test_one_billion_word_text_is_prepared_with_its_published_counts(tmp_path):
    shard = "heldout-monolingual.tokenized.shuffled/news.en.heldout-000{}-of-00050"
    pins = {"validation": {"lines": 6119, "words": 155414}}
    source = TextSource(str(real_text("lm1b")), shard.format(12), shard.format(13), expected=pins)
    prepared = LanguageModelTask(source, Vocabulary(size=2000, kind="bpe"), cache_dir=str(tmp_path)).prepare()
    counts = prepared.counts("validation")
    assert counts["words"] + counts["sentences"] == 155414 + 6119 and counts["unknown"] == 0
    rows = prepared.eval_rows("validation", 32, 2048)
    assert sum(int((batch["targets"] == 1).sum()) for batch in rows) == 6119
