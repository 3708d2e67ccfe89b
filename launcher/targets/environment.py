"""Environment variables that ranks on other hosts get from this shell, because ssh forwards none."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from launcher.targets.local import SAFE_PATH
from trainer.config.files import read_text
from trainer.contract.whole_files import write_whole

PREFIXES = (
    "CUDA_", "DS_", "GLOO_", "HF_", "MKL_", "NCCL_", "OMP_", "PYTHONPATH", "PYTHONSAFEPATH", "PYTORCH_", "TOKENIZERS_",
    "TORCH_", "TRANSFORMERS_", "TRITON_", "UCX_", "ZEROLORA_",
)  # fmt: skip
# The hostfile numbers the GPUs, and only this host reads the file of variables.
NOT_EXPORTED = ("CUDA_VISIBLE_DEVICES", "DS_ENV_FILE")
# Every user of a host can read a command line.
SECRET = ("TOKEN", "KEY", "SECRET", "PASSWORD")


def exported_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of `env` that configure Python and the libraries, without secrets."""
    return {
        name: value
        for name, value in {**env, **SAFE_PATH}.items()
        if name.startswith(PREFIXES) and name not in NOT_EXPORTED and not any(word in name.upper() for word in SECRET)
    }


def write_environment(file: Path, env: Mapping[str, str]) -> None:
    """Write `file`, which DeepSpeed's launcher reads instead of ~/.deepspeed_env, including the user's own variables.

    PYTHONPATH is this shell's, because DeepSpeed's begins with the working folder. PATH begins with the folder of this
    Python and its ninja, which builds the operators: another ninja would rebuild them, and without one ranks fail.
    """
    own = os.environ.get("DS_ENV_FILE", ".deepspeed_env")
    lines = [f"PATH={Path(sys.executable).parent}:$PATH", "PYTHONPATH="]
    for folder in (Path.home(), Path()):
        if (folder / own).is_file():
            lines += [line for line in read_text(folder / own).splitlines() if "=" in line]
    lines += [f"{name}={value}" for name, value in exported_variables(env).items() if "\n" not in value]
    write_whole(file, "\n".join(lines))
