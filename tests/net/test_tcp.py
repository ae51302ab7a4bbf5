"""Which interface has an address."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from odc.errors import UnsupportedError
from odc.net import tcp


def test_an_interface_by_its_ipv6_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = tmp_path / "if_inet6"
    addresses.write_text(
        "00000000000000000000000000000001 01 80 10 80       lo\n"
        "fe80000000000000021122fffe334455 02 40 20 80     eth0\n"
        "20010db8000000000000000000000007 02 40 00 80     eth0\n"
    )
    monkeypatch.setattr(tcp, "_IPV6", addresses)
    assert tcp.interface_of("::1") == "lo"
    assert tcp.interface_of("2001:db8::7") == "eth0"
    assert tcp.interface_of("fe80::211:22ff:fe33:4455%eth0") == "eth0"
    assert tcp.interface_of("2001:db8::8") is None
    monkeypatch.setattr(tcp, "_IPV6", tmp_path / "none")
    assert tcp.interface_of("::1") is None


@pytest.mark.parametrize("address", ["0.0.0.0", "::"])
def test_the_address_of_every_interface_is_no_place_for_other_hosts(address: str) -> None:
    """They would connect to themselves, and find no rank there or another one."""
    with pytest.raises(UnsupportedError, match="would reach itself; name the address of one"):
        tcp.own_address(None, address)
    assert tcp.own_address(None, "10.0.0.1") == "10.0.0.1"


def test_a_store_whose_host_cannot_be_resolved_leaves_this_hosts_address_unknown() -> None:
    """The resolver may have failed since the store was connected to."""
    store = SimpleNamespace(host="host.invalid", port=29500)
    with pytest.raises(UnsupportedError, match=r"there is no way to host\.invalid, .* set Settings\(address="):
        tcp.own_address(store)
