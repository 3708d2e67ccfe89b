"""Compute lm-eval scores for the model in memory, on all ranks.

Every rank runs lm-eval on all documents, but computes only some of the batches and receives the other results. The
batches are the same as on one rank, so the number of ranks does not change a score. All ranks compute the same number
of batches, since a forward pass under ZeRO-3 gathers weights.
"""

import copy
import logging
import random
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import torch
from yaml import MarkedYAMLError

from trainer.config import UserError
from trainer.config.evaluation_section import EvaluationSection, check_task_names
from trainer.config.files import UnreadableFileError, check_type
from trainer.contract.known_versions import patch_attribute, replaces
from trainer.parallel.ranks.group import Ranks, assign_batches, gather_objects
from trainer.parallel.ranks.progress import phase

PYTHON_SEED, SEED = 0, 1234
"""The default seeds of `lm_eval run`."""


@dataclass(frozen=True)
class Scores:
    """Scores by TASK/METRIC; by TASK/METRIC/FILTER if the filter is not lm-eval's default."""

    values: dict[str, float]
    errors: dict[str, float]
    """Standard errors."""
    lower_is_better: set[str]


@cache
def load_tasks(names: tuple[str, ...]) -> dict[str, Any]:
    """Load lm-eval tasks and groups with their data. Raises UserError if a task cannot be loaded."""
    check_task_names(names)
    files = [name for name in names if name.endswith(".yaml")]

    from lm_eval.config.task import TaskConfig
    from lm_eval.tasks import TaskManager
    from lm_eval.tasks._yaml_loader import load_yaml

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    types = get_type_hints(TaskConfig, None, {"Callable": Callable, "OutputType": str, "FewshotConfig": dict})
    types |= {key: types[key] | int | list for key in ("doc_to_text", "doc_to_target")}
    manager = TaskManager(include_defaults=len(files) < len(names))  # indexing all tasks takes seconds
    loaded: dict[str, Any] = {"tasks": {}, "groups": {}}
    for name in names:
        if name not in files and not manager.match_tasks([name]):
            raise UserError(f"evaluation.tasks={name}: not a task of lm-eval; use a task that `lm-eval ls tasks` lists")
        try:
            task: Any = load_yaml(str(Path(name).absolute()), resolve_func=True) if name in files else name
            if name in files and not task.keys() & {"dataset_path", "custom_dataset"}:
                raise ValueError("it has no dataset_path")
            for key in types.keys() & task if name in files else ():
                check_type({key: task[key]}, Path(name), dict[str, types[key]])  # type: ignore[valid-type]
            with _hide_progress(), _use_lm_eval_seeds():
                task_set = manager.load([task])
        except MarkedYAMLError as error:
            line = error.problem_mark.line + 1 if error.problem_mark else 1
            raise UserError(f"evaluation.tasks={name}: line {line} is not YAML ({error.problem}); fix it") from None
        except UnreadableFileError as error:
            raise UserError(f"evaluation.tasks={name}: {error.problem}; fix this key of the task") from None
        except Exception as error:  # lm-eval and datasets may raise anything for a bad file
            text = re.sub(r".*unexpected keyword argument '(.*)'.*", r"unknown key \1", str(error))
            if isinstance(error, KeyError):
                text = "unknown metric" if text == "None" else f"it has no {text}"
            problem = f"lm-eval cannot load it ({text or type(error).__name__})"
            raise UserError(f"evaluation.tasks={name}: {problem}; check the task and its data") from None
        for kind in loaded:
            loaded[kind] |= task_set[kind]
        for task in task_set["tasks"].values():
            if getattr(task, "UNSAFE_CODE", False) or getattr(task, "MULTIMODAL", False):
                problem = "reads images or runs code that the model writes, which zerolora does not support"
                raise UserError(f"evaluation.tasks={name}: {problem}; use `lm_eval run`")
    return loaded


class _Model:
    """The model interface that lm-eval calls; not an nn.Module, since lm-eval would tie its weights again.

    It truncates the vocabulary to `vocabulary_size`, the tokenizer's size, as lm-eval does for adapters.
    """

    def __init__(self, module: Any, device: torch.device, vocabulary_size: int, *, sync_ranks: bool) -> None:
        self.config, self.device = module.config, device
        self._module, self._vocabulary_size, self._sync_ranks = module, vocabulary_size, sync_ranks
        self._padding = list(range(vocabulary_size, module.config.get_text_config().vocab_size))

    @phase("generate")
    def __call__(self, input_ids: torch.Tensor) -> Any:
        result = self._module(input_ids=input_ids, use_cache=False)
        result.logits = result.logits[..., : self._vocabulary_size]
        return result

    @phase("generate")
    def generate(self, **options: Any) -> torch.Tensor:
        return self._module.generate(**options, suppress_tokens=self._padding or None, synced_gpus=self._sync_ranks)


class TaskEvaluator:
    """Computes a model's scores as `lm_eval run --model hf` does."""

    def __init__(self, settings: EvaluationSection, tokenizer: Any, batch_size: int, ranks: Ranks) -> None:
        self._loaded = load_tasks(settings.tasks)
        self._settings, self._batch_size, self._ranks = settings, batch_size, ranks
        self._tokenizer = copy.deepcopy(tokenizer)  # lm-eval changes its padding

    def measure(
        self, module: Any, device: torch.device, *, sync_ranks: bool = False, standard_errors: bool = False
    ) -> Scores:
        """Return the scores of a model in evaluation mode, optionally with standard errors; a collective call.

        With `sync_ranks`, all ranks generate until the last one has finished, which ZeRO-3 requires.
        """
        from lm_eval.evaluator import evaluate
        from lm_eval.models.huggingface import HFLM

        model = HFLM(
            pretrained=_Model(module, device, len(self._tokenizer), sync_ranks=sync_ranks),
            tokenizer=self._tokenizer,
            backend="causal",
            batch_size=self._batch_size,
        )
        chat, shots = self._settings.apply_chat_template, self._settings.num_fewshot
        for task in self._loaded["tasks"].values():
            default_shots = task.get_config("num_fewshot")
            if default_shots is None or (default_shots and shots is not None):
                task.set_config(key="num_fewshot", value=shots or 0)
            task.set_fewshot_seed(seed=SEED)
        with phase("generate"), _hide_progress(), _use_lm_eval_seeds(), _distribute_batches(self._ranks):
            results = evaluate(
                model,
                self._loaded,
                limit=self._settings.limit,
                bootstrap_iters=100_000 if standard_errors else 0,
                log_samples=False,
                apply_chat_template=chat,
                fewshot_as_multiturn=chat,
            )
        return _flatten(results)


def _flatten(results: Any) -> Scores:
    scores = Scores({}, {}, set())
    for task, metrics in results["results"].items():
        for key, value in metrics.items():
            metric, comma, filter_name = key.partition(",")
            if comma and isinstance(value, int | float):
                base = metric.removesuffix("_stderr")
                name = f"{task}/{base}" + f"/{filter_name}" * (filter_name != "none")
                (scores.values if base == metric else scores.errors)[name] = float(value)
                if results["higher_is_better"].get(task, {}).get(base) is False:
                    scores.lower_is_better.add(name)
    return scores


def _hide_progress() -> Any:
    """Return a context in which lm-eval and datasets show progress bars only on a terminal."""
    from lm_eval.api.task import tqdm

    show = tqdm.__init__
    hide = lambda *arguments, **options: show(*arguments, **options | {"disable": True})  # noqa: E731
    return nullcontext() if sys.stderr.isatty() else patch_attribute(tqdm, "__init__", hide, "lm_eval")


@contextmanager
def _use_lm_eval_seeds() -> Iterator[None]:
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_available() else []):
        random.seed(PYTHON_SEED)
        np.random.seed(SEED)
        torch.manual_seed(SEED)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


@replaces("`Collator`, which batches requests")
def _distribute_batches(ranks: Ranks) -> Any:
    """Return a context in which each rank computes some of lm-eval's batches and receives all results."""
    if ranks.world_size == 1:
        return nullcontext()

    from lm_eval.models import huggingface

    class SharedBatches(huggingface.Collator):
        """Yields this rank's batches; `_reorder_indices` are the positions of their results."""

        def get_batched(self, n: int = 1, batch_fn: Any = None) -> Iterator[Any]:
            batches = list(super().get_batched(n, batch_fn))
            # Empty if requests are grouped by context; `get_cache` then adds the positions of each result.
            positions = iter(self._reorder_indices)
            local = assign_batches([(batch, list(islice(positions, len(batch)))) for batch in batches], ranks)
            self._reorder_indices: list[int] = [position for _, positions in local for position in positions]
            yield from (batch for batch, _ in local)

        def get_original(self, newarr: Sequence[Any]) -> list[Any]:
            pairs = list(zip(self._reorder_indices, newarr, strict=True))
            results = {position: result for part in gather_objects(pairs) for position, result in part}
            return [results[position] for position in range(self._size)]

    return patch_attribute(huggingface, "Collator", SharedBatches, "lm_eval")
