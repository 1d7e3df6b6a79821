"""Bodies of OpenAI's requests and responses, with vLLM's additions.

A request body becomes a checked `RequestBody`, a result becomes a response body. Both are plain mappings: nothing here
knows files, lines of a batch or connections, so that batch jobs and a server can share it.
"""
