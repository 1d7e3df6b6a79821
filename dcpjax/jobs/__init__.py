"""Batch jobs: a JSONL file of requests in, a JSONL file of results out.

Every finished request has a whole record on disk at once, so that a job can be resumed after any interruption. Reads
lines, runs them on an engine and writes records; the bodies of requests and responses are `dcpjax.openai`'s.
"""
