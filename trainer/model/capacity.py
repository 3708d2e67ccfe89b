"""How much an adapter can hold, beside how much its data tell: where that is more, LoRA falls behind full training.

Schulman et al., "LoRA Without Regret" (2025).
"""

BITS_PER_PARAMETER = 2.0
"""What a trained parameter holds (Allen-Zhu and Li, "Knowledge Capacity Scaling Laws", 2024)."""
BITS_PER_TOKEN = 1.0
"""About what a token of text tells a model that has been trained on text."""


def holds(parameters: float) -> float:
    """Bits that an adapter of so many parameters holds."""
    return BITS_PER_PARAMETER * parameters


def tells(trained_tokens: float) -> float:
    """Bits that data with so many trained tokens tell, read however often."""
    return BITS_PER_TOKEN * trained_tokens


def too_small(parameters: float, trained_tokens: float, rank: int) -> str | None:
    """A line where the data tell more than the adapter holds."""
    if holds(parameters) >= tells(trained_tokens):
        return None
    return (
        f"the data tells about {tells(trained_tokens) / 1e6:,.1f} Mbit and an adapter of r={rank} holds about "
        f"{holds(parameters) / 1e6:,.1f}: more data than it can learn; a higher lora.r, or adapter: none"
    )
