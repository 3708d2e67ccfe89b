"""Time of a step by category, from the kernels of a torch.profiler trace; no time is counted twice.

A kernel belongs to the operators on the host that launched it, and in the backward pass also to those of the forward
pass that created its node. Without a GPU the operators replace the kernels, each with its own time. The window runs
from the end of the first recorded step on the device to the end of the last, which leaves out the profiler's start.
"""

import gzip
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.monitor.profiler import BACKWARD, OPTIMIZER, SCU, STEP

FROZEN, DEQUANTIZATION, ATTENTION, ADAPTER = "frozen products", "quantisation", "attention", "adapter"
NORMS, HEAD, ELEMENTWISE, INFORMATION = "norms, activations", "head and loss", "element-wise", "SCU"
ENGINE, COMMUNICATION, COPIES, IDLE = "engine, optimizer", "communication", "host copies", "idle"
CONVOLUTIONS, GROUP_NORM = "convolutions", "group norm"
OF_SOME = (CONVOLUTIONS, GROUP_NORM)  # listed only for models that have them
# Of two concurrent kernels the first gets the time: work hidden behind computing costs nothing.
CATEGORIES = (
    FROZEN,
    CONVOLUTIONS,
    DEQUANTIZATION,
    ATTENTION,
    ADAPTER,
    GROUP_NORM,
    NORMS,
    HEAD,
    ELEMENTWISE,
    INFORMATION,
    ENGINE,
    COMMUNICATION,
    COPIES,
    IDLE,
)

_COMMUNICATION = re.compile(r"nccl|gloo:|c10d::", re.I)
_ATTENTION = re.compile(r"flash|fmha|sdpa|attention|varlen", re.I)
_HEAD = re.compile(r"cross_entropy|softmax|nll_loss|token_loss", re.I)
_DEQUANTIZATION = re.compile(r"quantize|nf4|mxfp4|transpose_bytes|transpose_any_bytes|rescale_kernel", re.I)
_PRODUCT = re.compile(r"gemm|nvjet|cutlass|xmma|cublas|splitk|aten::(mm|addmm|addmm_|bmm|baddbmm|matmul|linear)$", re.I)
# Only torch's: a fused Mamba layer is named after its conv1d.
_CONVOLUTION = re.compile(r"aten::\w*conv(\dd|olution)")
_GROUP_NORM = re.compile(r"aten::\w*group_norm")
# gate_kernel and combine_kernel: the experts' activation and weighted sum.
_NORMS = re.compile(r"rms_?norm|layer_?norm|silu|swiglu|gelu|rope|rotary|gate_kernel|combine_kernel", re.I)
FROZEN_PRODUCT = "zerolora::frozen_product"  # ops/csrc/operator/products.h
_OUR_KERNEL = re.compile(r"zerolora::")
_ENGINE = re.compile(rf"{OPTIMIZER}|AccumulateGrad|Optimizer\.step|multi_tensor", re.I)
_BACKWARD_NODE = "autograd::engine::evaluate_function"


@dataclass(frozen=True)
class Shape:
    """Sizes that identify matrix products: rows of the output head, and R of the adapter."""

    vocabulary: int
    """-1 without such a head."""
    rank: int


@dataclass(frozen=True)
class Work:
    """One kernel: when it ran (microseconds), the step that launched it, and its category."""

    name: str
    category: str
    start: float
    end: float
    step: int


@dataclass
class _Launch:
    """A position on the host: the enclosing operators from outermost to innermost, and the innermost one's shapes."""

    time: float
    names: tuple[str, ...]
    node: int | None
    sizes: frozenset[int]


def read_trace(path: Path) -> list[dict[str, Any]]:
    """Read the events of a trace, compressed or not."""
    opened = gzip.open(path, "rt") if path.suffix == ".gz" else path.open()
    with opened as file:
        return list(json.load(file)["traceEvents"])


def categorise_kernels(events: Iterable[dict[str, Any]], shape: Shape) -> list[Work]:
    """Return every kernel of the recorded steps with its category, in order of time."""
    complete = [event for event in events if event.get("ph") == "X"]
    # A range on the host has a counterpart on the device, which begins and ends later.
    ranges = (event for event in complete if event.get("cat") != "gpu_user_annotation")
    steps = sorted((e["ts"], e["ts"] + e["dur"], i) for i, e in enumerate(ranges) if e["name"].startswith(STEP + " "))
    kernels = [event for event in complete if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    if kernels:
        places = _launches(complete)
    else:
        kernels, places = _operators(complete)
    forward = {place.node: place.names for place in places.values() if place.node and not _is_backward(place.names)}
    works = []
    for event in kernels:
        place = places.get(event["args"]["correlation"])
        if place is None:
            continue
        step = next((number for number, (start, end, _) in enumerate(steps) if start <= place.time < end), None)
        if step is not None:
            context = (forward.get(place.node or 0, ()) if _is_backward(place.names) else ()) + place.names
            category = categorise(event["name"], context, place.sizes, shape, memcpy=event.get("cat") == "gpu_memcpy")
            works.append(Work(event["name"], category, event["ts"], event["ts"] + event["dur"], step))
    return sorted(works, key=lambda work: work.start)


def categorise(
    name: str, context: tuple[str, ...], sizes: frozenset[int], shape: Shape, *, memcpy: bool = False
) -> str:
    """Return the category of a kernel by its name, the enclosing operators, and the innermost one's input sizes.

    `context` is in order from the outermost to the innermost, in a backward pass after those of the forward.
    """
    innermost = context[-1] if context else ""
    around = "\n".join(context)
    if _COMMUNICATION.search(name) or _COMMUNICATION.search(around):
        return COMMUNICATION
    if _ENGINE.search(around):
        return ENGINE
    if SCU in context:
        return INFORMATION
    if memcpy and re.search("HtoD|DtoH|Host", name):
        return COPIES
    if _DEQUANTIZATION.search(name):
        return DEQUANTIZATION
    if _HEAD.search(name) or _HEAD.search(around) or shape.vocabulary in sizes:
        return HEAD
    if _ATTENTION.search(name) or _ATTENTION.search(around):
        return ATTENTION
    if _GROUP_NORM.search(around):
        return GROUP_NORM
    if _CONVOLUTION.search(around):
        return CONVOLUTIONS
    if innermost in (
        FROZEN_PRODUCT,
        "aten::_scaled_mm",
        "aten::_int_mm",
        "aten::_grouped_mm",
        "aten::grouped_mm",
    ):  # by cuBLAS, torch, or our kernel that includes the adapter
        return FROZEN
    if _OUR_KERNEL.search(name):
        return NORMS if _NORMS.search(name) else ADAPTER
    if innermost.startswith(("zerolora::lora_", "zerolora::nf4_", "zerolora::eight_bit_")):
        return ADAPTER
    if _PRODUCT.search(name) or _PRODUCT.search(innermost):
        return ADAPTER if sizes and min(sizes) <= 4 * shape.rank else FROZEN
    return NORMS if _NORMS.search(name) or _NORMS.search(around) else ELEMENTWISE


def breakdown(works: list[Work]) -> tuple[dict[str, float], float, int]:
    """Return milliseconds of a step by category (with idle, they add up) and of the step, and the recorded steps.

    Raises ValueError if fewer than two steps were recorded.
    """
    ends: dict[int, float] = defaultdict(float)
    for work in works:
        ends[work.step] = max(ends[work.step], work.end)
    if len(ends) < 2:
        raise ValueError(f"{len(ends)} recorded steps: need at least two, because the first is left out")
    begin, end, count = ends[min(ends)], ends[max(ends)], len(ends) - 1
    bounds: list[tuple[float, int, str]] = []
    for work in works:
        start, stop = max(work.start, begin), min(work.end, end)
        if start < stop:
            bounds += [(start, 1, work.category), (stop, -1, work.category)]
    totals = dict.fromkeys(CATEGORIES, 0.0)
    running = dict.fromkeys(CATEGORIES, 0)
    now = begin
    for time, change, category in [*sorted(bounds), (end, 0, IDLE)]:
        totals[next((kind for kind in CATEGORIES if running[kind]), IDLE)] += time - now
        running[category] += change
        now = time
    named = {kind: total for kind, total in totals.items() if total or kind not in OF_SOME}
    return {kind: total / count / 1e3 for kind, total in named.items()}, (end - begin) / count / 1e3, count


def longest(works: list[Work], category: str, count: int = 5) -> list[tuple[str, int, float]]:
    """Return the slowest kernels of a category: name, calls and milliseconds in all recorded steps."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for work in works:
        if work.category == category:
            sums[work.name][0] += 1
            sums[work.name][1] += (work.end - work.start) / 1e3
    ordered = sorted(sums.items(), key=lambda item: -item[1][1])
    return [(name, int(calls), milliseconds) for name, (calls, milliseconds) in ordered[:count]]


def _is_backward(names: tuple[str, ...]) -> bool:
    return any(name.startswith((_BACKWARD_NODE, BACKWARD)) for name in names)


def _threads(events: list[dict[str, Any]], kinds: tuple[str, ...]) -> Iterator[list[dict[str, Any]]]:
    """Yield the events of each host thread in order; of two that start together the enclosing one comes first."""
    threads: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event.get("cat") in kinds:
            threads[event["tid"]].append(event)
    for thread in threads.values():
        yield sorted(thread, key=lambda event: (event["ts"], -event["dur"]))


def _launches(events: list[dict[str, Any]]) -> dict[int, _Launch]:
    """Return the position on the host where each kernel was launched, by correlation."""
    places: dict[int, _Launch] = {}
    for thread in _threads(events, ("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver")):
        stack: list[dict[str, Any]] = []
        for event in thread:
            while stack and stack[-1]["ts"] + stack[-1]["dur"] <= event["ts"]:
                stack.pop()
            if not event["cat"].startswith("cuda"):
                stack.append(event)
            elif "correlation" in event.get("args", {}):
                places[event["args"]["correlation"]] = _place(event["ts"], stack)
    return places


def _operators(events: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[int, _Launch]]:
    """Return operators on a CPU as if they were kernels: the pieces of time in which no inner one runs."""
    pieces: list[dict[str, Any]] = []
    places: dict[int, _Launch] = {}

    def cut(stack: list[dict[str, Any]], since: float, until: float) -> None:
        if stack and stack[-1]["cat"] == "cpu_op" and since < until:
            places[len(pieces)] = _place(since, stack)
            piece = {"name": stack[-1]["name"], "ts": since, "dur": until - since}
            pieces.append(piece | {"args": {"correlation": len(pieces)}})

    for thread in _threads(events, ("cpu_op", "user_annotation")):
        stack: list[dict[str, Any]] = []
        now = 0.0
        for event in [*thread, None]:
            begin = event["ts"] if event else math.inf
            while stack and (end := stack[-1]["ts"] + stack[-1]["dur"]) <= begin:
                cut(stack, now, end)
                now = max(now, end)
                stack.pop()
            if event:
                cut(stack, now, begin)
                now = begin
                stack.append(event)
    return pieces, places


def _place(time: float, stack: list[dict[str, Any]]) -> _Launch:
    nodes = [event["args"]["Sequence number"] for event in stack if "Sequence number" in event.get("args", {})]
    dims = stack[-1].get("args", {}).get("Input Dims", []) if stack else []
    sizes = {size for shape in dims if len(shape) > 1 and all(isinstance(n, int) for n in shape) for size in shape}
    return _Launch(time, tuple(event["name"] for event in stack), nodes[-1] if nodes else None, frozenset(sizes))
