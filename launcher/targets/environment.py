"""Which variables of this shell the ranks on other hosts get: ssh passes on none of them."""

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
# GPUs are numbered by the hostfile, and the file of variables is read here only.
NOT = ("CUDA_VISIBLE_DEVICES", "DS_ENV_FILE")
# A command line is there for every user of a host to see.
SECRET = ("TOKEN", "KEY", "SECRET", "PASSWORD")


def exported_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Return those variables of `env` that steer Python and the libraries, none that holds a secret."""
    return {
        name: value
        for name, value in {**env, **SAFE_PATH}.items()
        if name.startswith(PREFIXES) and name not in NOT and not any(word in name.upper() for word in SECRET)
    }


def write_environment(file: Path, env: Mapping[str, str]) -> None:
    """Write `file` for DeepSpeed's launcher, which reads DS_ENV_FILE in place of ~/.deepspeed_env: both are in it.

    PYTHONPATH is that of this shell, in place of DeepSpeed's, which begins with the working folder. The folder of this
    Python comes first in PATH, as here: operators are built by the ninja in it. Another ninja would build all of them
    again, and without one the ranks would fail.
    """
    own = os.environ.get("DS_ENV_FILE", ".deepspeed_env")
    lines = [f"PATH={Path(sys.executable).parent}:$PATH", "PYTHONPATH="]
    for folder in (Path.home(), Path()):
        if (folder / own).is_file():
            lines += [line for line in read_text(folder / own).splitlines() if "=" in line]
    lines += [f"{name}={value}" for name, value in exported_variables(env).items() if "\n" not in value]
    write_whole(file, "\n".join(lines))
