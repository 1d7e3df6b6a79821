"""Write tests/goldens/smollm2-135m.npz: what SmolLM2-135M-Instruct says in float32 torch, from its GGUF file.

    python tests/reference/smollm2.py SmolLM2-135M-Instruct.Q4_1.gguf

Reads the file with the `gguf` package and runs it with transformers; knows nothing of dcpjax. Arrays of each run:
`<run>_prompt`, `<run>_greedy` (past the end-of-text token), `<run>_margin` (the least distance between the two best
logits) and, except for `needle`, `<run>_top_ids` and `<run>_top_logits` [step, 5].
"""

import argparse
import sys
from pathlib import Path

import gguf
import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

# So that the file runs as a script, as a module and under pytest alike.
sys.path.insert(0, str(Path(__file__).parent))
from make_goldens import GOLDENS, greedy, margin

CONFIG = LlamaConfig(
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    head_dim=64,
    max_position_embeddings=8192,
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
    rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
    bos_token_id=1,
    eos_token_id=2,
)
# GGUF name within a block -> transformers name within a layer
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
CONTROL_TOKEN = 3  # gguf.TokenType.CONTROL

CHATS = {"france": "What is the capital of France?", "sky": "Explain in two sentences why the sky is blue."}
COMPLETIONS = {"fibonacci": "The Fibonacci numbers are"}
NEEDLE = "The secret key is 48213. Remember it."
QUESTION = "What is the secret key? Answer with the number only."


def build(path: str | Path) -> LlamaForCausalLM:
    """The model of the GGUF file at `path`, dequantised to float32, with eager attention."""
    model = LlamaForCausalLM._from_config(CONFIG, dtype=torch.float32, attn_implementation="eager")
    state = {}
    for tensor in gguf.GGUFReader(path).tensors:
        weight = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        state[transformers_name(tensor.name)] = unpermute(tensor.name, weight)
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, strict=True)
    return model.eval()


def transformers_name(name: str) -> str:
    if name.startswith("blk."):
        _, layer, part, _ = name.split(".")
        return f"model.layers.{layer}.{LAYER[part]}.weight"
    return {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}[name]


def unpermute(name: str, weight: torch.Tensor) -> torch.Tensor:
    """Undo the row order of q and k: llama.cpp rotates rows (2i, 2i + 1), transformers rows (i, i + D / 2)."""
    if not name.endswith(("attn_q.weight", "attn_k.weight")):
        return weight
    heads = weight.reshape(-1, CONFIG.head_dim, weight.shape[1])
    return torch.cat((heads[:, 0::2], heads[:, 1::2]), dim=1).reshape(weight.shape)


def build_tokenizer(path: str | Path) -> PreTrainedTokenizerFast:
    """The byte-level BPE of the GGUF file at `path` with its chat template; single digits, no prefix space."""
    fields = gguf.GGUFReader(path).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    kinds = fields["tokenizer.ggml.token_type"].contents()
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"].contents()]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([t for t, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=fields["tokenizer.chat_template"].contents(),
        bos_token=tokens[1],
        eos_token=tokens[2],
    )


def chat(tokenizer: PreTrainedTokenizerFast, question: str) -> np.ndarray:
    """Ids [n] of the question in the model's chat template, ready for the answer."""
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
    )
    return np.array(tokenizer.encode(text, add_special_tokens=False), dtype=np.int32)


def filler(n: int) -> list[str]:
    """`n` varied sentences without digits."""
    who = ["A baker", "The old captain", "My neighbour", "A young engineer", "The gardener", "Her cousin", "A painter"]
    did = ["repaired", "sold", "described", "carried home", "photographed", "forgot about", "cleaned", "borrowed",
           "admired", "hid", "wrapped up"]  # fmt: skip
    what = ["a copper kettle", "the garden gate", "two wooden chairs", "a map of the coast", "the broken clock",
            "a basket of pears", "an oil lamp", "a red bicycle", "the church bell", "a letter from abroad",
            "a jar of honey", "some thick rope", "a violin"]  # fmt: skip
    when = ["before sunrise", "on a rainy morning", "after the market closed", "during the long winter",
            "while the others slept"]  # fmt: skip
    # The four lengths have no common factor, so a sentence returns only after their product.
    return [f"{who[i % 7]} {did[i % 11]} {what[i % 13]} {when[i % 5]}." for i in range(n)]


def needle_question(n_paragraphs: int = 31, place: float = 0.3) -> str:
    """About 3,000 tokens of filler with the needle at the fraction `place`, then the question.

    In a paragraph of its own the needle is found with wide margins; among other sentences this small model
    overlooks it.
    """
    sentences = filler(8 * n_paragraphs)
    paragraphs = [" ".join(sentences[i : i + 8]) for i in range(0, len(sentences), 8)]
    paragraphs.insert(int(place * n_paragraphs), NEEDLE)
    return "\n\n".join([*paragraphs, QUESTION])


def top(logits: np.ndarray, n: int = 5) -> tuple[np.ndarray, np.ndarray]:
    """Ids (int32) and values (float32) of the `n` best logits of each row, best first."""
    ids = np.argsort(-logits, axis=-1, kind="stable")[..., :n]
    return ids.astype(np.int32), np.take_along_axis(logits, ids, axis=-1)


def compute(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> dict[str, np.ndarray]:
    """Golden arrays of every run; prints the texts and the least margins."""
    prompts = {name: chat(tokenizer, question) for name, question in CHATS.items()}
    for name, text in COMPLETIONS.items():
        prompts[name] = np.array(tokenizer.encode(text, add_special_tokens=False), dtype=np.int32)
    golden = {}
    for name, prompt in prompts.items():
        tokens, logits = greedy(model, prompt, 64)
        ids, values = top(logits)
        golden |= {f"{name}_prompt": prompt, f"{name}_greedy": tokens, f"{name}_margin": margin(logits)}
        golden |= {f"{name}_top_ids": ids, f"{name}_top_logits": values}
        show(tokenizer, name, prompt, tokens, margin(logits))
    prompt = chat(tokenizer, needle_question())
    tokens, logits = greedy(model, prompt, 24)
    golden |= {"needle_prompt": prompt, "needle_greedy": tokens, "needle_margin": margin(logits)}
    show(tokenizer, "needle", prompt, tokens, margin(logits))
    if "48213" not in tokenizer.decode(tokens):
        raise ValueError("the needle's five digits must be repeated, but are not; change place or question")
    golden |= bfloat16_first_token(model, prompts["france"])
    return {key: np.asarray(value) for key, value in golden.items()}


@torch.no_grad()
def bfloat16_first_token(model: LlamaForCausalLM, prompt: np.ndarray) -> dict[str, np.ndarray]:
    """The five best first tokens after `prompt` with weights and activations in bfloat16; casts `model`."""
    logits = model.to(torch.bfloat16)(torch.tensor(prompt[None], dtype=torch.long)).logits[0, -1:].float().numpy()
    ids, values = top(logits)
    return {"france_bfloat16_top_ids": ids[0], "france_bfloat16_top_logits": values[0]}


def show(tokenizer: PreTrainedTokenizerFast, name: str, prompt: np.ndarray, tokens: np.ndarray, least: float) -> None:
    print(f"== {name}: {len(prompt)} prompt tokens, least margin {least:.5f}")
    print(f"... {tokenizer.decode(prompt)[-220:]!r}\n--> {tokenizer.decode(tokens)!r}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("gguf", type=Path)
    path = parser.parse_args().gguf
    torch.set_num_threads(1)
    golden = compute(build(path), build_tokenizer(path))
    np.savez_compressed(GOLDENS / "smollm2-135m.npz", **golden)


if __name__ == "__main__":
    main()
