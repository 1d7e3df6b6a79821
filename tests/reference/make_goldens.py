"""Write tests/goldens/<family>/: a tiny checkpoint saved by transformers and what transformers computes with it.

    python tests/reference/make_goldens.py [family ...]

`golden.npz` holds `prompt`, `logits` (every prompt position, one forward pass), `greedy` and `greedy_logits`,
then `short_prompt`, `short_greedy`, `long_prompt` and `long_greedy`. The weights are float32, the arithmetic float64
(transformers keeps norms, softmax and angles in float32): in float32 torch's logits differ by 3e-5 from one CPU to the
next, and no golden could be made again. Knows nothing of dcpjax.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

# So that the file runs as a script, as a module and under pytest alike.
sys.path.insert(0, str(Path(__file__).parent))
from families import FAMILIES, Family

GOLDENS = Path(__file__).parents[1] / "goldens"
# name -> (prompt tokens, greedy tokens)
RUNS = {"": (23, 24), "short_": (3, 8), "long_": (150, 16)}
LEAST_MARGIN = 1e-3


def make(family: Family, folder: Path) -> dict[str, np.ndarray]:
    """Save the family's checkpoint and its `golden.npz` under `folder`; returns the golden arrays."""
    torch.set_num_threads(1)
    model = family.build()
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder, max_shard_size=family.max_shard_size)
    golden = compute(model, family.seed)
    np.savez_compressed(folder / "golden.npz", **golden)
    return golden


def compute(model: PreTrainedModel, seed: int) -> dict[str, np.ndarray]:
    """Golden arrays of `model`, which becomes float64, for prompts drawn from `seed`.

    Raises ValueError where the two best logits of a greedy step are too close to compare tokens.
    """
    model, generator, golden = model.double(), np.random.default_rng(seed), {}
    for name, (n_prompt, n_greedy) in RUNS.items():
        prompt = generator.integers(model.config.vocab_size, size=n_prompt, dtype=np.int32)
        tokens, logits = greedy(model, prompt, n_greedy)
        if margin(logits) <= LEAST_MARGIN:
            raise ValueError(f"margins must exceed {LEAST_MARGIN}, but one is {margin(logits)}; change the seed")
        golden |= {f"{name}prompt": prompt, f"{name}greedy": tokens}
        if not name:
            golden |= {"logits": forward(model, prompt), "greedy_logits": logits}
    return golden


@torch.no_grad()
def forward(model: PreTrainedModel, prompt: np.ndarray) -> np.ndarray:
    """Logits [n, V] of one forward pass over `prompt` [n]."""
    return model(torch.tensor(prompt[None], dtype=torch.long)).logits[0].float().numpy()


def greedy(model: PreTrainedModel, prompt: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """The `n` greedy tokens after `prompt` and their logits [n, V], by transformers with its own cache."""
    model.generation_config.eos_token_id = None
    tokens = torch.tensor(prompt[None], dtype=torch.long)
    output = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=n,
        do_sample=False,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return output.sequences[0, len(prompt) :].int().numpy(), torch.cat(output.logits).float().numpy()


def margin(logits: np.ndarray) -> float:
    """The least distance between the best and the second best logit over the rows of `logits`."""
    best = np.sort(logits, axis=-1)
    return float((best[:, -1] - best[:, -2]).min())


def legacy(config: dict) -> dict:
    """`config` as transformers before version 5 wrote it: rope keys and `torch_dtype` at the top level."""
    old = {key: value for key, value in config.items() if key not in ("rope_parameters", "dtype")}
    rope = dict(config["rope_parameters"])
    theta = rope.pop("rope_theta")
    scaling = None if rope["rope_type"] == "default" else rope
    return old | {"rope_theta": theta, "rope_scaling": scaling, "torch_dtype": config["dtype"]}


def write_legacy_config(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.legacy.json").write_text(json.dumps(legacy(config), indent=2, sort_keys=True) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=list(FAMILIES), metavar="family")
    names = parser.parse_args().names
    if unknown := set(names) - set(FAMILIES):
        parser.error(f"families must be among {', '.join(FAMILIES)}, but are {', '.join(sorted(unknown))}")
    for name in names:
        golden = make(FAMILIES[name], GOLDENS / name)
        if name == "llama3":
            write_legacy_config(GOLDENS / name)
        size = sum(path.stat().st_size for path in (GOLDENS / name).iterdir())
        print(f"{name}: {size / 1000:.0f} kB, least margin {margin(golden['greedy_logits']):.4f}", flush=True)


if __name__ == "__main__":
    main()
