"""The server daemon of a rank: accumulate, liveness, attach, status."""

from odc.server.attach import Rendezvous, summary
from odc.server.daemon import DOOR_PREFIX, Daemon, await_departures, daemon, stop_daemon
from odc.server.leave import leave
from odc.server.presence import announce_failure, announce_process
from odc.server.service import Service, reading_token

__all__ = [
    "DOOR_PREFIX",
    "Daemon",
    "Rendezvous",
    "Service",
    "announce_failure",
    "announce_process",
    "await_departures",
    "daemon",
    "leave",
    "reading_token",
    "stop_daemon",
    "summary",
]
