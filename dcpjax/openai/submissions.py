"""A checked request body -> what an `LLM` runs: one submission for each prompt."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dcpjax.api.checks import option_names
from dcpjax.api.sampling_params import SamplingParams
from dcpjax.frontend.submission import Submission
from dcpjax.llm import LLM
from dcpjax.openai.parsers.message import MessageFormats
from dcpjax.openai.request import RequestBody


def own_defaults(llm: LLM) -> Mapping[str, Any]:
    """The sampling options in which the model's checkpoint differs from the defaults of `SamplingParams`."""
    own, usual = llm.get_default_sampling_params(), SamplingParams()
    names = option_names(SamplingParams)
    return {name: getattr(own, name) for name in names if getattr(own, name) != getattr(usual, name)}


def submissions(llm: LLM, key: int, request: RequestBody, formats: MessageFormats) -> list[Submission]:
    """Tokenise and check the prompts of a request.

    `key` is what their events carry as the number of the prompt, `formats` how the model writes tool calls.

    Raises ValueError if one of the prompts cannot be run.
    """
    made = _submissions(llm, key, request, formats)
    for place, submission in enumerate(made):
        if submission.error is not None:
            where = f"prompt {place}: " if len(made) > 1 else ""
            raise ValueError(f"{where}{submission.error}")
        _check_max_tokens(llm, submission)
    return made


def _submissions(llm: LLM, key: int, request: RequestBody, formats: MessageFormats) -> list[Submission]:
    intake, sampling = llm.intake, request.sampling
    intake.check_priority(request.priority)
    if request.messages is None:
        return [
            _echoed(llm, request, intake.submission(key, prompt, sampling, request.priority, request.cache_salt))
            for prompt in request.prompts
        ]
    chat = intake.chat_submission(
        key,
        request.messages,
        sampling,
        request.priority,
        request.cache_salt,
        formats.shown_tokens(request),
        tools=request.tools,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
        chat_template_kwargs=request.chat_template_kwargs,
    )
    return [chat]


def _check_max_tokens(llm: LLM, submission: Submission) -> None:
    """Refuse a request for more tokens than fit, where `LLM.generate` would generate fewer."""
    prompt_tokens = len(submission.prompt_token_ids)
    asked, room = submission.params.max_tokens, llm.max_model_len - prompt_tokens
    if asked is not None and asked > room:
        raise ValueError(
            f"max_tokens must be at most {room} (max_model_len={llm.max_model_len} less "
            f"{prompt_tokens} of the prompt), but is {asked}; use {room}"
        )


def _echoed(llm: LLM, request: RequestBody, submission: Submission) -> Submission:
    """Gives token ids the text that the response repeats."""
    if not request.echo or submission.prompt is not None or submission.error is not None:
        return submission
    if llm.tokenizer is None:
        raise ValueError("echo needs a tokenizer, but the model has none; leave it out")
    text = llm.tokenizer.decode(submission.prompt_token_ids, skip_special_tokens=False)
    return replace(submission, prompt=text)
