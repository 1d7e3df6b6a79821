"""vLLM's options that have no counterpart here: accepted where they change nothing, refused by name otherwise.

So code written for vLLM runs as it is, and no option is dropped that would have done something. docs/vllm.md shows
the same tables for readers.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from dcpjax.api.checks import check_option_names

EITHER = (False, True)


class Neutral(NamedTuple):
    """The values at which an option changes nothing, and what to do instead of others; ends an error message."""

    values: tuple[Any, ...]
    instead: str


# Options of `LLM`.
ENGINE: dict[str, Neutral] = {
    "allowed_local_media_path": Neutral((None, ""), "models here read text alone"),
    "allowed_media_domains": Neutral((None,), "models here read text alone"),
    "attention_backend": Neutral((None, "auto"), "the kernel follows from the device and the shapes"),
    "calculate_kv_scales": Neutral((None, False), "the cache is not quantised"),
    "code_revision": Neutral((None,), "no code from a checkpoint is run"),
    "compilation_config": Neutral((None, {}), "XLA compiles every step; see warmup and compilation_cache"),
    "config_format": Neutral((None, "auto", "hf"), "convert the checkpoint to Hugging Face's form"),
    "convert": Neutral((None, "auto", "none"), "models here generate text"),
    "cpu_offload_gb": Neutral((None, 0), "weights stay on the devices; raise tensor_parallel_size"),
    "data_parallel_size": Neutral((None, 1), "start a process for each copy of the model"),
    "disable_async_output_proc": Neutral((None, *EITHER), "see async_scheduling"),
    "disable_cascade_attn": Neutral((None, *EITHER), "the kernel follows from the device and the shapes"),
    "disable_custom_all_reduce": Neutral((None, *EITHER), "collectives are XLA's"),
    "disable_hybrid_kv_cache_manager": Neutral((None, *EITHER), "all layers have the same kind of cache"),
    "disable_log_requests": Neutral((None, *EITHER), "nothing is logged; see llm.stats()"),
    "disable_log_stats": Neutral((None, *EITHER), "nothing is logged; see llm.stats()"),
    "disable_sliding_window": Neutral((None, False), "no model with a sliding window is supported"),
    "distributed_executor_backend": Neutral((None, "uni", "mp"), "one process drives all devices"),
    "download_dir": Neutral((None,), "set HF_HOME, or pass the folder as model"),
    "enable_chunked_prefill": Neutral((None, True), "prompts longer than max_num_batched_tokens run in several steps"),
    "enable_expert_parallel": Neutral((None, False), "experts are spread over all devices already"),
    "enable_log_requests": Neutral((None, *EITHER), "nothing is logged; see llm.stats()"),
    "enable_lora": Neutral((None, False), "merge the adapter into the weights"),
    "enable_return_routed_experts": Neutral((None, False), "the experts chosen are not reported"),
    "enable_sleep_mode": Neutral((None, False), "delete the LLM to free its memory"),
    "enforce_eager": Neutral((None, *EITHER), "steps are always compiled"),
    "generation_config": Neutral((None, "auto"), "pass SamplingParams() for defaults that no model sets"),
    "guided_decoding_backend": Neutral((None, "auto", "guidance"), "llguidance does it"),
    "hf_config_path": Neutral((None,), "config.json is read from the model's folder; see hf_overrides"),
    "hf_token": Neutral((None,), "set HF_TOKEN"),
    "kv_transfer_config": Neutral((None,), "caches are not sent between engines"),
    "limit_mm_per_prompt": Neutral((None, {}), "models here read text alone"),
    "logits_processors": Neutral((None, []), "see logit_bias, allowed_token_ids and structured_outputs"),
    "logprobs_mode": Neutral((None, "raw_logprobs"), "log-probabilities are those of the model's own logits"),
    "long_prefill_token_threshold": Neutral((None, 0), "use max_mixed_prefill_tokens"),
    "max_num_partial_prefills": Neutral((None, 1), "use max_mixed_prefill_tokens"),
    "max_parallel_loading_workers": Neutral((None,), "each device reads its own slices of the weights"),
    "max_seq_len_to_capture": Neutral((None, 8192), "steps of every length are compiled"),
    "mm_processor_kwargs": Neutral((None, {}), "models here read text alone"),
    "model_impl": Neutral((None, "auto", "vllm"), "the models here are dcpjax's own"),
    "num_gpu_blocks_override": Neutral((None,), "use kv_cache_memory_bytes"),
    "num_lookahead_slots": Neutral((None, 0), "there is no speculative decoding"),
    "override_generation_config": Neutral((None, {}), "pass SamplingParams"),
    "pipeline_parallel_size": Neutral((None, 1), "use tensor_parallel_size"),
    "pooler_config": Neutral((None,), "models here generate text"),
    "preemption_mode": Neutral((None, "recompute"), "what is preempted is computed again"),
    "prefill_context_parallel_size": Neutral((None, 1), "use decode_context_parallel_size, which splits prompts too"),
    "prefix_caching_hash_algo": Neutral((None, "builtin", "sha256", "sha256_cbor"), "SHA-256 is used"),
    "quantization": Neutral((None,), "FP8 checkpoints are widened while they are loaded"),
    "revision": Neutral((None, "main"), "download that revision, and pass its folder as model"),
    "rope_scaling": Neutral((None, {}), "use hf_overrides={'rope_scaling': ...}"),
    "rope_theta": Neutral((None,), "use hf_overrides={'rope_theta': ...}"),
    "runner": Neutral((None, "auto", "generate"), "models here generate text"),
    "served_model_name": Neutral((None,), "it names the model of a server or of dcpjax batch"),
    "skip_tokenizer_init": Neutral((None, False), "use detokenize=False; token ids need no tokenizer"),
    "speculative_config": Neutral((None,), "there is no speculative decoding"),
    "stream_interval": Neutral((None, 1), "stream gives every token at once"),
    "structured_outputs_config": Neutral((None, {}), "llguidance does it"),
    "swap_space": Neutral((None, 0, 4), "what is preempted is computed again"),
    "task": Neutral((None, "auto", "generate"), "models here generate text"),
    "tokenizer_mode": Neutral((None, "auto", "hf"), "tokenizer.json is read"),
    "tokenizer_revision": Neutral((None,), "pass the folder of that revision as tokenizer"),
    "trust_remote_code": Neutral((None, False), "no code from a checkpoint is run"),
    "use_v2_block_manager": Neutral((None, *EITHER), "there is one block manager"),
    "worker_use_ray": Neutral((None, False), "one process drives all devices"),
}

# Options of `SamplingParams`.
SAMPLING: dict[str, Neutral] = {
    "best_of": Neutral((None, 1), "use n, and choose by cumulative_logprob"),
    "early_stopping": Neutral((None, False), "use LLM.beam_search"),
    "extra_args": Neutral((None, {}), "no plug-in reads it"),
    "flat_logprobs": Neutral((None, False), "log-probabilities are one dict for each token"),
    "guided_decoding": Neutral((None,), "use structured_outputs"),
    "length_penalty": Neutral((None, 1.0), "use LLM.beam_search"),
    "logits_processors": Neutral((None, []), "use logit_bias, allowed_token_ids or structured_outputs"),
    "prompt_logprob_start": Neutral((None, 0), "use prompt_logprobs, which starts at the first token"),
    "prompt_logprob_token_ids": Neutral((None,), "use prompt_logprobs"),
    "repetition_detection": Neutral((None,), "use repetition_penalty or stop"),
    "routed_experts_prompt_start": Neutral((None, 0), "the experts chosen are not reported"),
    "skip_clone": Neutral(EITHER, "params are always copied"),
    "skip_reading_prefix_cache": Neutral((None, False), "give the prompt a cache_salt of its own"),
    "spaces_between_special_tokens": Neutral((None, *EITHER), "tokens are joined as decoding all of them does"),
    "stream_interval": Neutral((None, 1), "stream gives every token at once"),
    "thinking_token_budget": Neutral((None, -1), "use max_tokens"),
    "trace_decode_token_ids": Neutral((None,), "use prompt_logprobs to score given tokens"),
    "use_beam_search": Neutral((None, False), "use LLM.beam_search"),
}

# Arguments of `LLM.generate`, `chat` and the other calls.
CALL: dict[str, Neutral] = {
    "chat_template_content_format": Neutral((None, "auto", "string"), "text parts are joined to one string"),
    "concurrency_limit": Neutral((None,), "use LLM(max_num_seqs=...)"),
    "guided_options_request": Neutral((None,), "use SamplingParams(structured_outputs=...)"),
    "lora_request": Neutral((None, []), "merge the adapter into the weights"),
    "media_io_kwargs": Neutral((None, {}), "models here read text alone"),
    "mm_processor_kwargs": Neutral((None, {}), "models here read text alone"),
    "prompt_adapter_request": Neutral((None, []), "there are no prompt adapters"),
    "prompt_token_ids": Neutral((None,), "pass the token ids as prompts"),
    "tokenization_kwargs": Neutral((None, {}), "use SamplingParams(truncate_prompt_tokens=...), or token ids"),
}

# Keys of a prompt.
PROMPT: dict[str, Neutral] = {
    "mm_processor_kwargs": Neutral((None, {}), "models here read text alone"),
    "multi_modal_data": Neutral((None, {}), "models here read text alone"),
    "multi_modal_uuids": Neutral((None, {}), "models here read text alone"),
    "negative_prompt": Neutral((None,), "models here have no negative prompts"),
    "prompt_embeds": Neutral((None,), "give text or token ids"),
}

# Attributes of vLLM's `LLM` -> what to use.
ATTRIBUTES = {
    "apply_model": "the weights are llm.runner.weights",
    "classify": "models here generate text; see SamplingParams(logprob_token_ids=...)",
    "collective_rpc": "one process drives all devices",
    "embed": "models here generate text",
    "encode": "models here generate text; for token ids use llm.get_tokenizer().encode",
    "get_metrics": "use llm.stats()",
    "llm_engine": "use llm.engine_config, llm.max_model_len and llm.stats()",
    "reward": "models here generate text",
    "score": "models here generate text; see SamplingParams(logprob_token_ids=...) and prompt_logprobs",
    "set_tokenizer": "use LLM(model, tokenizer=...)",
    "sleep": "delete the LLM to free its memory",
    "start_profile": "use jax.profiler.start_trace",
    "stop_profile": "use jax.profiler.stop_trace",
    "wake_up": "open the LLM again",
}


def without_neutral(options: Mapping[str, Any], neutral: Mapping[str, Neutral]) -> dict[str, Any]:
    """The options that are not among `neutral`.

    Raises ValueError for one of those at a value that would have done something: "x must be None or 1, but is 2; ...".
    """
    for name in options.keys() & neutral.keys():
        value, (values, instead) = options[name], neutral[name]
        if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in values):
            legal = " or ".join(map(repr, values))
            raise ValueError(f"{name} must be {legal}, but is {value!r}; {instead}")
    return {name: value for name, value in options.items() if name not in neutral}


def check_call(options: Mapping[str, Any], *own: str) -> None:
    """Raise ValueError for further arguments of a call that takes `own`, unless they are vLLM's and change nothing."""
    check_option_names(without_neutral(options, CALL), own)
