"""The page at "/", as it is sent and as Chromium shows it: its numbers are those of /metrics, its chat is the API's."""

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from chromium import PROGRAM, Browser, Page, chromium
from prometheus_client.parser import text_string_to_metric_families
from serving import Served, served

from dcpjax.api.sampling_params import SamplingParams
from dcpjax.api.structured_outputs import StructuredOutputsParams

MARKUP = '<img src=x onerror="window.ran = 1"><script>window.ran = 1</script>\\n{}"'
in_browser = pytest.mark.skipif(PROGRAM is None, reason="no Chromium is installed")


def test_the_page_asks_nobody_else_and_runs_no_other_script(server):
    with server.http() as http:
        made = http.get("/")
        assert http.head("/").status_code == 200
    assert made.headers["content-type"] == "text/html; charset=utf-8"
    assert not re.search(r"""\b(src|href|action)="(?!data:|metrics")|@import|url\(|\son\w+=|\sstyle=""", made.text)
    policy = dict(part.split(" ", 1) for part in made.headers["content-security-policy"].split("; "))
    assert (policy["default-src"], policy["connect-src"], policy["frame-ancestors"]) == ("'none'", "'self'", "'none'")
    assert all(re.fullmatch(r"'sha256-[\w+/]{43}='", policy[name]) for name in ("script-src", "style-src"))
    assert "unsafe" not in made.headers["content-security-policy"]


def test_the_root_path_without_its_slash_leads_to_the_page(llm):
    with served(llm, root_path="/llm") as server, server.http() as http:
        made = http.get(server.url)
        assert (made.status_code, made.headers["location"]) == (307, "/llm/")
        assert "<title>dcpjax</title>" in http.get(f"{server.url}/").text


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium(tmp_path_factory.mktemp("chromium")) as made:
        yield made


@contextmanager
def opened(browser: Browser, server: Served) -> Iterator[Page]:
    """The page of a server, once it shows numbers. It must ask nobody else, and nothing in it may fail."""
    page = browser.page(f"{server.url}/")
    page.wait("element('state').textContent === 'connected'")
    yield page
    asked = [event["request"]["url"] for event in page.events("Network.requestWillBeSent")]
    assert all(url.startswith((f"{server.url}/", "data:")) for url in asked)
    assert page.events("Runtime.exceptionThrown") == []
    assert [event for event in page.events("Log.entryAdded") if event["entry"]["source"] == "security"] == []


def numbers(server: Served) -> dict[str, float]:
    """The samples of /metrics by name, those of ranks by name and rank."""
    with server.http() as http:
        text = http.get("/metrics").text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {sample.name + sample.labels.get("rank", ""): sample.value for sample in samples}


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


@in_browser
def test_the_numbers_are_those_of_the_metrics(browser, server, client):
    for _ in range(2):  # the second finds the first one's prompt
        client.completions.create(model="tiny", prompt="a prompt of some length " * 4, max_tokens=7)
    known = numbers(server)
    hits, queries = (known[f"vllm:prefix_cache_{name}_total"] for name in ("hits", "queries"))
    assert 0 < hits < queries
    with opened(browser, server) as page:
        assert page.text("#model") == "tiny"
        assert page.run("document.title") == "tiny · dcpjax"
        assert page.text("#generated-total") == f"{known['vllm:generation_tokens_total']:,.0f} in all"
        assert page.text("#prompt-total") == f"{known['vllm:prompt_tokens_total']:,.0f} in all"
        assert page.text("#hit-rate") == percent(hits / queries)
        assert page.text("#hits") == f"{hits:,.0f} of {queries:,.0f} tokens"
        assert (page.text("#running"), page.text("#waiting"), page.text("#cache")) == ("0", "0", "0.0 %")


def plant(server: Served, **changed: Any) -> None:
    """Let the server's numbers be others, until its engine runs again."""
    engine = server.service.engine
    engine.stats = replace(engine.stats, **changed)


@in_browser
def test_every_rank_has_a_bar_as_long_as_its_share(browser, server):
    stats = server.service.engine.stats
    slots = stats.num_blocks * stats.block_size // 8
    tokens = tuple(slots * eighth // 8 for eighth in (0, 1, 2, 3, 4, 6, 7, 8))
    plant(server, num_running=1234, num_waiting=5, num_used_blocks=stats.num_blocks // 2, tokens_per_rank=tokens)
    try:
        known = numbers(server)
        with opened(browser, server) as page:
            assert (page.text("#running"), page.text("#waiting")) == ("1,234", "5")
            assert page.text("#cache") == percent(known["vllm:kv_cache_usage_perc"])
            shares = [known[f"dcpjax:kv_cache_usage_perc{rank}"] for rank in range(8)]
            shown = [
                line.split("\n") for line in page.run("[...element('ranks').children].map((row) => row.innerText)")
            ]
            assert shown == [[f"rank {rank}", percent(share)] for rank, share in enumerate(shares)]
            page.wait("element('ranks').getAnimations({ subtree: true }).length === 0")
            width = "[...document.querySelectorAll('.bar')].map((bar) => bar.clientWidth / bar.parentNode.clientWidth)"
            assert page.run(width) == pytest.approx(shares, abs=0.02)
            plant(server, tokens_per_rank=tokens[:2])
            page.run("look()")
            assert page.run("element('ranks').children.length") == 2
    finally:
        plant(server, **vars(stats))


@in_browser
def test_rates_are_tokens_over_the_time_between_two_looks(browser, server):
    stats = server.service.engine.stats
    try:
        with opened(browser, server) as page:
            page.run("window.clock = 1e6; performance.now = () => window.clock; look()")
            page.run("window.clock += 10_000")
            more = {"generated_tokens": stats.generated_tokens + 505, "prompt_tokens": stats.prompt_tokens + 20_000}
            plant(server, **more)
            page.run("look()")
            assert (page.text("#generated-rate"), page.text("#prompt-rate")) == ("50.5", "2,000")
            assert re.match(r"M[\d., L]+$", page.run("element('prompt-history').lastElementChild.getAttribute('d')"))
            page.run("window.clock += 10_000; look()")
            assert page.text("#generated-rate") == "0.0"
            plant(server, generated_tokens=0)  # as after a new start
            page.run("look()")
            assert "-" not in page.text("#generated-rate")
    finally:
        plant(server, **vars(stats))


@in_browser
def test_a_server_that_does_not_answer_is_shown_until_it_does(browser, server, monkeypatch):
    def broken() -> bytes:
        raise RuntimeError("out of luck")

    with opened(browser, server) as page:
        with monkeypatch.context() as patch:
            patch.setattr(server.service.metrics, "text", broken)
            page.run("look()")
            assert page.text("#state") == "the server does not answer"
        page.run("look()")
        assert page.text("#state") == "connected"


def ask(page: Page, text: str) -> None:
    page.type("#message", text)
    page.press_enter()
    page.wait("running === null && element('log').lastElementChild.classList.contains('note')")


def answers(page: Page) -> list[str]:
    return page.run("[...document.querySelectorAll('.assistant')].map((each) => each.textContent)")


@pytest.fixture
def greedy(server: Served, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets what the server takes for what a request leaves out."""

    def set_defaults(**options: Any) -> None:
        monkeypatch.setattr(server.service, "defaults", {"temperature": 0, **options})

    return set_defaults


@in_browser
def test_the_chat_is_a_conversation_with_the_model(browser, server, llm, greedy):
    greedy(max_tokens=12)

    def wanted(*texts: str) -> str:
        messages = [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(texts)]
        made = llm.chat(messages, SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)
        return made[0].outputs[0].text

    with opened(browser, server) as page:
        ask(page, "Hello")
        first = wanted("Hello")
        assert answers(page) == [first]
        assert re.fullmatch(r"\d+ tokens( · [\d.]+ per second)? · first after [\d.]+ s", page.text("#log .note"))
        ask(page, "More")
        assert answers(page) == [first, wanted("Hello", first, "More")]
        page.click("#clear")
        assert page.run("element('log').childElementCount") == 0
        ask(page, "More")
        assert answers(page) == [wanted("More")]


@in_browser
def test_an_answer_is_seen_while_it_grows_and_can_be_stopped(browser, server, llm, greedy, monkeypatch):
    greedy(ignore_eos=True)
    advance, steps, may_go_on = llm.advance, iter(range(10)), threading.Event()

    def held() -> None:
        if next(steps, None) is None:
            assert may_go_on.wait(60)
        advance()

    monkeypatch.setattr(llm, "advance", held)
    with opened(browser, server) as page:
        try:
            page.type("#message", "Hello")
            page.press_enter()
            page.wait("document.querySelector('.assistant')?.textContent.length >= 5")
            assert page.run("element('send').hidden && !element('stop').hidden && element('log').ariaBusy === 'true'")
            page.click("#stop")
            page.wait("document.querySelector('#log .note')?.textContent === 'stopped'")
        finally:
            may_go_on.set()
        page.wait("looks.at(-1).running === 0")
        assert page.run("!element('send').hidden && element('stop').hidden && element('log').ariaBusy === 'false'")
    assert llm.stats().num_used_blocks == 0


@in_browser
def test_what_the_model_says_and_is_called_is_text(browser, llm):
    with served(llm, served_model_name=[MARKUP]) as server:
        server.service.defaults = {"structured_outputs": StructuredOutputsParams(choice=[MARKUP])}
        with opened(browser, server) as page:
            ask(page, MARKUP)
            assert page.text("#model") == MARKUP
            assert answers(page) == [MARKUP]
            assert page.text(".user") == MARKUP
            assert page.run("document.querySelector('img, #log script') === null && window.ran === undefined")


@in_browser
def test_with_a_key_the_numbers_are_open_and_the_chat_asks_for_it(browser, llm):
    with served(llm, api_key=["secret"], root_path="/llm") as server:
        server.service.defaults = {"temperature": 0, "max_tokens": 4}
        with opened(browser, server) as page:
            page.wait("!element('key-row').hidden")
            ask(page, "Hello")
            assert "enter an API key" in page.text("#log .error")
            assert page.run("document.activeElement.id") == "key"
            assert page.run("element('message').value") == "Hello"  # to be sent again
            page.type("#key", "secret")
            ask(page, "")
            assert len(answers(page)) == 1
            assert page.run("localStorage.length + sessionStorage.length + document.cookie.length") == 0


@in_browser
def test_no_key_is_asked_for_where_none_is_needed(browser, server):
    with opened(browser, server) as page:
        page.run("fetch('v1/models').then((answer) => answer.text())")  # the page has asked the same before
        assert page.run("element('key-row').hidden")


@in_browser
@pytest.mark.parametrize("width", [320, 600, 1280])
def test_the_page_is_as_wide_as_the_screen(browser, llm, width):
    with served(llm, served_model_name=["a" * 200]) as server, opened(browser, server) as page:
        page.size(width, 800)
        page.run(f"say('message assistant', {'b' * 500!r})")
        assert page.run("document.documentElement.scrollWidth <= innerWidth && innerWidth") == width


@in_browser
def test_every_control_has_a_name(browser, server):
    with opened(browser, server) as page:
        page.run("element('key-row').hidden = false")
        nodes = page.call("Accessibility.getFullAXTree")["nodes"]
    named = {(node["role"]["value"], node.get("name", {}).get("value")) for node in nodes if not node["ignored"]}
    wanted = {("textbox", "Message"), ("textbox", "API key"), ("button", "Send"), ("button", "New chat")}
    assert wanted | {("log", "Chat"), ("meter", "rank 0"), ("status", "")} <= named
    assert {name for role, name in named if role in ("textbox", "button", "link")} >= {name for _, name in wanted}
    assert not [role for role, name in named if role in ("textbox", "button", "link", "meter") and not name]
