"""The plan command: what it prints, and that every bad input ends in seconds with a message that helps.

UPDATE_GOLDEN=1 in the environment writes the messages anew, to be read and committed.
"""

import importlib.util
import json
import os
from pathlib import Path

import pytest

from tests.commands import runs

GOLDEN = Path(__file__).parent / "golden" / "plan"
LARGE = "--gin_file=lm_4.9b.gin"

ILLEGAL = {
    "nothing_asked": [],
    "misspelt_rule": [LARGE, "--gin_param=layout='batch:rows;d_f:cols'"],
    "unknown_mesh_dimension": [LARGE, "--gin_param=layout='batch:rows;d_ff:columns'"],
    "two_dimensions_on_one": [LARGE, "--gin_param=layout='batch:rows;length:rows;d_ff:cols'"],
    "products_count_too": [LARGE, "--gin_param=layout='d_ff:cols;d_model:cols'"],
    "size_that_does_not_divide": [LARGE, "--gin_param=mesh_shape='rows:16;cols:30'"],
    "batch_that_does_not_divide": [LARGE, "--gin_param=mesh_shape='rows:512;cols:1'"],
    "microbatches_that_do_not_divide": [LARGE, "--gin_param=Training.microbatches=32"],
    "looped_over": [LARGE, "--gin_param=layout='batch:rows;layers:cols'", "--gin_param=num_layers=32"],
    "rule_twice": [LARGE, "--gin_param=layout='heads:rows;heads:cols'"],
    "mesh_of_another_number": [LARGE, "--devices=500"],
    "mesh_without_sizes": [LARGE, "--gin_param=mesh_shape='rows;cols'"],
    "unknown_hardware": [LARGE, "--hardware=tpu_v22"],
    "machine_too_small": [LARGE, "--hardware=tpu_v5e"],
    "unknown_setting_of_the_hardware": [LARGE, "--gin_param=Hardware.memry=8e9"],
    "unknown_compiler": [LARGE, "--compile=gpu"],
    "unknown_macro": [LARGE, "--gin_param=num_head=4"],
    "missing_gin_file": ["--gin_file=lm_49b.gin"],
    "search_of_an_illegal_layout": [LARGE, "--search", "--gin_param=layout='batch:rows;vocabulary:cols'"],
    "search_and_compile": [LARGE, "--search", "--compile=cpu"],
    "study_without_output": ["--study=planning/layouts.gin"],
    "study_that_is_none": ["--study=lm_4.9b.gin", "--output=out"],
    "table1_with_a_flag_it_does_not_read": ["--table1", "--json"],
    "too_many_virtual_devices": [LARGE, "--hardware=cpu"],
}


@pytest.mark.parametrize("name", ILLEGAL)
def test_bad_input_is_refused_in_seconds_with_a_message_that_helps(name, tmp_path, env):
    result = runs.run("plan", *ILLEGAL[name], cwd=tmp_path, env=env, limit=60)
    assert result.code == 2, result
    message = result.err.replace(str(tmp_path), "<here>").replace(str(runs.REPOSITORY), "<repository>")
    message = message.split("usage: ")[0]  # how argparse breaks its lines depends on the version of Python
    golden = GOLDEN / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.mkdir(exist_ok=True)
        golden.write_text(message, encoding="utf-8")
    assert message == golden.read_text(encoding="utf-8")
    assert message.startswith("error: ") and "Traceback" not in result.out + message
    assert not result.out and not list(tmp_path.iterdir())
    print(f"{name}: {result.seconds:.1f} s")


@pytest.fixture(scope="module")
def large(tmp_path_factory, env):
    return runs.run("plan", LARGE, cwd=tmp_path_factory.mktemp("plan"), env=env)


def test_the_plan_of_the_largest_model_says_all_that_matters(large):
    assert large.code == 0, large
    for part in (
        "16 x 32 (rows:16;cols:32), 512 devices",
        "4,899,222,528",
        "cols: 16 along torus x (ring, 62.0 GB/s a device) and 2 along cores of a chip",
        "fits",
        "the paper: 6 of 11.5 PFLOP/s (52 %) on 512 TPU v2 cores, 13 hours",
        "decoder/feed_forward/wi_wo  [layers=6, in_out=2, d_model=1024, d_ff=262144]        [6, 2, 1024, 8192]",
        "no single change of the layout would save time",
    ):
        assert part in large.out, part


def test_it_is_the_same_for_machines(large, tmp_path, env):
    result = runs.run("plan", LARGE, "--json", cwd=tmp_path, env=env)
    found = json.loads(result.out)
    assert found["parameters"] == 4_899_222_528 and found["fits"] and found["mesh"] == {"rows": 16, "cols": 32}
    assert sum(found["shares"].values()) == pytest.approx(found["seconds"]["nothing_overlaps"])
    assert f"{found['efficiency']:.1%} of the peak" in large.out
    assert {c["remat"] for c in found["choices"]} == {"none", "communication", "full"}


def test_compilers_are_asked_beside_the_trace(tmp_path, here, env):
    result = runs.run(
        "plan", f"--gin_file={here / 'tiny.gin'}", "--compile=cpu", "--devices=4", "--json", cwd=tmp_path, env=env
    )
    (compiled,) = json.loads(result.out)["compiled"]
    assert compiled["fits"] and compiled["target"] == "cpu" and compiled["argument_bytes"] > 0


def test_a_search_prints_the_best_and_why_others_lose(tmp_path, here, env):
    tiny = f"--gin_file={here / 'tiny.gin'}"
    result = runs.run("plan", tiny, "--search", "--devices=8", cwd=tmp_path, env=env)
    assert result.code == 0, result
    assert (
        "legal meshes and layouts were" in result.out and "the best" in result.out and "communication +" in result.out
    )


def test_table_1_needs_no_gin_file(tmp_path, env):
    result = runs.run("plan", "--table1", "--gin_param=Table1.batch=32", cwd=tmp_path, env=env)
    assert result.code == 0 and "2 bd/r + 2 dh/c + h/c + 1" in result.out and "b = 32" in result.out


def test_this_machine_can_be_measured(tmp_path, here, env):
    tiny = f"--gin_file={here / 'tiny.gin'}"
    result = runs.run("plan", tiny, "--hardware=cpu", "--devices=2", cwd=tmp_path, env=env)
    assert result.code == 0 and "this CPU as 2 devices" in result.out, result


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu, the TPU compiler, is not installed")
def test_the_tpu_compiler_refuses_the_largest_model_data_parallel(tmp_path, env):
    flags = ["--gin_param=layout='batch:rows'", "--gin_param=mesh_shape='rows:256;cols:2'", "--compile=tpu:v2:16x16"]
    result = runs.run("plan", LARGE, *flags, cwd=tmp_path, env=env)
    assert result.code == 0 and "DOES NOT FIT: needs " in result.out and " of 7.48 GiB" in result.out
