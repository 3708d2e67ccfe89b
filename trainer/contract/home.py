"""Locate configs/, slurm/ and pyproject.toml: in the checkout, or in the copy that setup.py adds to a wheel."""

from pathlib import Path

CHECKOUT = Path(__file__).parents[2]
ZEROLORA_HOME = CHECKOUT if (CHECKOUT / "slurm" / "train.sbatch").is_file() else Path(__file__).parent / "home"
