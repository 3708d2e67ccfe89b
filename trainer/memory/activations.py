"""What a micro-batch keeps between forward and backward, and what the loss and one layer's backward need as well.

Legend: T tokens of a micro-batch, H hidden width, e bytes of an activation, V vocabulary, K positions with a target.
Every formula says what the product saves: the fused operators x and h = x A^T; attention q, k, v, its output and one
32-bit logarithm per head and token; our RMSNorm its input and a 32-bit scale, our SwiGLU gate and up. The model's own
norm keeps a 32-bit copy of its input, its own SwiGLU the activated gate as well. Where results of these two are
forgotten (trainer/patches/norm_mlp_rope.py), the adapted layers behind them keep none of their input.
"""

from dataclasses import dataclass, replace

from ops.head import LOGITS_AT_ONCE
from trainer.memory.widths import Layer, Mixer, NormBytes, Shapes
from trainer.patches.norm_mlp_rope import WORTH_FORGETTING

FP32 = 4
INDEX = 8
FEED_FORWARD = ("gated", "plain", "experts")
DEQUANTISED_AT_ONCE = 64 << 20
"""Bytes: siblings' 4-bit weights that take no more share a product in the backward pass (kMostBytes, ops/csrc)."""
UNFUSED_LOSS_BYTES = 12
"""Per logit at the worst moment: log-probabilities, their gradient and that of the logits, 32 bits each."""


@dataclass(frozen=True)
class Work:
    """What one micro-step of one rank computes."""

    rows: int
    length: int
    """Longest row in tokens, padding included."""
    targets: int
    """Positions for which logits are computed."""
    element: int
    """e."""
    norms: str
    """Whose code computes them: `ours` or `model`."""
    swiglu: str
    """The same for what gated feed-forward parts do between their projections."""
    rotary: str
    """The same for the rotary embedding."""
    forgets: str
    """What ours computes again in the backward pass: `none`, SwiGLU's `activations`, outputs of `norms` as well."""
    fused_loss: bool
    recompute: str
    """training.gradient_checkpointing."""
    offload_activations: bool
    masked: bool
    """Documents of a pack are kept apart by a mask."""
    copied_heads: bool
    """Keys and values are copied for every head: under a mask, in eager attention, without flash attention."""
    eager: bool
    """Attention runs in plain torch, which keeps the probabilities (heads x L x L)."""
    softcap: bool
    """Attention caps its scores by a hyperbolic tangent, whose results are kept too."""
    capped_logits: bool
    """The model caps its logits by a hyperbolic tangent, whose results are kept too."""
    packed_weights: bool
    """4-bit weights, dequantised where they are used, or 8-bit ones."""
    eight_bit: bool = False
    """They have 8 bits, and their products take 8-bit inputs."""
    frozen_by_operator: bool = False
    """Our operator computes experts without an adapter too (trainer/patches/fused_experts.py)."""
    scan_by_kernel: bool = False
    """mamba-ssm computes the scans of recurrent layers, and not plain torch."""
    recomputed_layers: int | None = None
    """training.gradient_checkpointing_layers."""
    rows_apart: int = 0
    """Rows that have a pass of their own, whose results are kept beside those of the others until both go back."""

    @property
    def of_larger_pass(self) -> "Work":
        """What goes back at one time."""
        return replace(self, rows=max(self.rows - self.rows_apart, self.rows_apart), rows_apart=0)

    @property
    def tokens(self) -> int:
        """T."""
        return self.rows * self.length

    @property
    def of_norm(self) -> int:
        """Bytes of what a norm keeps per element: its input, or by the model's own code a 32-bit copy of it."""
        return FP32 if self.norms == "model" else self.element

    def kept_input(self, width: int, *, of_norm: bool) -> int:
        """T e of what an adapted layer reads, or nothing where it is computed again."""
        size = self.tokens * width * self.element
        whose = self.norms if of_norm else self.swiglu
        forgotten = self.forgets == "norms" if of_norm else self.forgets != "none"
        recipe = whose == "ours" and forgotten and size >= WORTH_FORGETTING
        return 0 if recipe else size


def kept_by_attention(mixer: Mixer, work: Work) -> int:
    """T e (q + k + v + o) + 4 T heads + x and h where adapted; k and v for all heads where they are copied; a mask.

    Eager attention keeps T L heads probabilities instead of the logarithms: 32 bits, and e where that is less.
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
    # The output projection reads what attention keeps anyway.
    total += work.kept_input(mixer.width_in, of_norm=True) if mixer.trained_in else 0
    return total + work.tokens * mixer.norm_width * work.of_norm


def kept_by_feed_forward(mixer: Mixer, work: Work) -> int:
    """T e (x + gate + up + product), by the model's own code what the activation keeps; ungated x and the latter."""
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


def kept_by_experts(mixer: Mixer, work: Work) -> int:
    """For S = T choices rows: gate and up, what the activation keeps, the result that is weighted, four indices.

    Adapted experts keep their input S H e as well. Our operator keeps T H e of it, gate and up, and h (in `ranks`).
    Packed ones without an adapter are computed again: of them only what they are called with is kept.
    """
    if computed_again(mixer, work):
        called_with = work.tokens * mixer.choices * (INDEX + work.element)
        return work.kept_input(mixer.width_in, of_norm=True) + called_with
    rows = work.tokens * mixer.choices
    if mixer.by_operator or (mixer.known_gate and work.frozen_by_operator):
        indices = 3 * INDEX  # order, choices and their weights, as the router keeps them
        kept = work.kept_input(mixer.width_in, of_norm=True)
        return kept + rows * (mixer.width_projected * work.element + indices)
    per_row = mixer.activated - (0 if mixer.trained_out else mixer.width_inner) + mixer.width_in
    per_row += mixer.width_in if mixer.trained_out else 0
    routed = work.kept_input(mixer.width_in, of_norm=True) if mixer.trained_in else 0
    return routed + int(rows * (per_row * work.element + 4 * INDEX))


def computed_again(mixer: Mixer, work: Work) -> bool:
    """Whether experts are packed and have no adapter (trainer/model/frozen_experts.py)."""
    by_operator = mixer.known_gate and work.frozen_by_operator
    return not (mixer.trained_out or by_operator) and (work.packed_weights or mixer.packed)


def kept_by_recurrence(mixer: Mixer, work: Work) -> int:
    """A Mamba-2 layer in plain torch: projections, convolution, gated norm, and its scan in 32 bits.

    The scan keeps what it takes and gives per chunk, head and state, and eight tensors of the inner width. mamba-ssm's
    keeps what it takes and gives alone, and one number of 32 bits a head; the gated norm keeps four tensors.
    """
    if work.scan_by_kernel:
        in_type = mixer.width_in + 2 * mixer.width_projected + mixer.width_inner
        return work.tokens * (in_type * work.element + FP32 * (mixer.heads + 4 * mixer.width_inner))
    in_type = mixer.width_in + 2 * mixer.width_projected + 3 * mixer.width_inner
    return work.tokens * (in_type * work.element + FP32 * (mixer.scan + 8 * mixer.width_inner))


def kept_by_mixer(mixer: Mixer, work: Work) -> int:
    """The part of a mixer, and h of its adapters: T e R."""
    kinds = {"attention": kept_by_attention, "recurrent": kept_by_recurrence, "experts": kept_by_experts}
    return kinds.get(mixer.kind, kept_by_feed_forward)(mixer, work) + work.tokens * work.element * mixer.ranks


def kept_by_norms(norms: NormBytes, hidden: int, work: Work) -> int:
    """What norms over the residual stream keep: T H e + 4 T each; by the model's own code what was observed."""
    if work.norms == "model":
        return work.tokens * (norms.in_32_bits if work.element == FP32 else norms.in_16_bits)
    return norms.count * work.tokens * (hidden * work.element + FP32)


def kept_by_layer(layer: Layer, work: Work) -> int:
    """Everything that one layer keeps when nothing is recomputed; what several mixers read is kept once."""
    norms = kept_by_norms(layer.norms, layer.hidden, work)
    shared = work.kept_input(layer.hidden, of_norm=True) if layer.parallel or _reads_with_experts(layer) else 0
    return norms + sum(kept_by_mixer(mixer, work) for mixer in layer.mixers) - shared


def _reads_with_experts(layer: Layer) -> bool:
    """Whether experts and a shared one, both adapted, keep the same input."""
    parts = [mixer for mixer in layer.mixers if mixer.kind in FEED_FORWARD]
    return any(each.by_operator for each in parts) and any(each.trained_in for each in parts if not each.by_operator)


def kept_if_selective(layer: Layer, work: Work) -> int:
    """Selective recomputation keeps everything but feed-forward parts, of which it keeps the input, T H e."""
    parts = [mixer for mixer in layer.mixers if mixer.kind in FEED_FORWARD]
    if not parts:
        return kept_by_layer(layer, work)
    # Experts, and those that all tokens visit, are one part.
    inputs = 1 if any(mixer.kind == "experts" for mixer in parts) else len(parts)
    others = sum(kept_by_mixer(mixer, work) for mixer in layer.mixers if mixer.kind not in FEED_FORWARD)
    if work.offload_activations or layer.parallel:
        inputs = 0
    return kept_by_norms(layer.norms, layer.hidden, work) + others + inputs * boundary(layer, work)


def boundary(layer: Layer, work: Work) -> int:
    """The hidden state between two layers: T H e."""
    return work.tokens * layer.hidden * work.element


def kept_by_layers(shapes: Shapes, work: Work) -> int:
    """All layers, by the kind of recomputation."""
    recomputed, whole = _split(shapes, work)
    kept_whole = sum(kept_by_layer(layer, work) for layer in whole)
    if not recomputed:
        return kept_whole
    # One input travels to the host, or back, while the next is computed or used.
    in_flight = 2 * max(boundary(layer, work) for layer in recomputed)
    if work.recompute == "selective":
        kept = sum(kept_if_selective(layer, work) for layer in recomputed)
        return kept + (in_flight if work.offload_activations else 0)
    return kept_whole + (in_flight if work.offload_activations else sum(boundary(layer, work) for layer in recomputed))


def recomputed_layer(shapes: Shapes, work: Work) -> int:
    """What one layer keeps once it has been recomputed, beyond what was kept of it anyway.

    The layers behind it that were kept whole have been given back by then.
    """
    recomputed, whole = _split(shapes, work)
    kept, work = kept_if_selective if work.recompute == "selective" else boundary, replace(work, forgets="none")
    most = max((kept_by_layer(layer, work) - kept(layer, work) for layer in recomputed), default=0)
    return max(0, most - sum(kept_by_layer(layer, work) for layer in whole)) if whole else most


def _split(shapes: Shapes, work: Work) -> tuple[list[Layer], list[Layer]]:
    """The layers that are recomputed, and those that are kept whole."""
    count = 0 if work.recompute == "none" else work.recomputed_layers or len(shapes.layers)
    return list(shapes.layers[:count]), list(shapes.layers[count:])


def backward_of_mixer(layer: Layer, mixer: Mixer, work: Work) -> int:
    """Gradients alive at once: of the residual stream and its branch, of the inner width, of the projections."""
    if mixer.kind == "experts":
        rows = work.tokens * mixer.choices * (2 * mixer.width_in + mixer.width_projected + 2 * mixer.width_inner)
        again = 0
        if computed_again(mixer, work):
            again = kept_by_experts(replace(mixer, packed=False), replace(work, packed_weights=False))
        return (work.tokens * 2 * layer.hidden + rows) * work.element + again
    per_token = 2 * layer.hidden + mixer.width_inner
    if mixer.kind == "attention":
        per_token += max(mixer.width_projected, 3 * mixer.width_inner) if work.copied_heads else mixer.width_projected
        per_token += mixer.width_projected
    elif work.swiglu == "ours":
        per_token += mixer.width_projected
    elif work.swiglu == "model":
        per_token += mixer.width_projected + mixer.width_inner
    beside = in_eight_bits(mixer, work) if work.eight_bit else dequantised(mixer, work) if work.packed_weights else 0
    return work.tokens * per_token * work.element + beside


def in_eight_bits(mixer: Mixer, work: Work) -> int:
    """Bytes of dY in 8 bits and of the turned weights: those of the first projections together, or the largest."""
    together = mixer.width_in * mixer.width_projected
    return work.tokens * max(mixer.width_projected, mixer.width_in) + max(mixer.largest_weight, together)


def dequantised(mixer: Mixer, work: Work) -> int:
    """Bytes of one 4-bit weight at a time, or of the first projections' together where they are small."""
    together = mixer.width_in * mixer.width_projected * work.element
    largest = mixer.largest_weight * work.element
    return max(largest, together) if together <= DEQUANTISED_AT_ONCE else largest


def backward_of_layer(shapes: Shapes, work: Work) -> int:
    """The most that the backward pass of one layer needs beside what is kept."""
    needs = [backward_of_mixer(layer, mixer, work) for layer in shapes.layers for mixer in layer.mixers]
    return max(needs, default=0)


def loss_head(shapes: Shapes, work: Work) -> int:
    """Final norm, logits, loss and the gradient of the hidden state, for K positions.

    Fused: the norm's output T H e, the K hidden states that count and their gradients 2 K H e, one chunk of logits.
    Otherwise 12 bytes a logit, and e for one that is capped.
    """
    norm = kept_by_norms(shapes.norm, shapes.hidden, work)
    hidden = work.tokens * shapes.hidden * work.element
    positions = work.rows * min(work.targets, work.length)
    if work.fused_loss:
        chunk = min(positions * shapes.vocabulary, LOGITS_AT_ONCE)
        return norm + hidden + (2 * positions * shapes.hidden + chunk) * work.element
    per_logit = UNFUSED_LOSS_BYTES + (work.element if work.capped_logits else 0)
    return norm + hidden + positions * (shapes.vocabulary * per_logit + 2 * shapes.hidden * work.element)
