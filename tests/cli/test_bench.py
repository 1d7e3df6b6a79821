import json
import subprocess
import sys

import pytest
from harness import GOLDENS

from dcpjax.cli import main
from dcpjax.cli.bench import to_text
from dcpjax.planning import measure
from dcpjax.planning.measure import BenchResult, BenchRow, BenchSizes, bench
from dcpjax.runtime.runner import Runner
from dcpjax.sharding.mesh import Layout

MODEL = str(GOLDENS / "smollm2")  # nine heads, three KV heads, 512 positions
SIZES = BenchSizes(batch_sizes=(1, 3), context_length=40, steps=2)
SMALL = {"block_size": 16, "max_num_batched_tokens": 32, "dtype": "float32"}


def measured(dcp, batch_size, step_seconds, prefill):
    return BenchRow(tp=1, dcp=dcp, batch_size=batch_size, step_seconds=step_seconds, prefill_tokens_per_second=prefill)


MADE_UP = BenchResult(
    model="m",
    machine="8 cpu devices",
    dtype="bfloat16",
    kv_cache_dtype="float32",
    sizes=SIZES,
    rows=(
        measured(1, 1, 0.1, 100.0),
        measured(1, 3, 0.2, 100.0),
        measured(8, 1, 0.05, 50.0),
        measured(8, 3, 0.4, 50.0),
    ),
)


def test_ratios_are_speed_over_the_first_layout_at_the_same_batch_size():
    assert [MADE_UP.ratios(row) for row in MADE_UP.rows] == [(1.0, 1.0), (1.0, 1.0), (2.0, 0.5), (0.5, 0.5)]
    assert [row.tokens_per_second for row in MADE_UP.rows] == pytest.approx([10, 15, 20, 7.5])


def test_text_says_what_was_measured_and_has_a_row_for_each():
    heading, *rest = to_text(MADE_UP).splitlines()
    assert heading == "m, weights bfloat16, cache float32; 8 cpu devices"
    assert "median of 2 decode steps, run one by one at 40 tokens per request" in rest[0]
    assert [line.split() for line in rest[-2:]] == [
        ["1", "x", "8", "1", "50.0", "20.0", "2.00", "50.0", "0.50"],
        ["1", "x", "8", "3", "400.0", "7.5", "0.50", "50.0", "0.50"],
    ]


@pytest.fixture(scope="module")
def steps():
    """A run on two layouts, and every step that it launched: (cached rows, tokens, copies) by layout."""
    launched, launch = [], Runner.launch

    def note(runner, step):
        entries = [(entry.start, entry.count, entry.copy, entry.samples) for entry in step]
        launched.append((runner.model.layout.dcp, entries))
        return launch(runner, step)

    layouts = [Layout(tensor_parallel_size=size, decode_context_parallel_size=size) for size in (1, 2)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Runner, "launch", note)
        found = bench(MODEL, layouts, SIZES, SMALL)
    return found, launched


def test_every_layout_and_batch_size_has_a_row(steps):
    found, _ = steps
    assert [(row.tp, row.dcp, row.batch_size) for row in found.rows] == [(1, 1, 1), (1, 1, 3), (1, 2, 1), (1, 2, 3)]
    assert all(row.step_seconds > 0 and row.prefill_tokens_per_second > 0 for row in found.rows)
    assert (found.dtype, found.machine.startswith("8 cpu devices")) == ("float32", True)


@pytest.mark.parametrize("dcp", [1, 2])
def test_prompts_run_in_chunks_their_cache_is_copied_and_decodes_stand_at_the_end(steps, dcp):
    mine = [step for layout, step in steps[1] if layout == dcp]
    prefill = [[(0, 32, None, False)], [(32, 8, None, True)]] * (1 + measure.PROMPTS)
    copies = [[(39, 1, None, True), (39, 1, (n, 3 + n), True), (39, 1, (n, 6 + n), True)] for n in range(3)]
    decodes = [[(39, 1, None, True)] * size for size in (1, 3) for _ in range(measure.WARM_UP + 2)]
    assert mine == [*prefill, *copies, *decodes]


def test_the_command_prints_json(capsys, monkeypatch):
    asked = {}

    def noted(*arguments, progress):
        asked.update(zip(("model", "layouts", "sizes", "options"), arguments, strict=True), progress=progress)
        return MADE_UP

    monkeypatch.setattr(measure, "bench", noted)
    flags = ["--layouts", "8,1", "1,8", "--batch-sizes", "1,2", "--block-size", "16", "--json", "-q"]
    assert main(["bench", "--model", "m", *flags]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][3]["decode_ratio"] == 0.5
    assert [(layout.tp, layout.dcp) for layout in asked["layouts"]] == [(8, 1), (1, 8)]
    assert asked["sizes"] == BenchSizes(batch_sizes=(1, 2), context_length=512, steps=10)
    assert (asked["model"], asked["options"], asked["progress"]) == ("m", {"block_size": 16}, False)
    assert main(["bench", "--model", "m", "-tp", "8", "-dcp", "2"]) == 0
    assert capsys.readouterr().out == f"{to_text(MADE_UP)}\n"
    assert [(layout.tp, layout.dcp) for layout in asked["layouts"]] == [(4, 2)]


MISTAKES = [
    (["--model", MODEL, "8,1"], "bench must have flags only, but has '8,1'; remove it"),
    ([], "--model must name a model, but is not given"),
    (
        ["--model", MODEL, "--layouts", "8"],
        "--layouts must be pairs TP,DCP of at least 1, but hold '8'; use 8,1 or 1,8",
    ),
    (["--model", MODEL, "--layouts", "0,1"], "--layouts must be pairs TP,DCP of at least 1, but hold '0,1'; use"),
    (["--model", MODEL, "--layouts", "1,2", "-tp", "2"], "--layouts must not come with --tensor-parallel-size, which"),
    (["--model", MODEL, "-tp", "8", "-dcp", "3"], "--decode-context-parallel-size must divide"),
    (["--model", MODEL, "--batch-sizes", "0"], "--batch-sizes must be at least 1, but is 0; use 1"),
    (["--model", MODEL, "--batch-sizes", "1,x"], "--batch-sizes must be an integer, but is 'x'"),
    (["--model", MODEL, "--context-length", "1"], "--context-length must be at least 2, but is 1; use 2"),
    (["--model", MODEL, "--steps", "0"], "--steps must be at least 1, but is 0; use 1"),
    (["--model", MODEL, "--layouts", "1,8", "--block-size", "12"], "--block-size must be a multiple of"),
    (["--model", MODEL, "--context-length", "513"], "--context-length must be at most the model's 512 positions, but"),
    (
        ["--model", MODEL, "--layouts", "1,8", "8,1"],
        "--decode-context-parallel-size must suit --tensor-parallel-size=8",
    ),
    (["--model", MODEL, "--kv-cache-memory-bytes", "9"], "--kv-cache-memory-bytes must hold 32 requests of 512 tokens"),
    (["--model", MODEL, "--max-num-seqs", "9"], "unknown flag --max-num-seqs; did you mean --max-num-batched-tokens?"),
]


@pytest.mark.parametrize("python", [[], ["-O"]])
def test_mistakes_are_refused_in_a_sentence_before_any_weight_is_read(python):
    code = (
        "from dcpjax.checkpoint.weight_files import SafetensorsSource\nfrom dcpjax.cli import main\n"
        "SafetensorsSource.read = None\n"
        f"print([main(['bench', *words]) for words in {[words for words, _ in MISTAKES]}])"
    )
    done = subprocess.run([sys.executable, *python, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [2] * len(MISTAKES)
    for line, (_, sentence) in zip(done.stderr.splitlines(), MISTAKES, strict=True):
        assert line.startswith(f"dcpjax: error: {sentence}")
