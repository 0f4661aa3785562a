"""Which checkpoints an evaluation takes: by name, several, their mean, and those that are still to come."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtf_experiments.errors import UserError
from mtf_experiments.mtf import Dimension, NamedTensor
from mtf_experiments.training.checkpoints import Checkpoints

SHAPE = [Dimension("d_model", 16)]


def params(step):
    """Numbers of every magnitude, of both types that parameters have."""
    values = np.random.default_rng(step).standard_normal(16).astype(np.float32) * 10.0 ** np.arange(-8, 8)
    return {"a": NamedTensor(jnp.asarray(values), SHAPE), "b": NamedTensor(jnp.asarray(values, jnp.bfloat16), SHAPE)}


def save(checkpoints, step):
    checkpoints.save(step, params(step), {"count": jnp.int32(step)}, {"step": step})
    checkpoints.wait()


@pytest.fixture
def checkpoints(tmp_path):
    with Checkpoints(tmp_path / "c", keep=9) as made:
        for step in (1, 2, 4):
            save(made, step)
        yield made


def test_the_mean_is_that_of_the_parameters(checkpoints):
    abstract = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), params(1))
    mean = checkpoints.restore_average([1, 2, 4], abstract)
    for name, found in mean.items():
        three = np.array([np.asarray(params(s)[name].array, np.float64) for s in (1, 2, 4)])
        rounding = {jnp.float32: 2.0**-22, jnp.bfloat16: 2.0**-6}[found.dtype.type]
        assert (np.abs(np.asarray(found.array, np.float64) - three.mean(0)) <= rounding * np.abs(three).max(0)).all()
    one = checkpoints.restore_average([2], abstract)
    assert all(np.array_equal(one[name].array, p.array) for name, p in params(2).items())


def test_steps_may_be_listed(checkpoints):
    assert checkpoints.choose("4, 1") == checkpoints.choose("1,4") == [1, 4]
    assert checkpoints.choose("latest,1") == [1, 4]
    with pytest.raises(UserError, match="checkpoint '3' of .*: there are 1, 2, 4"):
        checkpoints.choose("1,3")


def test_following_gives_each_new_step_once_and_ends_with_the_last(checkpoints):
    seen = []
    for step in checkpoints.follow(last=6, patience=60, every=0.01):
        seen.append(step)
        if step == 4:
            save(checkpoints, 5)
        if step == 5:
            save(checkpoints, 6)
    assert seen == [1, 2, 4, 5, 6]


def test_following_ends_when_nothing_new_comes(checkpoints):
    assert list(checkpoints.follow(last=6, patience=0.1, every=0.01)) == [1, 2, 4]
    assert list(checkpoints.follow(last=4, patience=60, every=0.01)) == [1, 2, 4]
