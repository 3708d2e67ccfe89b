"""One rank of test_zero3_nf4.py: trains a few adapted linears under every stage; rank 0 writes the losses."""

import json
import os
import sys
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ops
from trainer.parallel.engine.deepspeed_engine import start_engine
from trainer.parallel.ranks.group import skip_shm_build
from trainer.patches.deepspeed_workarounds import install_workarounds

WIDTH, RANK, STEPS = 64, 4, 3


class Adapted(nn.Module):
    """One linear with its adapter through the operator; the parameters are read as attributes of their own modules."""

    def __init__(self, base: str, generator: torch.Generator) -> None:
        super().__init__()
        # Trained tensors come first: DeepSpeed reads a model's number format off its first parameter where it has fp16.
        weight = torch.randn(WIDTH, WIDTH, generator=generator) * WIDTH**-0.5
        self.nf4: ops.Nf4Weight | None = None
        if base == "nf4":
            from bitsandbytes import functional

            packed, state = functional.quantize_4bit(weight, quant_type="nf4", compress_statistics=True, blocksize=64)
            packed.quant_state = state
            self.nf4 = ops.Nf4Weight.from_parameter(packed)
            weight = packed
        else:
            weight = weight.bfloat16()
        self.down = nn.Parameter((torch.randn(RANK, WIDTH, generator=generator) * WIDTH**-0.5).bfloat16())
        self.up = nn.Parameter((torch.randn(WIDTH, RANK, generator=generator) * 0.1).bfloat16())
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        adapter = [None], [self.down], [self.up], [2.0]
        if self.nf4 is None:
            return torch.tanh(ops.lora_group(x, [self.weight], *adapter)[0])
        packed = ops.Nf4Weight(
            self.weight, self.nf4.state, self.nf4.rows, self.nf4.cols, self.nf4.block, self.nf4.nested_block
        )
        return torch.tanh(ops.nf4_group(x, [packed], *adapter)[0])


class Stack(nn.Module):
    def __init__(self, base: str, kind: str) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.layers = nn.ModuleList(Adapted(base, generator) for _ in range(3))
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()  # reentrant checkpointing needs an input that wants a gradient
        for layer in self.layers:
            if self.kind == "none":
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self.kind == "reentrant")
        return x.float().square().mean()


def train(base: str, stage: int, kind: str) -> list[float]:
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 2**20},
        "zero_allow_untested_optimizer": True,
    }
    model = Stack(base, kind)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine = start_engine(model, torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.1), config)
    install_workarounds(engine)
    losses = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(100 + 2 * step + dist.get_rank())
        loss = engine(torch.randn(8, WIDTH, generator=generator).bfloat16())
        engine.backward(loss)
        engine.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total) / 2)
    return losses


def main() -> None:
    with skip_shm_build():
        deepspeed.init_distributed(dist_backend="gloo")
    found = {
        base: {
            f"{stage} {kind}": train(base, stage, kind)
            for stage in (0, 1, 2, 3)
            for kind in ("none", "reentrant", "non-reentrant")
        }
        for base in ("bf16", "nf4")
    }
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads abort at the interpreter's end now and then


if __name__ == "__main__":
    main()
