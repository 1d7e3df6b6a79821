"""Bodies of OpenAI's requests and responses. Knows nothing about files, lines or connections."""
