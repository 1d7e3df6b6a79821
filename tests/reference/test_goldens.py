"""The committed goldens are what transformers writes and computes; needs torch, knows nothing of dcpjax."""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parent))
from families import EAGER, FAMILIES
from make_goldens import GOLDENS, LEAST_MARGIN, compute, legacy, make, margin
from safetensors.numpy import load_file

pytestmark = pytest.mark.reference
every_family = pytest.mark.parametrize("name", list(FAMILIES))


def tensors(folder: Path) -> dict[str, np.ndarray]:
    shards = [load_file(path) for path in sorted(folder.glob("*.safetensors"))]
    return {name: tensor for shard in shards for name, tensor in shard.items()}


def assert_same(golden: dict[str, np.ndarray], committed: dict[str, np.ndarray]) -> None:
    assert golden.keys() == committed.keys()
    for name, expected in committed.items():
        assert golden[name].dtype == expected.dtype
        if name.endswith("logits"):
            np.testing.assert_allclose(golden[name], expected, rtol=0, atol=1e-5, err_msg=name)
        else:
            np.testing.assert_array_equal(golden[name], expected, err_msg=name)


@every_family
def test_made_again_family_equals_the_committed_one(name: str, tmp_path: Path) -> None:
    golden = make(FAMILIES[name], tmp_path)
    assert_same(golden, dict(np.load(GOLDENS / name / "golden.npz")))
    made, committed = tensors(tmp_path), tensors(GOLDENS / name)
    assert made.keys() == committed.keys()
    for key, expected in committed.items():
        np.testing.assert_array_equal(made[key], expected, err_msg=key)
    for path in tmp_path.glob("*.json"):
        assert json.loads(path.read_text()) == json.loads((GOLDENS / name / path.name).read_text()), path.name


@every_family
def test_committed_checkpoint_loads_and_gives_the_golden_logits(name: str) -> None:
    model, loading = FAMILIES[name].model.from_pretrained(GOLDENS / name, **EAGER, output_loading_info=True)
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    golden = compute(model.eval(), FAMILIES[name].seed)
    assert_same(golden, dict(np.load(GOLDENS / name / "golden.npz")))


@every_family
def test_greedy_margins_are_clear_and_no_bias_or_norm_is_trivial(name: str) -> None:
    assert margin(np.load(GOLDENS / name / "golden.npz")["greedy_logits"]) > LEAST_MARGIN
    for key, tensor in tensors(GOLDENS / name).items():
        assert tensor.dtype == np.float32
        assert np.ptp(tensor) > 0.1, f"{key} is nearly constant"


def test_llama2_is_saved_in_several_shards() -> None:
    index = json.loads((GOLDENS / "llama2" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) >= 2


def test_legacy_config_of_llama3_gives_the_same_logits(tmp_path: Path) -> None:
    committed = json.loads((GOLDENS / "llama3" / "config.legacy.json").read_text())
    assert committed == legacy(json.loads((GOLDENS / "llama3" / "config.json").read_text()))
    assert committed["rope_scaling"]["rope_type"] == "llama3"
    assert "rope_parameters" not in committed
    shutil.copy(GOLDENS / "llama3" / "config.legacy.json", tmp_path / "config.json")
    shutil.copy(GOLDENS / "llama3" / "model.safetensors", tmp_path)
    model = FAMILIES["llama3"].model.from_pretrained(tmp_path, **EAGER)
    golden = compute(model.eval(), FAMILIES["llama3"].seed)
    assert_same(golden, dict(np.load(GOLDENS / "llama3" / "golden.npz")))
