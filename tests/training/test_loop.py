"""The training loop: an interrupted run is the unbroken one to the last bit, and nothing broken is ever saved."""

import functools
import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtf_experiments import mtf
from mtf_experiments.data.synthetic import SyntheticSource
from mtf_experiments.data.tasks import LanguageModelTask
from mtf_experiments.data.tokenizer import Vocabulary
from mtf_experiments.errors import NonFiniteError
from mtf_experiments.evaluation.evaluator import PerplexityEvaluator
from mtf_experiments.evaluation.settings import Decoding, Evaluation
from mtf_experiments.reporting.run_directory import RunDirectory
from mtf_experiments.training import optimizers
from mtf_experiments.training.checkpoints import Checkpoints
from mtf_experiments.training.loop import Trainer
from mtf_experiments.training.schedules import InverseSquareRootToZero
from mtf_experiments.training.settings import Training
from tests.layouts import tiny

LENGTH, BATCH, STEPS = 16, 8, 10
SCHEDULE = InverseSquareRootToZero(train_steps=STEPS, warmup_steps=4, final_steps=3)
BOTH = "batch:rows;vocab:cols;d_ff:cols;heads:cols"


@pytest.fixture(autouse=True, scope="module")
def quick_compilation():
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    # An epoch is about five steps long, so that runs go through the end of one.
    source = SyntheticSource(train_lines=45, validation_lines=10)
    cache = tmp_path_factory.mktemp("cache")
    vocabulary = Vocabulary(size=384, kind="word")
    return LanguageModelTask(source, vocabulary, "toy", LENGTH, str(cache), unknown_limit=1.0).prepare()


@functools.cache
def programs(mesh="all:1", layout=""):
    """Programs that are compiled once, however many runs use them."""
    config = tiny.model(vocab_size=384, num_layers=1)
    made = tiny.programs(mesh, layout, config=config, rows=BATCH, schedule=SCHEDULE)
    made.compiled_update = functools.cache(made.compiled_update)
    made.compiled_nll = functools.cache(made.compiled_nll)
    return made


def trainer(task, path, train_steps=STEPS, made=None):
    training = Training(log_every=1, eval_every=5, checkpoint_every=5)
    run = RunDirectory.create(path)
    return Trainer(made or programs(), task, run, train_steps, training, Evaluation(), Decoding(), 1.0)


def saved(path, step, made=None):
    """The checkpoint after `step` updates, as a training state."""
    abstract = (made or programs()).abstract_state()
    with Checkpoints(path / "checkpoints", read_only=True) as checkpoints:
        params, opt_state = checkpoints.restore(step, abstract.params, abstract.opt_state)
    return SimpleNamespace(params=params, opt_state=opt_state)


def series(path, key):
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text("utf-8").split("\n") if line]
    found = [(row["step"], row["value"]) for row in rows if row["key"] == key]
    assert len(dict(found)) == len(found), f"{key} has two values for one step"
    return dict(found)


@pytest.fixture(scope="module")
def straight(task, tmp_path_factory):
    """The directory of a run of ten steps in one go, and the result it returned."""
    path = tmp_path_factory.mktemp("straight")
    return path, trainer(task, path).train()


@pytest.fixture(scope="module")
def restarted(task, tmp_path_factory):
    """The directory of the same run in five pieces, each a new trainer, and the rows that it was trained on."""
    path = tmp_path_factory.mktemp("restarted")
    update, consumed = programs().compiled_update(), []

    def spied(state, batch):
        consumed.append(tiny.numpy(batch))
        return update(state, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(programs(), "compiled_update", lambda: spied)
        for steps in (1, 2, 5, 7, STEPS):
            trainer(task, path, steps).train()
    return path, consumed


def test_learning_rate_of_each_step_is_the_schedules_after_the_updates_before_it(straight):
    path, _ = straight
    rates = series(path, "train/learning_rate")
    assert rates == {step: float(SCHEDULE(step - 1)) for step in range(1, STEPS + 1)}


def test_five_restarts_change_no_bit_of_parameters_optimizer_or_metrics(straight, restarted):
    whole, pieces = saved(straight[0], STEPS), saved(restarted[0], STEPS)
    for name, parameter in whole.params.items():
        np.testing.assert_array_equal(pieces.params[name].array, parameter.array, err_msg=name)
    for a, b in zip(jax.tree.leaves(pieces.opt_state), jax.tree.leaves(whole.opt_state), strict=True):
        np.testing.assert_array_equal(a, b)
    for key in ("train/loss", "train/learning_rate", "train/grad_norm", "train/tokens", "train/epoch"):
        expected = series(straight[0], key)
        assert list(expected) == list(range(1, STEPS + 1))
        assert series(restarted[0], key) == expected, key


def test_each_batch_is_consumed_exactly_once_across_restarts(task, restarted):
    rows = task.train_rows(BATCH, programs().settings.seed, 384)
    assert 2 < rows.steps_per_epoch < STEPS - 1
    assert len(restarted[1]) == STEPS
    for step, batch in enumerate(restarted[1]):
        for name, expected in rows.batch(step).items():
            np.testing.assert_array_equal(
                batch[name].reshape(expected.shape), expected, err_msg=f"{name} of step {step}"
            )


def test_checkpoint_of_a_step_holds_so_many_updates(straight):
    path, _ = straight
    with Checkpoints(path / "checkpoints", read_only=True) as checkpoints:
        assert checkpoints.steps() == [5, STEPS]
    for step in (5, STEPS):
        assert optimizers.updates_done(saved(path, step).opt_state) == step


def test_saved_parameters_are_those_of_the_step_although_training_went_on(straight, task):
    # The fifth step's buffers were given to the sixth while they were being saved.
    rows = task.train_rows(BATCH, programs().settings.seed, 384)
    update, state = programs().compiled_update(), programs().initialise()
    for step in range(5):
        state, _ = update(state, tiny.feed(programs(), rows.batch(step), training=True))
    for name, parameter in saved(straight[0], 5).params.items():
        np.testing.assert_array_equal(parameter.array, state.params[name].array, err_msg=name)


def test_evaluation_after_restoring_is_the_one_before_saving_to_the_last_digit(straight, task):
    path, result = straight
    again = PerplexityEvaluator(programs(), task, BATCH, (1.0,)).evaluate(saved(path, STEPS).params, "validation")
    assert again.at(1.0) == result.perplexity.at(1.0)
    assert series(path, "validation/nll_per_token")[STEPS] == result.perplexity.at(1.0).nll_per_token
    assert list(series(path, "validation/nll_per_token")) == [0, 5, STEPS]


def poisoned(step, change):
    """An update whose state (before) or result (after) is changed at one step."""
    update = programs().compiled_update()

    def changed(state, batch):
        if int(state.step) + 1 != step:
            return update(state, batch)
        return change(update, state, batch)

    return changed


def with_inf(state):
    softmax = state.params["softmax"]
    broken = jax.device_put(softmax.array.at[3, 3].set(jnp.inf), softmax.array.sharding)
    state.params["softmax"] = mtf.NamedTensor(broken, softmax.shape)
    return state


def infinite_before(update, state, batch):
    return update(with_inf(state), batch)


def infinite_after(update, state, batch):
    state, metrics = update(state, batch)
    return with_inf(state), metrics


@pytest.mark.parametrize(
    ("step", "change", "message"),
    [
        (7, infinite_before, r"step 7 \(batch 6 of data seed 7\): loss nan.*\bstep 5\b"),
        (
            10,
            infinite_before,
            r"step 10 \(batch 9 of data seed 7\): loss nan.*first parameter.*finite: \S*/.*\bstep 5\b",
        ),
        (10, infinite_after, "after step 10"),
    ],
)
def test_what_is_not_finite_ends_the_run_and_is_not_saved(task, tmp_path, monkeypatch, step, change, message):
    broken = poisoned(step, change)
    monkeypatch.setattr(programs(), "compiled_update", lambda: broken)
    with pytest.raises(NonFiniteError, match=message):
        trainer(task, tmp_path).train()
    with Checkpoints(tmp_path / "checkpoints", read_only=True) as checkpoints:
        assert checkpoints.steps() == [5]
    assert all(np.isfinite(p.array).all() for p in saved(tmp_path, 5).params.values())


@pytest.fixture(scope="module")
def elsewhere(task, tmp_path_factory):
    """A checkpoint of one update on 2 x 4 processors, and the loss of the next step there."""
    made = programs("rows:2;cols:4", BOTH)
    path = tmp_path_factory.mktemp("split") / "checkpoints"
    rows = task.train_rows(BATCH, 7, 384)
    update = made.compiled_update()
    state, _ = update(made.initialise(), tiny.feed(made, rows.batch(0), training=True))
    state, _ = update(state, tiny.feed(made, rows.batch(1), training=True))
    with Checkpoints(path) as checkpoints:
        checkpoints.save(2, state.params, state.opt_state, {})
        checkpoints.wait()
    values = tiny.numpy((state.params, state.opt_state))
    _, metrics = update(state, tiny.feed(made, rows.batch(2), training=True))
    return path.parent, values, float(metrics["loss"])


@pytest.mark.parametrize("mesh", ["rows:1;cols:1", "rows:8;cols:1", "rows:1;cols:8"])
def test_a_checkpoint_goes_on_under_another_mesh_with_the_same_loss(task, elsewhere, mesh):
    path, values, loss = elsewhere
    made = programs(mesh, BOTH)
    restored = saved(path, 2, made)
    for a, b in zip(jax.tree.leaves((restored.params, restored.opt_state)), jax.tree.leaves(values), strict=True):
        np.testing.assert_array_equal(a, b)
    for name, parameter in restored.params.items():
        assert parameter.array.sharding == made.abstract_state().params[name].array.sharding
    batch = tiny.feed(made, task.train_rows(BATCH, 7, 384).batch(2), training=True)
    _, metrics = made.gradient_program(restored.params, batch, jax.random.key(7), jnp.int32(2))
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6)
