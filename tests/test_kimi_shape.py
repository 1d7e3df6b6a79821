"""A published shape, cut to two layers, with random weights on eight virtual devices."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "run_kimi_shape.py"


@pytest.mark.slow
def test_kimi_k2_cut_to_two_layers_loads_and_decodes_on_eight_devices() -> None:
    """About 9 GiB with 16 of the 384 experts; the script's own default, 128, wants 18."""
    run = subprocess.run(
        [sys.executable, str(SCRIPT), "--experts", "16", "--tokens", "3"], capture_output=True, text=True, check=True
    )
    first, second = [line for line in run.stdout.splitlines() if "run" in line.split(":")[0]]
    tokens = [line[line.index("[") : line.index("]") + 1] for line in (first, second)]
    assert tokens[0] == tokens[1]
    assert len(tokens[0].split(",")) == 3
