"""Folder with configs/, slurm/ and pyproject.toml: the checkout, or the copy that setup.py puts in a wheel."""

from pathlib import Path

CHECKOUT = Path(__file__).parents[2]
HOME = CHECKOUT if (CHECKOUT / "slurm" / "train.sbatch").is_file() else Path(__file__).parent / "home"
