"""Small configs and a model folder with a tokenizer, shared by tests of several rooms."""

import json
import shutil
from pathlib import Path
from typing import Any

from harness import GOLDENS
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from dcpjax.models.config import MoEConfig

TEMPLATE = (
    "{% for message in messages %}<u>{{ message['content'] }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
PLAIN_EXPERTS = MoEConfig(
    experts=10,
    experts_per_token=3,
    intermediate_size=1,
    shared_size=0,
    scoring="softmax",
    correction_bias=False,
    groups=1,
    groups_per_token=1,
    normalise=False,
    scale=1.0,
    dense_layers=frozenset(),
)
NINE_HEADS = {  # config.json of nine query heads and three KV heads
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 36,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 64,
}


def character_model(path: Path, **generation_config: Any) -> Path:
    """The weights of a golden checkpoint (vocabulary 101), printable characters as tokens, three control tokens."""
    shutil.copytree(GOLDENS / "smollm2", path)
    characters = ["Ġ", "Ċ", *(chr(code) for code in range(33, 127))]
    vocabulary = {token: number for number, token in enumerate(["<e>", "<u>", "<a>", *characters])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<e>", "<u>", "<a>")])
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<e>", "chat_template": TEMPLATE}))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": 0, **generation_config}))
    return path
