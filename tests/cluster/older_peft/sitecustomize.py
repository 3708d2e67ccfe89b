"""One host of a cluster has an older peft: rank 1 of a run sees this folder's, and is on a host called n2."""

import os
import sys
from pathlib import Path

if os.environ.get("RANK") == "1":
    os.environ["SLURMD_NODENAME"] = "n2"
    sys.path.insert(0, str(Path(__file__).parent / "site"))
