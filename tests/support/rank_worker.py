"""What tests use inside rank processes (see `odc.ranks.worker`): `report` and `die`; running a test's function."""

from __future__ import annotations

import dataclasses
import gc
import os
import pickle
import signal
import sys
import time
import warnings
from typing import Any

from odc.ranks.worker import load, report
from odc.settings import Settings
from support.interpreter import patch_once

__all__ = ["die", "perform", "report"]


def die(after_report: Any = None) -> None:
    """End this rank as `kill -9` would, after reporting when (`time.monotonic()`) and whatever else is given."""
    report((time.monotonic(), after_report))
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def perform(rank: int, world: int, where: tuple[str, str, str], args: bytes) -> Any:
    """Run a function of a test module with a trace of its own; warnings of odc are errors."""
    check_protocol()
    if os.environ.get("TRITON_INTERPRET") == "1":
        patch_once()
    warnings.filterwarnings("error", module=r"odc(\.|$)")
    if "odc.trace.recorder" in sys.modules:
        # A model that was dropped within a minibatch leaves its window open, which hides all later ones.
        sys.modules["odc.trace.recorder"]._process_recorder = None  # type: ignore[attr-defined]
    _drop_aborted()
    function = load(*where)
    body = getattr(function, "on_rank", function)  # of a test that `support.on_ranks` has decorated
    return body(rank, world, *pickle.loads(args))


def _drop_aborted() -> None:
    """Models of an earlier test whose job was aborted: they stay until garbage is collected, and end what waits."""
    if "odc.fsdp.root" in sys.modules:
        from odc.fsdp.root import live_roots
        from odc.protocol import Word

        if any(one.layout.mine.board.load(Word.ABORT) for one in live_roots()):
            gc.collect()


def check_protocol() -> None:
    """Make all settings that are made in this process from now on check the protocol, unless they say otherwise."""
    names = [field.name for field in dataclasses.fields(Settings)]
    defaults = list(Settings.__init__.__defaults__ or ())
    defaults[names.index("check_protocol") - len(names)] = True
    Settings.__init__.__defaults__ = tuple(defaults)
