import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from dcpjax.checkpoint.template_bounds import TemplateBounds
from dcpjax.checkpoint.template_process import TemplateProcess

BOUNDS = TemplateBounds(seconds=0.5, characters=1000, memory_bytes=2**28)


@pytest.fixture(scope="module")
def process() -> Iterator[TemplateProcess]:
    made = TemplateProcess(BOUNDS)
    yield made
    made.close()


def task(template: str, **changes: Any) -> dict[str, Any]:
    return {
        "template": template,
        "messages": [{"role": "user", "content": "hello"}],
        "tools": None,
        "special_tokens": {"bos_token": "<s>"},
        "added_tokens": [("<s>", True), ("<think>", False)],
        "options": {"add_generation_prompt": True, "continue_final_message": False},
        "switches": {},
        **changes,
    }


LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% if b < 0 %}x{% endif %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        (LOOPS, r"chat template must render a conversation in 0\.5 s of CPU time, but took longer"),
        ("{{ 10 ** (10 ** 8) > 1 }}", r"0\.5 s of CPU time"),  # one call, which Python itself cannot interrupt
        ("{{ 'a' * 1001 }}", r"must write at most 1,000 characters, but wrote 1,001"),
        ("{% for a in range(9999) %}{{ a }}{% endfor %}", r"must write at most 1,000 characters"),
        ("{{ 'a' * 10 ** 10 }}", r"in 268,435,456 bytes of memory, but took more"),
        # on a slow machine so many copies may take too long before they are too large
        (
            "{% set s = namespace(x='a') %}{% for a in range(40) %}{% set s.x = s.x ~ s.x %}{% endfor %}",
            "of memory|CPU",
        ),
        ("{{ 'a' | center(10000000000) }}", "of memory"),
    ],
)
def test_a_template_without_end_is_ended_and_the_next_one_renders(process, template, sentence):
    with pytest.raises(ValueError, match=sentence):
        process.render(task(template))
    assert process.render(task("{{ bos_token }}{{ messages[0].content }}")) == "<s>hello"


def test_a_text_of_the_greatest_length_is_given(process):
    assert process.render(task("{{ 'a' * 1000 }}")) == "a" * 1000


def test_an_error_of_a_template_is_quoted_in_short(process):
    with pytest.raises(ValueError, match=f"but it refused them: {'x' * 500}; see which roles"):
        process.render(task("{{ raise_exception('x' * 900) }}"))


def test_a_process_that_was_killed_is_started_anew(process):
    process.start()
    os.kill(process._process.pid, signal.SIGKILL)
    process._process.wait()
    assert process.render(task("a")) == "a"


def test_threads_get_their_own_texts(process):
    found: dict[int, str] = {}

    def render(number: int) -> None:
        found[number] = process.render(task("{{ n }}", switches={"n": number}))

    threads = [threading.Thread(target=render, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: str(number) for number in range(8)}


def test_an_interrupt_leaves_no_answer_for_the_next_task(process, monkeypatch):
    process.start()

    class Interrupted:
        def write(self, data: bytes) -> None:
            raise KeyboardInterrupt

    monkeypatch.setattr(process._process, "stdin", Interrupted())
    monkeypatch.setattr(process, "close", lambda: setattr(process, "_process", None))
    running = process._process
    with pytest.raises(KeyboardInterrupt):
        process.render(task("first"))
    monkeypatch.undo()
    running.kill()
    running.communicate()
    assert process.render(task("second")) == "second"


def test_only_control_tokens_of_the_user_are_marked(process):
    marked = process.render(task("{{ x }}|{{ bos_token }}|{{ y }}", switches={"x": "<s>", "y": "<think>"}))
    marks = "\U000f0000\U000f0001"
    assert marked == f"{marks[0]}<s>{marks[1]}|<s>|<think>"
    marked = process.render(task("<think>{% generation %}{{ y }}{% endgeneration %}", switches={"y": "<think>"}))
    assert marked == f"<think>{marks[0]}<think>{marks[1]}"


def test_what_json_lacks_is_given_by_its_type(process):
    assert process.render(task("{{ x }}", switches={"x": {1}})) == "<set>"
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(ValueError, match="messages must fit into JSON"):
        process.render(task("a", tools=deep))
