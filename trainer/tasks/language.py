"""Train causal language models on plain text and conversations."""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import torch
from rich.markup import escape

from ops.head import LossKind
from trainer.config import RunConfig, UserError
from trainer.data.batches import Batches, MicroBatch, StreamBatches, iterate_evaluation_batches
from trainer.data.formats import PREFERENCE, UNPAIRED
from trainer.data.grouping import DataStats
from trainer.data.image_parts import build_thumbnail
from trainer.data.prepared import PreparedRun, has_images
from trainer.data.prompt_files import format_prompt
from trainer.data.samples import Sample, Samples, decode_parts, split_documents
from trainer.data.vision import ImageInputs
from trainer.model.answers import encode_prompt, generate_greedy_answers, needs_synced_passes
from trainer.model.base import add_embedding_noise, check_base_is_finite, load_base_model, resize_to_vocabulary
from trainer.model.image_reader import build_image_inputs, cache_features, has_trained_image_modules
from trainer.model.tokenizer_files import read_tokenizer_files, write_files
from trainer.monitor.metrics import Record
from trainer.monitor.mfu import MfuMeter
from trainer.monitor.report.model_card import build_model_card
from trainer.parallel.engine.deepspeed_engine import DTYPES
from trainer.parallel.engine.layer_gather.shards import LayerShards
from trainer.parallel.engine.linear_layers import find_base_model
from trainer.parallel.engine.protocol import Engine
from trainer.parallel.ranks.group import Ranks, gather_objects
from trainer.parallel.ranks.progress import phase
from trainer.parallel.ranks.sequence_group import form_sequence_group
from trainer.patches.loss_head import TokenLoss, bypass_adapter
from trainer.patches.packed_attention import VARLEN, choose_attention, disable_varlen, mask_padding
from trainer.patches.packing_probe import check_causal, check_sequence_parts, separate_documents
from trainer.patches.per_document import describe_separate_documents
from trainer.tasks.answer_metrics import AnswerMetrics
from trainer.tasks.lm_eval_scores import Scores, TaskEvaluator
from trainer.tasks.task import Task

Log = Callable[[str], None]
REPORT_EXAMPLE_COUNT = 3
"""Number of training examples in the HTML report."""
LOSS_PARAMETERS = {"eaft": "eaft_alpha", "focal": "focal_gamma", "label_smoothing": "label_smoothing"}
"""Maps values of `training.loss` to the settings that contain their parameters."""


class LanguageTask(Task):
    """Task for language models; a sample is plain text, a conversation, or a pack of these."""

    title = "a language model"
    batch_units = ("tokens", "target_tokens")
    pairs = False
    """Whether a document is a pair of answers."""
    peft_type = "CAUSAL_LM"
    formats: ClassVar[tuple[str, ...]] = ("peft", "vllm", "sglang", "gguf-lora", "hf", "gguf", "ollama")
    auto_class, pipeline_tag = "AutoModelForCausalLM", "text-generation"
    """The transformers class that loads the model, and its pipeline tag on the Hub."""
    predicts_time = True

    def __init__(
        self, config: RunConfig, prepared: PreparedRun, ranks: Ranks, device: torch.device, precision: str, log: Log
    ) -> None:
        """Set up the task and its sequence group; every `auto` in `config` must be resolved."""
        self._config, self._prepared, self._ranks = config, prepared, ranks
        self._device, self._precision, self._log = device, precision, log
        self._sequence = form_sequence_group(ranks, config.parallel.sequence)
        self._tokenizer_files: dict[str, bytes] | None = None
        self._last_answers: dict[str, str] = {}
        self._answers: AnswerMetrics | None = None
        self._first_scores = Scores({}, {}, set())
        self._images: ImageInputs | None = None
        self.shares_prompts = False
        """Whether the prompt of a pair is computed only once."""

    @property
    def _pad_token_id(self) -> int:
        return int(self._prepared.tokenizer.pad_token_id)

    def load_base(self, dtype: torch.dtype, engine_config: dict[str, Any], shards: LayerShards | None) -> Any:
        """Load the base model, quantized for `adapter: qlora`, and resize its embedding for added tokens."""
        config = self._config
        model = load_base_model(
            config.base_model,
            config.model,
            dtype=dtype,
            device=self._device,
            attention=choose_attention(config.model),
            quantization=config.quantization if config.adapter == "qlora" else None,
            deepspeed_config=engine_config if engine_config["zero_optimization"]["stage"] == 3 else None,
            shards=shards,
        )
        resize_to_vocabulary(model, self._prepared.tokenizer)
        return model

    def _build_image_inputs(self, model: Any) -> None:
        if not has_images(self._prepared):
            return
        assert self._prepared.images is not None
        every_rank = self._config.zero.stage == 3 or has_trained_image_modules(model)
        self._images = build_image_inputs(self._prepared.images, model, add_dummy_images=every_rank)
        # varlen attention has no masks for image tokens, and the vision tower would receive the documents' bounds.
        if self._images.type_name is not None or not self._config.vision.cache:
            disable_varlen(model)

    def must_keep_embeddings(self) -> bool:
        rows = self._prepared.model_config.get_text_config().vocab_size
        return bool(self._config.model.added_tokens) or len(self._prepared.tokenizer) > rows

    def find_added_token_ids(self) -> list[int]:
        return self._prepared.tokenizer.convert_tokens_to_ids(list(self._config.model.added_tokens))

    def run_dummy_forward(self, model: Any) -> object:
        tokens = torch.full((1, 8), self._pad_token_id, device=self._device)
        try:
            return model(input_ids=tokens, use_cache=False)
        except TypeError as error:
            base = find_base_model(model)
            if base.config._attn_implementation != VARLEN:
                raise
            problem = f"{type(base).__name__} reads the attention mask, which packs do not have"  # HY-V4's indexer
            raise UserError(f"dataset.packing=true: {problem}; set dataset.packing: false") from error

    def build_loss(self, model: Any, *, fused_head: bool | None) -> TokenLoss:
        training = self._config.training
        self._build_image_inputs(model)
        add_embedding_noise(model, training.neftune_noise_alpha)
        parameter = LOSS_PARAMETERS.get(training.loss)
        kind = LossKind(training.loss, getattr(training, parameter) if parameter else 0.0)
        return TokenLoss(model, fused=fused_head, log=self._log, aux_loss_weight=training.router_aux_loss, kind=kind)

    def check_trainable(self, engine: Engine, loss: TokenLoss, *, varlen: bool) -> None:
        """Check that no token attends to a later one or to another packed document; cache image features."""
        config, device = self._config, self._device
        check_causal(loss, engine.module, self._pad_token_id, device, config.base_model)
        probed = loss, engine.module, self._pad_token_id, device
        flat = config.dataset.packing or self._sequence is not None
        self.flat_packs = flat and separate_documents(*probed)
        if self._sequence is not None:
            check_sequence_parts(*probed, self._sequence)
        if self._images is not None and config.vision.cache:
            with phase("load"):
                folder = Path(config.dataset.cache_dir).expanduser()
                samples = self._prepared.data.train
                self._images = cache_features(self._images, engine.module, samples, folder, device, self._log)
        for message in describe_separate_documents(engine.module):
            self._log(message)
        if varlen and not self.flat_packs:
            self._log("[yellow]warning:[/yellow] packed sequences use a dense mask, so the memory estimate is too low")

    def check_base(self) -> None:
        check_base_is_finite(self._config.base_model, self._config.model, DTYPES[self._precision])

    def build_batches(self) -> Batches | StreamBatches:
        training, samples = self._config.training, self._prepared.data.train
        options: dict[str, Any] = {
            "batch_size": training.batch_size,
            "accumulation": training.gradient_accumulation_steps,
            **self._data_parallel_options,
            **self._collate_options,
        }
        if isinstance(samples, Samples):
            dataset, seed = self._config.dataset, self._config.seed
            by_tokens = dataset.batching == "tokens"
            return Batches(samples, seed=seed, shuffle=dataset.shuffle, by_tokens=by_tokens, **options)
        return StreamBatches(samples, gather=gather_objects, **options)

    def build_evaluation_batches(self) -> Iterable[MicroBatch]:
        training, samples = self._config.training, self._prepared.data.evaluation
        assert samples is not None
        return self._iterate(samples, training.eval_batch_size or training.batch_size)

    def _iterate(self, samples: Samples, batch_size: int) -> Iterable[MicroBatch]:
        return iterate_evaluation_batches(
            samples, batch_size=batch_size, **self._data_parallel_options, **self._collate_options
        )

    @property
    def _data_parallel_options(self) -> dict[str, int]:
        """Rank and world size for distributing samples; ranks that share a sequence count as one."""
        parallel = self._config.parallel
        return {
            "rank": self._ranks.rank // parallel.sequence,
            "world_size": self._config.count_data_ranks(self._ranks.world_size),
        }

    @property
    def _collate_options(self) -> dict[str, Any]:
        token, shared = self._pad_token_id, self.shares_prompts
        layout = {"pad_token_id": token, "flat": self.flat_packs, "pairs": self.pairs, "shared": shared}
        return {**layout, "sequence": self._sequence, "images": self._images}

    def compute_scores(self, engine: Engine, *, base: bool = False) -> Scores:
        if base and self._config.lora.adapter_path is None:  # a new adapter changes nothing
            return self._first_scores
        with mask_padding(engine.module), bypass_adapter(engine.module) if base else nullcontext():
            scores = self._measure_scores(engine)
        self._first_scores = self._first_scores if self._first_scores.values else scores
        return scores

    def _measure_scores(self, engine: Engine) -> Scores:
        settings, training = self._config.evaluation, self._config.training
        size = training.eval_batch_size or training.batch_size
        scores, answers = Scores({}, {}, set()), {}
        engine.eval()
        if settings.tasks:
            tasks = TaskEvaluator(settings, self._prepared.tokenizer, size, self._ranks)
            scores = tasks.measure(engine.module, engine.device, sync_ranks=needs_synced_passes(engine))
        if settings.metrics:
            held_out, tokenizer = self._prepared.data.evaluation, self._prepared.tokenizer
            assert held_out is not None
            self._answers = self._answers or AnswerMetrics(settings, held_out, tokenizer)
            answers = self._answers.measure(engine, size, self._ranks)
        engine.train()
        return replace(scores, values=scores.values | answers)

    @staticmethod
    def build_pair_loss(model: Any, config: RunConfig) -> Any:
        """Return the loss for evaluating a finished run's pairs with `measure_pairs`; only for tasks with pairs."""
        raise NotImplementedError  # `zerolora eval` only calls it for preference and reward

    def compute_loss_metrics(self, loss: float) -> dict[str, float]:
        return {"eval/bpt": loss / math.log(2), "eval/perplexity": math.exp(min(loss, 700.0))}

    def build_flops_meter(self, model: Any) -> MfuMeter | None:
        return MfuMeter.for_device(model, self._device, self._precision)

    def generate_samples(self, engine: Engine, when: str, step: int, folder: Any) -> None:
        tokenizer, prompt_format = self._prepared.tokenizer, self._prepared.data.stats.prompt_text
        samples = self._prepared.data.train
        if when == "before" and isinstance(samples, Samples):
            examples = self.choose_examples(document for sample in samples for document in split_documents(sample))
            decoded = []
            for name, document in examples:
                images = [(0.0, build_thumbnail(stored)) for part in document.images for stored in part]
                decoded.append((name, [*decode_parts(document, tokenizer), *images]))
            folder.save_examples(decoded)
        for raw in self._prepared.sample_prompts:
            ids, prompt = encode_prompt(tokenizer, self._config.dataset, raw, prompt_format), format_prompt(raw)
            [answer] = generate_greedy_answers(engine, tokenizer, ids.tolist(), self._config.logging.sample_tokens)
            # Repeat the answers from before training, which have scrolled off the console.
            earlier = self._last_answers.get(prompt)
            before = "" if earlier is None else f"\n  before: {escape(earlier.strip())}"
            self._last_answers[prompt] = answer
            self._log(f"[bold]{when} training[/bold]  {escape(prompt)}\n  -> {escape(answer.strip())}{before}")
            folder.save_answer(prompt, when, answer.strip())

    def choose_examples(self, documents: Iterator[Sample]) -> list[tuple[str, Sample]]:
        return [
            (f"example {number}", document)
            for number, document in enumerate(islice(documents, REPORT_EXAMPLE_COUNT), start=1)
        ]

    def prepare_companion_files(self) -> Callable[[Path], None]:
        """Return a function that writes tokenizer files; their contents are built here, in the main thread."""
        if self._tokenizer_files is None:
            self._tokenizer_files = read_tokenizer_files(self._prepared.tokenizer, self._config.model.revision)
        return partial(write_files, self._tokenizer_files)

    @classmethod
    def build_model_card(cls, config: RunConfig, run_dir: Path, records: list[Record], name: str) -> str:
        loads = {"auto_class": cls.auto_class, "pipeline_tag": cls.pipeline_tag}
        return build_model_card(config.model_dump(mode="json"), run_dir, records, name=name, **loads)

    @classmethod
    def check_data(cls, config: RunConfig, stats: DataStats) -> list[str]:
        """Return warnings about the data. Raises UserError if it is for another task."""
        if stats.desirable + stats.undesirable:
            where = stats.find_source("dataset", UNPAIRED)
            raise UserError(
                f"task={config.task}: the answers in {where} are labeled true or false; set task: preference and "
                "preference.loss: kto (init: --preset kto). To train on every answer, set "
                f"{where}.format: messages or prompt_completion"
            )
        for label, part in (("dataset", stats), ("dataset.evaluation", stats.evaluation or stats)):
            if part.pairs:
                where = stats.find_source(label, PREFERENCE)
                raise UserError(
                    f"task={config.task}: {where} has pairs of a chosen and a rejected answer; set task: preference "
                    "(init: --preset dpo) or, to train on the chosen answers only, "
                    f"{where}.fields: {{prompt: prompt, completion: chosen}}"
                )
        return []

    @classmethod
    def check_can_evaluate(cls, config: RunConfig, folder: Path, stats: DataStats) -> None:
        """Raise UserError if `zerolora eval` cannot evaluate the finished run in `folder` on this data."""
        cls.check_data(config, stats)
