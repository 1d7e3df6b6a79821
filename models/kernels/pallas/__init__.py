"""Paged attention for GPUs and TPUs in Pallas: one device and one rank's cache; merging over ranks is elsewhere."""
