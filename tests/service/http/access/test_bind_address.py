"""Addresses that other machines reach are refused without API keys."""

from __future__ import annotations

import pytest

from service.domain.errors import Invalid
from service.domain.settings import Settings
from service.http.keys import check_bind_address


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_loopback_may_be_bound(host: str) -> None:
    check_bind_address(Settings(host=host), has_keys=False)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "10.0.0.7", "example.org", "127.0.0.1.nip"])
def test_other_addresses_need_keys_or_insecure(host: str) -> None:
    """Other addresses are refused where no keys are required, unless `insecure` is set."""
    with pytest.raises(Invalid, match=r"heed keys create.*HEED_INSECURE"):
        check_bind_address(Settings(host=host), has_keys=False)
    with pytest.raises(Invalid, match="HEED_KEYS is off"):
        check_bind_address(Settings(host=host, keys="off"), has_keys=True)
    check_bind_address(Settings(host=host), has_keys=True)
    check_bind_address(Settings(host=host, keys="required"), has_keys=False)
    check_bind_address(Settings(host=host, insecure=True), has_keys=False)
