"""TRL's generation by a vLLM server that reads the ranks' published shards: `use_vllm=True, vllm_mode="server"`.

TRL gathers every parameter on all ranks, and rank 0 sends it to the server over NCCL. Here all ranks publish, and the
server's workers read (`odc.integrations.vllm`): no rank gathers or sends. For TRL 1.16 and a server started with
`--weight-transfer-config '{"backend": "odc"}'`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from odc.errors import ConfigError, OdcError, refuse_setting
from odc.fsdp import default_store, root_of
from odc.handover import version, weight_handle
from odc.net import Mailbox
from odc.protocol import RootState


def serves(args: Any) -> bool:
    """Whether a Trainer's arguments are TRL's for generation by a server."""
    return bool(getattr(args, "use_vllm", False)) and getattr(args, "vllm_mode", None) == "server"


@contextlib.contextmanager
def without_communicator(args: Any) -> Iterator[None]:
    """While a Trainer is made: TRL's client of a server opens no communicator, but checks who sends the weights."""
    if not serves(args):
        yield
        return
    try:
        from trl.generation.vllm_client import VLLMClient
    except ImportError as error:
        raise ConfigError(f"odc cannot apply vllm_mode='server': it needs TRL 1.16 ({error})") from error
    stock, VLLMClient.init_communicator = VLLMClient.init_communicator, _refuse_other_backend
    try:
        yield
    finally:
        VLLMClient.init_communicator = stock


def _refuse_other_backend(client: Any, device: Any = None) -> None:
    """In place of `VLLMClient.init_communicator`."""
    backend = (client.get_server_info()["weight_transfer_config"] or {}).get("backend")
    if backend != "odc":
        raise ConfigError(
            f"the vLLM server at {client.base_url} takes weights by {backend!r}: with odc installed where it runs, "
            """start it with --weight-transfer-config '{"backend": "odc"}'"""
        )


def serve_from_shards(trainer: Any) -> None:
    """Let the server of a Trainer whose model is sharded read its weights. ConfigError for adapters."""
    if hasattr(trainer.model, "peft_config"):
        refuse_setting("use_vllm=True with an adapter", "ranks publish it unmerged; leave it out")
    trainer.vllm_generation.sync_weights = ServerWeights(trainer.model, trainer.vllm_generation)


class ServerWeights:
    """In place of `VLLMGeneration.sync_weights`, for a root of `odc.fully_shard`.

    Every rank calls it, between backwards. Each publishes, unless it has pushed gradients in a minibatch that is still
    open, whose version has these weights. Rank 0 asks the server to read, and all wait until it has. If the server
    refuses, rank 0 raises what TRL's client does, and every other rank OdcError.
    """

    def __init__(self, model: Any, generation: Any) -> None:
        self._model, self._generation = model, generation
        self._mail: tuple[Any, Mailbox] | None = None  # and the store by which it goes

    def __call__(self) -> None:
        minibatch = root_of(self._model).minibatch  # open amid accumulated gradients, where TRL may generate
        if not (minibatch.state is RootState.OPEN and minibatch.current.pushed):
            self._model.publish()
        cause: Exception | None = None
        if dist.get_rank() == 0:
            try:
                self._read(self._generation.vllm_client)
            except Exception as error:
                cause = error
        refused = self._agree("" if cause is None else f"{type(cause).__name__}: {cause}")
        if cause is not None:
            raise cause
        if refused:
            raise OdcError(f"rank {dist.get_rank()}: the vLLM server has not read the weights: {refused}")

    def _agree(self, refused: str) -> str:
        """What rank 0 gives, on every rank: one that went on before could publish the next version. By the store, as a
        collective of NCCL would occupy the devices that the server reads meanwhile.
        """
        store, rank, world = default_store(), dist.get_rank(), dist.get_world_size()
        if self._mail is None or self._mail[0] is not store:  # a job that goes on after a death has another
            root = root_of(self._model)
            timeout_s, check = root.layout.settings.timeout_s, root.member.protocol.waiter.check
            mailbox = Mailbox(store, range(world), rank, timeout_s, "odc/vllm/", task="training", check=check)
            self._mail = store, mailbox
        mailbox, what = self._mail[1], "the vLLM server's answer"
        if rank:
            return mailbox.receive(0, what).decode()
        for other in range(1, world):
            mailbox.send(other, refused.encode(), what)
        return refused

    def _read(self, client: Any) -> None:
        start = {"init_info": {"handle": weight_handle(self._model)}}  # each time, as the server may be a new process
        client._post(f"{client.base_url}/init_weight_transfer_engine", json=start)
        update, cause = {"update_info": {"version": version(self._model)}}, None
        try:
            with client.weight_update():
                try:
                    client._post(f"{client.base_url}/update_weights", json=update)
                except Exception as error:
                    cause = error
                    raise
        except Exception as error:  # a worker that failed to read has ended the update, and refuses to finish it
            raise (cause or error) from None
        client.reset_prefix_cache()
