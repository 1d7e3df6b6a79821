"""The queue of requests that wait to be served.

Adding, finding the first and removing take logarithmic time at most, however many wait.
"""

import heapq
from collections.abc import Callable, Iterator

from dcpjax.engine.request import Request

SPARE = 64  # removed entries that the heap may hold beside as many as wait


class WaitingQueue:
    """Requests in the order in which they will be served; some can be set aside until they may be served.

    A removed request is left in the heap until it is at its top, so the heap's top always waits.
    """

    def __init__(self) -> None:
        self._requests: dict[int, Request] = {}  # by number: all that wait
        self._heap: list[tuple[int, int, Request]] = []  # (priority, number, request) of those not set aside
        self._aside: dict[int, list[Request]] = {}  # by the number of their first sibling

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        """All, in order. Sorts them."""
        return iter(sorted(self._requests.values(), key=lambda request: request.order))

    def __contains__(self, request: Request) -> bool:
        return request.number in self._requests

    def add(self, request: Request) -> None:
        self._requests[request.number] = request
        self._push(request)

    def first(self) -> Request | None:
        """The first to be served, except for those set aside."""
        return self._heap[0][-1] if self._heap else None

    def remove(self, request: Request) -> None:
        del self._requests[request.number]
        if len(self._heap) > 2 * len(self._requests) + SPARE:
            self._heap = [entry for entry in self._heap if entry[-1] in self]
            heapq.heapify(self._heap)
        self._drop_removed()

    def set_first_aside(self) -> None:
        """Let the others come before the first, which waits for its first sibling."""
        _, _, request = heapq.heappop(self._heap)
        assert request.first_sibling is not None
        self._aside.setdefault(request.first_sibling.number, []).append(request)
        self._drop_removed()

    def bring_back(self, may_be_served: Callable[[Request], bool]) -> None:
        """Bring back those set aside that need not wait for their first sibling any longer."""
        for sibling in [number for number, group in self._aside.items() if may_be_served(group[0])]:
            for request in self._aside.pop(sibling):
                if request in self:
                    self._push(request)

    def _push(self, request: Request) -> None:
        heapq.heappush(self._heap, (*request.order, request))

    def _drop_removed(self) -> None:
        while self._heap and self._heap[0][-1] not in self:
            heapq.heappop(self._heap)
