"""verl's SFT trainer on CPU ranks: `torchrun --nproc-per-node 2 -m odc.integrations.verl.sft_on_cpu key=value ...`.

`verl.trainer.sft_trainer` opens its process group with the backend "cpu:gloo,<device>:<backend>", which torch refuses
if the device is the CPU. Set VERL_PLATFORM=cpu. With an accelerator, run verl's own module.
"""

from __future__ import annotations

from typing import Any

import hydra
import torch.distributed as dist
from verl.trainer.sft_trainer import SFTTrainer


@hydra.main(  # type: ignore[untyped-decorator]
    config_path="pkg://verl.trainer.config", config_name="sft_trainer_engine", version_base=None
)
def main(config: Any) -> None:
    """Train by `config`; runs on every rank."""
    dist.init_process_group("gloo")
    SFTTrainer(config).fit()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
