import json
from pathlib import Path

import pytest
from batch_mock import MockEngine

from dcpjax.jobs.job import BatchDefaults
from dcpjax.jobs.merge import merge_parts
from dcpjax.jobs.options import BatchOptions
from dcpjax.jobs.output_file import OutputError
from dcpjax.jobs.run import BatchFiles, run_files
from dcpjax.jobs.statistics import JobStatistics

SHARDS = 3


def run(folder: Path, output: str, **options) -> JobStatistics:
    statistics, files = JobStatistics(), BatchFiles(input=folder / "in", output=folder / output)
    defaults = BatchDefaults(model="m", sampling={}, seed=0)
    engine = MockEngine(seed=len(output))
    chosen = BatchOptions(**options)
    run_files(files, chosen, defaults, lambda: (engine, {}), statistics=statistics, shown=False)
    return statistics


def sharded(folder: Path) -> list[Path]:
    """Run every shard of folder/in; the outputs."""
    for index in range(1, SHARDS + 1):
        run(folder, f"part{index}", shard=f"{index}/{SHARDS}")
    return [folder / f"part{index}" for index in range(1, SHARDS + 1)]


def lines(folder: Path, count: int = 11) -> None:
    made = [json.dumps({"prompt": f"line {number}", "id": number}) for number in range(1, count + 1)]
    (folder / "in").write_text("\n".join(made))


def whole(path: Path) -> list[dict]:
    """Records without the seconds at which they were made."""
    found = [json.loads(line) for line in path.read_bytes().splitlines()]
    for record in found:
        record["response"]["body"].pop("created", None)
    return found


def test_merged_shards_are_what_one_job_writes(tmp_path):
    content = [json.dumps({"prompt": f"line {number}", "id": number}) for number in range(20)]
    content[4] = ""
    content[7] = "no JSON"
    content[8] = content[9]  # a custom id twice, in two shards: the second line is the error
    content[12] = content[1]
    (tmp_path / "in").write_text("\n".join(content))
    run(tmp_path, "one", ordered=True)
    merged = merge_parts(tmp_path / "out", sharded(tmp_path), tmp_path / "in")
    assert whole(tmp_path / "out") == whole(tmp_path / "one")
    assert (merged.records, merged.errors, merged.checked) == (19, 3, True)


def test_the_order_of_the_parts_does_not_matter(tmp_path):
    lines(tmp_path)
    parts = sharded(tmp_path)
    merge_parts(tmp_path / "a", parts)
    merge_parts(tmp_path / "b", parts[::-1])
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_shard_goes_on_where_it_stopped_and_counts_its_own_lines(tmp_path):
    lines(tmp_path)
    parts = sharded(tmp_path)
    records = parts[1].read_bytes().splitlines(keepends=True)
    parts[1].write_bytes(b"".join(records[:2]) + records[2][:9])
    statistics = run(tmp_path, "part2", shard="2/3", resume=True)
    assert (statistics.resumed, statistics.written, statistics.total) == (2, 2, 4)
    assert merge_parts(tmp_path / "out", parts, tmp_path / "in").records == 11


def test_a_shard_does_not_go_on_with_the_output_of_another(tmp_path):
    lines(tmp_path)
    sharded(tmp_path)
    with pytest.raises(ValueError, match=r"answers line 1, which is not in `shard`=2/3; use the `shard` that"):
        run(tmp_path, "part1", shard="2/3", resume=True)


def test_missing_lines_are_named(tmp_path):
    lines(tmp_path, 40)
    parts = sharded(tmp_path)
    with pytest.raises(ValueError) as refused:
        merge_parts(tmp_path / "out", parts[:2])
    sentence = "but lines 3, 6, 9, 12, 15, 18, 21, 24, 27, 30 and 3 more are in none; name every part"
    assert sentence in str(refused.value)
    assert not (tmp_path / "out").exists()


def test_a_line_missing_at_the_end_is_seen_with_the_input(tmp_path):
    lines(tmp_path)
    parts = sharded(tmp_path)
    records = parts[1].read_bytes().splitlines(keepends=True)
    kept = [record for record in records if b'"batch_req_11_' not in record]
    parts[1].write_bytes(b"".join(kept))
    assert not merge_parts(tmp_path / "unchecked", parts).checked
    with pytest.raises(ValueError, match="but line 11 is in none; name every part"):
        merge_parts(tmp_path / "out", parts, tmp_path / "in")


def test_blank_lines_are_not_missing_with_the_input(tmp_path):
    (tmp_path / "in").write_text('{"prompt": "a"}\n\n{"prompt": "b"}\n')
    parts = sharded(tmp_path)
    with pytest.raises(ValueError, match=r"but line 2 is in none; .* --input if these lines are blank"):
        merge_parts(tmp_path / "out", parts)
    assert merge_parts(tmp_path / "out", parts, tmp_path / "in").records == 2


def test_doubled_lines_are_named_with_their_parts(tmp_path):
    lines(tmp_path)
    parts = sharded(tmp_path)
    again = tmp_path / "again"
    again.write_bytes(parts[0].read_bytes())
    with pytest.raises(ValueError, match=r"but lines 1, 4, 7 and 10 are more than once: line 1 in .*part1 and .*again"):
        merge_parts(tmp_path / "out", [*parts, again])


def test_parts_of_another_input_are_refused(tmp_path):
    lines(tmp_path)
    parts = sharded(tmp_path)
    text = (tmp_path / "in").read_text()
    (tmp_path / "in").write_text(text.replace("line 5", "line five"))
    with pytest.raises(ValueError, match=r"but line 5 of .* has changed"):
        merge_parts(tmp_path / "out", parts, tmp_path / "in")
    (tmp_path / "in").write_text(text.rpartition("\n")[0])
    with pytest.raises(ValueError, match="has fewer lines; line 11 is beyond"):
        merge_parts(tmp_path / "out", parts, tmp_path / "in")


def test_an_output_that_holds_something_is_kept_unless_told_otherwise(tmp_path):
    lines(tmp_path)
    parts = sharded(tmp_path)
    (tmp_path / "out").write_text("precious")
    with pytest.raises(ValueError, match=r"`output` must be a new file, but .* holds 8 bytes"):
        merge_parts(tmp_path / "out", parts)
    assert (tmp_path / "out").read_text() == "precious"
    assert merge_parts(tmp_path / "out", parts, overwrite=True).records == 11


def test_a_part_is_not_written_over(tmp_path):
    lines(tmp_path)
    parts = sharded(tmp_path)
    with pytest.raises(ValueError, match="must not be one of its parts"):
        merge_parts(parts[1], parts, overwrite=True)


def test_what_is_no_output_of_a_job_is_refused(tmp_path):
    lines(tmp_path)
    with pytest.raises(OutputError, match="must hold records of dcpjax batch only, but line 1 is none"):
        merge_parts(tmp_path / "out", [tmp_path / "in"])
    with pytest.raises(OutputError, match="must be a file that can be read, but is not: No such file"):
        merge_parts(tmp_path / "out", [tmp_path / "nothing"])
