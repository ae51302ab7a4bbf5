"""The rollout process, `python -m odc.experiments.grpo.worker FD`: it draws responses with its own copy of the model.

It gets everything over the socket FD, and ends when that closes. It returns the log-probabilities of the
distribution that was sampled (temperature 1, no cut-off); cached decoding makes the first ratio 1 only to about 1e-5.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch

from odc.errors import ConfigError, PeerLostError
from odc.experiments.config import GrpoConfig, threads_per_rank
from odc.experiments.grpo.generator import Generator, ResponseSource
from odc.experiments.preflight import model_source
from odc.handover import Reader


def answer(generator: ResponseSource, reader: Reader | None, request: dict[str, Any]) -> dict[str, Any]:
    """Brings the weights up to date, by reading them or from the request, and draws the responses asked for."""
    version = None
    if reader is not None:
        version = generator.update(reader, request["at_least"])
    else:
        assert isinstance(generator, Generator)
        own = generator.weights(list(request["weights"]))
        for name, value in request["weights"].items():
            own[name].copy_(torch.from_numpy(value))
    return {"version": version, "responses": generator.respond(request["prompts"], request["step"])}


def generator_of(config: GrpoConfig, stop_ids: Sequence[int], handle: str | None) -> ResponseSource:
    """The generator that `config.rollout` names."""
    source = model_source(config.model)
    if config.rollout == "hf":
        return Generator(config, source, stop_ids)
    from odc.experiments.grpo.vllm_generator import VllmGenerator

    assert handle is not None, "an arm of odc has one"
    return VllmGenerator(config, source, stop_ids, handle)


def refuse_left_out(names: Sequence[str]) -> None:
    """ConfigError for what no rank publishes: vLLM begins with random weights, and would keep these."""
    if names:
        raise ConfigError(f"rollout: vLLM would not get {names[0]} ({len(names)} buffers or unsharded weights); use hf")


def serve(channel: Connection) -> None:
    """Answers requests until the channel closes; errors are sent, not raised."""
    try:
        first: dict[str, Any] = channel.recv()
        config, handle = first["config"], first["handle"]
        torch.set_num_threads(threads_per_rank(config.ranks + 1))
        generator = generator_of(config, first["stop_ids"], handle)
        reader = Reader(handle, timeout_s=config.timeout_s, tries=64) if handle else None
        if config.rollout == "vllm" and reader is not None:
            refuse_left_out(reader.left_out)
        while True:
            channel.send(answer(generator, reader, channel.recv()))
    except EOFError:
        return
    except Exception as error:
        lost = error.culprit if isinstance(error, PeerLostError) else None
        text = f"{type(error).__name__}: {error}"
        channel.send({"error": text, "traceback": traceback.format_exc(), "lost": lost})


if __name__ == "__main__":
    from transformers.utils import logging as messages

    messages.set_verbosity_error()
    with Connection(int(sys.argv[1])) as connection:
        try:
            serve(connection)
        except (BrokenPipeError, ConnectionResetError):
            os._exit(1)  # rank 0 is gone; no process is left that would read it
