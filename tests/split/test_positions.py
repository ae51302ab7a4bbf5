"""A piece that is run without its positions, or through another model, is refused before its first layer attends."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.split_jobs import OwnModel, model_of, tokens_of
from torch import Tensor, nn

from odc.errors import UnsupportedError
from odc.split import models
from odc.split.handle import PieceHandle, guard

POSITIONS = torch.cat([torch.arange(5), torch.arange(15, 20)])[None]


class Attended(Exception):
    """The first layer has got as far as its attention."""


class Piece:
    def attend(self, *given: Any) -> Tensor:
        raise Attended


def prepared(kind: str) -> tuple[Any, dict[str, Any]]:
    model: Any = model_of(kind)
    extra = models.hook(model) if models.is_of_transformers(model) else {}
    guard(model)
    guard(model)
    given = {"input_ids": tokens_of(0, 20)[POSITIONS], "position_ids": POSITIONS}
    return model, {**given, **extra, "odc_piece": PieceHandle(Piece(), POSITIONS)}


@pytest.mark.parametrize("kind", ["llama", "gpt2", "own"])
def test_a_piece_with_its_positions_runs(kind: str) -> None:
    for given in (POSITIONS, POSITIONS.clone(), POSITIONS.to(torch.int32)):
        model, inputs = prepared(kind)
        with pytest.raises(Attended):
            model(**{**inputs, "position_ids": given})


def test_positions_may_be_given_by_place() -> None:
    model, inputs = prepared("own")
    with pytest.raises(Attended):
        model(inputs["input_ids"], inputs["position_ids"], inputs["odc_piece"])


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_loop_that_omits_positions_is_refused(kind: str) -> None:
    model, inputs = prepared(kind)
    del inputs["position_ids"]
    for called in (model, model.base_model):  # whose head may be run apart
        with pytest.raises(UnsupportedError, match=r"without its position_ids, .* pass all of SamplePiece.of"):
            called(**inputs)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "own"])
@pytest.mark.parametrize("wrong", [torch.arange(10)[None], torch.arange(20)[None]])
def test_other_positions_are_refused(kind: str, wrong: Tensor) -> None:
    model, inputs = prepared(kind)
    with pytest.raises(UnsupportedError, match="other position_ids than the piece's"):
        model(**{**inputs, "position_ids": wrong})


def test_positions_may_have_moved_to_a_device() -> None:
    """Nothing of a tensor on the meta device can be read: the comparison has come to its result."""
    model, inputs = prepared("own")
    with pytest.raises(RuntimeError, match="cannot be called on meta tensors"):
        model(**{**inputs, "position_ids": POSITIONS.to("meta")})


def test_a_model_within_another_is_guarded() -> None:
    """A model that is not guarded gets no further than its first layer."""

    class Wrapped(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, **inputs: Any) -> Any:
            return self.model(**{name: one for name, one in inputs.items() if name != "position_ids"})

    model, inputs = prepared("llama")
    with pytest.raises(UnsupportedError, match="without its position_ids"):
        Wrapped(model)(**inputs)
    with pytest.raises(UnsupportedError, match="the model that the Splitter was made with was not called"):
        OwnModel()(**{name: inputs[name] for name in ("input_ids", "position_ids", "odc_piece")})


def test_whole_samples_are_not_guarded() -> None:
    model, inputs = prepared("llama")
    assert model(input_ids=inputs["input_ids"], use_cache=False).logits.shape[1] == 10
