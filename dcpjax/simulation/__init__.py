"""Recorded traffic through the engine's own scheduler, on a machine that need not exist."""
