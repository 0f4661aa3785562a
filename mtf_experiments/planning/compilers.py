"""What a real compiler makes of the training step: memory, collectives, and whether it fits. No devices are needed.

`cpu` is XLA's CPU compiler on so many virtual devices; `tpu:v2:16x16` the TPU compiler for a pod slice of that name, from
the optional package libtpu, on any machine.
"""

from __future__ import annotations

import importlib.util
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from mtf_experiments import mtf
from mtf_experiments.errors import UserError
from mtf_experiments.planning.hlo import hlo_ledger
from mtf_experiments.training.step import Programs

INSTALL = "pip install 'mtf-experiments[tpu-aot]'"


@dataclass(frozen=True)
class Compiled:
    """The verdict of a compiler. Bytes are those of one processor; None where the program was refused."""

    target: str
    fits: bool
    argument_bytes: int | None
    """What the step is given: parameters, optimizer state, batch, with the compiler's padding."""
    temporary_bytes: int | None
    """What it allocates besides: activations and gradients, copies, and gaps between them."""
    ledger: mtf.Ledger | None
    seconds: float
    reason: str = ""
    """Of a program that does not fit: what the compiler says it needs."""
    limit_bytes: int | None = None
    """The memory of a device, where the compiler said so."""
    needed_bytes: int | None = None
    """Of a program that does not fit: all that it needs."""
    peak_bytes: int | None = None
    """All that is in use at the fullest moment, arguments included, where the compiler says so."""


def as_json(compiled: Compiled) -> dict[str, Any]:
    """For machines."""
    found = compiled.ledger.elements_by_mesh_dimension() if compiled.ledger else {}
    return {**vars(compiled), "ledger": {";".join(axes): n for axes, n in found.items()}}


def check_target(target: str) -> None:
    """Raises UserError for a target that does not exist or whose compiler is not installed."""
    kind, _, name = target.partition(":")
    if target != "cpu" and (kind != "tpu" or not re.fullmatch(r"v[0-9]+[a-z]*:[0-9]+(x[0-9]+)+", name)):
        raise UserError(
            f"--compile={target}: want cpu, or tpu:NAME with the name of a pod slice, e.g. tpu:v2:16x16, tpu:v5e:16x16"
        )
    if kind == "tpu" and importlib.util.find_spec("libtpu") is None:
        raise UserError(
            f"--compile={target} needs the TPU compiler, which is not installed: {INSTALL} (no TPU is needed)"
        )


def target_mesh(target: str, mesh_shape: mtf.MeshShape, devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh to compile for: of `devices`, else of all that the target has. Raises UserError for another number of them."""
    if devices is None:
        devices = jax.devices() if target == "cpu" else _topology(target.partition(":")[2])
    if len(devices) != mesh_shape.processors:
        raise UserError(
            f"--compile={target} has {len(devices)} devices, the mesh {mesh_shape} {mesh_shape.processors}; "
            "set mesh_shape so that its product is that number, or name another slice"
        )
    grid = np.array(devices).reshape(tuple(mesh_shape.values()) or (1,))
    names = tuple(mesh_shape) or ("all",)
    return Mesh(grid, names, axis_types=(AxisType.Auto,) * len(names))


def compile_step(
    programs: Callable[[Mesh], Programs], target: str, mesh_shape: mtf.MeshShape, devices: Sequence[Any] | None = None
) -> Compiled:
    """The verdict on the whole update: `programs` are made for the mesh of `target`.

    For `cpu` as many virtual devices must be there as the mesh has processors (`--devices`).
    """
    start = time.perf_counter()
    made = programs(target_mesh(target, mesh_shape, devices))
    batch = {
        name: mtf.NamedTensor.unchecked(
            jax.ShapeDtypeStruct(x.shape.sizes, x.array.dtype, sharding=made.sharding(x.shape)), x.shape
        )
        for name, x in made.abstract_batch().items()
    }
    lowered = made.compiled_update(keep_unused=True).lower(made.abstract_state(), batch)
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        reason, needed, limit = _shortage(str(error))
        seconds = time.perf_counter() - start
        return Compiled(target, False, None, None, None, seconds, reason, limit, needed)
    memory = compiled.memory_analysis()
    return Compiled(
        target,
        True,
        memory.argument_size_in_bytes,
        memory.temp_size_in_bytes,
        hlo_ledger(compiled.as_text(), mesh_shape),
        time.perf_counter() - start,
        peak_bytes=getattr(memory, "peak_memory_in_bytes", 0) or None,
    )


_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def _shortage(message: str) -> tuple[str, int | None, int | None]:
    """What is said of it in one line, the bytes needed and those there are."""
    size = r"([0-9.]+)([KMGT]?)"
    found = re.search(rf"Used {size} of {size} hbm|\({size}\) exceeds available HBM \({size}\)", message)
    if not found:
        return message.split("\n")[0], None, None
    found = [group for group in found.groups() if group is not None]
    needed, limit = (int(float(found[i]) * _UNITS[found[i + 1]]) for i in (0, 2))
    return f"needs {found[0]} {found[1]}iB of {found[2]} {found[3]}iB", needed, limit


def _topology(name: str) -> list[Any]:
    """The devices of a pod slice, in the order of their coordinates. Raises UserError for an unknown name."""
    # The library asks the machine it runs on what kind of TPU host it is, unless it is told.
    for key, value in {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": "v5litepod-16",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_STDERR_LOG_LEVEL": "3",
        "TPU_MIN_LOG_LEVEL": "3",
    }.items():
        os.environ.setdefault(key, value)
    from jax.experimental import topologies

    try:
        return list(topologies.get_topology_desc(name, platform="tpu").devices)
    except Exception as error:  # whatever the library raises, it does not know the name
        raise UserError(
            f"--compile=tpu:{name}: the TPU compiler does not know this slice: {str(error).split(chr(10))[0]}"
        ) from None
