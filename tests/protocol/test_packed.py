from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from odc.errors import UnsupportedError
from odc.protocol.packed import PackedMicrobatch, unpack

DTYPES = (torch.int64, torch.int32, torch.uint8, torch.bool, torch.float32, torch.bfloat16, torch.float64)


def sent(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    packed = PackedMicrobatch(tensors)
    raw = torch.full((packed.nbytes + 64,), 7, dtype=torch.uint8)
    packed.write(raw[: packed.nbytes])
    assert raw[packed.nbytes :].eq(7).all(), "written beyond its end"
    return unpack(raw[: packed.nbytes])


@st.composite
def microbatches(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    found = {}
    for name in draw(st.lists(st.text(max_size=9), max_size=4, unique=True)):
        shape = draw(st.lists(st.integers(0, 5), max_size=3))
        generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
        values = torch.randint(0, 256, shape, generator=generator)
        found[name] = values.to(draw(st.sampled_from(DTYPES)))
    return found


@given(microbatches())
def test_what_arrives_is_what_was_sent(tensors: dict[str, torch.Tensor]) -> None:
    found = sent(tensors)
    assert list(found) == list(tensors)
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
        assert torch.equal(found[name], tensor)


def test_views_and_parameters_travel_as_their_values() -> None:
    turned, parameter = torch.arange(12).view(3, 4).T, torch.nn.Parameter(torch.tensor([0.5, -0.5]))
    found = sent({"turned": turned, "parameter": parameter, "every second": torch.arange(9)[::2]})
    assert torch.equal(found["turned"], turned)
    assert found["parameter"].tolist() == [0.5, -0.5] and not found["parameter"].requires_grad
    assert found["every second"].tolist() == [0, 2, 4, 6, 8]


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"ids": [1, 2]}, "'ids' of a microbatch is a list: only tensors travel"),
        ({"ids": np.zeros(2)}, "is a ndarray: only tensors"),
        ({3: torch.zeros(2)}, "names its tensors by text, not by 3"),
        ({"ids": torch.zeros(2, device="meta")}, "'ids' of a microbatch is a Tensor .* on meta: only dense tensors"),
        ({"ids": torch.zeros(2, 2).to_sparse()}, "torch.sparse_coo. on cpu: only dense tensors on the CPU"),
    ],
)
def test_what_cannot_travel_is_refused_by_name(tensors: dict, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        PackedMicrobatch(tensors)
