"""Which modules are sharded, on a model that only looks like one of Hugging Face."""

from __future__ import annotations

from types import SimpleNamespace

from torch import nn

from odc.integrations.verl.units import units_of


class Block(nn.Linear): ...


class Model(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.config = SimpleNamespace(tie_word_embeddings=tied)
        self.embed_tokens = nn.Embedding(4, 2)
        self.layers = nn.ModuleList([Block(2, 2), Block(2, 2)])
        self.lm_head = nn.Linear(2, 4)


def test_blocks_and_untied_ends() -> None:
    model = Model(tied=False)
    assert units_of(model, "Block") == [*model.layers, model.embed_tokens, model.lm_head]
    tied = Model(tied=True)
    tied._no_split_modules = {"Block"}
    assert units_of(tied) == [*tied.layers]


def test_a_head_that_fused_kernels_read_stays_in_the_root() -> None:
    model = Model(tied=False)
    assert units_of(model, "Block", head_apart=False) == [*model.layers, model.embed_tokens]
