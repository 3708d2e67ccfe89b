"""Capacity of an adapter against the information in its data: LoRA falls behind full training if the data has more.

Schulman et al., "LoRA Without Regret" (2025).
"""

BITS_PER_PARAMETER = 2.0
"""Capacity of a trained parameter (Allen-Zhu and Li, "Knowledge Capacity Scaling Laws", 2024)."""
BITS_PER_TOKEN = 1.0
"""Approximate information of a token of text to a pretrained model."""


def capacity_bits(parameters: float) -> float:
    """Return the capacity in bits of an adapter with this many parameters."""
    return BITS_PER_PARAMETER * parameters


def information_bits(trained_tokens: float) -> float:
    """Return the information in bits of data with this many trained tokens, whatever the number of epochs."""
    return BITS_PER_TOKEN * trained_tokens


def too_small(parameters: float, trained_tokens: float, rank: int) -> str | None:
    """Return a warning if the data has more information than the adapter can hold."""
    capacity, information = capacity_bits(parameters), information_bits(trained_tokens)
    if capacity >= information:
        return None
    return (
        f"the data has about {information / 1e6:,.1f} Mbit of information and an adapter of r={rank} holds about "
        f"{capacity / 1e6:,.1f}: more data than it can learn; use a higher lora.r, or adapter: none"
    )
