"""Things to configure in tests of configuration."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import gin
import pytest

from mtf_experiments import config
from mtf_experiments.errors import UserError


@gin.configurable(module="config_test")
@dataclasses.dataclass(frozen=True, kw_only=True)
class ByName:
    width: int
    depth: int


class Optimizer(Protocol):
    def update(self) -> None: ...


@gin.configurable(module="config_test")
@dataclasses.dataclass
class Sgd:
    rate: float = 0.5
    momentum: float | None = None
    clip: float = math.inf

    def update(self) -> None: ...


@gin.configurable(module="config_test")
@dataclasses.dataclass
class Adam:
    rate: float = 0.1
    betas: tuple[float, ...] = (0.9, 0.98)

    def update(self) -> None: ...


@gin.configurable(module="config_test")
@dataclasses.dataclass
class Net:
    width: int = 8
    activation: Literal["relu", "gelu"] = "relu"
    bias: bool = False
    sizes: Sequence[int] = ()

    def __post_init__(self) -> None:
        if self.width % 2:
            raise UserError(f"width must be even, got {self.width}")


@gin.configurable(module="config_test")
@dataclasses.dataclass
class Root:
    steps: int
    optimizer: Optimizer | None = None
    encoder: Net | None = None
    decoder: Net | None = None
    name: str = "root"
    make: Callable[..., Any] | None = None


@gin.configurable(module="config_test")
@dataclasses.dataclass
class Unused:
    x: int = 0


@gin.configurable(module="config_test")
def required_function(size: int = gin.REQUIRED) -> int:
    return size


def refused(action, *arguments):
    with pytest.raises(UserError) as caught:
        action(*arguments)
    return str(caught.value)


def built(*gin_params, files=()):
    config.load(files, gin_params)
    config.check_types()
    return config.build(Root)
