"""Replays recorded traffic through the engine's own scheduler on a simulated device with a virtual clock.

Knows traces, the engine and the planner's costs. Knows nothing about text, weights or command-line flags.
"""
