"""Perplexity of a model on a split: the same for every batch size, order and number of devices, and every scale at once."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from mtf_experiments import mtf
from mtf_experiments.data.synthetic import SyntheticSource
from mtf_experiments.data.tasks import LanguageModelTask
from mtf_experiments.data.tokenizer import Vocabulary
from mtf_experiments.errors import UserError
from mtf_experiments.evaluation.evaluator import PerplexityEvaluator
from tests.layouts import tiny

LENGTH, SENTENCES = 64, 45
SCALES = (1.0, 0.8, 1.2)


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    source = SyntheticSource(train_lines=200, validation_lines=SENTENCES)
    vocabulary = Vocabulary(size=384, kind="word")
    cache = tmp_path_factory.mktemp("cache")
    return LanguageModelTask(source, vocabulary, "toy", LENGTH, str(cache), unknown_limit=1.0).prepare()


@functools.cache
def programs(mesh="all:1", layout="", label_smoothing=0.0):
    config = tiny.model(vocab_size=384, num_layers=1, row_length=LENGTH)
    return tiny.programs(mesh, layout, config=config, length=LENGTH, label_smoothing=label_smoothing)


@functools.cache
def params(mesh="all:1", layout=""):
    return programs(mesh, layout).initialise().params


def evaluate(task, batch_size, mesh="all:1", layout="", scales=(1.0,)):
    evaluator = PerplexityEvaluator(programs(mesh, layout), task, batch_size, scales)
    return evaluator.evaluate(params(mesh, layout), "validation")


@pytest.fixture(scope="module")
def expected(task):
    return evaluate(task, 8, scales=SCALES)


def assert_same(result, expected):
    for name in ("tokens", "per_word", "per_char", "counts", "token_checksum", "total_sentences", "partial"):
        assert getattr(result, name) == getattr(expected, name), name
    for scale in result.scales:
        np.testing.assert_allclose(scale.total_nll, expected.at(scale.logit_scale).total_nll, rtol=1e-6)
        np.testing.assert_allclose(scale.ppl_word, expected.at(scale.logit_scale).ppl_word, rtol=1e-6)


def test_every_line_and_token_of_the_split_is_counted_once(task, expected):
    counts = task.counts("validation")
    assert expected.counts.sentences == SENTENCES == counts["sentences"]
    assert expected.tokens == counts["tokens"] == counts["pieces"] + SENTENCES
    assert expected.per_word == counts["words"] + SENTENCES
    assert expected.partial == ""


@pytest.mark.parametrize("batch_size", [1, 2, 3, 4, 7, 16])
def test_batch_size_neither_drops_nor_repeats_a_sentence(task, expected, batch_size):
    assert_same(evaluate(task, batch_size), expected)


@pytest.mark.parametrize(
    ("mesh", "layout"),
    [("rows:2", "batch:rows"), ("rows:2;cols:2", "batch:rows;vocab:cols;heads:cols"), ("rows:8", "batch:rows")],
)
def test_devices_do_not_change_the_result(task, expected, mesh, layout):
    # The rows do not fill the last batch.
    rows = task.eval_rows("validation", 1, 384)
    assert len(rows) % 8
    assert_same(evaluate(task, 8, mesh, layout), expected)


def test_logit_scales_of_one_pass_are_those_of_separate_passes(task, expected):
    for scale in SCALES[1:]:
        assert_same(evaluate(task, 8, scales=(1.0, scale)), expected)
    assert len({s.total_nll for s in expected.scales}) == 3


def test_total_is_that_of_the_sentences_one_by_one(task, expected):
    alone = sentence_nll(task, [[s] for s in range(SENTENCES)])
    np.testing.assert_allclose(alone.sum(), expected.at(1.0).total_nll, rtol=1e-6)


def sentence(task, number):
    store = task.stores["validation"]
    return store.tokens[store.offsets[number] : store.offsets[number + 1]].tolist()


def sentence_nll(task, rows):
    """NLL of each sentence, when row i holds the sentences that `rows[i]` numbers, one row of eight at a time in order."""
    totals = np.zeros(SENTENCES)
    nll = _nll()
    for start in range(0, len(rows), 8):
        part = rows[start : start + 8]
        made = [tiny.packed([sentence(task, s) for s in row], rows=1, length=LENGTH) for row in part]
        made += [tiny.packed([[1]], rows=1, length=LENGTH)] * (8 - len(part))
        batch = {name: np.concatenate([row[name] for row in made]) for name in made[0]}
        scored = np.asarray(nll(params(), tiny.feed(programs(), batch)).array)[0]
        for row, numbers in enumerate(part):
            for segment, number in enumerate(numbers):
                totals[number] = scored[row, batch["segments"][row] == segment + 1].sum()
    return totals


@functools.cache
def _nll():
    return programs().compiled_nll((1.0,))


def test_a_sentence_is_as_likely_alone_as_in_any_company_and_order(task):
    short = [s for s in range(SENTENCES) if len(sentence(task, s)) <= LENGTH // 2]
    assert len(short) > 10
    alone = sentence_nll(task, [[s] for s in range(SENTENCES)])
    assert all(len(sentence(task, s)) <= LENGTH for s in range(SENTENCES))
    pairs = [short[i : i + 2] for i in range(0, len(short), 2)]
    for packing in (pairs, [pair[::-1] for pair in pairs[::-1]]):
        np.testing.assert_allclose(sentence_nll(task, packing)[short], alone[short], rtol=1e-6)
    np.testing.assert_allclose(sentence_nll(task, [[s] for s in reversed(range(SENTENCES))]), alone, rtol=1e-6)


def test_a_uniform_model_has_the_vocabulary_for_its_perplexity_with_or_without_smoothing(task):
    # With the softmax layer at zero, every one of the 384 ids has the same probability.
    for label_smoothing in (0.0, 0.1):
        made = programs(label_smoothing=label_smoothing)
        softmax = made.params["softmax"]
        uniform = params() | {"softmax": mtf.NamedTensor(jnp.zeros(softmax.shape.sizes), softmax.shape)}
        result = PerplexityEvaluator(made, task, 8, (1.0,)).evaluate(uniform, "validation")
        np.testing.assert_allclose(result.at(1.0).ppl_token, 384, rtol=1e-5)


def test_training_and_evaluation_show_a_sentence_with_the_same_inputs(task):
    def examples(batches):
        found = {}
        for batch in batches:
            for row in range(len(batch["targets"])):
                for segment in range(1, batch["segments"][row].max() + 1):
                    here = batch["segments"][row] == segment
                    example = [tuple(batch[name][row, here].tolist()) for name in ("inputs", "positions")]
                    found.setdefault(tuple(batch["targets"][row, here].tolist()), set()).add(tuple(example))
        return found

    evaluated = examples(task.eval_rows("train", 4, 384))
    steps = range(int(task.train_rows(4, 0, 384).steps_per_epoch) + 1)
    trained = examples(task.train_rows(4, 0, 384).batch(step) for step in steps)
    assert trained == evaluated
    for targets, shown in trained.items():
        assert shown == {((0, *targets[:-1]), tuple(range(len(targets))))}


def test_between_is_called_before_each_batch(task):
    calls = []
    evaluator = PerplexityEvaluator(programs(), task, 8, (1.0,))
    evaluator.evaluate(params(), "validation", between=lambda: calls.append(1))
    assert len(calls) == len(task.eval_rows("validation", 8, 384))


def test_a_split_that_is_not_there_is_named(task):
    with pytest.raises(UserError, match="toy has no test split; it has train, validation"):
        PerplexityEvaluator(programs(), task, 8, (1.0,)).evaluate(params(), "test")
