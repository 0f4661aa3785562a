"""The direction of imports: commands -> training, evaluation, planning, reporting -> models -> mtf."""

import ast
import sys
from pathlib import Path

import pytest

PACKAGE = "mtf_experiments"
ROOT = Path(__file__).parents[1] / PACKAGE
COMMANDS = {"train", "evaluate", "decode", "score", "plan", "sweep", "report", "prepare", "__main__"}
ROOMS = {"training", "evaluation", "planning", "reporting"}
COMMON = {"errors", "config", "files"}

# For each part of the package, the other parts that it may import.  A module that is not listed wires the parts
# together for the commands and may import everything but commands.
ALLOWED = {
    "errors": set(),
    "config": {"errors"},
    "files": {"errors"},
    "cli": COMMON,
    "mtf": set(),
    "data": COMMON,
    "models": COMMON | {"mtf"},
    "training": COMMON | ROOMS | {"models", "mtf", "data"},
    "evaluation": COMMON | ROOMS | {"models", "mtf", "data"},
    "planning": COMMON | ROOMS | {"models", "mtf"},
    "reporting": COMMON | ROOMS | {"models", "mtf"},
}


def modules():
    return sorted(path.relative_to(ROOT) for path in ROOT.rglob("*.py"))


def part_of(path):
    return path.parts[0].removesuffix(".py")


def imported_names(text, package=()):
    """The full names that a module's text imports, functions and type checking included; `package` resolves dots."""
    names = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) + 1 - node.level]] if node.level else []
            module = ".".join([*base, *filter(None, [node.module])])
            names |= {f"{module}.{alias.name}" for alias in node.names}
    return names


def parts_imported(path):
    package = (PACKAGE, *path.parts[:-1])
    names = imported_names((ROOT / path).read_text(encoding="utf-8"), package)
    return {name.split(".")[1] for name in names if name.startswith(f"{PACKAGE}.")}


def test_the_reader_of_imports_sees_all_kinds():
    text = "import a.b\ndef f():\n    from c import d\nfrom . import e\nfrom ..g import h\n"
    assert imported_names(text, ("p", "q")) == {"a.b", "c.d", "p.q.e", "p.g.h"}


@pytest.mark.parametrize("path", modules(), ids=str)
def test_imports_point_one_way(path):
    part = part_of(path)
    imported = parts_imported(path) - {part, "__version__"}
    forbidden = imported - ALLOWED[part] if part in ALLOWED else imported & COMMANDS - {"__main__"}
    assert not forbidden, f"{path} must not import {sorted(forbidden)}"


def test_the_language_imports_jax_and_numpy_only():
    outside = {}
    for path in modules():
        if part_of(path) == "mtf":
            names = imported_names((ROOT / path).read_text(encoding="utf-8"), (PACKAGE, *path.parts[:-1]))
            found = {name.split(".")[0] for name in names} - {PACKAGE, "jax", "numpy"} - set(sys.stdlib_module_names)
            if found:
                outside[str(path)] = found
    assert not outside


def test_no_module_switches_off_the_check_of_varying_axes():
    found = [str(p) for p in modules() if "check_vma=False" in (ROOT / p).read_text(encoding="utf-8").replace(" ", "")]
    assert not found


def test_no_module_splits_lines_at_anything_but_a_line_feed():
    # str.splitlines splits at ten characters besides LF.
    users = [str(path) for path in modules() if ".splitlines(" in (ROOT / path).read_text(encoding="utf-8")]
    assert not users
