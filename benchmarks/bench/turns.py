"""Several works in turns, each in a thread of its own and only one at a time.

A disturbance of the machine then hits all alike.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

HandOver = Callable[[], None]


class _Worker(threading.Thread):
    def __init__(self, work: Callable[[HandOver], None]) -> None:
        super().__init__(daemon=True)
        self.work = work
        self.go = threading.Semaphore(0)
        self.back = threading.Semaphore(0)
        self.error: BaseException | None = None
        self.ended = False

    def run(self) -> None:
        self.go.acquire()
        try:
            self.work(self.hand_over)
        except BaseException as error:
            self.error = error
        self.ended = True
        self.back.release()

    def hand_over(self) -> None:
        """Let the others run, and return when it is this one's turn again."""
        self.back.release()
        self.go.acquire()


def in_turns(works: Sequence[Callable[[HandOver], None]]) -> None:
    """Run all works to their end.

    A work calls its argument wherever the others may go on; the first error ends them all.
    """
    workers = [_Worker(work) for work in works]
    for worker in workers:
        worker.start()
    while workers:
        for worker in workers:
            worker.go.release()
            worker.back.acquire()
            if worker.error is not None:
                raise worker.error
        workers = [worker for worker in workers if not worker.ended]
