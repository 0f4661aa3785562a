"""The grammar's numbers against brute force, and the same text everywhere."""

import hashlib
import math
from collections import Counter
from itertools import product

import numpy as np
import pytest

from mtf_experiments.data.sources import describe, lines
from mtf_experiments.data.synthetic import Grammar, SyntheticSource


def test_probabilities_of_all_sentences_add_up_to_one():
    grammar = Grammar(seed=5, topics=2, openers=3, classes=2, words=2)
    words = [word for words in grammar.words for word in words]
    total = 0.0
    for length in range(7):
        for opener in grammar.openers:
            for rest in product(words, repeat=length):
                log_p = grammar.log_prob(" ".join((opener, *rest)))
                if log_p > -math.inf:
                    total += math.exp(log_p)
    assert 0.5 < total < 1.0  # the rest are longer sentences
    # Those have the probability that a chain has not ended, which the class table alone decides.
    step = grammar.next_class / grammar.next_class.sum(axis=1, keepdims=True)
    alive = np.eye(len(step))[0]
    for _ in range(7):
        alive = np.append(0.0, (alive @ step)[1:])
    assert total + alive.sum() == pytest.approx(1.0, abs=1e-12)


def test_entropy_is_the_mean_over_drawn_sentences():
    source = SyntheticSource(seed=1, train_lines=20_000)
    text = list(lines(source, "train"))
    nats = np.array([-source.grammar.log_prob(line) for line in text])
    tokens = np.array([len(line.split()) + 1 for line in text])
    expected_nats, expected_tokens = source.grammar.expectation
    for sample, expected in ((nats, expected_nats), (tokens, expected_tokens)):
        assert abs(sample.mean() - expected) < 4 * sample.std() / math.sqrt(len(sample))
    assert source.entropy_per_word == pytest.approx(expected_nats / expected_tokens)
    assert source.entropy_per_word == pytest.approx(nats.sum() / tokens.sum(), rel=0.01)


def test_probability_of_a_sentence_is_the_product_of_its_choices():
    grammar = Grammar(seed=2)
    opener, first, second = 5, (3, 7), (1, 0)
    topic = grammar.opener_topic[opener]
    grammar.next_class[1, 0] = 4
    expected = grammar.opener_weight[opener] / grammar.opener_weight.sum()
    last = 0
    for number, word in (first, second):
        expected *= grammar.next_class[last, number] / grammar.next_class[last].sum()
        expected *= grammar.word_weight[topic, number - 1, word] / grammar.word_weight[topic, number - 1].sum()
        last = number
    expected *= 4 / grammar.next_class[1].sum()
    line = " ".join([grammar.openers[opener], grammar.words[2][7], grammar.words[0][0]])
    assert grammar.log_prob(line) == pytest.approx(math.log(expected))
    assert grammar.log_prob(grammar.openers[0]) == -math.inf  # cannot end after the opener
    assert grammar.log_prob("nonsense " + line) == -math.inf


def test_known_likelihood_of_a_split_covers_each_word_and_sentence_end():
    source = SyntheticSource(seed=0, validation_lines=500)
    nats, tokens = source.source_nll("validation")
    counts = describe(source, "validation").whole
    assert tokens == counts.words + counts.lines
    assert nats / tokens == pytest.approx(source.entropy_per_word, rel=0.03)


def test_the_text_is_the_same_on_every_platform_and_does_not_depend_on_how_much_is_drawn():
    short = list(lines(SyntheticSource(seed=0, train_lines=300), "train"))
    longer = list(lines(SyntheticSource(seed=0, train_lines=5000), "train"))
    assert longer[:300] == short and len(longer) == 5000
    digest = hashlib.sha256("\n".join(short).encode()).hexdigest()
    assert digest.startswith("ae654a0c272cdcf3"), digest


def test_splits_and_seeds_differ():
    source = SyntheticSource(seed=0, train_lines=200, validation_lines=200, test_lines=200)
    texts = [tuple(lines(source, split)) for split in source.splits]
    texts.append(tuple(lines(SyntheticSource(seed=1, train_lines=200), "train")))
    assert len(set(texts)) == 4
    assert SyntheticSource(test_lines=0).splits == ("train", "validation")


def test_words_alone_and_pairs_of_words_do_not_reach_the_entropy():
    source = SyntheticSource(seed=0, train_lines=20_000)
    single, pair, before = Counter(), Counter(), Counter()
    for line in lines(source, "train"):
        words = ["<s>", *line.split(), "</s>"]
        single.update(words[1:])
        pair.update(zip(words[:-1], words[1:], strict=True))
        before.update(words[:-1])
    total = sum(single.values())
    unigram = -sum(n * math.log(n / total) for n in single.values()) / total
    bigram = -sum(n * math.log(n / before[a]) for (a, _), n in pair.items()) / total
    assert unigram > source.entropy_per_word + 0.5  # in spite of being fitted to this very text
    assert bigram > source.entropy_per_word + 0.02
