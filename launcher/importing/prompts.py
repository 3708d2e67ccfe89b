"""Prompts and chat templates that other trainers refer to by name."""

from launcher.importing.translation import read_tables
from trainer.config.aliases import split_names

ALPACA_HEAD = "Below is an instruction that describes a task"
ALPACA_PAIRED = ", paired with an input that provides further context"
ALPACA_TAIL = ". Write a response that appropriately completes the request."
STYLES: dict[str, tuple[str, str, str]] = read_tables()["alpaca_styles"]
CHAT_TEMPLATES: dict[str, str] = split_names(read_tables()["chat_templates"])


def alpaca(style: str) -> tuple[str, str]:
    """Return the prompt of Stanford Alpaca for records with an input, and for those without."""
    system, with_input, without = STYLES[style]
    return (
        system.replace("{system}", ALPACA_HEAD + ALPACA_PAIRED + ALPACA_TAIL) + with_input,
        system.replace("{system}", ALPACA_HEAD + ALPACA_TAIL) + without,
    )
