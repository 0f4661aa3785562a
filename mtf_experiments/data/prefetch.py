"""Making batches ahead of time, in a thread of its own."""

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class prefetch(Generic[T]):  # noqa: N801  (used like a function)
    """Iterates over fn(start_step), fn(start_step + 1), ..., computed up to `depth` steps ahead.

    What `fn` raises is raised by `next` at the step where it happened. `close` (or leaving a `with` block) ends the
    thread, also in the middle of a run.

    Args:
        fn: makes the item of a step; called in the background thread, one step at a time and in order.
        start_step: the first step.
        depth: how many items may wait.
        stop_step: the step before which to end; None goes on for ever.
    """

    def __init__(self, fn: Callable[[int], T], start_step: int, depth: int = 2, stop_step: int | None = None):
        if depth < 1:
            raise ValueError(f"depth must be at least 1, not {depth}")
        self._items: queue.Queue[tuple[str, T | BaseException | None]] = queue.Queue(depth)
        self._stop = threading.Event()
        self._ended = False
        self._thread = threading.Thread(
            target=self._work, args=(fn, start_step, stop_step), name="prefetch", daemon=True
        )
        self._thread.start()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if self._ended:
            raise StopIteration
        kind, item = self._items.get()
        if kind == "item":
            return item  # type: ignore[return-value]
        self.close()
        if isinstance(item, BaseException):
            raise item
        raise StopIteration

    def __enter__(self) -> "prefetch[T]":
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()

    def close(self) -> None:
        """End the thread; afterwards the iterator is at its end."""
        self._ended = True
        self._stop.set()
        self._thread.join()

    def _work(self, fn: Callable[[int], T], step: int, stop_step: int | None) -> None:
        try:
            while not self._stop.is_set() and (stop_step is None or step < stop_step):
                self._hand_over("item", fn(step))
                step += 1
            self._hand_over("end", None)
        except BaseException as error:  # whatever it is belongs to the reader
            self._hand_over("error", error)

    def _hand_over(self, kind: str, item: T | BaseException | None) -> None:
        while not self._stop.is_set():
            try:
                return self._items.put((kind, item), timeout=0.1)
            except queue.Full:
                continue
