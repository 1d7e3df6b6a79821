"""The committed goldens are what transformers writes and computes; needs torch, knows nothing of dcpjax."""

import json
import shutil
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from safetensors.numpy import load_file

pytestmark = pytest.mark.reference

GOLDENS = Path(__file__).parents[1] / "goldens"
NAMES = sorted(path.name for path in GOLDENS.iterdir() if path.is_dir())
every_family = pytest.mark.parametrize("name", NAMES)


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    """The module `make_goldens`, imported late: torch costs seconds that a deselected suite need not spend."""
    pytest.importorskip("torch")
    sys.path.insert(0, str(Path(__file__).parent))
    import make_goldens

    return make_goldens


def golden_of(name: str) -> dict[str, np.ndarray]:
    return dict(np.load(GOLDENS / name / "golden.npz"))


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


def settings(path: Path) -> dict[str, object]:
    """A JSON file less the stamp of the release of transformers that wrote it: a newer one may run this suite."""
    return {key: value for key, value in json.loads(path.read_text()).items() if key != "transformers_version"}


def test_every_family_has_a_committed_folder(maker: ModuleType) -> None:
    assert sorted(maker.FAMILIES) == NAMES


@every_family
def test_made_again_family_equals_the_committed_one(name: str, maker: ModuleType, tmp_path: Path) -> None:
    assert_same(maker.make(maker.FAMILIES[name], tmp_path), golden_of(name))
    made, committed = tensors(tmp_path), tensors(GOLDENS / name)
    assert made.keys() == committed.keys()
    for key, expected in committed.items():
        np.testing.assert_array_equal(made[key], expected, err_msg=key)
    for path in tmp_path.glob("*.json"):
        assert settings(path) == settings(GOLDENS / name / path.name), path.name


@every_family
def test_committed_checkpoint_loads_and_gives_the_golden_logits(name: str, maker: ModuleType) -> None:
    family = maker.FAMILIES[name]
    assert_same(maker.compute(family.load(GOLDENS / name), family.seed), golden_of(name))


@every_family
def test_greedy_margins_are_clear_and_no_bias_or_norm_is_trivial(name: str, maker: ModuleType) -> None:
    assert maker.margin(golden_of(name)["greedy_logits"]) > maker.LEAST_MARGIN
    for key, tensor in tensors(GOLDENS / name).items():
        assert tensor.dtype == np.float32
        assert np.ptp(tensor) > 0.1, f"{key} is nearly constant"


def test_llama2_is_saved_in_several_shards() -> None:
    index = json.loads((GOLDENS / "llama2" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) >= 2


def test_legacy_config_of_llama3_gives_the_same_logits(maker: ModuleType, tmp_path: Path) -> None:
    folder, family = GOLDENS / "llama3", maker.FAMILIES["llama3"]
    config = json.loads((folder / "config.legacy.json").read_text())
    assert config == maker.legacy(json.loads((folder / "config.json").read_text()))
    assert config["rope_scaling"]["rope_type"] == "llama3"
    assert "rope_parameters" not in config
    shutil.copy(folder / "config.legacy.json", tmp_path / "config.json")
    shutil.copy(folder / "model.safetensors", tmp_path)
    assert_same(maker.compute(family.load(tmp_path), family.seed), golden_of("llama3"))
