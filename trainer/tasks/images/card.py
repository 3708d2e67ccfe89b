"""The model card of an adapter of an image model."""

from pathlib import Path
from typing import Any

import yaml

from trainer.config import RunConfig
from trainer.monitor.metrics import Record
from trainer.monitor.report.charts import render_template
from trainer.monitor.report.model_card import MARKER, is_on_hub, public_name, python_path
from trainer.monitor.report.write import metric_values
from trainer.tasks.images.files import DIFFUSERS
from trainer.tasks.images.pipeline import Pipeline


def image_card(config: RunConfig, pipeline: Pipeline, records: list[Record], name: str) -> str:
    """Return the card of an adapter; `name` as in `trainer.monitor.report.model_card.model_card`."""
    base = public_name(config.base_model)
    sources = [source.path for source in config.dataset.mix or (config.dataset,) if source.path]
    front: dict[str, Any] = {"library_name": "diffusers", "pipeline_tag": "text-to-image"}
    front |= {"base_model": base} if is_on_hub(base) else {}
    front["tags"] = ["lora", "diffusers", "text-to-image", "zerolora"]
    prompts = list(config.logging.sample_prompts)
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
    uploaded = not Path(name).is_absolute()
    return render_template(
        "image_card.md.jinja",
        front=yaml.safe_dump(front, sort_keys=False),
        ours=MARKER,
        title=name.rpartition("/")[2],
        base=base,
        prompts=prompts,
        pipeline=pipeline.family.pipeline,
        adapter=f'"{name}"' if uploaded else python_path(name),
        base_path=python_path(config.base_model, uploaded=uploaded),
        file=DIFFUSERS,
        rows=rows,
    )
