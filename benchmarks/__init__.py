"""Measure zerolora: speed next to other trainers, acceptance tiers, comparisons of the SCU. Not part of the wheel."""
