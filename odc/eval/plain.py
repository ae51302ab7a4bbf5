"""Plain values as bytes and back, for messages between ranks.

Values of JSON's types are sent as JSON, which is three times faster; others by `torch.save`, and are read by
`torch.load(weights_only=True)`. Any process that can write into the job's store can write these messages,
so reading them builds nothing but plain values; `pickle` alone would run code that the bytes name.
"""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch.serialization import safe_globals

from odc.errors import ResultsError

_JSON = frozenset({type(None), bool, int, float, str})
_NUMPY_KINDS = "biufcSU"  # numbers, bytes and texts of fixed length; no objects
#: What NumPy's arrays and scalars are pickled as, beside the types that torch builds anyway.
_BUILT: list[Any] = [
    bytes, frozenset, np.ndarray, np.dtype, np.empty(0).__reduce__()[0], np.float64(0).__reduce__()[0],
    *{type(np.dtype(code)) for code in "?bhilqBHILQefdgFDGSU"},
]  # fmt: skip
_reading = threading.Lock()  # `safe_globals` belongs to the whole process


class PlainMessage:
    """`values` that are sent together; `what` names each in errors, `nbytes` is how long they are, roughly."""

    def __init__(self, what: str) -> None:
        self.nbytes = 0
        self.values = list[Any]()
        self._what, self._as_json = what, True

    def add(self, value: Any) -> None:
        """Append a value.

        Takes None, bool, int, float, complex, str, bytes, and lists, tuples, sets and dicts of such, NumPy arrays and
        scalars of numbers or texts, and dense CPU tensors. Raises ResultsError for any other type, and names it.
        """
        try:
            self.values.append(self._taken(value))
        except RecursionError:
            raise ResultsError(f"{self._what} holds a value that is nested too deeply or contains itself") from None

    def encode(self) -> bytes:
        """What `loads` reads."""
        if self._as_json:
            return json.dumps(self.values, separators=(",", ":")).encode()
        message = io.BytesIO()
        torch.save(self.values, message)
        return message.getvalue()

    def _taken(self, value: Any) -> Any:
        """The value, in which tensors do not hold on to storage beyond their own elements."""
        kind = type(value)
        self.nbytes += 8
        if kind in _JSON:
            self.nbytes += len(value) if kind is str else 0
            return value
        if kind is list:
            return [self._taken(one) for one in value]
        if kind is dict:
            self._as_json &= all(type(key) is str for key in value)
            return {self._taken(key): self._taken(one) for key, one in value.items()}
        self._as_json = False
        if kind in (tuple, set, frozenset):
            return kind(self._taken(one) for one in value)
        if kind in (bytes, complex):
            self.nbytes += len(value) if kind is bytes else 8
            return value
        name = f"{kind.__module__}.{kind.__qualname__}"
        if isinstance(value, torch.Tensor):
            if kind is torch.Tensor and value.layout is torch.strided and value.device.type == "cpu":
                self.nbytes += 256 + value.nbytes
                return value.detach().clone()
            name += f" ({value.layout} on {value.device})"
        elif kind is np.ndarray or isinstance(value, np.generic):
            if value.dtype.kind in _NUMPY_KINDS:
                self.nbytes += 256 + value.nbytes
                return value
            name = f"numpy.ndarray of {value.dtype}"
        raise ResultsError(
            f"{self._what} holds a value of type {name}, which ranks cannot send each other: send plain values "
            "(numbers, texts, bytes, lists, tuples, sets, dicts, NumPy arrays, CPU tensors), for example "
            "dataclasses.asdict(value), and build objects from them on the rank that gathers"
        )


def sent(value: Any, what: str) -> Any:
    """What another rank would receive; raises as `PlainMessage.add` does."""
    message = PlainMessage(what)
    message.add(value)
    return message.values[0]


def dumps(values: Iterable[Any], what: str) -> bytes:
    """The message of `values`; raises as `PlainMessage.add` does."""
    message = PlainMessage(what)
    for value in values:
        message.add(value)
    return message.encode()


def loads(message: bytes, what: str) -> list[Any]:
    """The values of a message; `what` names them in errors. Raises ResultsError for what odc has not written."""
    try:
        if message[:1] == b"[":
            return list(json.loads(message))
        with _reading, safe_globals(_BUILT):
            return list(torch.load(io.BytesIO(message), weights_only=True))
    except Exception as error:  # of any kind: the bytes may be anything
        raise ResultsError(f"{what} cannot be read ({type(error).__name__}); it was not written by odc") from None
