"""One rank that loads FOLDER/model module by module and writes what it was told to FOLDER/rank<N>.txt.

deepspeed --module tests.distributed.shapes_case FOLDER
"""

import torch

from tests.rank_program import join
from trainer.config import ModelSection, QuantizationSection, UserError
from trainer.model.base import load_base_model
from trainer.ranks.group import end_process, leave_process_group


def main() -> None:
    folder, ranks = join(timeout_minutes=2)
    try:
        load_base_model(
            str(folder / "model"),
            ModelSection(),
            dtype=torch.float32,
            device=torch.device("cpu"),
            attention="eager",
            quantization=QuantizationSection(),
        )
        told = "loaded"
    except UserError as error:
        told = str(error)
    (folder / f"rank{ranks.rank}.txt").write_text(told)
    leave_process_group()


if __name__ == "__main__":
    main()
    end_process(0)
