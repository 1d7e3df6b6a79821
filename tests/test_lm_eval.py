"""lm-evaluation-harness on dcpjax: log-likelihoods are those that transformers gave for the golden checkpoints."""

import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from harness import GOLDENS, golden
from small_models import character_model

from dcpjax import LLM, SamplingParams

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))

import lm_eval_dcpjax

OPTIONS: dict[str, Any] = {"dtype": "float32", "kv_cache_memory_bytes": 2**20, "block_size": 16, "max_num_seqs": 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return character_model(tmp_path_factory.mktemp("model") / "tiny")


def expected(tokens: np.ndarray, logits: np.ndarray, start: int) -> tuple[float, bool]:
    """The log-likelihood of tokens[start:], from logits that follow each of the tokens."""
    wide = logits[start - 1 : len(tokens) - 1].astype(np.float64)
    logprobs = wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))
    chosen = tokens[start:]
    total = float(logprobs[range(len(chosen)), chosen].sum())
    return total, bool((wide.argmax(axis=-1) == chosen).all())


def test_log_likelihoods_are_those_of_transformers() -> None:
    known = golden("smollm2")
    prompt, logits = known["prompt"], known["logits"]
    both = np.concatenate([prompt, known["greedy"]])
    both_logits = np.concatenate([logits[:-1], known["greedy_logits"]])
    llm = LLM(GOLDENS / "smollm2", progress=False, **OPTIONS)
    pairs = [(prompt[:start].tolist(), prompt[start:].tolist()) for start in range(1, len(prompt))]
    pairs.append((prompt.tolist(), known["greedy"].tolist()))
    found = list(lm_eval_dcpjax.log_likelihoods(llm, pairs))
    wanted = [expected(prompt, logits, start) for start in range(1, len(prompt))]
    wanted.append(expected(both, both_logits, len(prompt)))
    np.testing.assert_allclose([total for total, _ in found], [total for total, _ in wanted], atol=2e-4)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in wanted]
    assert found[-1][1]


def test_a_context_that_is_too_long_loses_its_beginning(folder: Path) -> None:
    llm = LLM(folder, progress=False, max_model_len=32, **OPTIONS)
    ids = [5 + number % 90 for number in range(60)]
    cut, short = lm_eval_dcpjax.log_likelihoods(llm, [(ids[:50], ids[50:]), (ids[60 - 31 : 50], ids[50:])])
    assert cut == pytest.approx(short)


def test_options_of_the_harness_become_sampling_params(folder: Path) -> None:
    llm: Any = SimpleNamespace(max_model_len=100)
    greedy = lm_eval_dcpjax.sampling_params(llm, {"until": ["\n", ""], "max_gen_toks": 20, "temperature": 0.7})
    assert greedy == SamplingParams(temperature=0, max_tokens=20, stop=["\n"], truncate_prompt_tokens=80)
    drawn = lm_eval_dcpjax.sampling_params(llm, {"until": "x", "do_sample": True, "temperature": 0.7, "top_p": 0.9})
    assert (drawn.temperature, drawn.top_p, drawn.stop, drawn.max_tokens) == (0.7, 0.9, ["x"], 256)
    with pytest.raises(ValueError, match="unknown option 'top_pp'; did you mean top_p"):
        lm_eval_dcpjax.sampling_params(llm, {"top_pp": 0.9})


# --- with the harness itself


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    pytest.importorskip("lm_eval", reason="pip install lm_eval")
    arguments = ",".join(f"{name}={value}" for name, value in OPTIONS.items())
    kind: Any = lm_eval_dcpjax.register()
    return kind.create_from_arg_string(f"pretrained={folder},progress=False,{arguments}", {"batch_size": 1})


def request(kind: str, *arguments: Any) -> Any:
    from lm_eval.api.instance import Instance  # pyright: ignore[reportMissingImports]

    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)


def test_the_harness_knows_the_model(model: Any) -> None:
    from lm_eval.api.registry import get_model  # pyright: ignore[reportMissingImports]

    assert get_model("dcpjax") is type(model)


def test_the_likelihoods_of_parts_are_that_of_the_whole(model: Any) -> None:
    (first, _), (second, _), (whole, _) = model.loglikelihood(
        [
            request("loglikelihood", "ab", "cd"),
            request("loglikelihood", "abcd", "ef"),
            request("loglikelihood", "ab", "cdef"),
        ]
    )
    assert first + second == pytest.approx(whole)
    (alone, _), (rolling,) = (
        model.loglikelihood([request("loglikelihood", "", "abcd")])[0],
        model.loglikelihood_rolling([request("loglikelihood_rolling", "abcd")]),
    )
    assert alone == pytest.approx(rolling)
    assert -math.inf < rolling < 0


def test_a_text_longer_than_the_model_is_scored_in_windows(model: Any) -> None:
    text = "abcdefgh" * (model.llm.max_model_len // 8 + 3)
    (rolling,) = model.loglikelihood_rolling([request("loglikelihood_rolling", text)])
    assert -math.inf < rolling < 0


def test_texts_end_where_the_harness_says(model: Any) -> None:
    def text(**options: Any) -> str:
        return model.generate_until([request("generate_until", "abc", {"max_gen_toks": 8, **options})])[0]

    free = text()
    cut = text(until=[free[3]])
    assert cut == free[: free.index(free[3])]


def test_a_chat_is_rendered_for_the_harness(model: Any) -> None:
    assert model.apply_chat_template([{"role": "user", "content": "hi"}]) == "<u>hi<a>"
    assert model.chat_template(True) is not None
