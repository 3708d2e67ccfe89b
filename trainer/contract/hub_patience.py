"""Where the hub does not answer, its library tries six times and waits 23 s between: for every file, cached or not."""

from functools import cache
from pathlib import Path

PATIENCE_S = 4.0


def ask_once_without_network(name: str) -> None:
    """Before the first look-up of `name` on the hub: where the hub cannot be reached, every question is put once."""
    if not Path(name).exists():
        _ask_once_without_network()


@cache
def _ask_once_without_network() -> None:
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
