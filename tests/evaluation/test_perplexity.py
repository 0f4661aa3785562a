import json
import math

import numpy as np
import pytest

from mtf_experiments.errors import NonFiniteError, UserError
from mtf_experiments.evaluation.perplexity import (
    PINNED_COUNTS,
    PerplexityAccumulator,
    TextCounts,
    choose_scale,
)

EOS = 1


def accumulated(sentences, scales=(1.0,), batch=None, nll=None, order=None):
    """Score sentences (lists of ids, EOS included), one a row, `batch` rows at a time; nll(row, column) in nats."""
    nll = nll or (lambda row, column: 0.25 + 0.5 * ((7 * row + 3 * column) % 5))
    order = list(order or range(len(sentences)))
    batch = batch or len(order)
    length = max(map(len, sentences))
    result = PerplexityAccumulator(scales)
    for start in range(0, len(order), batch):
        targets = np.zeros((batch, length), np.int32)
        values = np.full((len(scales), batch, length), 99.0)  # padding holds rubbish
        for i, row in enumerate(order[start : start + batch]):
            targets[i, : len(sentences[row])] = sentences[row]
            for column in range(len(sentences[row])):
                values[:, i, column] = np.asarray(scales) * nll(row, column)
        result.add(values, targets, (targets != 0).astype(np.int32))
    return result


def of_constant(nll, tokens, extra=()):
    """One sentence of `tokens` tokens with the same NLL each, and more such (nll, tokens)."""
    parts = [(nll, tokens), *extra]
    sentences = [[5] * (n - 1) + [EOS] for _, n in parts]
    return accumulated(sentences, nll=lambda row, column: parts[row][0])


def test_nll_per_token_times_tokens_is_the_total():
    sentences = [[5, 6, EOS], [7] * 9 + [EOS]]
    result = accumulated(sentences).result(TextCounts(2, 11, 40))
    expected = sum(0.25 + 0.5 * ((7 * r + 3 * c) % 5) for r, s in enumerate(sentences) for c in range(len(s)))
    only = result.at(1.0)
    assert only.total_nll == pytest.approx(expected, rel=1e-12)
    assert only.nll_per_token * result.tokens == pytest.approx(expected, rel=1e-12)
    assert result.tokens == 13


def test_perplexity_is_not_an_average_over_batches():
    uneven = of_constant(1.0, 100)
    uneven.merge(of_constant(4.0, 10))
    assert uneven.result(TextCounts(2, 108, 500)).at(1.0).ppl_token == pytest.approx(3.5706, abs=5e-5)


@pytest.mark.parametrize("shards", range(1, 9))
def test_merging_shards_gives_the_same_as_one_pass(shards):
    sentences = [[5 + i % 3] * (i % 4) + [EOS] for i in range(23)]
    whole = accumulated(sentences).result(TextCounts(23, 40, 99))
    merged = PerplexityAccumulator()
    for shard in range(shards):
        merged.merge(accumulated(sentences, order=range(shard, 23, shards)))
    parts = merged.result(TextCounts(23, 40, 99))
    assert parts.tokens == whole.tokens and parts.token_checksum == whole.token_checksum
    assert parts.at(1.0).ppl_word == pytest.approx(whole.at(1.0).ppl_word, rel=1e-12)


@pytest.mark.parametrize("batch", [1, 2, 3, 4, 7, 16])
def test_batch_size_and_order_change_nothing(batch):
    sentences = [[5] * n + [EOS] for n in (3, 1, 0, 6, 2, 5, 4)]
    reference = accumulated(sentences).result(TextCounts(7, 21, 80))
    result = accumulated(sentences, batch=batch, order=[6, 2, 0, 4, 1, 5, 3]).result(TextCounts(7, 21, 80))
    assert (result.tokens, result.token_checksum) == (reference.tokens, reference.token_checksum)
    assert result.at(1.0).total_nll == pytest.approx(reference.at(1.0).total_nll, rel=1e-12)


def test_checksum_tells_other_tokens_and_repeated_sentences():
    checksums = [
        accumulated(s).result(TextCounts(len(s), 9, 9)).token_checksum
        for s in ([[5, EOS]], [[6, EOS]], [[5, EOS], [5, EOS]], [[5, 5, EOS]])
    ]
    assert len(set(checksums)) == 4


def test_padding_is_not_in_the_denominator():
    text = ["one", " ".join(["word"] * 50)]
    sentences = [[9] * len(line.split()) + [EOS] for line in text]
    result = accumulated(sentences).result(TextCounts(2, 51, sum(map(len, text))))
    assert result.tokens == sum(len(line.split()) for line in text) + len(text) == 53


def test_targets_and_segments_that_disagree_about_padding_are_refused():
    targets = np.array([[5, EOS, 0]])
    with pytest.raises(ValueError, match="padding"):
        PerplexityAccumulator().add(np.zeros((1, 1, 3)), targets, np.array([[1, 1, 1]]))


def test_per_word_perplexity_applies_the_ratio_to_the_logarithm():
    tokens, words_with_ends = 176_923, 159_658
    accumulator = of_constant(3.0, tokens)
    result = accumulator.result(TextCounts(1, words_with_ends - 1, 10**6)).at(1.0)
    assert result.ppl_word == pytest.approx(27.78, abs=0.005)
    assert result.ppl_word == pytest.approx(math.exp(3.0 * tokens / words_with_ends), rel=1e-9)
    assert result.ppl_word != pytest.approx(math.exp(3.0) * tokens / words_with_ends, rel=0.1)


def test_a_label_is_refused_for_other_counts():
    words = 153_583
    assert PINNED_COUNTS["LM1B per-word"] == (6_075, words) and 6_075 + words == 159_658
    ends = np.full((1, 6_075), EOS)
    accumulator = PerplexityAccumulator()
    accumulator.add(np.full((1, 1, 6_075), 2.0), ends)
    right = TextCounts(6_075, words, 800_000)
    assert accumulator.result(right, label="LM1B per-word").label == "LM1B per-word"
    for counts, options in [
        (TextCounts(6_075, words + 1, 800_000), {}),
        (right, {"total_sentences": 6_076}),
    ]:
        with pytest.raises(UserError, match="6,075 sentences and 153,583 words"):
            accumulator.result(counts, label="LM1B per-word", **options)
    with pytest.raises(UserError, match="known are LM1B per-word"):
        accumulator.result(right, label="LM1B")


def test_uniform_model_over_ten_words_has_perplexity_ten_with_and_without_ends():
    accumulator = accumulated([[5, 6, EOS]], nll=lambda row, column: math.log(10))
    counts = TextCounts(1, 2, 7)
    result = accumulator.result(counts)
    assert result.tokens == result.per_word == 3
    assert result.at(1.0).total_nll == pytest.approx(3 * math.log(10))
    assert result.at(1.0).ppl_token == pytest.approx(10, rel=1e-14)
    assert result.at(1.0).bits_per_char == pytest.approx(3 * math.log2(10) / 8)
    without = accumulator.result(counts, include_eos=False)
    assert without.tokens == without.per_word == 2 and without.per_char == 7
    assert without.at(1.0).total_nll == pytest.approx(2 * math.log(10))
    assert without.at(1.0).ppl_word == pytest.approx(10, rel=1e-14)


def test_definitions_say_what_is_scored():
    counts = TextCounts(1, 2, 7, unknown=1, oov_rule="words outside words.txt became UNK")
    result = accumulated([[5, 2, EOS]]).result(counts)
    definitions = result.definitions()
    assert (definitions["eos"], definitions["bos"]) == ("scored and counted", "neither scored nor counted")
    assert definitions["unk"] == "scored and counted" and definitions["oov"] == "words outside words.txt became UNK"
    assert result.tokens == 3  # the unknown token counts
    assert "words + sentences = 3" in definitions["ppl/word"]
    without = accumulated([[5, EOS]]).result(counts, include_eos=False)
    assert without.definitions()["eos"] == "neither scored nor counted"
    assert "sentences" not in without.definitions()["ppl/word"]
    assert not without.metrics().keys() & result.metrics().keys()
    assert "1 unknown" in result.lines()[0] and "became UNK" in "\n".join(result.lines())


def test_partial_evaluation_has_another_name_and_says_how_much():
    accumulator = accumulated([[5, EOS], [6, EOS]])
    whole = accumulator.result(TextCounts(2, 2, 6), split="test", total_sentences=2)
    part = accumulator.result(TextCounts(2, 2, 6), split="test", total_sentences=10)
    assert whole.partial == "" and "test/ppl_word" in whole.metrics()
    assert part.partial == part.as_json()["partial"] == "PARTIAL 2/10"
    assert "PARTIAL 2/10" in part.lines()[0]
    assert "test/ppl_word_partial" in part.metrics()
    assert not part.metrics().keys() & whole.metrics().keys()


def test_counts_of_another_text_are_refused():
    with pytest.raises(ValueError, match="2 sentences were scored, but the text has 3"):
        accumulated([[5, EOS], [6, EOS]]).result(TextCounts(3, 3, 3))


def test_empty_set_is_an_error_and_not_nan():
    with pytest.raises(UserError, match="validation set has no tokens"):
        PerplexityAccumulator().result(TextCounts(0, 0, 0))


def test_blank_lines_are_scored_as_their_ends():
    blank = accumulated([[EOS], [EOS]], nll=lambda row, column: 2.0)
    result = blank.result(TextCounts(2, 0, 0))
    assert result.at(1.0).ppl_word == pytest.approx(math.exp(2.0)) and result.per_char == 2
    with pytest.raises(UserError, match="nothing but ends"):
        blank.result(TextCounts(2, 0, 0), include_eos=False)


def test_overflowing_perplexity_is_inf_beside_its_finite_nll():
    result = of_constant(1000.0, 2).result(TextCounts(1, 1, 4))
    assert result.at(1.0).ppl_word == math.inf and result.at(1.0).total_nll == 2000.0
    stored = json.loads(json.dumps(result.as_json(), allow_nan=False))
    assert stored["scales"][0]["ppl_word"] == "inf" and stored["scales"][0]["total_nll"] == 2000.0


def test_nan_at_padding_is_ignored_and_at_a_token_is_refused():
    targets = np.array([[5, EOS, 0]])
    accumulator = PerplexityAccumulator()
    accumulator.add(np.array([[[1.0, 2.0, np.nan]]]), targets)
    assert accumulator.result(TextCounts(1, 1, 1)).at(1.0).total_nll == 3.0
    with pytest.raises(NonFiniteError, match="1 token"):
        accumulator.add(np.array([[[np.nan, 2.0, 0.0]]]), targets)


def test_many_single_precision_values_are_summed_exactly_enough():
    n = 3_000_000
    accumulator = PerplexityAccumulator()
    for _ in range(3):
        accumulator.add(np.full((1, 1, n), 0.1, np.float32), np.full((1, n), EOS))
    total = accumulator.result(TextCounts(3 * n, 0, 0)).at(1.0).total_nll
    assert total == pytest.approx(3 * n * float(np.float32(0.1)), rel=1e-12)


def test_every_scale_is_reported_and_the_best_is_chosen_on_development_data_only():
    accumulator = accumulated([[5, 6, EOS]], scales=(0.9, 1.0, 1.1))
    result = accumulator.result(TextCounts(1, 2, 5))
    assert [scale.logit_scale for scale in result.scales] == [0.9, 1.0, 1.1]
    choice = choose_scale(result)
    assert choice.logit_scale == 0.9  # this fake NLL is proportional to the scale
    assert choice.development == result.at(0.9) and choice.development_at_one == result.at(1.0)
    assert "validation/ppl_word_logits_x0.9" in result.metrics() and "validation/ppl_word" in result.metrics()
    with pytest.raises(UserError, match="development data"):
        choose_scale(accumulator.result(TextCounts(1, 2, 5), split="test"))
    with pytest.raises(UserError, match="contain 1.0"):
        PerplexityAccumulator((0.9,))


def test_stored_result_has_every_count():
    counts = TextCounts(1, 2, 7, unknown=1, files=("dev.txt",), sha256="ab")
    stored = accumulated([[5, 6, EOS]]).result(counts).as_json()
    assert stored["counts"] == {
        "sentences": 1,
        "words": 2,
        "characters": 7,
        "unknown": 1,
        "truncated": 0,
        "files": ["dev.txt"],
        "sha256": "ab",
        "oov_rule": counts.oov_rule,
    }
    assert (stored["tokens"], stored["per_word"], stored["per_char"]) == (3, 3, 8)


def test_interval_is_that_of_a_bootstrap_over_sentences():
    rng = np.random.default_rng(0)
    rows, length = 60, 24
    targets, segments = np.zeros((rows, length), int), np.zeros((rows, length), int)
    sentences = []
    for row in range(rows):
        at = 0
        for segment in (1, 2, 3):
            n = int(rng.integers(2, 8))
            targets[row, at : at + n], segments[row, at : at + n] = [*rng.integers(3, 90, n - 1), 1], segment
            sentences.append((row, at, at + n))
            at += n
    hard = {s: rng.gamma(2.0, 1.5) for s in sentences}  # whole sentences are easy or hard
    nll = np.zeros((1, rows, length))
    for (row, a, b), mean in hard.items():
        nll[0, row, a:b] = rng.gamma(2.0, mean / 2, b - a)
    accumulator = PerplexityAccumulator()
    for part in np.array_split(np.arange(rows), 4):  # however it is batched
        accumulator.add(nll[:, part], targets[part], segments[part])
    words = int((targets > 1).sum())
    result = accumulator.result(TextCounts(len(sentences), words, 5 * words)).at(1.0)

    totals = np.array([[nll[0, r, a:b].sum(), b - a] for r, a, b in sentences])
    drawn = rng.integers(0, len(totals), (4000, len(totals)))
    means = np.log(result.ppl_word) * totals[drawn, 0].sum(1) / totals[drawn, 1].sum(1) / result.nll_per_token
    low, high = np.exp(np.quantile(means, [0.025, 0.975]))
    width = np.log(result.ppl_word_high / result.ppl_word_low)
    assert width == pytest.approx(np.log(high / low), rel=0.05)  # the bootstrap's is a little skewed
    assert result.ppl_word_low < result.ppl_word < result.ppl_word_high


def test_there_is_no_interval_of_few_sentences_or_where_they_are_not_told_apart():
    targets = np.array([[5, 6, 1, 0]] * 12)
    for rows, segments in ((9, np.where(targets > 0, 1, 0)), (12, None)):
        accumulator = PerplexityAccumulator()
        accumulator.add(np.ones((1, rows, 4)), targets[:rows], segments if segments is None else segments[:rows])
        assert accumulator.result(TextCounts(rows, 2 * rows, 9 * rows)).at(1.0).ppl_word_low is None
