"""Processes, sockets, secrets, messages and the store of the job: bytes, and no word of the protocol."""

from __future__ import annotations

from odc.net.announced import announce_failure, announce_process, host_identity
from odc.net.mailbox import Mailbox
from odc.net.store import JobStore

__all__ = [
    "JobStore",
    "Mailbox",
    "announce_failure",
    "announce_process",
    "host_identity",
]
