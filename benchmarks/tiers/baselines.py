"""Throughput of each tier on each card: the first run keeps it, and later runs are compared with it."""

import json
import re
from pathlib import Path

from trainer.config import UserError
from trainer.contract.whole_files import write_json


class Baselines:
    """Tokens a second by tier, in one JSON file a card."""

    def __init__(self, folder: Path, card: str) -> None:
        self.path = folder / f"{re.sub('[^A-Za-z0-9]+', '-', card)}.json"

    def read(self, tier: str) -> float | None:
        """What was kept for a tier; None if nothing was. Raises UserError for a file that cannot be read."""
        return self._all().get(tier)

    def keep(self, tier: str, tokens_per_second: float) -> None:
        """In place of what was kept before."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self.path, self._all() | {tier: tokens_per_second})

    def _all(self) -> dict[str, float]:
        if not self.path.is_file():
            return {}
        try:
            return {str(tier): float(rate) for tier, rate in json.loads(self.path.read_text()).items()}
        except (ValueError, AttributeError, TypeError):
            raise UserError(f"{self.path}: holds no baselines; delete it, and the next run is kept") from None
