"""How the next token is chosen: sampling options as arrays, the jitted sampler, and masks from grammars.

`sampler_arrays` turns the options of the requests in a step into arrays; `sampler` and `processors` apply them to the
logits on the device. Knows requests and logits; knows nothing about models, the KV cache, scheduling or meshes.
"""
