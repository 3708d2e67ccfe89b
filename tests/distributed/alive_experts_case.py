"""Two ranks at stage 3, and how many bytes of gathered experts outlive the forward pass; see test_mixtures.py."""

import gc
import json
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tests.rank_program import join
from trainer.config import LoraSection, ModelSection, QuantizationSection, TrainingSection, ZeroSection
from trainer.model.adapter import apply_adapter
from trainer.model.base import load_base_model
from trainer.model.expert_layers import find_expert_modules, list_expert_tensors
from trainer.parallel.engine.deepspeed_engine import build_deepspeed_config, enable_transformers_zero3, start_engine
from trainer.parallel.engine.layer_gather.shards import LayerShards
from trainer.parallel.engine.optimizer import build_optimizer
from trainer.parallel.ranks.group import exit_process, leave_process_group
from trainer.patches.deepspeed_workarounds import install_workarounds
from trainer.patches.fused_experts import install_expert_forwards

CPU = torch.device("cpu")
KINDS = {
    "lora": ("mixtral", None),
    "qlora": ("mixtral", QuantizationSection()),
    "mxfp4": ("gpt_oss", None),
    "unknown-gate": ("relu", None),
}
ADAPTERS = {
    "experts": LoraSection(r=4, init="gaussian"),
    "attention": LoraSection(r=4, init="gaussian", target_modules=("q_proj", "v_proj")),
}
CASES = {
    f"{kind}-{adapted}-{gather}-{'recomputed' if recomputed else 'kept'}": (kind, adapted, gather, recomputed)
    for kind in KINDS
    for adapted in ADAPTERS
    for gather in ("layer", "module")
    for recomputed in (False, True)
    if adapted == "experts" or (gather == "module" and not recomputed)
}


class Watch:
    """The storages that the experts' tensors had whenever they were about to be computed."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._seen: dict[int, StorageWeakRef] = {}
        self.seen = 0
        """Bytes of all of them."""
        for experts in find_expert_modules(model).values():
            experts.register_forward_pre_hook(self._look)

    def _look(self, experts: Any, _inputs: Any) -> None:
        for name in list_expert_tensors(experts):
            storage = getattr(experts, name).data.untyped_storage()
            reference = StorageWeakRef(storage)
            if reference.cdata not in self._seen:
                self._seen[reference.cdata] = reference
                self.seen += storage.nbytes()

    def bytes_alive(self) -> int:
        """Of all that were seen, what still has memory."""
        storages = [torch.UntypedStorage._new_with_weak_ptr(each.cdata) for each in self._seen.values()]
        return sum(storage.nbytes() for storage in storages if storage is not None)


def measured(folder: Path, kind: str, adapted: str, gather: str, *, recomputed: bool) -> dict[str, Any]:
    """Bytes alive at the end of the first forward pass, and the losses of two steps.

    In later passes DeepSpeed fetches what the backward pass begins with before the forward pass has ended.
    """
    model_name, quantization = KINDS[kind]
    training = TrainingSection(learning_rate=1e-2, gradient_accumulation_steps=1)
    zero = ZeroSection(stage=2 if gather == "layer" else 3, persistence_threshold=0)
    config = build_deepspeed_config(training, zero, "fp32", on_gpu=False)
    shards = LayerShards(CPU) if gather == "layer" else None
    how: dict[str, Any] = {"dtype": torch.float32, "device": CPU, "attention": "eager", "quantization": quantization}
    torch.manual_seed(0)
    base = load_base_model(
        str(folder / model_name), ModelSection(), shards=shards, deepspeed_config=None if shards else config, **how
    )
    with enable_transformers_zero3(config):
        torch.manual_seed(0)
        model: Any = apply_adapter(base, ADAPTERS[adapted], torch.float32)
    install_expert_forwards(model, on_gpu=True)  # on a CPU the operator is plain torch: frozen experts by it as well
    if shards is not None:
        shards.attach(model)
    if recomputed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    engine: Any = start_engine(model, build_optimizer(model, training, ADAPTERS[adapted], fused=False), config)
    install_workarounds(engine)
    watch = Watch(model)
    engine.train()
    ids, alive, losses = torch.arange(3, 27).view(2, 12), None, []
    for _ in range(2):
        loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
        alive = watch.bytes_alive() if alive is None else alive
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    largest = max((unit.bytes_gathered for unit in shards.units), default=0) if shards else 0
    return {"losses": losses, "alive": alive, "seen": watch.seen, "two_units": 2 * largest}


def main() -> int:
    folder, ranks = join(timeout_minutes=5)
    found = {}
    for name, (kind, adapted, gather, recomputed) in CASES.items():
        found[name] = measured(folder, kind, adapted, gather, recomputed=recomputed)
        # DeepSpeed collects garbage several times per case, which takes longer the more objects exist.
        gc.collect()
        gc.freeze()
    (folder / f"alive-{ranks.rank}.json").write_text(json.dumps(found))
    leave_process_group()
    return 0


if __name__ == "__main__":
    exit_process(main())
