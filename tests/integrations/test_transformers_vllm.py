"""How TRL's server gets the weights: ranks publish, and it reads; servers and models that cannot are refused."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.models import Case, adamw, build
from support.on_ranks import on_ranks
from support.programs import backward
from support.ranks import spawn_ranks
from torch.distributed.device_mesh import init_device_mesh

from odc import Settings, fully_shard
from odc.errors import ConfigError, OdcError, PeerLostError
from odc.fsdp import root_of
from odc.handover import Reader, read_groups, version
from odc.integrations.transformers_vllm import ServerWeights, _refuse_other_backend, serve_from_shards

ONCE = ["init_weight_transfer_engine", "start", "update_weights", "finish", "reset"]


class ReadingClient:
    """In place of TRL's client: it notes what is asked of the server, and reads as one would."""

    base_url = "http://server"

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.tensors: dict[str, torch.Tensor] = {}
        self._reader: Reader | None = None

    def _post(self, url: str, json: dict[str, Any]) -> None:
        self.asked.append(url.removeprefix(f"{self.base_url}/"))
        if "init_info" in json:
            self.close()
            self._reader = Reader(**json["init_info"], timeout_s=60.0)
            return
        assert self._reader is not None
        for group in read_groups(self._reader, 1 << 10, **json["update_info"]):
            self.tensors |= {name: tensor.clone() for name, tensor in group.items()}

    @contextlib.contextmanager
    def weight_update(self) -> Iterator[None]:
        self.asked.append("start")
        yield
        self.asked.append("finish")

    def reset_prefix_cache(self) -> None:
        self.asked.append("reset")

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()


@on_ranks(2)
def test_the_server_reads_what_the_ranks_have_published(rank: int, world: int) -> None:
    model = build(fully_shard, Case(counts=((1,),)), init_device_mesh("cpu", (world,)))
    optimizer, client = adamw(model), ReadingClient()
    sync = ServerWeights(model, SimpleNamespace(vllm_client=client))
    for step in range(3):
        sync()
        whole = {name: value.full_tensor() for name, value in model.state_dict().items()}
        if rank == 0:
            assert client.tensors.keys() == whole.keys()
            assert all(torch.equal(client.tensors[name], value) for name, value in whole.items()), step
        with model.minibatch():
            backward(model, rank, step)
        optimizer.step()
        optimizer.zero_grad()
    assert client.asked == (ONCE * 3 if rank == 0 else [])
    client.close()
    dist.barrier()


@on_ranks(2)
def test_amid_accumulated_gradients_the_server_reads_what_the_ranks_have_published(rank: int, world: int) -> None:
    """TRL generates there where steps of an optimizer and generations are out of step."""
    model = build(fully_shard, Case(counts=((2,),)), init_device_mesh("cpu", (world,)))
    optimizer, client = adamw(model), ReadingClient()
    sync = ServerWeights(model, SimpleNamespace(vllm_client=client))
    for number in range(2):
        model.set_is_last_backward(False)
        backward(model, rank, number)
        before = version(model)
        sync()
        assert version(model) == before == number + 1
        whole = {name: value.full_tensor() for name, value in model.state_dict().items()}
        if rank == 0:
            assert client.tensors.keys() == whole.keys()
            assert all(torch.equal(client.tensors[name], value) for name, value in whole.items()), number
        model.set_is_last_backward(True)
        backward(model, rank, number, microbatch=1)
        optimizer.step()
        optimizer.zero_grad()
    assert client.asked == (ONCE * 2 if rank == 0 else [])
    client.close()
    dist.barrier()


@on_ranks(2)
def test_a_server_that_was_started_anew_reads_too(rank: int, world: int) -> None:
    """Its process knows no handle: it is given the one that the process before it had."""
    model = build(fully_shard, Case(counts=((1,),)), init_device_mesh("cpu", (world,)))
    generation = SimpleNamespace(vllm_client=ReadingClient())
    sync = ServerWeights(model, generation)
    for _ in range(2):
        sync()
        whole = {name: value.full_tensor() for name, value in model.state_dict().items()}
        client, generation.vllm_client = generation.vllm_client, ReadingClient()
        assert rank or all(torch.equal(client.tensors[name], value) for name, value in whole.items())
        client.close()
    dist.barrier()


def wait_for_an_answer(rank: int, world: int) -> None:
    settings = Settings(timeout_s=60.0)
    model: Any = build(fully_shard, Case(counts=((1,),)), init_device_mesh("cpu", (world,)), settings=settings)
    model.publish()
    dist.barrier()
    if rank == 1:  # rank 0 does not answer
        root_of(model).member.protocol.abort("rank 0 died", 0)
        with pytest.raises(PeerLostError, match="waiting for the vLLM server's answer: .* by rank 0: rank 0 died"):
            ServerWeights(model, SimpleNamespace())._agree("")
    dist.barrier()


def test_an_abort_ends_the_wait_for_the_servers_answer() -> None:
    """As where rank 0 was on another host, whose processes cannot be seen from here."""
    with spawn_ranks(2, wait_for_an_answer) as ranks:
        outcomes = ranks.wait()
    assert [(one.exit_code, one.error) for one in outcomes] == [(0, None)] * 2, outcomes[1].describe()


class RefusingClient(ReadingClient):
    def _post(self, url: str, json: dict[str, Any]) -> None:
        raise ConnectionError("the server has gone")


@on_ranks(2)
def test_no_rank_waits_for_a_server_that_refuses(rank: int, world: int) -> None:
    model = build(fully_shard, Case(counts=((1,),)), init_device_mesh("cpu", (world,)))
    with model.minibatch():
        backward(model, rank, 0)
    sync = ServerWeights(model, SimpleNamespace(vllm_client=RefusingClient()))
    why = "the server has gone"
    kind, text = (ConnectionError, why) if rank == 0 else (OdcError, f"rank 1: .* ConnectionError: {why}")
    with pytest.raises(kind, match=text):
        sync()


class FailingClient(ReadingClient):
    """A server that fails to read. Like vLLM's workers it has then ended the update, and refuses to finish it."""

    def _post(self, url: str, json: dict[str, Any]) -> None:
        if "update_info" in json:
            raise ConnectionError("500: rank 1 died")

    @contextlib.contextmanager
    def weight_update(self) -> Iterator[None]:
        try:
            yield
        finally:  # as TRL's client
            raise ConnectionError("500: finish_weight_update called without a matching start_weight_update")


@on_ranks(2)
def test_the_first_error_of_a_server_that_fails_is_the_cause(rank: int, world: int) -> None:
    model = build(fully_shard, Case(counts=((1,),)), init_device_mesh("cpu", (world,)))
    sync = ServerWeights(model, SimpleNamespace(vllm_client=FailingClient()))
    why = "500: rank 1 died$"
    kind, text = (ConnectionError, f"^{why}") if rank == 0 else (OdcError, f"ConnectionError: {why}")
    with pytest.raises(kind, match=text):
        sync()


def server(transfer: Any) -> Any:
    return SimpleNamespace(base_url="http://host:8000", get_server_info=lambda: {"weight_transfer_config": transfer})


def test_a_server_that_does_not_read_is_refused_by_name() -> None:
    _refuse_other_backend(server({"backend": "odc"}), "cpu")
    for transfer, found in ((None, "None"), ({"backend": "nccl"}, "'nccl'")):
        with pytest.raises(ConfigError, match=f"the vLLM server at http://host:8000 takes weights by {found}: .*odc"):
            _refuse_other_backend(server(transfer), "cpu")


def test_weights_that_are_not_exported_are_refused_before_the_first_step() -> None:
    def trainer(**model: Any) -> Any:
        return SimpleNamespace(model=SimpleNamespace(**model), vllm_generation=SimpleNamespace(sync_weights=None))

    with pytest.raises(ConfigError, match="use_vllm=True with an adapter"):
        serve_from_shards(trainer(peft_config={}))
    fits = trainer()
    serve_from_shards(fits)
    assert isinstance(fits.vllm_generation.sync_weights, ServerWeights)
