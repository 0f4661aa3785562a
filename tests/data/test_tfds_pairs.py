"""A prepared WMT'14 set of TFDS is read in either direction: the registered builder, its real parsers and layout on disk."""

import sys

import pytest

from mtf_experiments.data.pair_sources import TfdsPairSource, check_aligned, pair_lines
from mtf_experiments.data.sources import check_readable, describe
from mtf_experiments.errors import UserError

TRAIN = [(f"English {n} é.", f"Deutsch {n} ü.") for n in range(500)]
TEST = [(f"Test {n}.", f"Probe {n}.") for n in range(30)]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    import tensorflow_datasets as tfds
    import tensorflow_datasets.translate.wmt14  # noqa: F401  (registers the builder without h5py)

    folder = tmp_path_factory.mktemp("tfds")
    builder = tfds.builder("wmt14_translate/de-en", data_dir=folder / "data")
    texts = folder / "text"

    def generators(dl_manager, **unused):
        made = []
        for split, pairs in (("train", TRAIN), ("validation", TEST), ("test", TEST)):
            (texts / split / "training").mkdir(parents=True)
            for number, language in enumerate(("en", "de")):
                name = texts / split / "training" / f"europarl-v7.de-en.{language}"
                name.write_text("".join(pair[number] + "\n" for pair in pairs), encoding="utf-8")
            arguments = {"split_subsets": ["europarl_v7"], "extraction_map": {"europarl_v7": [str(texts / split)]}}
            made.append(tfds.core.SplitGenerator(name=split, gen_kwargs=arguments))
        return made

    builder._split_generators = generators
    builder.download_and_prepare(
        file_format="array_record",
        download_config=tfds.download.DownloadConfig(try_download_gcs=False, num_shards=2),
    )
    return folder / "data"


@pytest.mark.parametrize(("source", "target", "order"), [("en", "de", (0, 1)), ("de", "en", (1, 0))])
def test_both_directions_are_read_completely_without_tensorflow(prepared, source, target, order):
    pairs = TfdsPairSource("wmt14_translate/de-en", source, target, str(prepared))
    assert pairs.splits == ("train", "validation", "test") and pairs.languages == (source, target)
    for side in (pairs.inputs, pairs.targets):
        check_readable(side)
    for split, expected in (("train", TRAIN), ("test", TEST)):
        infos = [describe(side, split) for side in (pairs.inputs, pairs.targets)]
        check_aligned(pairs, split, *infos)
        assert sorted(pair_lines(pairs, split)) == sorted((p[order[0]], p[order[1]]) for p in expected)
    assert "tensorflow" not in sys.modules


def test_another_number_of_test_sentences_than_pinned_is_refused(prepared):
    pairs = TfdsPairSource("wmt14_translate/de-en", "en", "de", str(prepared), expected={"test": {"lines": 3003}})
    with pytest.raises(UserError, match="lines is 30, expected 3003"):
        pairs.inputs.check_content(describe(pairs.inputs, "test"))
    pairs = TfdsPairSource(
        "wmt14_translate/de-en", "en", "de", str(prepared), test=None, expected={"test": {"lines": 30}}
    )
    with pytest.raises(UserError, match="expected names 'test'; the splits here: train, validation"):
        pairs.inputs.check_content(describe(pairs.inputs, "train"))


def test_a_language_that_the_set_does_not_have_is_named(prepared):
    pairs = TfdsPairSource("wmt14_translate/de-en", "en", "fr", str(prepared))
    with pytest.raises(UserError, match="has no text feature 'fr'; it has de, en|it has en, de"):
        check_readable(pairs.targets)
