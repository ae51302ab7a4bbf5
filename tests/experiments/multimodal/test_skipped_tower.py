"""A rank whose microbatch has no image does not run the vision tower: odc finishes with the right gradients, FSDP2 not.

The model is one root whose forward leaves the tower out when there are no pixels, as in pytorch#148334, torchtitan#4777
and miles#2406.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.rank_worker import tell
from support.ranks import spawn_ranks
from support.tiny_multimodal import CONFIG
from torch import Tensor, nn
from torch.nn.functional import pad

from odc.experiments.data.packing import IGNORED
from odc.experiments.multimodal.model import build_towers
from odc.fsdp import shutdown

Pools = Callable[[int], Any]
_PATIENCE_S = 15.0  # for two steps of FSDP2, which take a tenth of a second where no rank skips anything


class Model(nn.Module):
    """Looks at pictures if there are any."""

    def __init__(self) -> None:
        super().__init__()
        towers = build_towers(CONFIG, seed=0)
        self.vision, self.llm = towers["image"], towers["llm"]

    def forward(self, ids: Tensor, patches: Tensor | None) -> Tensor:
        """Summed loss of one text of bytes, behind the features of one 4 x 6 image, or behind none."""
        features = torch.zeros(0, CONFIG.geometry.width)
        if patches is not None:
            features = self.vision(patches, torch.tensor([[4, 6]]))
        length = len(features) + len(ids)
        order = torch.arange(length).roll(len(features))  # features stand first, and have rows after the text's
        labels = (
            pad(ids, (len(features) - 1, 1), value=IGNORED) if len(features) else pad(ids[1:], (0, 1), value=IGNORED)
        )
        loss: Tensor = self.llm(ids, features, order, labels, [length])
        return loss


def sample(rank: int, pictures: bool = False) -> tuple[Tensor, Tensor | None]:
    """Rank 0 has an image, the others have none; with `pictures` all have."""
    draw = torch.Generator().manual_seed(rank)
    ids = torch.randint(256, (7 + 3 * rank,), generator=draw)
    return ids, torch.randn(24, 48, generator=draw) if rank == 0 or pictures else None


def train(rank: int, world: int, transport: str, pictures: bool = False) -> dict[str, Tensor]:
    """Whole gradients of the second step; with `pictures` every rank has an image."""
    if transport == "odc":
        from odc import fully_shard
    else:
        from torch.distributed.fsdp import fully_shard
    model = Model()
    for block in [*model.vision.blocks, *model.llm.blocks]:  # type: ignore[operator, misc]
        fully_shard(block)
    fully_shard(model)
    tell("built")
    for _ in range(2):
        model.zero_grad()
        model(*sample(rank, pictures)).backward()
    return {name: p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None}  # type: ignore[attr-defined]


def train_with_odc(rank: int, world: int) -> dict[str, Tensor]:
    found = train(rank, world, "odc")
    dist.barrier()
    shutdown()
    return found


def train_with_fsdp2(rank: int, world: int, pictures: bool) -> dict[str, Tensor]:
    return train(rank, world, "fsdp2", pictures)


@pytest.mark.parametrize("world", [2, 4])
def test_odc_needs_no_dummy(ranks: Pools, world: int) -> None:
    reference = Model()
    for rank in range(world):
        (reference(*sample(rank)) / world).backward()  # gradients are averaged over ranks
    expected = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    assert any(name.startswith("vision") for name in expected)
    for found in ranks(world).run(train_with_odc):
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


def test_fsdp2_finishes_where_every_rank_has_an_image(ranks: Pools) -> None:
    """So that the next test says something."""
    one, two = ranks(2).run(train_with_fsdp2, True)
    assert one.keys() == two.keys()


@pytest.mark.thorough
def test_fsdp2_does_not_finish() -> None:
    """Over gloo a rank is killed where messages of two units meet; where they have equal sizes, ranks wait for ever.

    If it finishes one day, this says so, and docs/multimodal.md must change.
    """
    with spawn_ranks(2, train_with_fsdp2, False) as processes:
        processes.until_told(1)
        deadline = time.monotonic() + _PATIENCE_S
        while time.monotonic() < deadline and all(o.exit_code is None for o in processes.outcomes):
            processes.receive(0.2)
        finished = [o.rank for o in processes.outcomes if o.answered and o.error is None]
        ends = [o.describe() for o in processes.outcomes]
    assert not finished, f"ranks {finished} of stock FSDP2 finished:\n" + "\n".join(ends)
