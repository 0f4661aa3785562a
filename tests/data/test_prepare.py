"""The prepare command reports what it made, and says what it cannot make."""

import re

import pytest

from mtf_experiments import config
from mtf_experiments.errors import UserError
from mtf_experiments.prepare import main


@pytest.fixture(autouse=True)
def clean_gin():
    yield
    config.clear()


def tiny(tmp_path, *params):
    bindings = [f"LanguageModelTask.cache_dir='{tmp_path}'", "SyntheticSource.train_lines=5000", *params]
    return ["--gin_file=lm_tiny.gin", *(f"--gin_param={binding}" for binding in bindings)]


def test_prepare_reports_counts_and_writes_what_training_reads(tmp_path, capsys):
    main(tiny(tmp_path))
    first = capsys.readouterr().out
    assert "train: 5,000 sentences (0 blank)" in first and "0 of 1,000 lines (0.00 %) change" in first
    assert "source, validation" in first and first.endswith(f"wrote {tmp_path}\n")
    assert len(list(tmp_path.rglob("manifest.json"))) == 3
    main(tiny(tmp_path))
    assert capsys.readouterr().out == first


def test_sentence_pairs_are_reported_on_both_sides(tmp_path, capsys):
    counts = "train_pairs=3000", "validation_pairs=60", "test_pairs=40", "max_words=99"
    bindings = [f"TranslationTask.cache_dir='{tmp_path}'", *(f"SyntheticPairSource.{count}" for count in counts)]
    main(["--gin_file=wmt_tiny.gin", *(f"--gin_param={binding}" for binding in bindings)])
    out = capsys.readouterr().out
    assert "ba -> zu; joint vocabulary" in out and "training uses 2," in out
    assert "validation: 60 pairs; ba" in out and "test: 40 pairs; ba" in out
    assert re.search(r"\d+ of 64 \+ 64 tokens, \d+\.\d% and \d+\.\d% full", out)
    assert "0 of 120 lines (0.00 %) change" in out  # both sides
    # A vocabulary, and a token store for each split and language.
    assert len(list(tmp_path.rglob("manifest.json"))) == 7
    assert "source, validation" not in out and out.endswith(f"wrote {tmp_path}\n")


def test_conversion_of_something_that_is_no_tfds_set_is_refused(tmp_path):
    with pytest.raises(UserError, match="this task reads a SyntheticSource"):
        main([*tiny(tmp_path), f"--convert_tfds_to={tmp_path / 'out'}"])


def test_missing_text_is_refused_before_anything_is_made(tmp_path):
    with pytest.raises(UserError, match="no folder .*nowhere for the train split"):
        main(
            [
                "--gin_file=lm_small.gin",
                f"--gin_param=LanguageModelTask.cache_dir='{tmp_path}'",
                f"--gin_param=data_dir='{tmp_path / 'nowhere'}'",
            ]
        )
    assert list(tmp_path.iterdir()) == []
