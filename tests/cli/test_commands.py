import io
import json
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
from small_models import NINE_HEADS

import dcpjax
import dcpjax.llm
from dcpjax.api.config import EngineConfig
from dcpjax.api.outputs import CompletionOutput, RequestMetrics, RequestOutput, StreamEvent
from dcpjax.api.sampling_params import SamplingParams
from dcpjax.checkpoint.model_files import open_model
from dcpjax.cli.commands import COMMANDS, main
from dcpjax.cli.flags import Flags, Parser, field_helps, flag, names_to_flags, parse
from dcpjax.cli.statistics import Timing, statistics_line
from dcpjax.cli.streaming import StreamedCompletion, print_stream
from dcpjax.frontend.intake import Intake
from dcpjax.runtime.compiling import CompileTimes
from dcpjax.sharding.mesh import Layout, check_layout

LISTED = ", ".join(COMMANDS)
HEAVY = {"jax", "jaxlib", "numpy", "transformers", "tokenizers"}


class FakeTokenizer:
    """One token per character; messages are joined by spaces."""

    def encode(self, text):
        return list(map(ord, text))

    def apply_chat_template(self, messages):
        return self.encode(" ".join(message["content"] for message in messages))


class FakeLLM:
    """Says the prompt in capitals, a character a token; fails where the prompt is "fail"."""

    max_model_len = 60
    tokenizer = FakeTokenizer()
    runner = SimpleNamespace(
        model=SimpleNamespace(
            config=SimpleNamespace(cache_heads=1),
            layout=Layout(tensor_parallel_size=8, decode_context_parallel_size=4),
            geometry=SimpleNamespace(block_size=256),
            dtype="bfloat16",
            kv_dtype="float32",
            platform="cpu",
        ),
        sizes=SimpleNamespace(num_blocks=91),
        compile_times=CompileTimes(),
    )
    files = SimpleNamespace(generation_config={"temperature": 0.7, "top_k": 40})

    def __init__(self, model, *, progress=True, **options):
        self.model, self.progress, self.options, self.calls, self.closed = model, progress, options, [], 0
        FakeLLM.last = self

    def get_default_sampling_params(self):
        return SamplingParams(temperature=0.7, top_k=40)

    def events(self, prompt):
        if prompt == "fail":
            return [StreamEvent(0, 0, "", [], "error", error="max_tokens must be smaller, but is not")]
        last = len(prompt) - 1
        return [
            StreamEvent(0, 0, letter.upper(), [ord(letter)], "stop" if place == last else None)
            for place, letter in enumerate(prompt)
        ]

    def generate(self, prompts, params):
        self.calls.append((prompts, params))
        return [self.result(prompt, params.n) for prompt in prompts]

    def result(self, prompt, n):
        events = self.events(prompt)
        text, ids = "".join(event.text for event in events), [t for event in events for t in event.token_ids]
        made = [
            CompletionOutput(index, text, ids, events[-1].finish_reason, error=events[-1].error) for index in range(n)
        ]
        return RequestOutput("0", prompt, list(map(ord, prompt)), made, True, RequestMetrics(1.0, 1.5, 2.0, 4.0))

    def chat(self, conversations, params):
        return self.generate([messages[-1]["content"] for messages in conversations], params)

    def stream(self, prompts, params):
        self.calls.append((prompts, params))
        try:
            yield from self.events(prompts[0])
        finally:
            self.closed += 1

    def stream_chat(self, messages, params):
        self.calls.append((messages, params))
        last = messages[-1] if isinstance(messages[-1], dict) else messages[0][-1]
        try:
            for event in self.events(last["content"]):
                if event.text == "!":
                    raise KeyboardInterrupt
                yield event
        finally:
            self.closed += 1


@pytest.fixture(autouse=True)
def fake(monkeypatch):
    monkeypatch.setattr(dcpjax.llm, "LLM", FakeLLM)
    monkeypatch.setattr(sys, "stdin", io.StringIO())


def ran(capsys, *arguments):
    """(exit code, standard output, standard error) of one command."""
    code = main(list(arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def terminal(monkeypatch, *names):
    for name in names:
        monkeypatch.setattr(getattr(sys, name), "isatty", lambda: True)


def typed(monkeypatch, text):
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))


# --- help, versions and flags


@pytest.mark.parametrize("command", COMMANDS)
def test_help_needs_no_jax(command):
    code = (
        f"import sys; from dcpjax.cli import main; codes = [main(['--version']), main(['{command}', '--help']), "
        f"main(['{command}', '--unheard-of'])]; print(codes, {HEAVY} & set(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"dcpjax {dcpjax.__version__}\nusage: dcpjax {command}")
    assert done.stderr.splitlines()[-1] == "[0, 0, 2] set()"


def test_the_list_of_commands_needs_no_jax():
    code = f"import sys; from dcpjax.cli import main; main(['--help']); print({HEAVY} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"


def test_no_command_shows_the_help_and_is_refused(capsys):
    code, out, err = ran(capsys)
    assert (code, out) == (2, "")
    assert all(f"  {name}" in err for name in COMMANDS)
    assert ran(capsys, "--help") == (0, err, "")


@pytest.mark.parametrize("kind", [EngineConfig, SamplingParams])
def test_every_option_is_a_flag_with_help(capsys, kind):
    text = " ".join(ran(capsys, "generate", "--help")[1].split())
    helps = field_helps(kind)
    for field in fields(kind):
        if field.name == "hf_overrides":  # a mapping: for Python alone
            continue
        assert f" {flag(field.name)}" in text
        assert helps[field.name]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["generate", "a", "--max-toknes", "5"], "unknown flag --max-toknes; did you mean --max-tokens?"),
        (["generate", "a", "--max_tokenz=5"], "unknown flag --max_tokenz; did you mean --max-tokens?"),
        (["generate", "a", "--max"], "unknown flag --max; did you mean --max-tokens or --max-"),
        (["generate", "a", "-z"], "unknown flag -z; see dcpjax generate --help"),
        (["gnerate"], f"the command must be one of {LISTED}, but is 'gnerate'; did you mean generate?"),
        (["--model", "m"], f"flags must follow a command ({LISTED}), but --model comes first"),
        (["generate", "a", "--model", "m", "-q", "-v"], "--quiet must not come with --verbose, but does; remove one"),
        (["chat", "--model", "m", "-q", "-v"], "--quiet must not come with --verbose, but does; remove one"),
        (["generate", "a"], "--model must name a model, but is not given"),
        (["generate", "--model", "m"], "generate must have a prompt, but has none"),
        (["generate", "a", "--model"], "--model must have a value, but has none"),
        (["generate", "a", "--top-k", "few"], "--top-k must be an integer, but is 'few'"),
        (["generate", "a", "--model", "m", "--top-p", "7"], "--top-p must be in (0, 1], but is 7.0; use 1"),
        (["generate", "a", "--model", "m", "--min-tokens", "300"], "--min-tokens must be at most --max-tokens=256"),
        (["generate", "a", "--model", "m", "--dtype", "int4"], "--dtype must be one of auto, float32, bfloat16"),
        (["generate", "a", "--model", "m", "--block_size", "0"], "--block-size must be an integer of at least 1"),
        (["generate", "a", "--model", "m", "--num-decode-steps", "0"], "--num-decode-steps must be an integer of at"),
        (["generate", "a", "--model", "m", "--num-decode-steps", "all"], "--num-decode-steps must be an integer, but"),
        (["generate", "a", "--model", "m", "-tp", "8", "-dcp", "3"], "--decode-context-parallel-size must divide"),
        (["generate", "a", "--model", "m", "--system", "s"], "--system must come with --chat"),
        (["generate", "a", "--model", "m", "--stream", "--json"], "--stream must not come with --json"),
        (["generate", "a", "b", "--model", "m", "--stream"], "--stream must have one prompt and --n 1"),
        (["generate", "--model", "m", "--prompt-file", "/none"], "--prompt-file must be a readable file, but /none"),
        (["chat", "hello", "--model", "m"], "chat must have no prompt among its flags, but has 'hello'"),
        (["env", "now"], "env takes no arguments, but got 'now'"),
    ],
)
def test_a_mistake_is_one_sentence_in_flags_and_exit_code_2(capsys, arguments, sentence):
    code, out, err = ran(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith(f"dcpjax: error: {sentence}")
    assert err.count("\n") == 1


def test_flags_go_anywhere_and_words_follow_two_dashes():
    parser = Parser(prog="p", usage="p", description="d")
    parser.add_argument("--max-tokens", type=int)
    flags = parse(parser, ["a", "--max_tokens=3", "- b", "-5", "--", "--c", "-d"])
    assert flags == Flags(positionals=["a", "- b", "-5", "--c", "-d"], given={"max_tokens": 3})


@pytest.mark.parametrize(
    ("sentence", "with_flags"),
    [
        ("block_size must be 8, use a smaller block_size", "--block-size must be 8, use a smaller --block-size"),
        ("n must be at least 1", "--n must be at least 1"),
        ("stop here: a model, a seed, n times", "--stop here: a model, a seed, n times"),
        ("(max_model_len=8 leaves one).", "(--max-model-len=8 leaves one)."),
        ("raise kv_cache_memory_bytes.", "raise --kv-cache-memory-bytes."),
        ("/home/block_size/x and 'max_tokens' stay", "/home/block_size/x and 'max_tokens' stay"),
        ("my_block_size and block_size_2 stay", "my_block_size and block_size_2 stay"),
    ],
)
def test_sentences_name_flags_as_they_are_typed(sentence, with_flags):
    assert names_to_flags(sentence) == with_flags


def test_options_reach_the_engine_and_the_requests(capsys):
    typed_flags = "--tensor_parallel_size 8 -dcp 4 --seed 7 --compilation-cache false --dcp-replicate-q --n 2"
    more = "--max-tokens none --stop A --stop B --stop-token-ids 1,2 --stop-token-ids 3 --no-skip-special-tokens"
    assert main(["generate", "x", "--model", "m", *typed_flags.split(), *more.split()]) == 0
    llm = FakeLLM.last
    assert llm.model == "m"
    assert llm.options == {
        "tensor_parallel_size": 8,
        "decode_context_parallel_size": 4,
        "seed": 7,
        "compilation_cache": False,
        "dcp_replicate_q": True,
    }
    assert llm.calls[0][1] == SamplingParams(
        n=2,
        seed=7,
        temperature=0.7,
        top_k=40,
        max_tokens=None,
        stop=["A", "B"],
        stop_token_ids=[1, 2, 3],
        skip_special_tokens=False,
    )


@pytest.mark.parametrize(("text", "value"), [("4", 4), ("auto", "auto")])
def test_a_flag_may_be_a_number_or_a_word(capsys, text, value):
    assert main(["generate", "x", "--model", "m", "--num-decode-steps", text]) == 0
    assert FakeLLM.last.options == {"num_decode_steps": value}


def test_without_sampling_flags_the_model_chooses_and_256_tokens_are_the_most():
    main(["generate", "x", "--model", "m", "--seed", "none"])
    assert FakeLLM.last.calls[0][1] == SamplingParams(temperature=0.7, top_k=40, max_tokens=256)
    assert FakeLLM.last.options == {}


# --- generate


def test_one_prompt_prints_its_text_and_nothing_else(capsys):
    assert ran(capsys, "generate", "hello", "--model", "m") == (0, "HELLO\n", "")


def test_several_prompts_have_a_line_above_each(capsys):
    code, out, _ = ran(capsys, "generate", "a\nb", "--model", "m", "x" * 80)
    assert (code, out) == (0, f"==> a b <==\nA\nB\n==> {'x' * 57}... <==\n{'X' * 80}\n")
    assert (
        ran(capsys, "generate", "a", "--n", "2", "--model", "m")[1] == "==> a (1 of 2) <==\nA\n==> a (2 of 2) <==\nA\n"
    )


def test_prompts_come_from_files_and_standard_input(capsys, monkeypatch, tmp_path):
    (tmp_path / "f").write_bytes(b"\xef\xbb\xbftwo\nlines\r\n")
    typed(monkeypatch, "piped\n")
    main(["generate", "-", "--prompt-file", str(tmp_path / "f"), "--model", "m"])
    assert FakeLLM.last.calls[0][0] == ["piped", "two\nlines"]


def test_a_failed_prompt_leaves_the_others_and_makes_exit_code_1(capsys):
    code, out, err = ran(capsys, "generate", "a", "fail", "b", "--model", "m")
    assert (code, out) == (1, "==> a <==\nA\n==> fail <==\n==> b <==\nB\n")
    assert err == "dcpjax: error: prompt 2: --max-tokens must be smaller, but is not\n"


def test_json_is_one_object_per_completion(capsys):
    code, out, _ = ran(capsys, "generate", "é", "fail", "--json", "--model", "m")
    first, second = map(json.loads, out.splitlines())
    assert (code, "É" in out) == (1, True)
    assert first == {
        "prompt": "é",
        "index": 0,
        "text": "É",
        "token_ids": [233],
        "finish_reason": "stop",
        "stop_reason": None,
        "error": None,
        "usage": {"prompt_tokens": 1, "completion_tokens": 1},
        "timings": {"scheduled": 0.5, "first_token": 1.0, "finished": 3.0},
    }
    assert second["error"] == "--max-tokens must be smaller, but is not"


def test_chat_wraps_each_prompt_in_messages(capsys, monkeypatch):
    given = []
    monkeypatch.setattr(FakeLLM, "chat", lambda self, inputs, params: given.extend(inputs) or [])
    main(["generate", "a", "b", "--chat", "--system", "be kind", "--model", "m", "--json"])
    system = {"role": "system", "content": "be kind"}
    assert given == [[system, {"role": "user", "content": text}] for text in "ab"]


@pytest.mark.parametrize("chat", [[], ["--chat"]])
def test_a_terminal_streams_one_prompt_and_gets_statistics(capsys, monkeypatch, chat):
    terminal(monkeypatch, "stdout", "stderr")
    code, out, err = ran(capsys, "generate", "hello", "--model", "m", *chat)
    assert (code, out, FakeLLM.last.closed) == (0, "HELLO\n", 1)
    assert err.startswith("tp=2 x dcp=4, cache of 23,296 tokens stored 2x | 5 prompt + 5 new tokens in ")


def test_streaming_and_statistics_can_be_switched(capsys, monkeypatch):
    assert "prompt + 1 new" in ran(capsys, "generate", "a", "--model", "m", "--stream", "--stats")[2]
    assert FakeLLM.last.closed == 1
    terminal(monkeypatch, "stdout", "stderr")
    assert ran(capsys, "generate", "a", "--model", "m", "--no-stream", "--no-stats") == (0, "A\n", "")
    assert FakeLLM.last.closed == 0


def test_a_failed_stream_prints_no_line(capsys):
    code, out, err = ran(capsys, "generate", "fail", "--stream", "--model", "m")
    assert (code, out, err) == (1, "", "dcpjax: error: --max-tokens must be smaller, but is not\n")


def test_the_first_piece_waits_for_the_second_event(capsys):
    seen = []

    def events():
        yield StreamEvent(0, 0, "a", [1])
        seen.append(capsys.readouterr().out)
        yield StreamEvent(0, 0, "b", [2])
        seen.append(capsys.readouterr().out)
        yield StreamEvent(0, 0, "c\n", [3], "stop")

    answer = StreamedCompletion()
    print_stream(events(), answer)
    assert (seen, capsys.readouterr().out) == (["", "ab"], "c\n")
    assert (answer.text, answer.tokens, answer.finish_reason) == ("abc\n", 3, "stop")


def test_a_model_that_asks_for_no_sampling_is_greedy(fake, monkeypatch):
    monkeypatch.setattr(FakeLLM, "files", SimpleNamespace(generation_config={}))
    assert main(["generate", "x", "--model", "m"]) == 0
    assert FakeLLM.last.calls[0][1].temperature == 0


ASKED = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1}


def asking(tmp_path, monkeypatch, generation_config):
    """A stand-in whose sampling defaults are what the real library reads from a folder."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "generation_config.json").write_text(json.dumps(generation_config))
    files = open_model(tmp_path)
    own = Intake(files, EngineConfig(), None, vocab_size=100, max_model_len=60).default_params
    monkeypatch.setattr(FakeLLM, "files", files)
    monkeypatch.setattr(FakeLLM, "get_default_sampling_params", lambda self: own)


def test_generate_and_chat_follow_generation_config(tmp_path, monkeypatch):
    asking(tmp_path, monkeypatch, {**ASKED, "do_sample": True, "eos_token_id": 2})
    assert main(["generate", "x", "--model", "m"]) == 0
    assert FakeLLM.last.calls[0][1] == SamplingParams(**ASKED, max_tokens=256)
    typed(monkeypatch, "x\n")
    assert main(["chat", "--model", "m"]) == 0
    assert FakeLLM.last.calls[0][1] == SamplingParams(**ASKED, max_tokens=1024)


@pytest.mark.parametrize(("name", "value"), [*dict.fromkeys(ASKED, 1).items(), ("temperature", 0), ("top_k", 0)])
def test_a_flag_wins_over_generation_config(tmp_path, monkeypatch, name, value):
    asking(tmp_path, monkeypatch, ASKED)
    assert main(["generate", "x", "--model", "m", flag(name), str(value)]) == 0
    assert FakeLLM.last.calls[0][1] == SamplingParams(**{**ASKED, name: value}, max_tokens=256)


def test_without_a_temperature_of_its_own_a_model_is_greedy_and_keeps_the_rest(tmp_path, monkeypatch):
    asking(tmp_path, monkeypatch, {"top_k": 20})
    assert main(["generate", "x", "--model", "m"]) == 0
    assert FakeLLM.last.calls[0][1] == SamplingParams(temperature=0, top_k=20, max_tokens=256)


@pytest.mark.parametrize("arguments", [["generate", "a"], ["generate", "a", "--stream"]])
def test_quiet_shows_results_alone_even_on_a_terminal(capsys, monkeypatch, arguments):
    terminal(monkeypatch, "stdout", "stderr")
    assert ran(capsys, *arguments, "--model", "m", "-q") == (0, "A\n", "")
    assert not FakeLLM.last.progress
    assert "tokens/s" in ran(capsys, *arguments, "--model", "m", "--quiet", "--stats")[2]


def test_quiet_still_tells_errors(capsys):
    assert ran(capsys, "generate", "fail", "--model", "m", "-q")[::2] == (
        1,
        "dcpjax: error: --max-tokens must be smaller, but is not\n",
    )


def test_verbose_tells_what_was_opened_and_what_is_asked_of_sampling(capsys):
    opened, chosen, statistics = ran(capsys, "generate", "a", "--model", "m", "-v", "--top-p", "0.5")[2].splitlines()
    assert opened.startswith("m opened in ")
    assert opened.endswith(
        "tp=2 x dcp=4, cache of 23,296 tokens stored 2x, weights bfloat16, cache float32, up to 60 tokens a request, "
        "on cpu"
    )
    assert chosen == "sampling with temperature=0.7, top_p=0.5, top_k=40, max_tokens=256"
    assert statistics.startswith("tp=2 x dcp=4")
    assert FakeLLM.last.progress


def test_time_spent_compiling_is_named_and_is_no_speed():
    line = statistics_line(FakeLLM("m"), prompt_tokens=1500, new_tokens=20, timing=Timing(seconds=12.0, compiling=2.0))
    assert line.endswith("1,500 prompt + 20 new tokens in 10.0 s + 2.0 s compiling, 2.0 tokens/s")
    timing = Timing(seconds=14.5, compiling=2.0, reading=2.5)
    line = statistics_line(FakeLLM("m"), prompt_tokens=1500, new_tokens=20, timing=timing)
    assert line.endswith("in 10.0 s + 2.5 s loading kept programs + 2.0 s compiling, 2.0 tokens/s")


def test_output_is_utf8_and_surrogates_are_escapes(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    main(["generate", "é\udcff", "--model", "m"])
    main(["generate", "é\udcff", "--model", "m", "--json"])
    text, record = raw.getvalue().splitlines()
    assert text == "É\\udcff".encode()
    assert json.loads(record)["text"] == "É\udcff"


def test_ctrl_c_leaves_quietly_with_130(capsys, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(FakeLLM, "generate", interrupt)
    assert ran(capsys, "generate", "a", "--model", "m") == (130, "", "")


def test_a_fault_inside_a_library_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr(FakeLLM, "generate", lambda *_: int("no number"))
    with pytest.raises(ValueError, match="invalid literal"):
        main(["generate", "a", "--model", "m"])


def test_a_file_that_cannot_be_read_is_a_sentence(capsys, monkeypatch):
    monkeypatch.setattr(FakeLLM, "generate", lambda *_: Path("/no/such/weights").read_bytes())
    code, _, err = ran(capsys, "generate", "a", "--model", "m")
    assert (code, err.count("\n"), "/no/such/weights" in err) == (2, 1, True)


# --- chat


def talk(capsys, monkeypatch, text, *flags):
    typed(monkeypatch, text)
    return ran(capsys, "chat", "--model", "m", *flags)


def test_each_piped_line_is_a_turn_and_history_is_kept(capsys, monkeypatch):
    assert talk(capsys, monkeypatch, "hi\n\nyou", "--system", "s") == (0, "HI\nYOU\n", "")
    assert FakeLLM.last.calls[1][0] == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "HI"},
        {"role": "user", "content": "you"},
    ]
    assert FakeLLM.last.calls[1][1].max_tokens == 1024


def test_commands_are_not_sent_to_the_model(capsys, monkeypatch):
    code, out, err = talk(capsys, monkeypatch, "hi\n/reset\n/help\n/quit\n/etc/hosts\n/exit\nnever\n")
    assert (code, out) == (0, "HI\n/ETC/HOSTS\n")
    assert "/reset  forget" in err
    assert "/quit must be one of /reset, /exit and /help" in err
    assert FakeLLM.last.calls[1][0] == [{"role": "user", "content": "/etc/hosts"}]


def test_a_full_conversation_says_so_and_goes_on(capsys, monkeypatch):
    code, out, err = talk(capsys, monkeypatch, f"{'a' * 50}\nb\n/reset\nc\n")
    assert (code, out) == (1, f"{'A' * 50}\nC\n")
    assert "shorter than --max-model-len=60 tokens, but has 103 with this message" in err
    assert "/reset" in err


def test_an_answer_that_was_cut_off_says_by_what(capsys, monkeypatch):
    def cut(self, prompt):
        return [StreamEvent(0, 0, "x", [1], "length")]

    monkeypatch.setattr(FakeLLM, "events", cut)
    assert talk(capsys, monkeypatch, "a\n")[2] == "(cut off at --max-tokens 1024)\n"
    assert "--max-model-len 60" in talk(capsys, monkeypatch, f"{'a' * 59}\n")[2]


def test_a_quiet_chat_says_nothing_but_answers_and_errors(capsys, monkeypatch):
    monkeypatch.setattr(FakeLLM, "events", lambda self, prompt: [StreamEvent(0, 0, "x", [1], "length")])
    assert talk(capsys, monkeypatch, "a\n", "-q") == (0, "x\n", "")
    code, out, err = talk(capsys, monkeypatch, f"{'a' * 60}\n", "-q")
    assert (code, out, err.startswith("dcpjax: error: the conversation must be shorter")) == (1, "", True)


def test_a_verbose_chat_has_statistics_after_each_answer(capsys, monkeypatch):
    assert talk(capsys, monkeypatch, "a\nb\n", "-v")[2].count("tokens/s") == 2
    assert "tokens/s" not in talk(capsys, monkeypatch, "a\n", "-v", "--no-stats")[2]


def test_a_failed_turn_is_not_kept(capsys, monkeypatch):
    code, out, err = talk(capsys, monkeypatch, "fail\nb\n")
    assert (code, out) == (1, "B\n")
    assert err == "dcpjax: error: --max-tokens must be smaller, but is not\n"
    assert len(FakeLLM.last.calls[1][0]) == 1


def test_ctrl_c_stops_the_answer_and_keeps_what_was_said(capsys, monkeypatch):
    lines = iter(["hi!more", KeyboardInterrupt, "!at once", "b", EOFError])

    def answer(prompt):
        line = next(lines)
        if isinstance(line, str):
            return line
        raise line

    terminal(monkeypatch, "stdout")
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr("builtins.input", answer)
    code, out, err = ran(capsys, "chat", "--model", "m")
    assert (code, out, FakeLLM.last.closed) == (0, "HI\n\nB\n", 3)
    assert err.count("(stopped)") == 2
    contents = [message["content"] for message in FakeLLM.last.calls[2][0]]
    assert contents == ["hi!more", "HI", "b"]


def test_ctrl_c_in_a_pipe_ends_the_command(capsys, monkeypatch):
    assert talk(capsys, monkeypatch, "hi!\nb\n")[:2] == (130, "HI\n")


def test_the_prompt_of_a_redirected_chat_is_no_result(capsys, monkeypatch):
    typed(monkeypatch, "a\n")
    terminal(monkeypatch, "stdin")
    code, out, err = ran(capsys, "chat", "--model", "m")
    assert (code, out, err.count("> ")) == (0, "A\n", 2)


def test_a_model_that_cannot_chat_is_refused_at_once(capsys, monkeypatch):
    monkeypatch.setattr(FakeLLM, "tokenizer", None)
    code, _, err = talk(capsys, monkeypatch, "a\n")
    assert (code, err.startswith("dcpjax: error: chat must have a model with a tokenizer")) == (2, True)


# --- env


def test_env_tells_versions_devices_and_cache(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("dcpjax.cli.env.cache_folder", lambda: tmp_path)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "file").write_bytes(b"12345")
    found = json.loads(ran(capsys, "env", "--json")[1])
    assert found["versions"]["dcpjax"] == dcpjax.__version__
    assert found["cache"] == {"path": str(tmp_path), "bytes": 5}
    assert sum(found["devices"].values()) >= 1
    assert found["cpu_kernels"]["available"]
    assert found["cpu_kernels"]["ffi"] == "0.3"
    monkeypatch.setattr("dcpjax.cli.env.OPTIONAL", ("no-such-package",))
    table = dict(line.split(maxsplit=1) for line in ran(capsys, "env")[1].splitlines())
    assert table["no-such-package"] == "not installed"
    assert table["cache"] == f"{tmp_path} (0.0 MB)"


KERNELS = {"available": True, "numba": "0.68.1", "tbb": "2022.3.0", "ffi": "0.3", "amx": False}


@pytest.mark.parametrize(
    ("found", "line"),
    [
        (KERNELS, "numba 0.68.1, tbb 2022.3.0, FFI 0.3, no AMX"),
        (KERNELS | {"amx": True}, "numba 0.68.1, tbb 2022.3.0, FFI 0.3, AMX"),
        (
            KERNELS | {"tbb": None},
            "numba 0.68.1, one thread: tbb is not installed (pip install 'dcpjax[cpu]'), FFI 0.3, no AMX",
        ),
        (
            {"available": False, "reason": "numba is not installed (pip install 'dcpjax[cpu]')"},
            "not in use: numba is not installed (pip install 'dcpjax[cpu]')",
        ),
    ],
)
def test_env_tells_which_kernels_for_cpus_are_in_use_and_why_not(found, line, capsys, monkeypatch):
    monkeypatch.setattr("dcpjax.models.kernels.cpu.support.details", lambda: found)
    assert json.loads(ran(capsys, "env", "--json")[1])["cpu_kernels"] == found
    assert f"cpu kernels      {line}" in ran(capsys, "env")[1].splitlines()


# --- as a process


def command(*arguments, python=(), **options):
    return subprocess.run(
        [sys.executable, *python, "-m", "dcpjax", *arguments], capture_output=True, text=True, check=False, **options
    )


@pytest.fixture
def nine_heads(tmp_path):
    """A model folder of nothing but a config: nine query heads, three KV heads."""
    (tmp_path / "config.json").write_text(json.dumps(NINE_HEADS))
    assert open_model(tmp_path).config == NINE_HEADS
    return str(tmp_path)


@pytest.mark.parametrize("python", [[], ["-O"]])
def test_an_illegal_layout_is_refused_with_the_legal_ones(nine_heads, python):
    layout = ["--tensor-parallel-size", "8", "--decode-context-parallel-size", "1"]
    done = command("generate", "a", "--model", nine_heads, *layout, python=python)
    with pytest.raises(ValueError) as refused:
        check_layout(Layout(tensor_parallel_size=8), 9, 3)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"dcpjax: error: {names_to_flags(str(refused.value))}\n"
    assert "--decode-context-parallel-size must suit --tensor-parallel-size=8" in done.stderr


def test_an_unknown_flag_is_refused_in_one_line():
    done = command("generate", "a", "--temprature", "0")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "dcpjax: error: unknown flag --temprature; did you mean --temperature?\n"


def test_a_reader_that_went_away_is_no_error():
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "dcpjax", "--help"], stdout=writing, stderr=subprocess.PIPE, check=False
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")


def test_help_survives_python_without_docstrings():
    done = command("generate", "--help", python=["-OO"])
    assert (done.returncode, "--tensor-parallel-size" in done.stdout) == (0, True)
