import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from harness import GOLDENS

from dcpjax.api.sampling_params import SamplingParams
from dcpjax.checkpoint.gguf_header import read_header
from dcpjax.checkpoint.gguf_source import GGUFSource
from dcpjax.checkpoint.model_files import open_model
from dcpjax.checkpoint.presets import PRESETS
from dcpjax.engine.request import Request
from dcpjax.engine.scheduler import Scheduled
from dcpjax.models.config import from_hf
from dcpjax.planning.hardware import HARDWARE
from dcpjax.planning.planner import plan

SCRIPTS = Path(__file__).parent.parent / "scripts"
sys.path.insert(0, str(SCRIPTS))
import check_device  # noqa: E402
from bench_prefill import chunks, prefill_operations  # noqa: E402
from bench_throughput import Answer, Kind, Profile, export, kind_of, random_prompts, report, rounds  # noqa: E402
from count_projections import HEAD, Projection, ways  # noqa: E402
from count_projections import rows as projection_rows  # noqa: E402
from measuring import row  # noqa: E402
from other_runtimes import read_all, write_gguf  # noqa: E402
from simulate_agents import B200, Agents, once_warm, simulated  # noqa: E402

LLAMA_FIELDS = {
    "llama.block_count": 1,
    "llama.context_length": 64,
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 48,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
}


def refused(script: str, *arguments: str) -> str:
    """The sentence with which a script ends itself."""
    environment = os.environ | {"PYTHONPATH": str(SCRIPTS.parent)}
    done = subprocess.run(
        [sys.executable, SCRIPTS / script, *arguments], capture_output=True, text=True, timeout=120, env=environment
    )
    assert done.returncode == 2, done.stderr
    return done.stderr.splitlines()[-1]


def entry(count: int) -> Scheduled:
    request = Request(number=0, prompt_token_ids=[1] * 9, params=SamplingParams(), max_tokens=1)
    return Scheduled(request, 0, count, [0], True)


def test_a_row_shows_medians_spreads_rates_and_how_many_times_as_long_the_others_took():
    cells = row([[0.010, 0.020, 0.030], [0.050, 0.050, 0.050]], 8, 0.25).split()
    assert cells == ["|", "20.0", "[12-28]", "400", "25%", "|", "50.0", "[50-50]", "160", "2.50"]


@pytest.mark.parametrize("length", [1, 7])
def test_the_operations_of_a_prompt_are_those_of_its_products(length):
    config = from_hf(open_model(GOLDENS / "smollm2").config)
    width, heads, head_dim = config.hidden_size, config.num_heads, config.head_dim
    attention = 2 * width * heads * head_dim + 2 * width * config.num_kv_heads * head_dim
    layer = attention + 3 * width * config.intermediate_size
    pairs = sum(position + 1 for position in range(length)) * heads * 2 * head_dim
    expected = 2 * (config.num_layers * (length * layer + pairs) + config.vocab_size * width)
    assert prefill_operations(config, length) == expected


def test_a_prompt_longer_than_a_step_of_the_engine_is_also_timed_in_its_steps():
    config = from_hf(open_model(GOLDENS / "smollm2").config)
    assert [chunks(config, length) for length in (128, 512, 2048)] == [[128], [512], [2048, 1024]]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_exported_folder_opens_as_the_same_model(dtype, tmp_path):
    source = open_model(GOLDENS / "smollm2")
    export(source, tmp_path / "model", dtype)
    copy = open_model(tmp_path / "model")
    width = np.dtype(np.float32 if dtype == "float32" else ml_dtypes.bfloat16)
    expected, found = read_all(source), read_all(copy)
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[name], expected[name].astype(width).astype(np.float32)) for name in expected)
    assert {copy.tensors().dtype(name) for name in found} == {width}
    assert from_hf(copy.config | {"dtype": None}) == from_hf(source.config | {"dtype": None, "torch_dtype": None})


@pytest.mark.parametrize(("dtype", "kind"), [("float32", 0), ("bfloat16", 30)])
def test_a_gguf_file_is_copied_with_its_fields_and_its_matrices_in_the_dtype_asked_for(dtype, kind, tmp_path):
    source, target = quantised_gguf(tmp_path / "source.gguf"), tmp_path / "target.gguf"
    write_gguf(source, target, dtype)
    before, after = read_header(source), read_header(target)
    assert after.fields == before.fields
    assert {name: tensor.type for name, tensor in after.tensors.items()} == {"matrix.weight": kind, "vector.weight": 0}
    for name in ("matrix.weight", "vector.weight"):
        values = GGUFSource(source).read(name, (slice(None),))
        width = np.float32 if name == "vector.weight" or dtype == "float32" else ml_dtypes.bfloat16
        assert np.array_equal(GGUFSource(target).read(name, (slice(None),)), values.astype(width))


def quantised_gguf(path: Path) -> Path:
    gguf: Any = pytest.importorskip("gguf")
    draw = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in LLAMA_FIELDS.items():
        writer.add_uint32(key, value)
    writer.add_array("tokenizer.ggml.tokens", ["a", "ä", ""])
    writer.add_array("tokenizer.ggml.scores", [0.5, -1.0, 0.0])
    writer.add_key_value("large.numbers", [2**40], gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.UINT64)
    kind = gguf.GGMLQuantizationType.Q4_1
    matrix = gguf.quants.quantize(draw.standard_normal((4, 64)).astype(np.float32), kind)
    writer.add_tensor("matrix.weight", matrix, raw_dtype=kind)
    writer.add_tensor("vector.weight", draw.standard_normal(64).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_random_prompts_are_the_same_for_the_same_seed_and_of_the_lengths_asked_for():
    options = argparse.Namespace(prompts=50, input=[3, 5], seed=1)
    prompts = random_prompts(options, 10)
    assert prompts == random_prompts(options, 10)
    assert prompts != random_prompts(argparse.Namespace(prompts=50, input=[3, 5], seed=2), 10)
    assert {len(prompt) for prompt in prompts} == {3, 4, 5}
    assert {token for prompt in prompts for token in prompt} == set(range(10))


def test_sides_alternate_and_the_first_round_is_not_counted():
    called, profile = [], Profile(Kind)

    def side(name: str) -> Any:
        def run() -> Answer:
            called.append(name)
            profile[name].steps += 1
            return Answer(float(len(called)), [[len(called)]])

        return run

    answers = rounds({"a": side("a"), "b": side("b")}, 2, profile)
    assert called == ["a", "b"] * 3
    assert [answer.seconds for answer in answers["b"]] == [4.0, 6.0]
    assert profile == {"a": Kind(steps=2), "b": Kind(steps=2)}


def test_the_report_divides_tokens_by_the_median_and_the_others_time_by_ours():
    answers = {
        "ours": [Answer(2.0, [[1, 2], [5, 6]]), Answer(4.0, []), Answer(9.0, [])],
        "vLLM": [Answer(1.0, [[1, 3], [4, 6]]), Answer(1.0, []), Answer(1.0, [])],
    }
    _, ours, theirs, alike = report(answers, [[7] * 10, [7] * 6]).splitlines()
    assert ours.split() == ["ours", "4.0", "[2.0-9.0]", "5", "1", "1.00"]
    assert theirs.split() == ["vLLM", "1.0", "[1.0-1.0]", "20", "4", "0.25"]
    assert alike == "the first token of 1 of 2 answers is the same"


@pytest.mark.parametrize(("counts", "kind"), [([1, 1], "decodes"), ([5, 3], "prompts"), ([1, 5], "both")])
def test_a_step_is_named_by_what_it_holds(counts, kind):
    assert kind_of([entry(count) for count in counts]) == kind


def test_an_interpreter_without_vllm_is_refused_by_name():
    pytest.importorskip("gguf")
    sentence = refused("bench_throughput.py", "--vllm-python", sys.executable)
    assert f"--vllm-python must be an interpreter that can import vllm, but is {sys.executable}: " in sentence
    assert "No module named 'vllm'" in sentence
    assert "/no/such/python" in refused("bench_throughput.py", "--vllm-python", "/no/such/python")


@pytest.mark.parametrize("script", ["bench_decode.py", "bench_prefill.py"])
def test_llama_cpp_is_refused_where_its_package_is_missing(script):
    sentence = refused(script, "--llama-cpp")
    assert "--llama-cpp must run in an environment with llama-cpp-python, but this one has none; pip" in sentence


def test_gathered_projections_are_counted_as_by_hand():
    """Llama-3.1-8B: 32 layers of 4,096 x 2 x 8 x 128 weights; B200: 8 TB/s, 2,250 TFLOPS, a link of 900 GB/s."""
    llama = Projection.of(from_hf(PRESETS["llama-3.1-8b"]))
    weights = 32 * 4096 * 2048
    assert llama.weight_bytes == 2 * weights
    decodes = ways(llama, 64, HARDWARE["b200"])
    assert decodes.replicated == pytest.approx(2 * weights / 8e12)
    assert decodes.riding == pytest.approx(2 * weights / 8 / 8e12 + 32 * 64 * 7 / 8 * 2048 * 2 / 900e9)
    assert decodes.alone == pytest.approx(decodes.riding + 32e-6)
    prompt = ways(llama, 2048, HARDWARE["b200"])
    assert prompt.replicated == pytest.approx(2 * 2048 * weights / 2250e12)
    assert Projection.of(from_hf(PRESETS["kimi-k2"])).weight_bytes == 61 * 7168 * 576 * 2


def test_the_table_of_projections_is_what_its_script_prints():
    table = "\n".join([HEAD, *projection_rows()])
    assert table in (SCRIPTS.parent / "docs" / "performance.md").read_text()


def test_agents_of_one_workload_fill_the_caches_as_published():
    """86 % with 32 users and over 100 % with 64 at dcp 1, 82 % with 512 at dcp 8, counted without a simulation."""
    agents = Agents()
    planned = plan("kimi-k2.6", **{name: B200[name] for name in B200 if not name.startswith("max_")})
    capacity = {row.dcp: row.tokens for row in planned.rows}

    def usage(dcp: int, users: int) -> float:
        own = agents.own + agents.answer / 2
        return (min(agents.groups, users) * agents.shared + users * own) / capacity[dcp]

    assert agents.shared + agents.own == pytest.approx(67_000, rel=0.002)
    assert usage(1, 32) == pytest.approx(0.86, abs=0.02)
    assert usage(1, 64) > 1
    assert usage(8, 512) == pytest.approx(0.82, abs=0.01)


def test_agents_share_the_prefix_of_their_group_and_their_own_history_grows():
    agents = Agents()
    first, next_turn, same_group, other = (agents.request(*who) for who in ((3, 0), (3, 1), (67, 0), (4, 0)))
    prefix = agents.shared // 256
    assert next_turn.hash_ids[: len(first.hash_ids)] == first.hash_ids
    assert next_turn.input_length - first.input_length == agents.new
    assert same_group.hash_ids[:prefix] == first.hash_ids[:prefix]
    assert not set(same_group.hash_ids[prefix:]) & set(first.hash_ids)
    assert not set(other.hash_ids) & set(first.hash_ids)
    assert agents.request(7, agents.turns // 2).input_length == agents.shared + agents.own


@pytest.mark.sweep
def test_the_best_of_dcp_generates_as_much_more_than_the_best_without_as_was_published():
    agents = Agents()
    warm = {who: once_warm(simulated(agents, *who), agents) for who in ((1, 32), (1, 64), (8, 512))}
    assert warm[1, 32].usage == pytest.approx(0.86, abs=0.02)
    assert warm[1, 64].most == pytest.approx(1, abs=0.01)
    assert warm[8, 512].usage == pytest.approx(0.82, abs=0.01)
    best_without = max(warm[1, 32].tokens_per_second, warm[1, 64].tokens_per_second)
    assert warm[8, 512].tokens_per_second / best_without > 3.27


def device_options(**changed: Any) -> argparse.Namespace:
    return argparse.Namespace(**{"model": "", "minutes": 11, "json": None} | changed)


def test_a_check_of_a_device_that_fails_does_not_hide_the_others():
    def broken(_: Any) -> Any:
        raise RuntimeError("no such device")

    checks = {"one": broken, "two": lambda _: {"found": 3}, "three": lambda _: check_device._judged(False, found=4)}
    report = check_device.run_checks(checks, device_options())
    assert {name: found["result"] for name, found in report.items()} == {
        "one": "failed",
        "two": "passed",
        "three": "failed",
    }
    assert report["one"]["why"] == "RuntimeError: no such device"
    assert (report["two"]["found"], report["three"]["found"]) == (3, 4)


def test_no_check_of_a_device_begins_after_the_given_minutes():
    report = check_device.run_checks({"one": lambda _: {}}, device_options(minutes=-1))
    assert report["one"]["result"] == "left out"


def test_a_wrong_sum_over_devices_fails(monkeypatch):
    assert check_device.check_smoke(device_options())["result"] == "passed"
    monkeypatch.setattr(jax.lax, "psum", lambda x, _: 2 * jax.lax.pmax(x, "all"))
    assert check_device.check_smoke(device_options())["result"] == "failed"


@pytest.mark.sweep
def test_the_check_of_this_machine_passes_and_is_written_as_json(tmp_path):
    command = [sys.executable, SCRIPTS / "check_device.py", "--model", "", "--json", tmp_path / "found.json"]
    subprocess.run(command, check=True, timeout=800, env=os.environ | {"PYTHONPATH": str(SCRIPTS.parent)})
    found = json.loads((tmp_path / "found.json").read_text())
    assert {name: each["result"] for name, each in found.items() if each["result"] != "left out"} == dict.fromkeys(
        ["versions", "smoke", "tokens", "speed", "memory"], "passed"
    )
    assert found["tokens"]["equal"] == dict.fromkeys(check_device.FAMILIES, True)
