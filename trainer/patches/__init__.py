"""Replacements in transformers, PEFT and torch: forwards, attention, the loss, recomputation."""
