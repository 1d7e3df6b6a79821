import pytest

from dcpjax.jobs.options import BatchOptions


@pytest.mark.parametrize("name", ["resume", "overwrite", "retry_errors", "ordered"])
def test_a_switch_is_true_or_false(name):
    with pytest.raises(ValueError, match=f"`{name}` must be True or False, but is 1"):
        BatchOptions.from_options({name: 1})


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"fsync": "often"}, "`fsync` must be one of always, interval, never, but is 'often'"),
        ({"max_line_bytes": 1}, "`max_line_bytes` must be an integer of at least 2, but is 1; use 2 or more"),
        ({"max_in_flight": True}, "`max_in_flight` must be an integer of at least 1, but is True; use 1 or more"),
        ({"grace_seconds": float("nan")}, "`grace_seconds` must be a number of seconds, at least 0, but is nan"),
        ({"grace_seconds": float("inf")}, "`grace_seconds` must be a number of seconds, at least 0, but is inf"),
        ({"resume": True, "overwrite": True}, "`resume` must not come with `overwrite`"),
        ({"retry_errors": True}, "`retry_errors` must come with `resume`, but stands alone; add `resume`"),
        ({"tool_call_parser": "gpt"}, "`tool_call_parser` must be one of auto, none, hermes, .*, but is 'gpt'"),
        ({"reasoning_parser": "r1"}, "`reasoning_parser` must be one of auto, none, deepseek_r1, qwen3, but is 'r1'"),
        ({"ordred": True}, "unknown option 'ordred'; did you mean ordered?"),
    ],
)
def test_a_value_out_of_range_is_refused_with_a_legal_one(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        BatchOptions.from_options(options)
