"""The rollout process, `python -m odc.experiments.grpo.worker FD`: no rank, and training never waits for its reading.

It is told everything over the socket FD, and ends when that closes.
"""

from __future__ import annotations

import os
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any

import torch

from odc.experiments.config import threads_per_rank
from odc.experiments.grpo.generate import Generator
from odc.experiments.preflight import model_source
from odc.handover import Reader


def answer(generator: Generator, reader: Reader | None, request: dict[str, Any]) -> dict[str, Any]:
    """Bring the weights up to date, by reading them or from the request, and draw what is asked for."""
    version = None
    if reader is not None:
        version = reader.read(generator.weights(list(reader.shapes())), at_least=request["at_least"]).version
    else:
        own = generator.weights(list(request["weights"]))
        for name, value in request["weights"].items():
            own[name].copy_(torch.from_numpy(value))
    return {"version": version, "responses": generator.respond(request["prompts"], request["step"])}


def serve(channel: Connection) -> None:
    """Answer requests until the channel closes; errors are sent, not raised."""
    try:
        told: dict[str, Any] = channel.recv()
        config = told["config"]
        torch.set_num_threads(threads_per_rank(config.ranks + 1))
        generator = Generator(config, model_source(config.model), told["stop_ids"])
        reader = Reader(told["ticket"], timeout_s=config.timeout_s, tries=64) if told["ticket"] else None
        while True:
            channel.send(answer(generator, reader, channel.recv()))
    except EOFError:
        return
    except Exception as error:
        channel.send({"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()})


if __name__ == "__main__":
    from transformers.utils import logging as messages

    messages.set_verbosity_error()
    with Connection(int(sys.argv[1])) as connection:
        try:
            serve(connection)
        except (BrokenPipeError, ConnectionResetError):
            os._exit(1)  # rank 0 is gone; nobody is left to be told
