"""The address that the service binds: whether other machines reach it, and what that requires."""

from __future__ import annotations

from service.domain.errors import Invalid
from service.domain.settings import PREFIX, Settings, is_loopback


def is_exposed(settings: Settings) -> bool:
    """Report whether other machines can reach the service, and `insecure` does not allow that.

    A host name other than `localhost` may resolve to anything, so it counts as exposed.
    """
    return not settings.insecure and not is_loopback(settings.host)


def check_bind_address(settings: Settings, *, has_keys: bool) -> None:
    """Check that an exposed service requires API keys.

    Raises:
        Invalid: naming what makes the address safe, and the setting that allows it.
    """
    if not is_exposed(settings) or settings.keys == "required":
        return
    if has_keys and settings.keys == "auto":
        return
    off = f"{PREFIX}KEYS is off" if settings.keys == "off" else "there is no API key"
    raise Invalid(
        "",
        f"refusing to bind {settings.host or 'every address'}: {off}, and other machines could "
        "read and write everything. Create a key with heed keys create or heed serve --first-key, "
        f"bind 127.0.0.1, or set {PREFIX}INSECURE=true if the network is protected by other means.",
    )
