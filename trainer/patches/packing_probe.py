"""Run the model before training to check that no token sees later tokens or another packed document.

A model may silently ignore the positions or bounds that separate documents. It would then be trained on mixed
documents.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch.distributed import DistError

from trainer.config import UserError
from trainer.config.errors import format_one_line
from trainer.data.batches import IGNORE_INDEX, MicroBatch, SequencePart, collate_samples
from trainer.data.samples import Sample
from trainer.model.model_kind import supports_sdpa
from trainer.parallel.engine.linear_layers import find_base_model
from trainer.parallel.ranks.group import sum_over_ranks
from trainer.patches.loss_head import TokenLoss, to_device
from trainer.patches.packed_attention import (
    FLAT_ATTENTION,
    VARLEN,
    can_share_keys,
    disable_varlen,
    enable_varlen,
    pass_positions_to_masks,
)
from trainer.patches.per_document import (
    PerDocumentForward,
    find_tensors,
    has_separate_documents,
    install_per_document_forwards,
    is_mask,
)

LENGTHS, LONG_LENGTHS = (5, 4), (37, 40)
"""Lengths of two documents in tokens; LONG_LENGTHS is for layers that combine several tokens into one (DeepSeek-V4)."""
LEAK, LEAK_WITH_EXPERTS = 1e-4, 0.05
"""Maximum change of logits (root mean square) at positions that must not see a changed token, relative to the change at
those that must. Logits of MoE models change even without a leak: other batch shapes round sums differently, and the
router's choice can flip."""
MAX_AMPLIFICATION = 10.0
"""A layer mixes documents if it amplifies the relative change at the second document by this factor."""
ROUNDING = 0.05
"""Relative difference between logits that may be due to 16-bit rounding."""


@torch.no_grad()
def check_causal(token_loss: TokenLoss, model: Any, pad_token_id: int, device: torch.device, base_model: str) -> None:
    """Raise UserError if logits depend on later tokens (the model is not causal); a collective call."""
    length = sum(LENGTHS)
    tokens = _build_distant_tokens(model, length)
    changed = tokens.clone()
    changed[-2] += 1  # the last token has no target, and may have no logits

    def compute_logits(ids: torch.Tensor) -> torch.Tensor:
        sample = Sample(ids.tolist(), [True] * length, [length])
        batch = collate_samples([sample], pad_token_id, packed=False, flat=False)
        return token_loss.compute_logits(model, batch, device)[0][0][: length - 1].float()

    with _report_model_errors(f"base_model={base_model}", "use a causal language model", model):
        if model.config.get_text_config() is not model.config:
            with torch.random.fork_rng([device] if device.type == "cuda" else []):
                compute_logits(tokens)  # in training, Molmo2 needs more than tokens
        with _evaluation_mode(model):
            change = compute_logits(changed) - compute_logits(tokens)
    if _compute_rms(change[:-1]) > _choose_tolerance(model) * _compute_rms(change[-1:]):
        raise UserError(
            f"base_model={base_model}: in {type(find_base_model(model)).__name__} tokens attend to later tokens, so "
            "there is nothing to predict; use a causal language model"
        )


def separate_documents(token_loss: TokenLoss, model: Any, pad_token_id: int, device: torch.device) -> bool:
    """Make the model separate packed documents, and return whether packs must be one row; a collective call.

    Layers that carry state from one document to the next are changed to compute each document separately. A model that
    ignores the bounds of our variable-length attention is switched to transformers' sdpa with a mask. Raises UserError
    if a document still sees another, or a token sees later tokens.
    """
    base = find_base_model(model)
    problem = None
    for attention in dict.fromkeys((base.config._attn_implementation, "sdpa")):
        if attention != base.config._attn_implementation:
            if base.config._attn_implementation != VARLEN or not supports_sdpa(base):
                break
            disable_varlen(base)
        probe = _Probe(token_loss, model, base, pad_token_id, device)
        if not probe.flat:
            pass_positions_to_masks(base)
        with _report_model_errors("dataset.packing=true", "set dataset.packing: false", model):
            current = probe.separate_documents()
            longer = _Probe(token_loss, model, base, pad_token_id, device, LONG_LENGTHS)
            longer.flat = probe.flat
            if not current and longer.differs_from_unpacked():
                current = "packed documents have different logits than separate ones"
        if not current:
            return probe.flat
        problem = problem or current
    raise UserError(f"dataset.packing=true: in {type(base).__name__} {problem}; set dataset.packing: false")


@torch.no_grad()
def share_prompt_keys(token_loss: TokenLoss, model: Any, pad_token_id: int, device: torch.device) -> str | None:
    """Make the two answers to a prompt share the prompt's keys, or return why the model cannot; a collective call.

    Neither answer may see the other, and their logits must be the same as without sharing.
    """
    base = find_base_model(model)
    original = base.config._attn_implementation
    if not can_share_keys(base) or has_separate_documents(base):
        return "the model has layers that cannot share the prompt's keys"
    prompt, chosen = _build_distant_tokens(model, sum(LENGTHS)).split(LENGTHS)
    rejected, other_chosen, length = chosen.flip(0), chosen + 1, sum(LENGTHS)

    def compute_logits(chosen: torch.Tensor, *, shared: bool) -> torch.Tensor:
        ids = torch.cat([prompt, chosen, prompt, rejected]).tolist()
        sample = Sample(ids, ([False] * LENGTHS[0] + [True] * LENGTHS[1]) * 2, [length, length])
        batch = collate_samples([sample], pad_token_id, packed=False, flat=False, pairs=True, shared=shared)
        values, targets = token_loss.compute_logits(model, batch, device)
        return values[targets != IGNORE_INDEX]

    with _evaluation_mode(model):
        alone = compute_logits(chosen, shared=False)
        enable_varlen(base)
        together = compute_logits(chosen, shared=True)
        change = compute_logits(other_chosen, shared=True) - together
    first, tolerance = LENGTHS[1], _choose_tolerance(model)
    rounding = tolerance if alone.dtype == torch.float32 else ROUNDING
    if _compute_rms(change[first:]) > tolerance * _compute_rms(change[:first]):
        reason = "the two answers of a pair would attend to each other"
    elif _compute_rms(together - alone) > rounding * _compute_rms(alone):
        reason = "the answers would have different logits than in separate sequences"
    else:
        return None
    base.set_attn_implementation(original)
    return reason


@torch.no_grad()
def check_sequence_parts(
    token_loss: TokenLoss, model: Any, pad_token_id: int, device: torch.device, part: SequencePart
) -> None:
    """Raise UserError if the logits of a part differ from those of the full sequence; a collective call.

    They differ if layers other than attention combine tokens. Such a model cannot be trained on split sequences.
    """
    length = 6 * part.size
    documents = [length - 2 * part.size + 1, 2 * part.size - 1]
    sample = Sample(_build_distant_tokens(model, length).tolist(), [True] * length, documents)
    full_batch = collate_samples([sample], pad_token_id, packed=True, flat=True)
    part_batch = part.slice_batch(full_batch)
    start = int((full_batch.targets[:, : 6 * part.rank] != IGNORE_INDEX).sum())

    def compute_logits(batch: MicroBatch) -> torch.Tensor:
        values, targets = token_loss.compute_logits(model, batch, device)
        return values[targets != IGNORE_INDEX]

    with _evaluation_mode(model):
        expected = compute_logits(full_batch)[start : start + part_batch.target_count]
        actual = compute_logits(part_batch)
    tolerance = _choose_tolerance(model) if actual.dtype == torch.float32 else ROUNDING
    differs = torch.tensor(_compute_rms(actual - expected) > tolerance * _compute_rms(expected), device=device).int()
    if sum_over_ranks(differs):
        raise UserError(
            f"parallel.sequence={part.size}: {type(find_base_model(model)).__name__} combines tokens outside of "
            "attention, so a part of a sequence has different logits than the full sequence; use 1"
        )


class _Probe:
    def __init__(
        self,
        token_loss: TokenLoss,
        model: Any,
        base: Any,
        pad_token_id: int,
        device: torch.device,
        lengths: tuple[int, int] = LENGTHS,
    ) -> None:
        self.flat = base.config._attn_implementation in FLAT_ATTENTION
        self._loss, self._model, self._base, self._device = token_loss, model, base, device
        self._pad_token_id, self._lengths = pad_token_id, lengths
        self._tokens = _build_distant_tokens(model, sum(lengths))

    def separate_documents(self) -> str | None:
        """Make layers that carry state across documents compute each document separately.

        Returns the problem that remains, or None. Layers keep using their kernels if these separate documents.
        """
        changed_first, changed_last = self._tokens.clone(), self._tokens.clone()
        changed_first[: LENGTHS[0]] += 1
        changed_last[-2] += 1
        tolerance, first = _choose_tolerance(self._model), LENGTHS[0] - 1
        separate: dict[type, list[PerDocumentForward]] = {}
        problem, leaks = None, True
        while leaks:
            observer = _LeakObserver(self._base, tolerance)
            with observer.watch():
                logits = self._compute_logits(self._tokens)
            with observer.watch():
                change = self._compute_logits(changed_first) - logits
            mixes_documents = _compute_rms(change[first:]) > tolerance * _compute_rms(change[:first])
            if mixes_documents:
                problem = "documents of a pack attend to each other"
            kinds = observer.find_leaking_classes()
            failed = [forward for kind in kinds for forward in separate.get(kind, ()) if forward.by_kernels]
            for forward in failed:
                forward.by_kernels = False
            new = kinds - separate.keys()
            separate |= {kind: install_per_document_forwards(self._base, kind) for kind in new}
            leaks = bool(failed or new)
        change = self._compute_logits(changed_last) - logits
        if _compute_rms(change[:-1]) > tolerance * _compute_rms(change[-1:]):
            # A separated layer may have needed its mask; then the documents are the problem.
            return problem if problem and separate else "tokens attend to later tokens"
        return problem if mixes_documents else None

    def differs_from_unpacked(self) -> bool:
        """Return whether most tokens of the second document have different logits in the pack than alone."""
        first = self._lengths[0]
        together, alone = self._compute_logits(self._tokens)[first - 1 :], self._compute_logits(self._tokens[first:])
        has_16_bits = self._base.get_input_embeddings().weight.element_size() == 2
        change, size = (logits.square().mean(-1).median() for logits in (together - alone, alone))
        return bool(change > (ROUNDING if has_16_bits else LEAK) ** 2 * size)

    @torch.no_grad()
    def _compute_logits(self, ids: torch.Tensor) -> torch.Tensor:
        """Compute the logits at all tokens except each document's last."""
        length, packed = len(ids), len(ids) == sum(self._lengths)
        sample = Sample(ids.tolist(), [True] * length, list(self._lengths) if packed else [length])
        batch = collate_samples([sample], self._pad_token_id, packed=packed, flat=packed and self.flat)
        with _evaluation_mode(self._model):
            logits = self._loss.compute_logits(self._model, batch, self._device)[0][0].float()
        return logits if len(logits) < length else logits[to_device(batch.targets[0] != IGNORE_INDEX, self._device)]


class _LeakObserver:
    """Finds the innermost layers that mix documents, by comparing two passes with different first documents."""

    def __init__(self, base: torch.nn.Module, tolerance: float) -> None:
        self._modules, self._tolerance = dict(base.named_modules()), tolerance
        self._first_pass: dict[tuple[str, int], tuple[torch.Tensor, list[torch.Tensor]]] = {}
        """Input and results of a module in the first pass, by module path and call index."""
        self._calls: Counter[str] = Counter()
        self._leaking: set[str] = set()
        self._inseparable = {""}
        """Modules that cannot compute documents separately, because an input has no token dimension."""

    @contextmanager
    def watch(self) -> Iterator[None]:
        is_second = bool(self._first_pass)
        self._calls.clear()
        with ExitStack() as hooks:
            for path, module in self._modules.items():
                observe = partial(self._observe, path, is_second)
                hooks.enter_context(module.register_forward_hook(observe, with_kwargs=True))
            yield

    def _observe(self, path: str, is_second: bool, _: Any, args: Any, kwargs: Any, output: Any) -> None:
        shape = (1, sum(LENGTHS))
        inputs, results = find_tensors((args, kwargs)), find_tensors(output)
        if not inputs or not results or not inputs[0].shape[:2] == results[0].shape[:2] == shape:
            return
        results = [tensor for tensor in results if tensor.shape[:2] == shape]
        self._calls[path] += 1
        call = path, self._calls[path]
        if not is_second:  # copies, since some models add to a result in place
            self._first_pass[call] = inputs[0].clone(), [tensor.clone() for tensor in results]
            if any(tensor.shape[:2] != shape and not is_mask(tensor, shape) for tensor in inputs):
                self._inseparable.add(path)
        elif call in self._first_pass:
            old_input, old_results = self._first_pass[call]
            input_change = _compare_documents(old_input, inputs[0])
            has_experts = any("experts" in name for name, _ in self._modules[path].named_modules(prefix=path))
            # In 16-bit types, a kernel's rounding can depend on other documents, by less than LEAK.
            rounding = LEAK if inputs[0].element_size() == 2 else 0.0
            # Earlier routers may have chosen other experts, and any layer can amplify this a little.
            limit = max(self._tolerance, MAX_AMPLIFICATION * input_change) if input_change or has_experts else rounding
            if input_change <= self._tolerance and max(map(_compare_documents, old_results, results)) > limit:
                self._leaking.add(path)

    def find_leaking_classes(self) -> set[type]:
        """Return the classes of leaking layers, except attention, which uses bounds or a mask."""
        innermost = [path for path in self._leaking if not any(other.startswith(f"{path}.") for other in self._leaking)]
        modules = [self._modules[path] for path in innermost if path not in self._inseparable]
        return {type(module) for module in modules if not hasattr(module, "is_causal")}


def _compare_documents(old: torch.Tensor, new: torch.Tensor) -> float:
    """Return the RMS change in the second document relative to that in the first."""
    first, second = (new - old)[0].abs().float().split(LENGTHS)  # rotary factors may be complex
    return _compute_rms(second) / max(_compute_rms(first), torch.finfo(torch.float32).tiny)


def _build_distant_tokens(model: Any, length: int) -> torch.Tensor:
    return torch.arange(length) * (model.config.get_text_config().vocab_size // length)


def _choose_tolerance(model: Any) -> float:
    return LEAK_WITH_EXPERTS if any("experts" in name for name, _ in model.named_modules()) else LEAK


@contextmanager
def _evaluation_mode(model: Any) -> Iterator[None]:
    training = model.training
    model.eval()
    with torch.compiler.set_stance("force_eager"):
        yield
    model.train(training)


@contextmanager
def _report_model_errors(setting: str, fix: str, model: Any) -> Iterator[None]:
    try:
        yield
    except (torch.OutOfMemoryError, DistError):
        raise
    except Exception as error:  # of any type, raised by the model's code
        name, message = type(find_base_model(model)).__name__, format_one_line(str(error))
        raise UserError(
            f"{setting}: the forward pass of {name} fails ({type(error).__name__}: {message}); {fix}"
        ) from error


def _compute_rms(change: torch.Tensor) -> float:
    return float(change.float().square().mean().sqrt())
