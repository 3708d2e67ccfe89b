"""Warns of a training loss that is suddenly far above those before it."""

from collections import deque
from collections.abc import Callable
from statistics import median

BEFORE = 100
"""How many earlier steps a loss is compared with."""
ENOUGH = 20
SPREADS = 8.0
FRACTION = 0.2
# 1.4826 median absolute deviations are one standard deviation of a normal distribution.
OF_NORMAL = 1.4826


class SpikeWatch:
    """The losses of the last steps; a spike is more than 8 of their spreads and a fifth above their median."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._losses: deque[float] = deque(maxlen=BEFORE)
        self._told_at = -BEFORE
        self.spikes = 0
        """How many there were."""

    def look(self, step: int, loss: float, grad_norm: float) -> None:
        """Compare a step's loss; warn of a spike, at most once in so many steps."""
        if len(self._losses) >= ENOUGH:
            middle = median(self._losses)
            spread = OF_NORMAL * median(abs(value - middle) for value in self._losses)
            if loss - middle > max(SPREADS * spread, FRACTION * middle):
                self.spikes += 1
                self._tell(step, loss, middle, grad_norm)
        self._losses.append(loss)

    def _tell(self, step: int, loss: float, middle: float, grad_norm: float) -> None:
        if step - self._told_at < ENOUGH:
            return
        self._told_at = step
        self._say(
            f"[yellow]warning:[/yellow] step {step}: loss {loss:.3f}, where the last {len(self._losses)} had a median "
            f"of {middle:.3f} (gradient norm {grad_norm:.3g}); `zerolora inspect CONFIG --step {step} --ranks N` shows "
            "what was trained on"
        )
