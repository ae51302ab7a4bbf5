from __future__ import annotations

import numpy as np
import pytest

from odc.errors import ConfigError
from odc.experiments.config import JobConfig
from odc.experiments.data.documents import Document
from odc.experiments.data.packing import pack
from odc.protocol.packed import PackedMicrobatch


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"arm": "zero1"}, "arm must be one of fsdp2-localsort, .*, odc-hybrid, not 'zero1'"),
        ({"precision": "fp8"}, "precision must be one of fp32, bf16"),
        ({"long": "truncate"}, "long must be one of error, split, drop"),
        ({"ranks": 0}, "ranks must be a whole number, 1 or more"),
        ({"ranks": 2.0}, "ranks must be a whole number"),
        ({"steps": True}, "steps must be a whole number"),
        ({"max_tokens": 1}, "max_tokens must be a whole number, 2 or more"),
        ({"lr": float("nan")}, "lr must be a finite number"),
        ({"lr": 0.0}, "lr, eps and timeout_s must be above 0"),
        ({"clip": -1.0}, "clip must be a finite number, 0 or more"),
        ({"betas": (0.9, 1.0)}, "betas must be two numbers"),
        ({"min_lr": 1.5}, "min_lr is a fraction"),
        ({"warmup": 11}, "warmup .11 steps. is longer than the job"),
        ({"save_every": 2}, "save_every needs an output folder"),
        ({"schedule": "step"}, "schedule must be one of cosine, linear, constant, not 'step'"),
        ({"valid_every": 2}, "valid_every needs a validation set"),
        ({"keep": "buddy"}, "keep needs a job that survives deaths"),
        ({"recover": 1, "rejoin_s": 5.0}, "rejoin_s needs a job that goes on with fewer ranks"),
        ({"lora_alpha": 32.0}, "lora_alpha needs adapters"),
        ({"lora_targets": "q_proj"}, "lora_targets needs adapters"),
        ({"lora": -1}, "lora must be a whole number, 0 or more"),
        ({"lora": 2, "lora_dropout": 1.0}, "lora_dropout must be below 1"),
        ({"merge": True, "export": "e"}, "merge adds adapters"),
        ({"slow": "1"}, "slow must be RANK:FACTOR, for example 1:1.5, not '1'"),
        ({"slow": "0:1.5,1:x"}, "slow must be RANK:FACTOR"),
        ({"slow": "2:1.5"}, "slow needs ranks below 2 and factors of at least 1, not '2:1.5'"),
        ({"slow": "0:0.5"}, "slow needs ranks below 2 and factors of at least 1"),
        ({"slow": "0:nan"}, "slow needs ranks below 2 and factors of at least 1"),
        ({"slow": "1:2", "device": "cuda"}, "slow emulates a slower processor"),
        ({"device": "tpu"}, "device must be one of cpu, cuda, not 'tpu'"),
    ],
)
def test_bad_values_are_refused_by_name(change: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        JobConfig(model="m", data="d", **change)


def test_the_least_piece_depends_on_the_device() -> None:
    found = [JobConfig(model="m", data="d", device=device).piece_floor for device in ("cpu", "cuda")]
    assert found == [256, 2048] and JobConfig(model="m", data="d", least_piece=9).piece_floor == 9


def test_slow_ranks_by_rank() -> None:
    assert JobConfig(model="m", data="d").slowed() == {}
    assert JobConfig(model="m", data="d", slow="1:1.5, 0:2").slowed() == {0: 2.0, 1: 1.5}


def test_only_the_dynamic_arm_has_a_queue_and_it_holds_the_largest_microbatches() -> None:
    assert JobConfig(model="m", data="d", arm="odc").settings().queue_bytes == 0
    job = JobConfig(model="m", data="d", arm="odc-dynamic", ranks=3, minibatch_size=7, max_tokens=50)
    documents = [Document("d", np.ones(50, np.int32), np.ones(50, np.bool_))] * 3
    packed = [PackedMicrobatch(pack(documents[:1]).tensors()) for _ in range(3)]
    tiny = PackedMicrobatch(pack([Document("d", np.ones(1, np.int32), np.ones(1, np.bool_))] * 50).tensors())
    most = max(packed[0].nbytes, tiny.nbytes)
    assert 64 + 3 * (most + 24) <= job.settings().queue_bytes < 64 + 3 * (most + 2048)
