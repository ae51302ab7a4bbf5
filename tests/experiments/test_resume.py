"""Jobs that stop and go on, bit for bit as without the stop. (GRPO's are in grpo/test_step.py.)"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import tiny_job, tiny_multimodal
from support.ranks import RanksFailed

from odc.fsdp import shutdown

pytest.importorskip("transformers", reason="needs the train extra")
KINDS: dict[str, Any] = {"text": tiny_job, "multimodal": tiny_multimodal}


def trained(rank: int, world: int, kind: str, config: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of the job and its whole parameters at the end."""
    job = KINDS[kind].rank_job(config)
    result = job.run()
    parameters = {name: p.full_tensor().detach().clone() for name, p in job.trainer.model.named_parameters()}
    dist.barrier()
    shutdown()
    return [step.loss for step in result.steps], parameters


@pytest.mark.parametrize(
    ("kind", "arm"),
    [
        ("text", "fsdp2"),
        ("text", "odc"),
        ("multimodal", "odc"),
        pytest.param("multimodal", "fsdp2", marks=pytest.mark.thorough),  # draws, saves and loads as "text" does
    ],
)
def test_a_resumed_job_goes_on_bit_for_bit(ranks: Callable[[int], Any], tmp_path: Path, kind: str, arm: str) -> None:
    for extra in ("PIL", "soundfile") if kind == "multimodal" else ():
        pytest.importorskip(extra, reason="needs the multimodal extra")
    options = {"steps": 4, "warmup": 1, "reproducible": arm == "odc", "save_every": 2, "output": "set below"}
    base = KINDS[kind].tiny_job(tmp_path, arm=arm, **options)
    straight, expected = ranks(2).run(trained, kind, base.with_(output=str(tmp_path / "straight")))[0]
    first = tmp_path / "straight" / "checkpoints" / "step-00000002"
    again = base.with_(output=str(tmp_path / "again"), resume=str(first))
    resumed, got = ranks(2).run(trained, kind, again)[0]
    assert resumed == straight[2:] and len(straight) == 4
    assert expected.keys() == got.keys()
    for name, value in expected.items():
        assert torch.equal(value, got[name]), name
    lines = (tmp_path / "straight" / "steps.jsonl").read_text().splitlines()
    assert [json.loads(line)["loss"] for line in lines] == straight
    if (kind, arm) == ("text", "odc"):  # after which the ranks are started anew
        with pytest.raises(RanksFailed, match=r"the checkpoint was made with seed=0, this job has seed=1"):
            ranks(2).run(trained, kind, again.with_(seed=1))
