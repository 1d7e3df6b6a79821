import subprocess
import sys

import jax
import pytest
from jax.sharding import AxisType

from dcpjax.sharding.mesh import Layout, check_layout, is_legal, legal_layouts, make_mesh

LATENT = 1  # multi-head latent attention: one latent serves every query head

# devices, query heads, KV heads -> legal decode_context_parallel_size with how often the cache is stored
LEGAL = [
    (1, 9, 3, {1: 1}),
    (2, 3, 3, {2: 1}),
    (3, 9, 3, {1: 1, 3: 1}),
    (4, 6, 3, {4: 1}),
    (4, 8, 2, {1: 2, 2: 1, 4: 1}),
    (6, 12, 2, {1: 3, 3: 1, 6: 1}),  # dcp=2 would give 3 groups to 2 KV heads: one group would need both
    (7, 12, 4, {7: 1}),
    (8, 9, 3, {8: 1}),
    (8, 14, 2, {4: 1, 8: 1}),
    (8, 16, LATENT, {1: 8, 2: 4, 4: 2, 8: 1}),
    (8, 32, 8, {1: 1, 2: 1, 4: 1, 8: 1}),
    (12, 24, 4, {1: 3, 3: 1, 6: 1, 12: 1}),
    (16, 64, 8, {1: 2, 2: 1, 4: 1, 8: 1, 16: 1}),
]

SENTENCES = [
    (
        (8, 2, 9, 3),
        "decode_context_parallel_size must suit tensor_parallel_size=8 and this model (9 query heads, 3 KV heads), "
        "but is 2: 9 query heads do not divide into 8/2 = 4 head groups; "
        "legal decode_context_parallel_size on 8 devices: 8 (cache stored 1x)",
    ),
    (
        (6, 2, 12, 2),
        "decode_context_parallel_size must suit tensor_parallel_size=6 and this model (12 query heads, 2 KV heads), "
        "but is 2: 2 KV heads neither divide into 6/2 = 3 head groups nor divide 3; "
        "legal decode_context_parallel_size on 6 devices: "
        "1 (cache stored 3x), 3 (cache stored 1x), 6 (cache stored 1x)",
    ),
    (
        (8, 3, 16, LATENT),
        "decode_context_parallel_size must suit tensor_parallel_size=8 and this model (16 query heads, 1 KV heads), "
        "but is 3: 8 devices do not split into groups of 3; legal decode_context_parallel_size on 8 devices: "
        "1 (cache stored 8x), 2 (cache stored 4x), 4 (cache stored 2x), 8 (cache stored 1x)",
    ),
    ((0, 1, 8, 2), "tensor_parallel_size must be an integer of at least 1, but is 0; use 1"),
    ((4, -2, 8, 2), "decode_context_parallel_size must be an integer of at least 1, but is -2; use 1"),
    ((4, 2.0, 8, 2), "decode_context_parallel_size must be an integer of at least 1, but is 2.0; use 1"),
    ((True, 1, 8, 2), "tensor_parallel_size must be an integer of at least 1, but is True; use 1"),
]


def layout(devices: int, dcp: int) -> Layout:
    return Layout(tensor_parallel_size=devices, decode_context_parallel_size=dcp)


@pytest.mark.parametrize(("devices", "heads", "kv_heads", "legal"), LEGAL)
def test_legal_layouts_and_their_duplication_are_those_of_the_table(devices, heads, kv_heads, legal):
    found = legal_layouts(devices, heads, kv_heads)
    assert {choice.dcp: choice.duplication(kv_heads) for choice in found} == legal
    assert [choice.dcp for choice in found] == sorted(legal)
    assert all(choice.devices == devices == choice.tp * choice.dcp for choice in found)


@pytest.mark.parametrize(("devices", "heads", "kv_heads", "legal"), LEGAL)
def test_exactly_the_layouts_of_the_table_pass_the_check(devices, heads, kv_heads, legal):
    for dcp in range(1, 2 * devices + 1):
        if dcp in legal:
            check_layout(layout(devices, dcp), heads, kv_heads)
        else:
            with pytest.raises(ValueError, match=f"but is {dcp}: "):
                check_layout(layout(devices, dcp), heads, kv_heads)


def test_in_a_legal_layout_each_group_stores_the_kv_heads_that_its_query_heads_read():
    for devices in range(1, 17):
        for kv_heads in range(1, 9):
            for heads in range(kv_heads, 33, kv_heads):
                for dcp in range(1, devices + 1):
                    if is_legal(layout(devices, dcp), heads, kv_heads):
                        assert groups_are_self_contained(layout(devices, dcp), heads, kv_heads)


def groups_are_self_contained(choice: Layout, heads: int, kv_heads: int) -> bool:
    stored = [head for head in range(kv_heads) for _ in range(choice.duplication(kv_heads))]
    per_group = len(stored) // choice.tp
    queries = heads // choice.tp
    return len(stored) % choice.tp == 0 and all(
        head // (heads // kv_heads) in stored[group * per_group : (group + 1) * per_group]
        for group in range(choice.tp)
        for head in range(group * queries, (group + 1) * queries)
    )


def test_some_layout_is_legal_on_every_number_of_devices():
    assert all(legal_layouts(devices, 9, 3) for devices in range(1, 33))


@pytest.mark.parametrize(("case", "sentence"), SENTENCES)
def test_an_illegal_layout_is_refused_with_the_flag_the_numbers_and_every_legal_value(case, sentence):
    devices, dcp, heads, kv_heads = case
    with pytest.raises(ValueError) as refusal:
        check_layout(layout(devices, dcp), heads, kv_heads)
    assert str(refusal.value) == sentence


def test_python_without_asserts_refuses_the_same_layouts():
    program = f"""
from dcpjax.sharding.mesh import Layout, check_layout
assert False, "asserts are on"
for (devices, dcp, heads, kv_heads), _ in {SENTENCES!r}:
    layout = Layout(tensor_parallel_size=devices, decode_context_parallel_size=dcp)
    try:
        check_layout(layout, heads, kv_heads)
    except ValueError as error:
        print(error)
"""
    run = subprocess.run([sys.executable, "-O", "-c", program], capture_output=True, text=True, timeout=120)
    assert run.stderr == ""
    assert run.stdout.splitlines() == [sentence for _, sentence in SENTENCES]


@pytest.mark.parametrize(("devices", "dcp"), [(1, 1), (2, 2), (4, 2), (8, 1), (8, 2), (8, 8)])
def test_mesh_is_tp_by_dcp_with_auto_axes_and_neighbours_in_one_group(devices, dcp):
    mesh = make_mesh(layout(devices, dcp))
    assert mesh.axis_names == ("tp", "dcp")
    assert mesh.axis_types == (AxisType.Auto, AxisType.Auto)
    assert dict(mesh.shape) == {"tp": devices // dcp, "dcp": dcp}
    assert list(mesh.devices.flat) == jax.devices()[:devices]
    assert list(mesh.devices[0]) == jax.devices()[:dcp]


def test_mesh_takes_the_devices_it_is_given():
    last = jax.devices()[4:]
    assert list(make_mesh(layout(4, 2), last).devices.flat) == last
