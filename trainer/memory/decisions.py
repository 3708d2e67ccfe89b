"""Decisions of a run before a weight is loaded: which kernels are used, what is kept, and the memory layout.

They follow from the configuration, the machine and the empty model. The builder executes them, the memory estimate uses
them, and console and run.json show them. If a self-test or probe on the device contradicts a decision, the builder
reports it, because the estimate is then off.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Generic, Literal, TypeVar

from trainer.config import AUTO, RunConfig
from trainer.config.checks import TILES_NO_GRAPHS, find_graph_obstacle, find_tile_obstacle
from trainer.config.zero import engine_stage, engine_zero, gathers_by_layer, why_not_by_layer
from trainer.parallel.engine.deepspeed_engine import guards_on_device
from trainer.parallel.engine.flat_adapter import why_not_flat
from trainer.parallel.ranks.group import list_groups
from trainer.patches.mamba import has_scan_kernels
from trainer.patches.model_properties import ModelProperties
from trainer.patches.norm_mlp_rope import PARTS
from trainer.patches.tiled_mlp import AUTO_TILE

Kernels = Literal["ours", "model"]
VARLEN = "varlen"
MANY_TOKENS = 4 * AUTO_TILE
"""Tokens of a micro-step from which on `training.tiled_mlp: auto` tiles."""
T = TypeVar("T")


@dataclass(frozen=True)
class Machine:
    """The devices of the ranks, and the precision: bf16, fp16 or fp32."""

    world_size: int
    on_gpu: bool
    precision: str
    own_kernels: bool
    """Whether the CUDA operators are or will be built."""
    flash: bool
    """Whether torch's flash attention runs on the device in this precision."""
    scan_kernels: bool = False
    """Whether mamba-ssm's scan kernels are installed."""
    hosts: tuple[str, ...] = ()
    """The host of each rank; empty if all are on one."""
    host_room: int | None = None
    """Bytes of host memory for what a rank offloads; None: any amount."""

    @classmethod
    def assumed(cls, world_size: int, precision: str, ranks_per_host: int | None = None) -> "Machine":
        """Assume GPUs with all kernels installed, except those of mamba-ssm unless they are installed here."""
        hosts = tuple(f"host {rank // (ranks_per_host or world_size)}" for rank in range(world_size))
        return cls(world_size, True, precision, True, precision != "fp32", has_scan_kernels(), hosts)


@dataclass(frozen=True)
class Decided(Generic[T]):
    """A decision and its reason, which is empty for the usual choice."""

    value: T
    reason: str = ""

    def __str__(self) -> str:
        word = {True: "yes", False: "no", None: "seen in the first step"}.get(self.value, self.value)  # type: ignore[call-overload]
        return f"{word} ({self.reason})" if self.reason else str(word)


@dataclass(frozen=True)
class Decisions:
    """All decisions that the builder and the estimate share."""

    attention: Decided[str]
    """`varlen`, `sdpa`, `eager`, or what model.attn_implementation names."""
    own_elementwise: Decided[bool]
    """Whether our norms, SwiGLU and rotary embedding are tried on the model."""
    norms: Decided[Kernels]
    swiglu: Decided[Kernels]
    rotary: Decided[Kernels]
    adapters: Decided[str]
    """Forward of adapted layers: `cuda`, `reference`, `peft`, `rounded` (training.qat), or `none`."""
    siblings: Decided[bool]
    """Whether shared-input projections are computed in one call."""
    recomputed_results: Decided[str]
    """What the backward pass recomputes: `none`, `activations` of SwiGLU, or outputs of `norms` as well."""
    attention_again: Decided[bool]
    """Whether recomputed layers compute attention again."""
    mlp_tile: Decided[int]
    """Tokens of a tile of gated MLPs; 0: they are computed whole."""
    fused_head: Decided[bool | None]
    """Whether head and loss are fused and computed in chunks; None: decided in the first micro-batch."""
    gather: Decided[str]
    """How stage 3 gathers the base: per `layer`, per `module`, or `none`."""
    shard_group: Decided[int]
    """Number of ranks that share one copy of the base at stage 3: the size of the smallest group."""
    flat: Decided[bool]
    """Whether all LoRA factors are one buffer."""
    clips_on_device: Decided[bool]
    """Whether the optimizer clips gradients and skips steps on the device, without the host."""

    cuda_graphs: Decided[bool | None]
    """Whether micro-steps are replayed from CUDA graphs; None: decided in the first steps."""

    def named(self) -> Iterator[tuple[str, Decided[object]]]:
        """Yield (name, decision) pairs."""
        for each in fields(self):
            yield each.name, getattr(self, each.name)

    def to_json(self) -> dict[str, dict[str, object]]:
        """Convert the decisions for run.json and `estimate --json`."""
        return {name: {"value": found.value, "reason": found.reason} for name, found in self.named()}

    def line(self) -> str:
        """Return a line for the console with the decisions that no other line shows."""
        shown = {
            "attention": self.attention,
            "attention recomputed": self.attention_again,
            "loss fused with the head": self.fused_head,
            "adapter in one buffer": self.flat,
            "clipping on the device": self.clips_on_device,
            "CUDA graphs": self.cuda_graphs,
        }
        return "decided: " + ", ".join(f"{name}: {found}" for name, found in shown.items())


def decide(config: RunConfig, machine: Machine, model: ModelProperties | None) -> Decisions:
    """Decide for a configuration with zero.stage resolved; `model` is None if it could not be built empty."""
    ours = _own_elementwise(config, machine)
    norms, swiglu, rotary = (_kernels(part, model, ours) for part in PARTS)
    zero = engine_zero(config)
    not_flat = why_not_flat(config)
    return Decisions(
        attention=_attention(config, machine, model),
        own_elementwise=ours,
        norms=norms,
        swiglu=swiglu,
        rotary=rotary,
        adapters=_adapters(config, machine),
        siblings=_siblings(config, machine),
        recomputed_results=_recomputed_results(config, machine),
        attention_again=_attention_again(config),
        mlp_tile=_mlp_tile(config),
        fused_head=_fused_head(config, machine, model),
        gather=_gather(config),
        shard_group=_shard_group(config, machine),
        flat=Decided(not_flat is None, not_flat or ""),
        clips_on_device=Decided(guards_on_device(config.training, zero, machine.precision, machine.on_gpu)),
        cuda_graphs=_cuda_graphs(config, machine),
    )


def decide_for_images(config: RunConfig, machine: Machine, model: ModelProperties | None) -> Decisions:
    """Decide for an image model, whatever `model` is: adapters and ZeRO as for text, the rest as in diffusers."""
    theirs = Decided[Kernels]("model", "an image model")
    return replace(
        decide(config, machine, None),
        attention=Decided("sdpa"),
        own_elementwise=Decided(False, "an image model"),
        norms=theirs,
        swiglu=theirs,
        rotary=theirs,
        recomputed_results=Decided("none", "an image model"),
        mlp_tile=Decided(0, "an image model"),
        fused_head=Decided(False, "an image model has no head"),
        cuda_graphs=Decided(False, "an image model"),
    )


def _attention(config: RunConfig, machine: Machine, model: ModelProperties | None) -> Decided[str]:
    """Choose transformers' default for `auto`, or variable-length kernels for packed sequences if the model can."""
    requested = config.model.attn_implementation
    if requested != "auto":
        return Decided(requested, "asked for")
    if config.parallel.sequence > 1:
        return Decided(VARLEN, f"heads are exchanged among {config.parallel.sequence} ranks")
    if model is not None and model.sinks and model.registry and config.dataset.packing:
        return Decided(VARLEN, "" if machine.flash else "attention sinks: document by document in plain torch")
    if model is not None and not model.sdpa:
        return Decided("eager", "the model knows no other")
    if not config.dataset.packing:
        return Decided("sdpa")
    if not machine.flash:
        return Decided("sdpa", "packs under a mask: no flash attention here")
    if model is not None and not model.registry:
        return Decided("sdpa", "packs under a mask: the model's attention cannot be replaced")
    return Decided(VARLEN)


def _own_elementwise(config: RunConfig, machine: Machine) -> Decided[bool]:
    if config.ops.elementwise == "off":
        return Decided(False, "ops.elementwise: off")
    if not machine.on_gpu:
        return Decided(False, "there is no GPU")
    if config.training.torch_compile:
        return Decided(False, "torch.compile fuses them")
    if config.ops.backend not in ("auto", "cuda"):
        return Decided(False, f"ops.backend: {config.ops.backend}")
    return Decided(machine.own_kernels, "" if machine.own_kernels else "no CUDA kernels here")


def _kernels(part: str, model: ModelProperties | None, ours: Decided[bool]) -> Decided[Kernels]:
    refusal = ours.reason if not ours.value or model is None else model.elementwise[part]
    return Decided("model", refusal) if refusal or not ours.value else Decided("ours")


def _adapters(config: RunConfig, machine: Machine) -> Decided[str]:
    backend = config.ops.backend
    if config.adapter == "none":
        return Decided("none", "all weights are trained")
    if config.training.qat:
        return Decided("rounded", f"training.qat: {config.training.qat}")
    if backend == "peft":
        return Decided("peft", "asked for")
    if backend == "auto" and not machine.on_gpu:
        return Decided("peft", "ops.backend: auto on a CPU")
    if backend == "reference" or (backend == "auto" and not machine.own_kernels):
        return Decided("reference", "asked for" if backend == "reference" else "no CUDA kernels here")
    return Decided("cuda")


def _siblings(config: RunConfig, machine: Machine) -> Decided[bool]:
    if _adapters(config, machine).value in ("none", "peft"):
        return Decided(False)
    if config.training.qat:
        return Decided(False, "training.qat: each has a merged weight of its own")
    if config.zero.stage == 3 and not gathers_by_layer(config):
        return Decided(False, "zero.gather: module gathers each adapted layer for itself")
    if config.training.torch_compile:
        return Decided(False, "torch.compile traces each layer alone")
    return Decided(True)


def _recomputed_results(config: RunConfig, machine: Machine) -> Decided[str]:
    # Gradient checkpointing keeps none of these, and DeepSpeed's own stage 3 has released the norm's weight by then.
    if config.ops.recompute == "none" or config.adapter == "none":
        return Decided("none", "ops.recompute: none" if config.adapter != "none" else "all weights are trained")
    training = config.training
    if training.gradient_checkpointing != "none" and training.gradient_checkpointing_layers is None:
        return Decided("none", "training.gradient_checkpointing")
    if engine_stage(config) == 3:
        return Decided("none", "zero.gather: module")
    if not _own_elementwise(config, machine).value:
        return Decided("none", "not our kernels")
    return Decided(config.ops.recompute)


def _attention_again(config: RunConfig) -> Decided[bool]:
    training = config.training
    if training.gradient_checkpointing not in ("non_reentrant", "reentrant"):
        return Decided(False, f"training.gradient_checkpointing: {training.gradient_checkpointing}")
    if not training.recompute_attention:
        where = "in host memory" if training.offload_activations else "on the device"
        return Decided(False, f"its output and log-sum-exp are kept {where}")
    return Decided(True)


def _mlp_tile(config: RunConfig) -> Decided[int]:
    requested = config.training.tiled_mlp
    if not requested:
        return Decided(0, "training.tiled_mlp: false")
    if requested != "auto":
        return Decided(AUTO_TILE if requested is True else requested)
    rows = 1 if config.training.batch_size == AUTO else config.training.batch_size
    if rows * config.dataset.max_length // config.parallel.sequence < MANY_TOKENS:
        return Decided(0, f"fewer than {MANY_TOKENS:,} tokens at once")
    obstacle = find_tile_obstacle(config)
    return Decided(0, obstacle[1]) if obstacle else Decided(AUTO_TILE)


def _fused_head(config: RunConfig, machine: Machine, model: ModelProperties | None) -> Decided[bool | None]:
    if model is not None and model.head:
        return Decided(False, model.head)
    if config.adapter == "none":
        return Decided(False, "the head is trained")
    if engine_stage(config) == 3:
        return Decided(False, "DeepSpeed's stage 3 partitions the head")
    return Decided(True if model is not None and model.head is not None else None)


def _cuda_graphs(config: RunConfig, machine: Machine) -> Decided[bool | None]:
    requested = config.training.cuda_graphs
    if requested == "off":
        return Decided(False, "training.cuda_graphs: off")
    if not machine.on_gpu:
        return Decided(False, "there is no GPU")
    if obstacle := find_graph_obstacle(config):
        return Decided(False, obstacle[1])
    if _mlp_tile(config).value:
        return Decided(False, TILES_NO_GRAPHS)
    return Decided(True, "asked for") if requested == "on" else Decided(None)


def _shard_group(config: RunConfig, machine: Machine) -> Decided[int]:
    if config.zero.stage < 3 or not gathers_by_layer(config):
        return Decided(machine.world_size)
    within = config.zero.shard_within
    groups = list_groups(within, machine.hosts or ("",) * machine.world_size)
    size = min(map(len, groups))
    return Decided(size) if len(groups) == 1 else Decided(size, f"zero.shard_within: {within}")


def _gather(config: RunConfig) -> Decided[str]:
    if config.zero.stage < 3:
        return Decided("none")
    if gathers_by_layer(config):
        return Decided("layer")
    return Decided("module", why_not_by_layer(config) or "asked for")
