"""A model's blocks, on modules that only look like Hugging Face's."""

from __future__ import annotations

import pytest
from torch import nn

from odc.blocks import blocks_of
from odc.errors import ConfigError


class Block(nn.Linear): ...


class Layer(nn.Sequential): ...


def test_blocks_come_in_order_and_whole() -> None:
    layers = [Layer(Block(2, 2), nn.ReLU()), Layer(nn.Sequential(Block(2, 2)))]
    model = nn.Sequential(Block(3, 3), *layers)
    assert blocks_of(model, "Layer") == layers
    assert blocks_of(model, ["Layer", "Block"]) == [model[0], *layers], "a block inside a block is part of it"
    model._no_split_modules = {"Block"}
    assert blocks_of(model) == [model[0], layers[0][0], layers[1][0][0]]
    assert blocks_of(model, ("Layer",)) == layers, "given classes count for more than the model's"


def test_a_block_that_shares_a_parameter_is_left_to_the_root() -> None:
    model = nn.Sequential(Layer(Block(2, 2), nn.ReLU()), Block(2, 2), Layer(Block(2, 2)))
    model[2][0].weight = model[1].weight
    assert blocks_of(model, "Layer") == [model[0]]
    assert blocks_of(model, ["Layer", "Block"]) == [model[0]]
    model[0].append(Block(2, 2))
    model[0][2].weight = model[0][0].weight
    assert blocks_of(model, "Layer") == [model[0]], "both are in the block"
    model.append(model[0])
    assert blocks_of(model, "Layer") == [model[0]], "the whole block is in two places"
    model.append(model[0][2])
    assert blocks_of(model, "Layer") == [], "a module of it is elsewhere, too"


def test_no_block() -> None:
    with pytest.raises(ConfigError, match="no block to shard in Linear \\(looked for none named\\)"):
        blocks_of(nn.Linear(1, 1))
    with pytest.raises(ConfigError, match="looked for Block, Layer\\): name their class"):
        blocks_of(nn.Linear(1, 1), ["Layer", "Block"])
