"""The position of a run in state.json."""

import json
import math

from trainer.checkpoint.checkpoint import Position


def test_losses_without_a_number_are_json() -> None:
    """No evaluation has been the best yet and the last one was NaN: strict readers of JSON reject NaN and Infinity."""
    position = Position(step=6, evaluated_at=6, last_evaluation=math.nan)
    stored = json.loads(json.dumps(position.to_dict(), allow_nan=False))
    back = Position.from_dict(stored)
    assert back.best_loss == math.inf and back.last_evaluation is None and back.step == 6


def test_losses_are_kept() -> None:
    position = Position(step=6, evaluated_at=6, last_evaluation=1.5, best_loss=1.25, best_step=3)
    assert Position.from_dict(position.to_dict()) == position
