"""Pictures of a sharded cache, of merging and of load, each with the numbers it shows.

Every function returns `(figure, numbers)`: a matplotlib figure that shows itself in a notebook and saves with
`figure.savefig(path)`, and plain data to check or to keep. Needs `pip install 'dcpjax[plots]'`; importing this does
not.
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
