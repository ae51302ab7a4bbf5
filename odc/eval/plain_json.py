"""Plain values as JSON text and back, for messages between ranks.

Anyone who can write into the job's store can write these messages, so reading them builds nothing but plain values;
`pickle` would run code that the text names. Types that JSON lacks are marked: `{"!": [kind, content]}`.
"""

from __future__ import annotations

import base64
import json
import sys
from typing import Any

import torch

from odc.errors import ResultsError

_MARK = "!"
_PLAIN = frozenset({type(None), bool, int, float, str})
_LISTS: dict[type, str] = {tuple: "tuple", set: "set", frozenset: "frozenset"}
_TYPES = {name: kind for kind, name in _LISTS.items()}
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
_NUMPY_KINDS = "biufcSU"  # numbers, bytes and texts of fixed length; no objects


def dumps(value: Any, what: str) -> bytes:
    """JSON of `value`; `what` names it in messages.

    Takes None, bool, int, float, complex, str, bytes, and lists, tuples, sets and dicts of such, NumPy arrays and
    scalars of numbers or texts, and dense CPU tensors. Raises ResultsError for any other type, and names it.
    """
    try:
        return json.dumps(_marked(value, what), separators=(",", ":")).encode()
    except RecursionError:
        raise ResultsError(f"{what} holds a value that is nested too deeply or contains itself") from None


def loads(text: bytes, what: str) -> Any:
    """The value that `dumps` was given; `what` names it in messages. Raises ResultsError for other texts."""
    try:
        return _unmarked(json.loads(text))
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RuntimeError) as error:
        raise ResultsError(
            f"{what} cannot be read ({type(error).__name__}: {error}); it was not written by odc"
        ) from None


def _marked(value: Any, what: str) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is list:
        return [_marked(one, what) for one in value]
    if kind is dict:
        if all(type(key) is str and key != _MARK for key in value):
            return {key: _marked(one, what) for key, one in value.items()}
        return {_MARK: ["dict", [[_marked(key, what), _marked(one, what)] for key, one in value.items()]]}
    if kind in _LISTS:
        return {_MARK: [_LISTS[kind], [_marked(one, what) for one in value]]}
    if kind is bytes:
        return {_MARK: ["bytes", base64.b64encode(value).decode()]}
    if kind is complex:
        return {_MARK: ["complex", [value.real, value.imag]]}
    if isinstance(value, torch.Tensor):
        return {_MARK: ["tensor", _tensor(value, what)]}
    numpy = sys.modules.get("numpy")
    if numpy is not None and (kind is numpy.ndarray or isinstance(value, numpy.generic)):
        return {_MARK: ["array" if kind is numpy.ndarray else "scalar", _array(numpy.asarray(value), what)]}
    raise _refusal(f"{kind.__module__}.{kind.__qualname__}", what)


def _refusal(found: str, what: str) -> ResultsError:
    return ResultsError(
        f"{what} holds a value of type {found}, which ranks cannot send each other: send plain values (numbers, texts, "
        "bytes, lists, tuples, sets, dicts, NumPy arrays, CPU tensors), for example dataclasses.asdict(value), and "
        "build objects from them on the rank that gathers"
    )


def _tensor(value: torch.Tensor, what: str) -> list[Any]:
    kind = type(value)
    dense = kind is torch.Tensor and value.layout is torch.strided and not value.is_quantized
    if not dense or value.device.type != "cpu":
        raise _refusal(f"{kind.__module__}.{kind.__qualname__} ({value.layout} on {value.device})", what)
    flat = value.detach().contiguous().reshape(-1)
    raw = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return [str(value.dtype).removeprefix("torch."), list(value.shape), base64.b64encode(raw).decode()]


def _array(value: Any, what: str) -> list[Any]:
    if value.dtype.kind not in _NUMPY_KINDS:
        raise _refusal(f"numpy.ndarray of {value.dtype}", what)
    return [value.dtype.str, list(value.shape), base64.b64encode(value.tobytes()).decode()]


def _unmarked(value: Any) -> Any:
    if type(value) is list:
        return [_unmarked(one) for one in value]
    if type(value) is not dict:
        return value
    if _MARK not in value:
        return {key: _unmarked(one) for key, one in value.items()}
    kind, content = value[_MARK]
    if kind == "dict":
        return {_unmarked(key): _unmarked(one) for key, one in content}
    if kind in _TYPES:
        return _TYPES[kind](_unmarked(one) for one in content)
    if kind == "complex":
        return complex(*content)
    if kind == "bytes":
        return base64.b64decode(content, validate=True)
    dtype, shape, text = content
    raw = bytearray(base64.b64decode(text, validate=True))
    if kind == "tensor":
        flat = torch.frombuffer(raw, dtype=_DTYPES[dtype]) if raw else torch.empty(0, dtype=_DTYPES[dtype])
        return flat.reshape(shape)
    if kind not in ("array", "scalar"):
        raise ValueError(f"there is no kind {kind!r}")
    import numpy

    if numpy.dtype(dtype).kind not in _NUMPY_KINDS:
        raise ValueError(f"arrays of {dtype!r} are not sent")
    array = numpy.frombuffer(raw, dtype=dtype).reshape(shape)
    return array if kind == "array" else array[()]
