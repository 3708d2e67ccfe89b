"""The plain way to train the same adapter of an image model: diffusers, PEFT, torch's AdamW, a loop of some lines."""

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from trainer.config import RunConfig
from trainer.parallel.engine.optimizer import build_schedule
from trainer.parallel.ranks.group import set_seed
from trainer.setup.preflight import prepare
from trainer.tasks.images.batches import ImageBatches, SizeGroup
from trainer.tasks.images.objective import Objective

TARGETS = ["to_k", "to_q", "to_v", "to_out.0", "add_k_proj", "add_q_proj", "add_v_proj", "to_add_out"]
FEED_FORWARD = ["ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2", "proj_mlp"]
CPU = torch.device("cpu")


def plain_losses(config: RunConfig, *, ranks: int, device: torch.device = CPU) -> tuple[list[float], Any]:
    """Mean loss a picture at each step of `config` in 32 bits, and the pipeline with the trained adapter in it.

    The pictures, noise and times are those that `ranks` ranks of zerolora draw; noising, prediction, loss and
    update are written as diffusers' own training scripts have them.
    """
    import diffusers

    training, prepared = config.training, prepare(config)
    family = prepared.model_config.family
    pipeline = getattr(diffusers, family.pipeline).from_pretrained(config.base_model, dtype=torch.float32)
    denoiser = getattr(pipeline, family.denoiser)
    denoiser.requires_grad_(False)
    if config.adapter == "qlora":
        in_four_bits(denoiser)
    _add_adapter(config, denoiser, family)
    denoiser.to(device).train()
    trained = [parameter for parameter in denoiser.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=training.learning_rate, weight_decay=training.weight_decay)
    assert training.max_steps is not None
    schedule = build_schedule(optimizer, training, training.max_steps)
    predicted = {} if config.image.prediction == "auto" else {"prediction_type": config.image.prediction}
    scheduler: Any = getattr(diffusers, family.scheduler).from_config(pipeline.scheduler.config, **predicted)
    batches = _batches(config, prepared, ranks)
    losses: list[float] = []
    epoch = offset = 0
    for _ in range(training.max_steps):
        parts, taken = batches.build_step_batches(epoch, offset)
        total = 0.0
        for part in parts:
            for group in (_on(device, each) for each in part.groups):
                loss = _loss(config, family.name, scheduler, denoiser, group, group.conditions) / taken
                loss.backward()
                total += loss.item()
        losses.append(total)
        torch.nn.utils.clip_grad_norm_(trained, training.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        offset += taken
        if offset >= len(prepared.data.train):
            epoch, offset = epoch + 1, 0
    return losses, pipeline


def in_four_bits(model: Any) -> None:
    """Every linear layer as bitsandbytes' NF4 layer, double quantization and blocks of 64, as diffusers loads them.

    Where rows do not hold whole blocks bitsandbytes 0.50.2 takes wrong scales on a CPU: such a layer, of the outermost
    ones of tiny models, has the values that its quantization gives of the same numbers in rows of 64.
    """
    import bitsandbytes as bnb
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    for path, linear in list(model.named_modules()):
        if type(linear) is not torch.nn.Linear:
            continue
        weight = linear.weight.data
        if weight.shape[1] % 64:
            packed, state = quantize_4bit(weight.reshape(-1, 64), quant_type="nf4", compress_statistics=True)
            linear.weight.data = dequantize_4bit(packed, state).view(weight.shape)
            continue
        layer = bnb.nn.Linear4bit(
            linear.in_features, linear.out_features, linear.bias is not None, torch.float32, quant_type="nf4"
        )
        layer.weight = bnb.nn.Params4bit(weight, requires_grad=False, quant_type="nf4")
        layer.bias = linear.bias
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, layer.to("cpu"))


def _add_adapter(config: RunConfig, denoiser: Any, family: Any) -> None:
    """By PEFT's own names of diffusers' scripts; the same first values, for the layers come in the same order."""
    from peft import LoraConfig

    lora = config.lora
    targets: list[str] | str = [*TARGETS, *FEED_FORWARD]
    if family.name == "flux2":
        targets = r".*(attn[.](to_[qkv]|to_out[.]0|add_[qkv]_proj|to_add_out)|[.]ff(_context)?[.]linear_(in|out))|"
        targets += r"single_transformer_blocks.*(to_qkv_mlp_proj|to_out)"
    if family.name == "flux":
        targets = rf".*({'|'.join(name.replace('.', '[.]') for name in targets)})|single_transformer_blocks.*proj_out"
    if lora.target_modules != ("all-linear",):
        targets = list(lora.target_modules)
    settings = LoraConfig(r=lora.r, lora_alpha=lora.alpha, target_modules=targets, init_lora_weights=True)
    set_seed(config.seed)
    denoiser.add_adapter(settings)


def _batches(config: RunConfig, prepared: Any, ranks: int) -> ImageBatches:
    training, image = config.training, config.image
    objective = Objective(prepared.model_config, image)
    return ImageBatches(
        prepared.data.train,
        objective.draw_timestep,
        image,
        prior=prepared.data.prior,
        batch_size=training.batch_size,
        accumulation=training.gradient_accumulation_steps * ranks,
        rank=0,
        world_size=1,
        seed=config.seed,
        shuffle=config.dataset.shuffle,
    )


def _on(device: torch.device, group: SizeGroup) -> SizeGroup:
    """In 32 bits: on a GPU the text encoders compute in 16."""
    conditions = {name: value.to(device, torch.float32) for name, value in group.conditions.items()}
    moved = {name: getattr(group, name).to(device) for name in ("latents", "noise", "timesteps", "weights")}
    return replace(group, conditions=conditions, **moved)


def _loss(config: RunConfig, family: str, scheduler: Any, denoiser: Any, group: SizeGroup, given: Any) -> torch.Tensor:
    """As train_text_to_image_lora_sdxl.py, train_dreambooth_lora_sd3.py and train_dreambooth_lora_flux.py."""
    from diffusers.training_utils import compute_snr

    latents, noise = group.latents, group.noise
    steps = scheduler.config.num_train_timesteps
    index = (group.timesteps * steps).long()
    if family in ("sd", "sdxl"):
        noisy = scheduler.add_noise(latents, noise, index)
        added = {"text_embeds": given["pooled"], "time_ids": given["sizes"]} if family == "sdxl" else None
        predicted = denoiser(noisy, index, given["text"], added_cond_kwargs=added).sample
        target = noise
        if scheduler.config.prediction_type == "v_prediction":
            target = scheduler.get_velocity(latents, noise, index)
        errors = F.mse_loss(predicted, target, reduction="none").mean(dim=(1, 2, 3))
        if (gamma := config.image.min_snr_gamma) is not None:
            ratio = compute_snr(scheduler, index)
            below = ratio + 1 if scheduler.config.prediction_type == "v_prediction" else ratio
            errors = errors * torch.stack([ratio, gamma * torch.ones_like(ratio)], dim=1).min(dim=1)[0] / below
        return (errors * group.weights).sum()
    known = scheduler.timesteps.to(latents.device)
    timesteps = known[steps - 1 - index]
    sigmas = scheduler.sigmas.to(latents.device)[[(known == each).nonzero().item() for each in timesteps]]
    sigmas = sigmas.view(-1, 1, 1, 1)
    noisy = (1.0 - sigmas) * latents + sigmas * noise
    if family == "sd3":
        predicted = denoiser(noisy, given["text"], given["pooled"], timesteps).sample
    else:
        predicted = (_flux2 if family == "flux2" else _flux)(denoiser, noisy, timesteps, given)
    errors = F.mse_loss(predicted, noise - latents, reduction="none").mean(dim=(1, 2, 3))
    return (errors * group.weights).sum()


def _flux(denoiser: Any, noisy: torch.Tensor, timesteps: torch.Tensor, given: Any) -> torch.Tensor:
    from diffusers import FluxPipeline

    count, channels, height, width = noisy.shape
    places = FluxPipeline._prepare_latent_image_ids(count, height // 2, width // 2, noisy.device, noisy.dtype)
    predicted = denoiser(
        hidden_states=FluxPipeline._pack_latents(noisy, count, channels, height, width),
        timestep=timesteps / 1000,
        guidance=torch.ones(count, device=noisy.device),
        pooled_projections=given["pooled"],
        encoder_hidden_states=given["text"],
        txt_ids=torch.zeros(given["text"].shape[1], 3, device=noisy.device),
        img_ids=places,
    ).sample
    return FluxPipeline._unpack_latents(predicted, 2 * height, 2 * width, 2)


def _flux2(denoiser: Any, noisy: torch.Tensor, timesteps: torch.Tensor, given: Any) -> torch.Tensor:
    from diffusers import Flux2KleinPipeline

    places = Flux2KleinPipeline._prepare_latent_ids(noisy)
    predicted = denoiser(
        hidden_states=Flux2KleinPipeline._pack_latents(noisy),
        timestep=timesteps / 1000,
        encoder_hidden_states=given["text"],
        txt_ids=Flux2KleinPipeline._prepare_text_ids(given["text"]).to(noisy.device),
        img_ids=places.to(noisy.device),
    ).sample
    return Flux2KleinPipeline._unpack_latents_with_ids(predicted, places, *noisy.shape[2:])
