"""Attention and products written for one kind of device, each with a plain XLA form as its reference."""
