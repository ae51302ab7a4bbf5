"""What puts a root together: its members, its daemon, how ranks meet and how they part. Begin with `member`."""

from __future__ import annotations

from odc.runtime.arena import Arena, abort_arenas, leave_arenas
from odc.runtime.connect import Rendezvous
from odc.runtime.daemon import Daemon, await_releases, daemon, refuse_losses, report_to_hosts, stop_daemon
from odc.runtime.linking import locate
from odc.runtime.member import Endpoint, Member
from odc.runtime.nvshmem import end_nvshmem
from odc.runtime.reading import MappedMember, ReadOnlyMember, RemoteMember, WeightEngine
from odc.runtime.service import Service, reading_token

__all__ = [
    "Arena",
    "Daemon",
    "Endpoint",
    "MappedMember",
    "Member",
    "ReadOnlyMember",
    "RemoteMember",
    "Rendezvous",
    "Service",
    "WeightEngine",
    "abort_arenas",
    "await_releases",
    "daemon",
    "end_nvshmem",
    "leave_arenas",
    "locate",
    "reading_token",
    "refuse_losses",
    "report_to_hosts",
    "stop_daemon",
]
