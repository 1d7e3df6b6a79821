"""Plots of the sharded cache, of merging and of load, each with the numbers it shows.

Every function returns `(figure, numbers)`: a matplotlib figure that a notebook displays and `figure.savefig(path)`
saves, and the plotted values as plain data. Plotting needs `pip install 'dcpjax[plots]'`; importing this package does
not. Knows loaded models, plans, simulations and recordings; knows nothing about how these are made.
"""

from dcpjax.plots.cache import duplication_map, merge_weights, ownership_strip
from dcpjax.plots.load import LoadPoint, capacity, occupancy, throughput, timeline
from dcpjax.plots.record import RecordedStep, Recording, record

__all__ = [
    "LoadPoint",
    "RecordedStep",
    "Recording",
    "capacity",
    "duplication_map",
    "merge_weights",
    "occupancy",
    "ownership_strip",
    "record",
    "throughput",
    "timeline",
]
