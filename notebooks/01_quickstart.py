# %% [markdown]
# # Quickstart
#
# A real small model, SmolLM2-135M-Instruct, on eight virtual CPU devices: generate, stream, stop early, and look at how
# the cache lies on the devices. Needs `pip install 'dcpjax[gguf,plots]'`. The model is fetched once, 98 MB; the first
# run compiles for a minute or two and keeps the programs.

# %%
from threading import Event

from dcpjax import LLM, SamplingParams, plots

llm = LLM(
    "smollm2-135m",
    tensor_parallel_size=8,
    decode_context_parallel_size=8,
    max_num_seqs=1,  # one after the other, in steps of one shape each for prompts and decodes: less to compile
    max_num_batched_tokens=32,
    kv_cache_memory_bytes=4 * 2**20,  # per device
    progress=False,
)
llm

# %% [markdown]
# ## Generate
#
# One result for each prompt, in their order. `temperature=0` is greedy: the same tokens for every mesh shape.

# %%
results = llm.generate(
    ["The Fibonacci numbers are", "The three primary colours are"], SamplingParams(temperature=0, max_tokens=16)
)
for result in results:
    print(repr(result.prompt), "->", repr(result.outputs[0].text))
assert [len(result.outputs[0].token_ids) for result in results] == [16, 16]

# %% [markdown]
# ## Chat
#
# `chat` renders the messages through the model's own template.

# %%
(answer,) = llm.chat(
    [{"role": "user", "content": "What is the capital of France?"}], SamplingParams(temperature=0, max_tokens=16)
)
assert "Paris" in answer.outputs[0].text
answer

# %% [markdown]
# ## Stream, and stop when enough is said
#
# `stream` yields text as it becomes certain. Leaving the loop, or closing the generator, ends the request and frees its
# blocks. A stop button is one flag that the loop looks at:
#
# ```python
# button = ipywidgets.Button(description="Stop")
# button.on_click(lambda _: stop.set())
# ```
#
# Here the flag is set by the loop itself, so that this runs without anybody to click.

# %%
stop = Event()
events = llm.stream_chat([{"role": "user", "content": "Tell me a long story."}], SamplingParams(max_tokens=200, seed=1))
text = ""
for event in events:
    text += event.text
    if len(text.split()) >= 12:  # the click
        stop.set()
    if stop.is_set():
        break
events.close()
print(text)

stats = llm.stats()
assert stats.num_running == stats.num_used_blocks == 0
stats

# %% [markdown]
# ## Where the cache lies
#
# The model has 9 query heads and 3 KV heads: tensor parallelism alone cannot put it on eight devices. Here each device
# holds every eighth position of every head. The map is read from the shards of the cache, not from what was asked for.

# %%
figure, held = plots.duplication_map(llm)
assert held["copies"] == 1
assert held["bytes_stored"] == held["bytes_unique"]
assert len(set(held["bytes_per_device"].values())) == 1
figure

# %% [markdown]
# Position `p` of a request lies on rank `p % 8`, so that the ranks have equally much to do at every length.

# %%
figure, owned = plots.ownership_strip(llm.runner.geometry, tokens=37)
assert owned["strips"][0]["ranks"] == [position % 8 for position in range(37)]
assert owned["strips"][0]["tokens_per_rank"] == [5, 5, 5, 5, 5, 4, 4, 4]
figure
