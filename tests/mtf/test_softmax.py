import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtf_experiments import mtf
from tests.mtf.helpers import check, collectives, dims, integers, run, tensor

LOGITS, LABELS = tensor("batch:4 length:3 vocab:8", scale=3.0), integers("batch:4 length:3", 8)
CASES = [("rows:2;cols:4", "batch:rows;vocab:cols"), ("rows:2", "batch:rows")]


def nll(logits, labels, smoothing=0.0):
    """Against the whole target distribution, in the formula's own words."""
    vocab = logits.shape[-1]
    target = (1 - smoothing) * jax.nn.one_hot(labels, vocab) + smoothing / vocab
    return -jnp.sum(target * jax.nn.log_softmax(logits), -1)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_and_its_gradient_equal_the_formula(smoothing):
    check(
        lambda x, y: mtf.softmax_cross_entropy(x, y, "vocab", smoothing),
        lambda x, y: nll(x, y, smoothing),
        [LOGITS, LABELS],
        CASES,
        outside=not smoothing,
    )


def test_the_gradient_is_the_probabilities_less_the_target():
    def program(x, y):
        return jax.grad(lambda x: mtf.reduce_sum(mtf.softmax_cross_entropy(x, y, "vocab")).array)(x)

    slope = run(program, *CASES[0], LOGITS, LABELS).array
    expected = jax.nn.softmax(LOGITS.array) - jax.nn.one_hot(LABELS.array, 8)
    np.testing.assert_allclose(slope, expected, atol=1e-6)
    np.testing.assert_allclose(slope.sum(-1), np.zeros((4, 3)), atol=1e-6)


@pytest.mark.parametrize("mesh, layout", [("rows:1", ""), CASES[0]])
def test_large_logits_and_masked_entries(mesh, layout):
    """-inf entries, such as those that pad a vocabulary, take no part; a label on one costs infinitely much."""
    rows = jnp.asarray([[1e4] + [-1e4] * 7, [-jnp.inf] * 4 + [0.0] * 4, [3e38] * 8, [-jnp.inf] * 7 + [5.0]])
    logits = mtf.NamedTensor(rows, dims("batch:4 vocab:8"))

    def program(x, y):
        def loss(x):
            z = mtf.softmax_cross_entropy(x, y, "vocab")
            return mtf.reduce_sum(z).array, z

        slope, z = jax.grad(loss, has_aux=True)(x)
        return z, slope

    z, slope = run(program, mesh, layout, logits, mtf.NamedTensor(jnp.asarray([1, 4, 0, 7]), dims("batch:4")))
    np.testing.assert_allclose(z.array, [2e4, np.log(4), 0.0, 0.0], atol=1e-6)
    assert np.isfinite(slope.array).all()
    np.testing.assert_array_equal(slope.array[1, :4], np.zeros(4))
    z, _ = run(program, mesh, layout, logits, mtf.NamedTensor(jnp.asarray([0, 0, 0, 0]), dims("batch:4")))
    assert z.array[1] == np.inf


@pytest.mark.parametrize("layout", ["batch:rows;vocab:cols", "batch:rows"])
def test_half_precision_logits_lose_nothing_further_in_the_loss(layout):
    """Logits up to 40 over 4096 classes: the loss is that of the same logits in double precision."""
    rng = np.random.default_rng(0)
    values = jnp.asarray(rng.uniform(-40, 40, (8, 4096)), jnp.bfloat16)
    values = values.at[:, 7].set(40.0)
    labels = rng.integers(0, 4096, 8).astype(np.int32)
    labels[0] = 7
    logits = mtf.NamedTensor(values, dims("batch:8 vocab:4096"))

    def program(x, y):
        def loss(x):
            z = mtf.softmax_cross_entropy(x, y, "vocab")
            return mtf.reduce_sum(z).array, z

        return jax.grad(loss, has_aux=True)(x)

    slope, z = run(program, "rows:2;cols:2", layout, logits, mtf.NamedTensor(labels, dims("batch:8")))
    assert z.dtype == jnp.float32 and slope.dtype == jnp.bfloat16
    exact = np.asarray(values, np.float64)
    share = np.exp(exact - exact.max(1, keepdims=True))
    normaliser = np.log(share.sum(1)) + exact.max(1)
    np.testing.assert_allclose(z.array, normaliser - exact[np.arange(8), labels], atol=1e-4)
    expected = share / share.sum(1, keepdims=True)
    expected[np.arange(8), labels] -= 1
    error = np.asarray(slope.array, np.float64) - expected
    assert np.linalg.norm(error) < 0.01 * np.linalg.norm(expected)


def test_only_the_maximum_the_sum_and_the_label_travel():
    def loss(x, y):
        return mtf.softmax_cross_entropy(x, y, "vocab")

    def slope(x, y):
        return jax.grad(lambda x: mtf.reduce_sum(loss(x, y)).array)(x)

    assert collectives(loss, *CASES[0], LOGITS, LABELS) == {"allreduce": 2, "allreduce max": 1}
    assert not collectives(loss, *CASES[1], LOGITS, LABELS)
    backward = collectives(slope, *CASES[0], LOGITS, LABELS)
    assert backward["allgather"] == backward["alltoall"] == 0 and backward["allreduce"] <= 3


@pytest.mark.parametrize("mesh, layout", [("rows:1", ""), CASES[0]])
def test_labels_outside_the_vocabulary_give_nan_not_a_plausible_loss(mesh, layout):
    labels = mtf.NamedTensor(jnp.asarray([[0, 8, -1]] * 4), LABELS.shape)
    z = run(lambda x, y: mtf.softmax_cross_entropy(x, y, "vocab"), mesh, layout, LOGITS, labels).array
    assert np.isfinite(z[:, 0]).all() and np.isnan(z[:, 1:]).all()


def test_labels_that_are_not_integers_are_refused():
    with pytest.raises(mtf.ShapeError, match="needs integer labels, got float32"):
        mtf.softmax_cross_entropy(LOGITS, tensor("batch:4 length:3"), "vocab")


def test_logits_that_a_broadcast_repeats_over_the_split_batch():
    """A unigram model: one logit per word, whose gradient gathers those of all examples."""
    bias, labels = tensor("vocab:8"), integers("batch:4", 8)
    check(
        lambda b, y: mtf.softmax_cross_entropy(mtf.broadcast(b, [*y.shape, *b.shape]), y, "vocab"),
        lambda b, y: nll(jnp.broadcast_to(b, (4, 8)), y),
        [bias, labels],
        [(CASES[0][0], CASES[0][1]), ("rows:2", "batch:rows")],
    )
