"""One case of tests.bench.peer_faults, as users of transformers' Trainer, TRL and PEFT write it.

    PEER_PYTHON tests/bench/peer_cases.py CASE FOLDER        prints what happened as JSON, on rank 0

It imports nothing of zerolora: the peers may be installed in an environment of their own. FOLDER has the models, their
tokenizers and the records (`train.jsonl`). RANK and WORLD_SIZE may be set, as torchrun sets them.
"""

import json
import os
import sys
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

RANK, RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
GLOBAL_BATCH = 4
STEPS = 4
Found = dict[str, Any]


def zero(stage: int) -> dict[str, Any]:
    """Return DeepSpeed's settings as transformers' documentation has them; nothing is too small to be partitioned."""
    return {
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}},
    }


def arguments(folder: Path, name: str, **changes: Any) -> dict[str, Any]:
    return {
        "output_dir": str(folder / name),
        "use_cpu": True,
        "max_steps": STEPS,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": GLOBAL_BATCH // RANKS,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "seed": 1,
        "bf16": False,
        "gradient_checkpointing": False,
    } | changes


def records(folder: Path) -> Any:
    from datasets import Dataset

    return Dataset.from_list([json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()])


def sft(
    folder: Path, name: str, model: str = "model", load: dict[str, Any] | None = None, data: Any = None, **changes: Any
) -> Any:
    """Return TRL's trainer of a LoRA; `data` instead of the records."""
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer  # type: ignore[import-not-found]

    lora = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    kwargs = {"dtype": "float32"} | (load or {})
    config = SFTConfig(model_init_kwargs=kwargs, **arguments(folder, name, **{"max_length": 96} | changes))
    return SFTTrainer(str(folder / model), args=config, train_dataset=data or records(folder), peft_config=lora)


def losses(trainer: Any) -> list[float]:
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def train_at_stage(folder: Path, stage: int, **changes: Any) -> Found:
    trainer = sft(folder, f"stage-{stage}", deepspeed=zero(stage), **changes)
    trainer.train()
    return {"ok": len(losses(trainer)) == STEPS, "result": f"trained {len(losses(trainer))} steps"}


def checkpointing(folder: Path) -> Found:
    """LoRA, ZeRO-3 and gradient checkpointing on two ranks."""
    return train_at_stage(folder, 3, gradient_checkpointing=True)


def stages(folder: Path) -> Found:
    """LoRA at ZeRO-1 to 3 with DeepSpeed's own schedule."""
    schedule = {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}
    for stage in (1, 2, 3):
        settings = zero(stage) | {"scheduler": {"type": "WarmupLR", "params": schedule}}
        trainer = sft(folder, f"schedule-{stage}", deepspeed=settings)
        trainer.train()
    return {"ok": True, "result": "trained at stages 1, 2 and 3"}


def four_bit(folder: Path) -> Found:
    """A 4-bit base at ZeRO-3 on two ranks: how much of its weights does a rank hold?"""
    from transformers import BitsAndBytesConfig

    quantized = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    # TRL loads models after its configuration knows ZeRO-3, as documented.
    trainer = sft(folder, "four-bit", load={"quantization_config": quantized}, deepspeed=zero(3))
    trainer.train()
    held = whole = 0
    weights = count_weights(folder)
    for parameter in trainer.model.parameters():
        if parameter.requires_grad:
            continue
        shard = getattr(parameter, "ds_tensor", None)
        size = parameter.element_size()
        held += (parameter.numel() + (shard.numel() if shard is not None else 0)) * size
        whole += getattr(parameter, "ds_numel", parameter.numel()) * size
    shown = f"a rank holds {held / whole:.0%} of the frozen weights, {8 * whole / weights:.1f} bits per weight in all"
    return {"ok": held < 0.6 * whole, "result": shown}


def count_weights(folder: Path) -> int:
    """Return the number of the base's weights."""
    from safetensors.torch import load_file

    return sum(each.numel() for each in load_file(folder / "model" / "model.safetensors").values())


def other_ranks(folder: Path) -> Found:
    """Two ranks save (`first`); one rank resumes with twice the accumulation."""
    trainer = sft(folder, "ranks", deepspeed=zero(2), save_strategy="steps", save_steps=2)
    if RANKS == 2:
        trainer.train()
        return {"ok": True, "result": f"two ranks trained, losses {losses(trainer)}"}
    trainer.train(resume_from_checkpoint=str(folder / "ranks" / "checkpoint-2"))
    return {"ok": True, "result": f"one rank resumed after step 2, losses {losses(trainer)[-2:]}"}


def checkpoint_size(folder: Path) -> Found:
    """How large is a checkpoint of a LoRA at ZeRO-3, in adapters?"""
    sizes = {}
    for stage in (2, 3):
        trainer = sft(folder, f"size-{stage}", deepspeed=zero(stage), save_strategy="steps", save_steps=2, max_steps=2)
        trainer.train()
        files = {
            path: path.stat().st_size
            for path in (folder / f"size-{stage}" / "checkpoint-2").rglob("*")
            if path.is_file() and path.suffix in (".pt", ".safetensors", ".bin")
        }
        adapter = next(size for path, size in files.items() if path.name == "adapter_model.safetensors")
        sizes[stage] = sum(files.values()) / adapter
    # fp32 factors and AdamW's two moments are three adapters, next to the adapter itself.
    shown = ", ".join(f"stage {stage}: {size:.1f} adapters" for stage, size in sizes.items())
    return {"ok": max(sizes.values()) < 6, "result": shown}


def merged_nf4(folder: Path) -> Found:
    """Merge a LoRA into the 4-bit base that it was trained on: are the logits those of the adapter?"""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    quantized = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(
        str(folder / "model"), quantization_config=quantized, dtype=torch.float32, device_map="cpu"
    )
    model: Any = PeftModel.from_pretrained(base, str(folder / "qlora"))
    tokens = torch.arange(3, 67)[None]
    with torch.no_grad():
        before = model(input_ids=tokens).logits
        with model.disable_adapter():
            plain = model(input_ids=tokens).logits
        after = model.merge_and_unload()(input_ids=tokens).logits
    apart, moved = float((after - before).norm()), float((before - plain).norm())
    return {"ok": apart < 1e-3 * moved, "result": f"logits move by {apart / moved:.1%} of what the adapter does"}


def packs(folder: Path, model: str) -> tuple[float, float]:
    """Return the loss of packed documents in TRL, and of the same documents one by one."""
    trainer = sft(folder, f"packed-{model}", model, packing=True, per_device_train_batch_size=1)
    batch = next(iter(trainer.get_train_dataloader()))
    trainer.model.eval()
    with torch.no_grad():
        packed = float(trainer.model(**batch).loss)
        ids, positions = batch["input_ids"][0], batch["position_ids"][0]
        starts = [*torch.nonzero(positions == 0).flatten().tolist(), len(ids)]
        sums, count = 0.0, 0
        for begin, end in pairwise(starts):
            if end - begin > 1:
                piece = ids[begin:end][None]
                sums += float(trainer.model(input_ids=piece, labels=piece).loss) * (end - begin - 1)
                count += end - begin - 1
    return packed, sums / count


def packing(folder: Path) -> Found:
    """Documents packed without FlashAttention: is the loss that of the documents?"""
    packed, alone = packs(folder, "model")
    apart = abs(packed - alone) / alone
    return {"ok": apart < 1e-5, "result": f"the loss is {apart:.1e} off"}


def hybrid_packing(folder: Path) -> Found:
    """The same for a model with Gated DeltaNet layers (Qwen3-Next)."""
    packed, alone = packs(folder, "hybrid")
    apart = abs(packed - alone) / alone
    return {"ok": apart < 1e-5, "result": f"the loss is {apart:.1e} off"}


def experts(folder: Path) -> Found:
    """`target_modules: all-linear` on a MoE model: are the experts adapted?"""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(folder / "mixture"))
    adapted: Any = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))
    names = [name for name, parameter in adapted.named_parameters() if parameter.requires_grad]
    found = sum("experts" in name for name in names)
    return {"ok": found > 0, "result": f"{found} of {len(names)} trained tensors belong to experts"}


def masks(folder: Path) -> Found:
    """Train on answers only with a chat template that has no generation marks: which tokens are trained?"""
    trainer = sft(folder, "masks", assistant_only_loss=True)
    batch = next(iter(trainer.get_train_dataloader()))
    trained = float((batch["labels"] != -100).float().mean())
    return {"ok": 0 < trained < 0.8, "result": f"{trained:.0%} of the tokens are trained"}


def resume(folder: Path) -> Found:
    """Resume at step 2 and compare with the run that was not interrupted."""
    usual: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
    whole = sft(folder, "whole", **usual)
    whole.train()
    again = sft(folder, "whole", **usual)
    again.train(resume_from_checkpoint=str(folder / "whole" / "checkpoint-2"))
    apart = max(abs(one - two) for one, two in zip(losses(again)[-2:], losses(whole)[-2:], strict=True))
    return {"ok": apart < 1e-6, "result": f"losses of steps 3 and 4 are {apart:.1e} off"}


def masked_packs(folder: Path) -> Found:
    """Packs of 16 tokens of records with longer prompts: nothing is left to train."""
    from datasets import Dataset

    data = Dataset.from_list([json.loads(line) for line in (folder / "long_prompts.jsonl").read_text().splitlines()])
    trainer = sft(folder, "masked", data=data, packing=True, max_length=16)
    trainer.train()
    batches = [batch["labels"] for batch in trainer.get_train_dataloader()]
    trained = sum(int((labels != -100).sum()) for labels in batches) / sum(labels.numel() for labels in batches)
    shown = f"trained {STEPS} steps, {trained:.0%} of the tokens carry loss, losses {losses(trainer)[:2]}"
    return {"ok": trained > 0.2, "result": shown}


def unmatched_target(folder: Path) -> Found:
    """`target_modules` with one name that the model has and one that it lacks."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        base = AutoModelForCausalLM.from_pretrained(str(folder / "model"))
        adapted: Any = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "qkv_proj"]))
    names = {name.split(".lora_")[0].rpartition(".")[2] for name, _ in adapted.named_parameters() if "lora_" in name}
    said = "" if any("qkv_proj" in str(each.message) for each in seen) else ", without a word"
    return {"ok": not said, "result": f"adapted {', '.join(sorted(names))}{said}"}


def resume_other_data(folder: Path) -> Found:
    """Resume at step 2 after half of the records were removed from the file."""
    usual: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
    sft(folder, "grown", **usual).train()
    more = records(folder).select(list(range(20)))
    again = sft(folder, "grown", data=more, **usual)
    try:
        again.train(resume_from_checkpoint=str(folder / "grown" / "checkpoint-2"))
    except ValueError as error:
        return {"ok": True, "result": f"refused: {error}"}
    return {"ok": False, "result": f"continued at step 3 with other records, losses {losses(again)[-2:]}"}


def other_base(folder: Path) -> Found:
    """Load an adapter of four layers onto a base of two."""
    from peft import LoraConfig, PeftModel, get_peft_model
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    deep = AutoModelForCausalLM.from_pretrained(str(folder / "deep"))
    get_peft_model(deep, LoraConfig(r=4, target_modules="all-linear")).save_pretrained(str(folder / "deep-adapter"))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        base = AutoModelForCausalLM.from_pretrained(str(folder / "model"))
        try:
            model: Any = PeftModel.from_pretrained(base, str(folder / "deep-adapter"))
        except (RuntimeError, ValueError) as error:
            return {"ok": True, "result": f"refused: {error}"}
    used = sum("lora_" in name for name, _ in model.named_parameters())
    stored = len(load_file(folder / "deep-adapter" / "adapter_model.safetensors"))
    said = ", with a warning" if any("adapter" in str(each.message) for each in seen) else ", without a word"
    return {"ok": used == stored, "result": f"loaded {used} of the {stored} tensors{said}"}


CASES = {
    function.__name__: function
    for function in (
        checkpointing, stages, four_bit, other_ranks, checkpoint_size, merged_nf4, packing, hybrid_packing, experts,
        masks, masked_packs, resume, resume_other_data, unmatched_target, other_base,
    )
}  # fmt: skip


def main() -> None:
    name, folder = sys.argv[1:]
    if RANKS > 1 or name in ("checkpointing", "stages", "four_bit", "other_ranks", "checkpoint_size"):
        import importlib

        # DeepSpeed would compile its sums in shared memory first, which takes a minute; gloo computes them.
        importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # type: ignore[attr-defined]
    try:
        found = CASES[name](Path(folder))
    except Exception as error:  # the error of a peer is a result, which the table shows
        first = " ".join(str(error).split())[:300]
        found = {"ok": False, "result": f"{type(error).__name__}: {first}"}
        if os.environ.get("PEER_TRACEBACK"):
            import traceback

            traceback.print_exc()
    if RANK == 0:
        print("FOUND " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
