"""Calls of CUDA's driver, by `cuda.bindings`, which the CUDA builds of torch bring. They let Python's lock go."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import torch

from odc.errors import UnsupportedError

NO_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT, in a thread that has not called CUDA's runtime yet


class DriverError(RuntimeError):
    """The driver's refusal of a call; `code` is its number, `name` that number's name."""

    def __init__(self, function: str, result: Any) -> None:
        self.code, self.name = int(result), str(getattr(result, "name", "unknown to cuda.bindings"))
        super().__init__(f"{function}: CUDA error {self.code} ({self.name})")


@cache
def bindings() -> Any:
    """`cuda.bindings.driver`. Raises UnsupportedError, naming the package, where it is not installed."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise UnsupportedError(
            f"{error}: odc calls CUDA's driver by cuda.bindings, which a torch that is built for CUDA brings along; "
            f"pip install cuda-bindings, of CUDA {torch.version.cuda}"
        ) from error
    return driver


def call(function: str, *args: object) -> Any:
    """What a function of the driver returns: None, a value, or a list of values. Raises DriverError if it refuses."""
    run = getattr(bindings(), function)
    try:
        result, *values = run(*args)
        if result == NO_CONTEXT:
            torch.cuda.current_stream().query()  # any call of CUDA's runtime gives a thread its context
            result, *values = run(*args)
    except (KeyError, ValueError) as error:  # a newer driver's number, of which the bindings make no result
        number = re.fullmatch(r"(\d+)( is not a valid CUresult)?", str(error))
        if number is None:
            raise
        result, values = int(number[1]), []
    if result:
        raise DriverError(function, result)
    return values[0] if len(values) == 1 else values or None
