import math

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mtf_experiments.errors import UserError
from mtf_experiments.reporting.metrics import MetricsWriter, read_metrics


def points(rows, key):
    return [(row["step"], row["value"]) for row in rows if row["key"] == key]


def on_board(directory, tag):
    accumulator = EventAccumulator(str(directory), size_guidance={"scalars": 0})
    accumulator.Reload()
    return [(event.step, event.value) for event in accumulator.Scalars(tag)]


def test_resume_leaves_one_value_for_a_step_in_file_and_board(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        for step in range(10, 151, 10):
            writer.scalars(step, {"loss": 1.0, "rate": step})
    with MetricsWriter(tmp_path, resume_step=100) as writer:
        for step in range(110, 161, 10):
            writer.scalars(step, {"loss": 2.0, "rate": step})
    expected = [(s, 1.0 if s <= 100 else 2.0) for s in range(10, 161, 10)]
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert points(rows, "loss") == expected
    assert len({(row["step"], row["key"]) for row in rows}) == len(rows) == 32
    assert on_board(tmp_path, "loss") == expected


def test_run_that_starts_over_keeps_nothing_of_the_earlier_one(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.scalars(5, {"loss": 1.0})
    with MetricsWriter(tmp_path) as writer:
        writer.scalars(5, {"loss": 3.0})
    assert points(read_metrics(tmp_path / "metrics.jsonl"), "loss") == [(5, 3.0)]
    assert on_board(tmp_path, "loss") == [(5, 3.0)]


def test_second_value_of_a_step_is_not_written(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.scalars(5, {"loss": 1.0})
        writer.scalars(5, {"loss": 9.0, "bleu": 2.0})
    with MetricsWriter(tmp_path, resume_step=5) as writer:
        writer.scalars(5, {"bleu": 9.0})
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert (points(rows, "loss"), points(rows, "bleu")) == ([(5, 1.0)], [(5, 2.0)])


@pytest.mark.parametrize("torn", [b'{"step": 3, "key": "lo', b'{"step": 3, "key": "loss"}', b"\x00\xff"])
def test_torn_last_line_is_ignored_and_gone_after_a_resume(tmp_path, torn):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(tmp_path) as writer:
        writer.scalars(1, {"loss": 1.0})
    with open(path, "ab") as file:
        file.write(torn)
    assert points(read_metrics(path), "loss") == [(1, 1.0)]
    with MetricsWriter(tmp_path, resume_step=3) as writer:
        writer.scalars(4, {"loss": 4.0})
    assert points(read_metrics(path), "loss") == [(1, 1.0), (4, 4.0)]
    assert path.read_bytes().count(b"\n") == 2


def test_damaged_line_in_the_middle_is_an_error_with_its_number(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "key": "loss", "value": 1}\nrubbish\n{"step": 2, "key": "loss", "value": 1}\n')
    with pytest.raises(UserError, match=r"metrics.jsonl:2: .*rubbish"):
        read_metrics(path)


def test_rows_are_on_disk_before_the_writer_is_closed(tmp_path):
    writer = MetricsWriter(tmp_path)
    writer.scalars(1, {"loss": 1.5})
    assert points(read_metrics(tmp_path / "metrics.jsonl"), "loss") == [(1, 1.5)]
    writer.close()


def test_values_that_are_not_finite_come_back_from_plain_json(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.scalars(1, {"up": math.inf, "down": -math.inf, "none": math.nan})
    text = (tmp_path / "metrics.jsonl").read_text()
    assert "Infinity" not in text and "NaN" not in text
    values = {row["key"]: row["value"] for row in read_metrics(tmp_path / "metrics.jsonl")}
    assert values["up"] == math.inf and values["down"] == -math.inf and math.isnan(values["none"])


def test_text_is_shown_on_the_board(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.text(0, "config", "d_model = 64")
    accumulator = EventAccumulator(str(tmp_path))
    accumulator.Reload()
    (tag,) = accumulator.Tags()["tensors"]
    assert tag.startswith("config")
    assert accumulator.Tensors(tag)[0].tensor_proto.string_val == [b"d_model = 64"]


def test_processes_that_do_not_write_leave_no_file(tmp_path):
    with MetricsWriter(tmp_path / "run", active=False) as writer:
        writer.scalars(1, {"loss": 1.0})
        writer.text(1, "config", "x")
    assert not (tmp_path / "run").exists()


def test_absent_file_has_no_rows(tmp_path):
    assert read_metrics(tmp_path / "metrics.jsonl") == []


def test_tensorboard_is_told_what_the_run_is(tmp_path):
    with MetricsWriter(tmp_path, active=True) as writer:
        writer.describe(
            {"d_ff": 64, "layout": "batch:rows"}, ["validation/ppl_word"], {"learning": {"loss": ["train/nll"]}}
        )
        writer.scalars(1, {"validation/ppl_word": 7.0})
    written = b"".join(p.read_bytes() for p in tmp_path.glob("events.*"))
    for part in (
        b"_hparams_/session_start_info",
        b"d_ff",
        b"batch:rows",
        b"validation/ppl_word",
        b"custom_scalars__config__",
    ):
        assert part in written
