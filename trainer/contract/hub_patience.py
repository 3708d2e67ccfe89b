"""Avoid the retries of huggingface_hub without a network: six tries in 23 s for every file, cached or not."""

from functools import cache
from pathlib import Path

PATIENCE_S = 4.0


def disable_retries_without_network(name: str) -> None:
    """Disable retries of the hub if it cannot be reached; call this before looking up `name` on the hub."""
    if not Path(name).exists():
        _disable_retries_without_network()


@cache
def _disable_retries_without_network() -> None:
    from huggingface_hub import constants, get_session
    from huggingface_hub.errors import HTTPError
    from huggingface_hub.utils import http_backoff

    if constants.HF_HUB_OFFLINE:
        return
    try:
        get_session().head(constants.ENDPOINT, timeout=PATIENCE_S)
    except (HTTPError, OSError):
        defaults = http_backoff.__kwdefaults__
        assert "max_retries" in defaults, f"http_backoff of huggingface_hub takes {sorted(defaults)}, no max_retries"
        defaults["max_retries"] = 0
