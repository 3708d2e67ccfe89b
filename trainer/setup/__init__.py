"""Preparation before the first step: checks, data, joining the ranks, building the model."""
