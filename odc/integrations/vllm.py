"""The backend `odc` for vLLM's weight transfer: each worker reads the training ranks' published shards.

No rank gathers and none sends: training publishes, and a worker of vLLM copies from the ranks' memory, or reads from
other hosts, and loads group after group. Installing odc registers the backend (entry point `vllm.general_plugins`):

    llm = LLM(model, weight_transfer_config=WeightTransferConfig(backend="odc"))
    llm.init_weight_transfer_engine({"init_info": {"handle": weight_handle(model)}})
    ...                                                     # once a step, after model.publish() on the ranks
    llm.start_weight_update()
    llm.update_weights({"update_info": {"version": version(model)}})
    llm.finish_weight_update()
    llm.reset_prefix_cache()                                # what it holds is of older weights

`weight_handle` and `version` are those of `odc.handover`, called on a rank. Names and shapes are those of the training
model's state dict, as in a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from odc.errors import ConfigError
from odc.handover import Reader, read_groups
from odc.handover.groups import GROUP_BYTES

try:
    from vllm.distributed.weight_transfer.base import (
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    if not hasattr(WeightTransferEngine, "start_weight_update"):
        raise ImportError("its weight transfer engines do not begin an update themselves")
except ImportError as error:
    raise ConfigError(f"odc.integrations.vllm needs vLLM 0.27, or one like it: {error}") from error


def register() -> None:
    """Make the backend known to vLLM; vLLM calls it in each of its processes."""
    if "odc" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine("odc", OdcWeightTransferEngine)


@dataclass
class OdcInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """The text of `odc.handover.weight_handle`, and how long a worker waits for a rank that makes no progress."""

    handle: str
    timeout_s: float = 600.0


@dataclass
class OdcUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """`version` is that of `odc.handover.version` after the ranks have published."""

    version: int


class OdcWeightTransferEngine(WeightTransferEngine):  # type: ignore[misc]
    """In a worker of vLLM, whose model gets the weights. Not for draft models."""

    init_info_cls, update_info_cls = OdcInitInfo, OdcUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._reader: Reader | None = None
        self._attached: OdcInitInfo | None = None  # by which the reader was made

    def init_transfer_engine(self, init_info: OdcInitInfo) -> None:
        """Attach to the job, unless attached by this very handle already. Waits for an answer of each rank."""
        if self._reader is None or init_info != self._attached:
            self.shutdown()
            self._reader, self._attached = Reader(init_info.handle, timeout_s=init_info.timeout_s), init_info

    def start_weight_update(self) -> None:
        """Get the model ready to load a whole checkpoint anew; after an update that has failed, too."""
        initialize_layerwise_reload(self.model)
        for layer in self.model.modules():  # one of which some parts had come still has them
            info = get_layerwise_info(layer)
            info.load_numel, info.loaded_weights = 0, []

    def finish_weight_update(self) -> None:
        """Bring the model into the form in which it runs."""
        finalize_layerwise_reload(self.model, self.model_config)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Read and load all weights of a version. Waits until every rank has published it.

        Raises StaleVersionError if the ranks publish anew meanwhile; ConfigError if vLLM's model has parameters that
        none of the weights is for, unless the ranks leave some out; what `odc.handover.read_groups` and the model's
        `load_weights` raise.
        """
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: OdcUpdateInfo) -> None:
        """As `update_weights`, which parses the request; copies to a device may still be under way."""
        if self._reader is None:
            raise ConfigError("weights are to be updated before init_weight_transfer_engine has given a handle")
        self.model.load_weights(self._weights(self._reader, update_info.version))
        # Scales of a quantized model may stay as they are, and so may what the ranks do not publish.
        strict = self.model_config.quantization is None and not self._reader.left_out
        if strict and (missing := self._missing()):
            raise ConfigError(
                f"nothing has come for {len(missing)} parameters of vLLM's model, first {missing[0]}: start vLLM with "
                "the configuration of the model that the ranks train; or this model cannot load them anew"
            )

    def _weights(self, reader: Reader, version: int) -> Iterator[tuple[str, torch.Tensor]]:
        for group in read_groups(reader, GROUP_BYTES, version, device=reader.device):
            for name, one in group.items():
                yield name, one.clone()  # vLLM keeps it until all of its layer has come; the group is overwritten

    def _missing(self) -> list[str]:
        """Names of parameters for which nothing has come since the update began. Those that a layer shares with another
        that has got them, as a tied head does, are not missing; biases, of which vLLM notes nothing, are never found.
        """
        begun = [
            (layer, info.restore_metadata[0], info.kernel_tensors[0], {name for name, _ in info.loaded_weights})
            for layer, module in self.model.named_modules()
            if (info := get_layerwise_info(module)).can_load() and info.kernel_tensors is not None
        ]
        got = {id(parameter) for parameter in self.model.parameters()}  # of layers that are whole, as they run
        got |= {id(running[name]) for _, _, running, came in begun for name in came & running.keys()}
        return [
            f"{layer}.{name}"
            for layer, loaded, running, _ in begun
            for name in running
            if name in loaded and id(running[name]) not in got
        ]

    def shutdown(self) -> None:
        """Let go of the job. Idempotent."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """Nothing is sent: `model.publish()` is all that training does."""
