"""Activations that a micro-batch keeps for its backward pass, and the memory of the loss and of a layer's backward.

T tokens of a micro-batch, H hidden width, e bytes of an activation, V vocabulary, K positions with a target. The
formulas follow the tensors that each operation saves: fused adapters x and h = x A^T; attention q, k, v, its output and
a 32-bit logsumexp per head and token; our RMSNorm its input and a 32-bit scale, our SwiGLU gate and up. The model's own
norm keeps a 32-bit copy of its input, its own SwiGLU the activated gate as well. Where results of norm and SwiGLU are
recomputed (trainer/patches/norm_mlp_rope.py), the adapted layers that read them keep no input.
"""

from dataclasses import dataclass, replace

from ops.head import LOGITS_AT_ONCE
from trainer.memory.widths import Layer, Mixer, NormBytes, Shapes
from trainer.patches.norm_mlp_rope import RECOMPUTE_FROM_BYTES

FP32 = 4
INDEX = 8
FEED_FORWARD = ("gated", "plain", "experts")
DEQUANTISED_AT_ONCE = 64 << 20
"""Bytes of 4-bit weights below which shared-input projections are dequantized together (kMostBytes, ops/csrc)."""
UNFUSED_LOSS_BYTES = 12
"""Bytes per logit at the peak: log-probabilities, their gradient and that of the logits, 32 bits each."""


@dataclass(frozen=True)
class Work:
    """Sizes and kernels of one micro-step on one rank."""

    rows: int
    length: int
    """Tokens of the longest row, padding included."""
    targets: int
    """Positions for which logits are computed."""
    element: int
    """Bytes of an activation (e)."""
    norms: str
    """Implementation of norms: `ours` or `model`."""
    swiglu: str
    """Implementation of gated activations in feed-forward layers: `ours` or `model`."""
    rotary: str
    """Implementation of the rotary embedding: `ours` or `model`."""
    recomputed_results: str
    """What our kernels recompute in the backward pass: `none`, SwiGLU's `activations`, or `norms` as well."""
    fused_loss: bool
    recompute: str
    """training.gradient_checkpointing."""
    offload_activations: bool
    masked: bool
    """Whether documents of a packed sequence are separated by a mask."""
    copied_heads: bool
    """Whether keys and values are copied for every head: with a mask, eager attention, or no flash attention."""
    eager: bool
    """Whether attention runs in plain torch, which keeps the probabilities (heads x L x L)."""
    softcap: bool
    """Whether attention scores are capped by tanh, which keeps its results."""
    capped_logits: bool
    """Whether logits are capped by tanh, which keeps its results."""
    packed_weights: bool
    """Whether the base is quantized to 4 or 8 bits."""
    eight_bit: bool = False
    """Whether the base has 8 bits and its products take 8-bit inputs."""
    frozen_by_operator: bool = False
    """Whether our operator also computes experts without an adapter (trainer/patches/fused_experts.py)."""
    scan_by_kernel: bool = False
    """Whether mamba-ssm rather than plain torch computes the scans of recurrent layers."""
    recomputed_layers: int | None = None
    """training.gradient_checkpointing_layers."""
    rows_apart: int = 0
    """Rows with a separate forward pass, which is kept in addition until the backward pass of both."""

    @property
    def larger_pass(self) -> "Work":
        """The larger of the two backward passes."""
        return replace(self, rows=max(self.rows - self.rows_apart, self.rows_apart), rows_apart=0)

    @property
    def tokens(self) -> int:
        """Tokens of the micro-batch (T)."""
        return self.rows * self.length

    @property
    def norm_bytes(self) -> int:
        """Bytes that a norm keeps per element: its input, or a 32-bit copy of it in the model's own code."""
        return FP32 if self.norms == "model" else self.element

    def kept_input(self, width: int, *, of_norm: bool) -> int:
        """Return the bytes (T e) of an adapted layer's input, or 0 if it is recomputed."""
        size = self.tokens * width * self.element
        kernels = self.norms if of_norm else self.swiglu
        recomputed = self.recomputed_results == "norms" if of_norm else self.recomputed_results != "none"
        return 0 if kernels == "ours" and recomputed and size >= RECOMPUTE_FROM_BYTES else size


def attention_activation_bytes(mixer: Mixer, work: Work) -> int:
    """Return T e (q + k + v + o) + 4 T heads, x and h of adapters, the mask; k and v for all heads if they are copied.

    Eager attention keeps T L heads probabilities instead of the logsumexp: 32 bits, and e bytes if that is less.
    """
    per_token = mixer.width_projected + mixer.width_inner + mixer.copied
    if work.copied_heads:
        per_token = 4 * mixer.width_inner
    if mixer.relaid and work.rotary == "model":
        per_token += mixer.width_inner
    total = work.tokens * (per_token * work.element + FP32 * mixer.heads)
    if work.eager:
        probability = work.element if mixer.own_softmax or work.element == FP32 else FP32 + work.element
        probability += work.element if work.softcap else 0
        total += work.tokens * mixer.heads * (work.length * probability - FP32)
    elif work.masked:
        total += work.rows * work.length**2 * work.element
    # The output projection reads a tensor that attention keeps anyway.
    total += work.kept_input(mixer.width_in, of_norm=True) if mixer.trained_in else 0
    return total + work.tokens * mixer.norm_width * work.norm_bytes


def feed_forward_activation_bytes(mixer: Mixer, work: Work) -> int:
    """Return T e (x + gate + up + product), plus the activation in the model's own code; ungated: x and the latter."""
    total = work.kept_input(mixer.width_in, of_norm=True) if mixer.trained_in else 0
    activated = int(work.tokens * mixer.width_inner * work.element * mixer.activated)
    if mixer.kind != "gated":
        return total + activated
    up = work.tokens * (mixer.width_projected - mixer.width_inner) * work.element
    if work.swiglu == "model":
        total += up + activated
    else:
        total += work.tokens * mixer.width_projected * work.element
    return total + (work.kept_input(mixer.width_inner, of_norm=False) if mixer.trained_out else 0)


def expert_activation_bytes(mixer: Mixer, work: Work) -> int:
    """Return, for S = T choices rows, the bytes of gate and up, the activation, the weighted result, and four indices.

    Adapted experts also keep their input, S H e. Our operator keeps T H e of it, gate and up, and h (in `ranks`).
    Packed experts without an adapter are recomputed and keep only their inputs.
    """
    if is_recomputed(mixer, work):
        called_with = work.tokens * mixer.choices * (INDEX + work.element)
        return work.kept_input(mixer.width_in, of_norm=True) + called_with
    rows = work.tokens * mixer.choices
    if mixer.by_operator or (mixer.known_gate and work.frozen_by_operator):
        indices = 3 * INDEX  # order, choices and their weights, kept by the router
        kept = work.kept_input(mixer.width_in, of_norm=True)
        return kept + rows * (mixer.width_projected * work.element + indices)
    per_row = mixer.activated - (0 if mixer.trained_out else mixer.width_inner) + mixer.width_in
    per_row += mixer.width_in if mixer.trained_out else 0
    routed = work.kept_input(mixer.width_in, of_norm=True) if mixer.trained_in else 0
    return routed + int(rows * (per_row * work.element + 4 * INDEX))


def is_recomputed(mixer: Mixer, work: Work) -> bool:
    """Return whether experts are packed without an adapter, hence recomputed (trainer/model/frozen_experts.py)."""
    by_operator = mixer.known_gate and work.frozen_by_operator
    return not (mixer.trained_out or by_operator) and (work.packed_weights or mixer.packed)


def recurrence_activation_bytes(mixer: Mixer, work: Work) -> int:
    """Return the bytes of a Mamba-2 layer in plain torch: projections, convolution, gated norm, and a 32-bit scan.

    The scan keeps its inputs and outputs per chunk, head and state, and eight tensors of the inner width; mamba-ssm's
    keeps only inputs, outputs and a 32-bit number per head. The gated norm keeps four tensors.
    """
    if work.scan_by_kernel:
        in_type = mixer.width_in + 2 * mixer.width_projected + mixer.width_inner
        return work.tokens * (in_type * work.element + FP32 * (mixer.heads + 4 * mixer.width_inner))
    in_type = mixer.width_in + 2 * mixer.width_projected + 3 * mixer.width_inner
    return work.tokens * (in_type * work.element + FP32 * (mixer.scan + 8 * mixer.width_inner))


def mixer_activation_bytes(mixer: Mixer, work: Work) -> int:
    """Return the bytes kept by a mixer, and by h of its adapters (T e R)."""
    kinds = {
        "attention": attention_activation_bytes,
        "recurrent": recurrence_activation_bytes,
        "experts": expert_activation_bytes,
    }
    return kinds.get(mixer.kind, feed_forward_activation_bytes)(mixer, work) + work.tokens * work.element * mixer.ranks


def norm_activation_bytes(norms: NormBytes, hidden: int, work: Work) -> int:
    """Return the bytes kept by norms over the residual stream: T H e + 4 T each, or as observed of the model's code."""
    if work.norms == "model":
        return work.tokens * (norms.in_32_bits if work.element == FP32 else norms.in_16_bits)
    return norms.count * work.tokens * (hidden * work.element + FP32)


def layer_activation_bytes(layer: Layer, work: Work) -> int:
    """Return the bytes kept by a layer without recomputation; an input of several mixers is kept once."""
    norms = norm_activation_bytes(layer.norms, layer.hidden, work)
    shared = work.kept_input(layer.hidden, of_norm=True) if layer.parallel or _reads_with_experts(layer) else 0
    return norms + sum(mixer_activation_bytes(mixer, work) for mixer in layer.mixers) - shared


def _reads_with_experts(layer: Layer) -> bool:
    """Return whether experts and a shared expert are both adapted and so keep the same input."""
    parts = [mixer for mixer in layer.mixers if mixer.kind in FEED_FORWARD]
    return any(each.by_operator for each in parts) and any(each.trained_in for each in parts if not each.by_operator)


def selective_activation_bytes(layer: Layer, work: Work) -> int:
    """Return the bytes kept with selective recomputation: of feed-forward layers only the input, T H e."""
    parts = [mixer for mixer in layer.mixers if mixer.kind in FEED_FORWARD]
    if not parts:
        return layer_activation_bytes(layer, work)
    # Experts and shared experts are one part.
    inputs = 1 if any(mixer.kind == "experts" for mixer in parts) else len(parts)
    others = sum(mixer_activation_bytes(mixer, work) for mixer in layer.mixers if mixer.kind not in FEED_FORWARD)
    if work.offload_activations or layer.parallel:
        inputs = 0
    return norm_activation_bytes(layer.norms, layer.hidden, work) + others + inputs * boundary(layer, work)


def boundary(layer: Layer, work: Work) -> int:
    """Return the bytes of the hidden state between two layers: T H e."""
    return work.tokens * layer.hidden * work.element


def total_activation_bytes(shapes: Shapes, work: Work) -> int:
    """Return the bytes kept by all layers, depending on recomputation."""
    recomputed, whole = _split(shapes, work)
    kept_whole = sum(layer_activation_bytes(layer, work) for layer in whole)
    if not recomputed:
        return kept_whole
    # One input is copied to or from the host while the next is computed or used.
    in_flight = 2 * max(boundary(layer, work) for layer in recomputed)
    if work.recompute == "selective":
        kept = sum(selective_activation_bytes(layer, work) for layer in recomputed)
        return kept + (in_flight if work.offload_activations else 0)
    return kept_whole + (in_flight if work.offload_activations else sum(boundary(layer, work) for layer in recomputed))


def recomputed_layer(shapes: Shapes, work: Work) -> int:
    """Return the bytes that a recomputed layer adds to those kept of it.

    Later layers that were kept whole have been freed by then.
    """
    recomputed, whole = _split(shapes, work)
    kept, work = (
        selective_activation_bytes if work.recompute == "selective" else boundary,
        replace(work, recomputed_results="none"),
    )
    most = max((layer_activation_bytes(layer, work) - kept(layer, work) for layer in recomputed), default=0)
    return max(0, most - sum(layer_activation_bytes(layer, work) for layer in whole)) if whole else most


def _split(shapes: Shapes, work: Work) -> tuple[list[Layer], list[Layer]]:
    count = 0 if work.recompute == "none" else work.recomputed_layers or len(shapes.layers)
    return list(shapes.layers[:count]), list(shapes.layers[count:])


def mixer_backward_bytes(layer: Layer, mixer: Mixer, work: Work) -> int:
    """Return the bytes of gradients alive at once: residual stream and branch, inner width, projections."""
    if mixer.kind == "experts":
        rows = work.tokens * mixer.choices * (2 * mixer.width_in + mixer.width_projected + 2 * mixer.width_inner)
        again = 0
        if is_recomputed(mixer, work):
            again = expert_activation_bytes(replace(mixer, packed=False), replace(work, packed_weights=False))
        return (work.tokens * 2 * layer.hidden + rows) * work.element + again
    per_token = 2 * layer.hidden + mixer.width_inner
    if mixer.kind == "attention":
        per_token += max(mixer.width_projected, 3 * mixer.width_inner) if work.copied_heads else mixer.width_projected
        per_token += mixer.width_projected
    elif work.swiglu == "ours":
        per_token += mixer.width_projected
    elif work.swiglu == "model":
        per_token += mixer.width_projected + mixer.width_inner
    weights = (
        eight_bit_bytes(mixer, work) if work.eight_bit else dequantized_bytes(mixer, work) if work.packed_weights else 0
    )
    return work.tokens * per_token * work.element + weights


def eight_bit_bytes(mixer: Mixer, work: Work) -> int:
    """Return the bytes of 8-bit dY and of transposed weights: the first projections together, or the largest."""
    together = mixer.width_in * mixer.width_projected
    return work.tokens * max(mixer.width_projected, mixer.width_in) + max(mixer.largest_weight, together)


def dequantized_bytes(mixer: Mixer, work: Work) -> int:
    """Return the dequantized bytes of the largest 4-bit weight, or of the first projections together if small."""
    together = mixer.width_in * mixer.width_projected * work.element
    largest = mixer.largest_weight * work.element
    return max(largest, together) if together <= DEQUANTISED_AT_ONCE else largest


def layer_backward_bytes(shapes: Shapes, work: Work) -> int:
    """Return the largest number of bytes that the backward pass of a layer needs in addition to kept activations."""
    needs = [mixer_backward_bytes(layer, mixer, work) for layer in shapes.layers for mixer in layer.mixers]
    return max(needs, default=0)


def loss_head(shapes: Shapes, work: Work) -> int:
    """Return the bytes of final norm, logits, loss and gradient of the hidden state, for K positions.

    Fused: the norm's output T H e, the K hidden states and their gradients 2 K H e, one chunk of logits. Otherwise 12
    bytes per logit, and e more if it is capped.
    """
    norm = norm_activation_bytes(shapes.norm, shapes.hidden, work)
    hidden = work.tokens * shapes.hidden * work.element
    positions = work.rows * min(work.targets, work.length)
    if work.fused_loss:
        chunk = min(positions * shapes.vocabulary, LOGITS_AT_ONCE)
        return norm + hidden + (2 * positions * shapes.hidden + chunk) * work.element
    per_logit = UNFUSED_LOSS_BYTES + (work.element if work.capped_logits else 0)
    return norm + hidden + positions * (shapes.vocabulary * per_logit + 2 * shapes.hidden * work.element)
