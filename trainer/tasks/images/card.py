"""The model card of an adapter of an image model."""

from pathlib import Path

import yaml

from trainer.config import RunConfig
from trainer.monitor.metrics import Record
from trainer.monitor.report.model_card import OURS, is_on_hub, public_name, python_path
from trainer.monitor.report.write import metric_values
from trainer.tasks.images.files import DIFFUSERS
from trainer.tasks.images.pipeline import Pipeline


def image_card(config: RunConfig, pipeline: Pipeline, records: list[Record], name: str) -> str:
    """Return the card of an adapter; `name` as in `trainer.monitor.report.model_card.model_card`."""
    base = public_name(config.base_model)
    sources = [source.path for source in config.dataset.mix or (config.dataset,) if source.path]
    front = {"library_name": "diffusers", "pipeline_tag": "text-to-image"}
    front |= {"base_model": base} if is_on_hub(base) else {}
    prompts = list(config.logging.sample_prompts)
    tags = ["lora", "diffusers", "text-to-image", "zerolora"]
    rows = [
        ("data", ", ".join(map(public_name, sources))),
        ("resolution", f"{config.image.resolution}, {'buckets' if config.image.buckets else 'squares'}"),
        ("adapter", f"{config.adapter}, r={config.lora.r}, alpha={config.lora.alpha:g}"),
        ("steps", f"{max((record['step'] or 0 for record in records), default=0):,.0f}"),
        ("learning rate", f"{config.training.learning_rate:g}, {config.training.lr_scheduler}"),
        ("seed", str(config.seed)),
    ]
    if len(losses := metric_values(records, "eval/loss")) > 1:
        rows.append(("held-out loss", f"{losses[0]:.5f} → {losses[-1]:.5f}"))
    lines = "\n".join(f"| {key} | {value} |" for key, value in rows)
    uploaded = not Path(name).is_absolute()
    adapter = f'"{name}"' if uploaded else python_path(name)
    model = python_path(config.base_model, uploaded=uploaded)
    code = (
        "```python\n" + "import os\n\n" * ("os." in adapter + model) + "import torch\n"
        f"from diffusers import {pipeline.family.pipeline}\n\n"
        f"pipeline = {pipeline.family.pipeline}.from_pretrained({model}, "
        'torch_dtype=torch.bfloat16).to("cuda")\n'
        f'pipeline.load_lora_weights({adapter}, weight_name="{DIFFUSERS}")\n'
        f'image = pipeline(prompt="{prompts[0] if prompts else "a prompt"}").images[0]\n```'
    )
    shown = [f"![{prompt}](samples/{index:02d}-after.png)" for index, prompt in enumerate(prompts)]
    parts = [
        f"---\n{yaml.safe_dump(front | {'tags': tags}, sort_keys=False)}---",
        OURS,
        f"# {name.rpartition('/')[2]}",
        f"A LoRA adapter for {base}, trained with zerolora.",
        *shown,
        "## Use",
        code,
        "## Training",
        f"| | |\n|---|---|\n{lines}",
    ]
    return "\n\n".join(parts) + "\n"
