import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dcpjax.sharding.arrays import ArraySpec, Axis
from dcpjax.sharding.mesh import Layout, make_mesh
from dcpjax.sharding.rules import LOGICAL_AXES, Placement, Rules


@pytest.fixture(scope="module")
def place() -> Placement:
    return Placement(make_mesh(Layout(tensor_parallel_size=8, decode_context_parallel_size=4)))


@pytest.mark.parametrize(
    ("axes", "spec"),
    [
        ((), P()),
        ((None, None), P(None, None)),
        (("query", None), P(("tp", "dcp"), None)),
        ((None, "heads"), P(None, ("tp", "dcp"))),
        (("ffn", None), P(("tp", "dcp"), None)),
        (("vocab", None), P(("tp", "dcp"), None)),
        (("experts", None, None), P(("tp", "dcp"), None, None)),
        (("kv_heads", None), P("tp", None)),
        ((None, "kv_context", "kv_heads", None, None), P(None, "dcp", "tp", None, None)),
    ],
)
def test_spec_follows_from_the_logical_names(axes, spec):
    assert Rules().spec(axes) == spec


def test_spec_is_as_long_as_the_array_has_dimensions():
    for name in LOGICAL_AXES:
        assert len(Rules().spec((name, None, None))) == 3


def test_replicated_queries_lie_on_tp_alone_and_nothing_else_moves():
    usual, replicated = Rules.for_attention(replicate_q=False), Rules.for_attention(replicate_q=True)
    assert usual == Rules()
    assert replicated.spec((None, "query")) == P(None, "tp")
    for name in set(LOGICAL_AXES) - {"query"}:
        assert replicated.spec((name,)) == usual.spec((name,))


@pytest.mark.parametrize("axes", [("heads", "ffn"), ("heads", "kv_heads"), ("vocab", "kv_context"), ("ffn", "ffn")])
def test_two_logical_axes_on_one_mesh_axis_are_refused(axes):
    with pytest.raises(ValueError, match="must lie on different mesh axes, but share one of") as refusal:
        Rules().spec(axes)
    assert all(repr(axis) in str(refusal.value) for axis in axes)


def test_an_unknown_logical_axis_is_refused_by_name_with_the_known_ones():
    with pytest.raises(ValueError, match=r"logical axis must be one of .*, but is 'head'") as refusal:
        Rules().spec((None, "head"))
    assert all(repr(name) in str(refusal.value) for name in LOGICAL_AXES)


def test_an_unknown_axis_of_an_array_is_refused_by_name(place):
    with pytest.raises(ValueError, match="but is 'head'"):
        ArraySpec(axes=(Axis(8, "head"),), dtype="float32").sharding(place)


def test_a_size_that_does_not_divide_is_refused_with_the_numbers(place):
    sentence = "logical axis 'ffn' must divide by the 8 devices it lies on, but has 12 entries"
    with pytest.raises(ValueError, match=sentence):
        ArraySpec(axes=(Axis(12, "ffn"), Axis(3)), dtype="float32").sharding(place)


def test_ways_count_the_pieces_of_each_axis(place):
    assert place.tp == 2
    assert place.dcp == 4
    assert {name: place.ways(name) for name in ("ffn", "kv_heads", "kv_context", None)} == {
        "ffn": 8,
        "kv_heads": 2,
        "kv_context": 4,
        None: 1,
    }


def test_sharding_is_on_the_placements_mesh(place):
    assert place.sharding(None, "ffn") == NamedSharding(place.mesh, P(None, ("tp", "dcp")))


def test_constrain_pins_an_intermediate_value_and_keeps_its_entries(place):
    x = jnp.arange(16.0).reshape(2, 8)
    pinned = jax.jit(lambda x: place.constrain(x + 1, None, "ffn"))(x)
    assert pinned.sharding.is_equivalent_to(place.sharding(None, "ffn"), 2)
    assert {shard.data.shape for shard in pinned.addressable_shards} == {(2, 1)}
    assert jnp.array_equal(pinned, x + 1)
