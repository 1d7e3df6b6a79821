"""Paged attention for GPUs and TPUs in Pallas."""
