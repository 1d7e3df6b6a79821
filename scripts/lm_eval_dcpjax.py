"""Tasks of lm-evaluation-harness (lm_eval, from 0.4 on) on dcpjax, with the harness's own flags:

    pip install lm_eval
    python scripts/lm_eval_dcpjax.py --model dcpjax --model_args pretrained=smollm2-135m,dtype=float32 --tasks arc_easy

`model_args` are `pretrained`, the model, and options of `LLM`. From Python, `register()` gives the class under the name
"dcpjax" to the harness. Log-likelihoods are sums of `prompt_logprobs`; a context longer than the model's loses its
beginning.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dcpjax import LLM, SamplingParams

PROMPTS_AT_ONCE = 512  # scores of every prompt token are held for so many
MAX_TOKENS = 256  # the harness's default for a request that does not say
Pair = tuple[Sequence[int], Sequence[int]]


def log_likelihoods(llm: "LLM", pairs: Sequence[Pair]) -> Iterator[tuple[float, bool]]:
    """Of each (context, continuation), as token ids: the continuation's log-likelihood, and whether it is greedy."""
    from dcpjax import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    longest = llm.max_model_len - 1  # one token is always generated
    for start in range(0, len(pairs), PROMPTS_AT_ONCE):
        chunk = pairs[start : start + PROMPTS_AT_ONCE]
        prompts = [[*context, *continuation][-longest:] for context, continuation in chunk]
        results = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        for result, (_, continuation) in zip(results, chunk, strict=True):
            if result.error is not None:
                raise RuntimeError(result.error)
            yield _sum(result.prompt_token_ids, result.prompt_logprobs or (), len(continuation))


def _sum(ids: Sequence[int], scores: Sequence[Mapping[int, Any] | None], count: int) -> tuple[float, bool]:
    """Over the last `count` tokens; the first of a prompt has no score."""
    last = [found[token] for token, found in list(zip(ids, scores, strict=True))[max(0, len(ids) - count) :] if found]
    return sum(score.logprob for score in last), all(score.rank == 1 for score in last)


def sampling_params(llm: "LLM", options: Mapping[str, Any]) -> "SamplingParams":
    """The harness's options of a generation. Those it does not know itself are fields of SamplingParams."""
    from dcpjax import SamplingParams

    given = dict(options)
    until, max_tokens = given.pop("until", None) or (), given.pop("max_gen_toks", MAX_TOKENS)
    temperature = given.pop("temperature", 1.0) if given.pop("do_sample", False) else 0.0
    given.pop("temperature", None)
    return SamplingParams(
        temperature=temperature,
        max_tokens=max_tokens,
        stop=[text for text in ([until] if isinstance(until, str) else until) if text],
        truncate_prompt_tokens=max(1, llm.max_model_len - max_tokens),
        **given,
    )


@cache
def register() -> type:
    """The harness's model class, known to it as "dcpjax" from then on."""
    from lm_eval.api.model import TemplateLM  # pyright: ignore[reportMissingImports]
    from lm_eval.api.registry import register_model  # pyright: ignore[reportMissingImports]
    from lm_eval.utils import (  # pyright: ignore[reportMissingImports]
        get_rolling_token_windows,
        make_disjoint_window,
    )

    @register_model("dcpjax")
    class HarnessModel(TemplateLM):
        """`LLM` as the harness calls a model. Batch sizes and devices of the harness have no meaning here."""

        def __init__(
            self,
            pretrained: str,
            batch_size: Any = None,
            max_batch_size: Any = None,
            device: Any = None,
            **options: Any,
        ) -> None:
            from dcpjax import LLM

            super().__init__()
            self.llm = LLM(pretrained, **options)
            self.tokenizer = self.llm.get_tokenizer()
            self._name = pretrained

        @property
        def tokenizer_name(self) -> str:
            return self._name.replace("/", "__")

        @property
        def eot_token_id(self) -> int:
            return self.tokenizer.eos_token_id

        @property
        def prefix_token_id(self) -> int:
            bos = self.tokenizer.bos_token_id
            return self.eot_token_id if bos is None else bos

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **options: Any) -> list[int]:
            if add_special_tokens is None:  # a rendered chat begins with them already
                begins = self.tokenizer.bos_token is not None and string.startswith(self.tokenizer.bos_token)
                add_special_tokens = not begins
            return self.tokenizer.encode(string, add_special_tokens=add_special_tokens)

        def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
            return self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )

        def _loglikelihood_tokens(
            self, requests: Sequence[tuple[Any, list[int], list[int]]], **options: Any
        ) -> list[tuple[float, bool]]:
            found = log_likelihoods(self.llm, [(context, continuation) for _, context, continuation in requests])
            return [self._kept("loglikelihood", key, each) for (key, *_), each in zip(requests, found, strict=True)]

        def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
            """Of whole texts: windows that follow each other, each with one token of context."""
            return [self._kept("loglikelihood_rolling", each.args, self._rolling(*each.args)) for each in requests]

        def _rolling(self, text: str) -> float:
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.llm.max_model_len - 2,  # a window holds one token more
                context_len=1,
            )
            pairs = [make_disjoint_window(window) for window in windows]
            return sum(total for total, _ in log_likelihoods(self.llm, pairs))

        def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
            prompts = [{"prompt_token_ids": self.tok_encode(request.args[0])} for request in requests]
            params = [sampling_params(self.llm, request.args[1]) for request in requests]
            results = self.llm.generate(prompts, params, use_tqdm=not disable_tqdm)
            failed = next((result.error for result in results if result.error), None)
            if failed is not None:
                raise RuntimeError(failed)
            texts = [result.outputs[0].text for result in results]
            return [
                self._kept("generate_until", request.args, text) for request, text in zip(requests, texts, strict=True)
            ]

        def _kept(self, kind: str, key: Any, found: Any) -> Any:
            """Give the harness's own cache what was found."""
            self.cache_hook.add_partial(kind, key, found)
            return found

    return HarnessModel


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate  # pyright: ignore[reportMissingImports]

    register()
    cli_evaluate()
