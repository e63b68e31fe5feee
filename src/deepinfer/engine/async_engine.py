"""An engine behind asyncio: streams with cancellation, steps on a thread of their own."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from ..errors import RequestError
from ..types import RequestOutput, SamplingParams
from .engine import Engine

__all__ = ["AsyncEngine"]


class AsyncEngine:
    """Steps an engine on one worker thread and hands its outputs to coroutines.

    Use from one event loop, as `async with AsyncEngine(engine) as served:`. The engine belongs to the worker
    meanwhile. Leaving a stream early (break, exception, cancelled task) cancels its request.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._fault: BaseException | None = None
        self._queues: dict[str, asyncio.Queue[RequestOutput | BaseException]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    async def __aenter__(self) -> AsyncEngine:
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._work, name="deepinfer-engine", daemon=True)
        self._thread.start()
        return self

    async def __aexit__(self, *_exc: object) -> None:
        """Cancels what is left and stops the worker."""
        for request_id in list(self._queues):
            self._command(lambda request_id=request_id: self.engine.cancel(request_id))
        with self._wake:
            self._closing = True
            self._wake.notify()
        assert self._thread is not None
        await asyncio.to_thread(self._thread.join)

    async def stream(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None, **fields: Any
    ) -> AsyncIterator[RequestOutput]:
        """Outputs so far (text and tokens grow), the last one finished.

        Raises:
            RequestError: it cannot be served as asked.
        """
        queue: asyncio.Queue[RequestOutput | BaseException] = asyncio.Queue()
        request_id = await self._submit(queue, prompt, params, fields)
        finished = False
        try:
            while not finished:
                output = await queue.get()
                if isinstance(output, BaseException):
                    raise output
                finished = output.finished
                yield output
        finally:
            self._queues.pop(request_id, None)
            if not finished:
                self._command(lambda: self.engine.cancel(request_id))

    async def generate(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None, **fields: Any
    ) -> RequestOutput:
        """The finished output of one prompt."""
        last: RequestOutput | None = None
        async with contextlib.aclosing(self.stream(prompt, params, **fields)) as outputs:  # type: ignore[type-var]
            async for output in outputs:
                last = output
        assert last is not None
        return last

    async def _submit(
        self,
        queue: asyncio.Queue[RequestOutput | BaseException],
        prompt: str | Sequence[int],
        params: SamplingParams | None,
        fields: dict[str, Any],
    ) -> str:
        """Add the request on the worker; its refusal is raised here."""
        loop = asyncio.get_running_loop()
        added: asyncio.Future[str] = loop.create_future()

        def add() -> None:
            try:
                if self._fault is not None:
                    raise self._fault
                request_id = self.engine.add(prompt, params, stream=True, **fields)
            except Exception as error:
                loop.call_soon_threadsafe(_settle, added, None, error)
                return
            self._queues[request_id] = queue
            loop.call_soon_threadsafe(_settle, added, request_id, None)

        if not self._command(add):
            raise RequestError("the engine takes no more requests: it is closed, or it failed") from self._fault
        try:
            return await added
        except asyncio.CancelledError:
            # the worker may add it after we are gone: cancel by whatever id it got
            self._command(lambda: self._drop(queue))
            raise

    def _drop(self, queue: asyncio.Queue[RequestOutput | BaseException]) -> None:
        for request_id in [key for key, value in list(self._queues.items()) if value is queue]:
            self._queues.pop(request_id, None)
            self.engine.cancel(request_id)

    def _command(self, command: Callable[[], None]) -> bool:
        """Have the worker run it; False once the worker has gone."""
        with self._wake:
            if self._closing or self._fault is not None:
                return False
            self._commands.append(command)
            self._wake.notify()
        return True

    def _work(self) -> None:
        try:
            while self._run_commands():
                for output in self.engine.step():
                    self._deliver(output)
        except Exception as error:  # a fault of the engine itself: nobody may wait for ever
            with self._wake:
                self._fault = error
            self._deliver_failure(error)
            for command in self._commands:  # adds that wait: their engine is at fault, and they fail with it
                command()

    def _run_commands(self) -> bool:
        """Run what was asked for; waits while there is nothing to do. False when it is time to go."""
        with self._wake:
            while not self._commands and not self.engine.has_work and not self._closing:
                self._wake.wait()
            commands = [self._commands.popleft() for _ in range(len(self._commands))]
        for command in commands:
            command()
        return not self._closing or self.engine.has_work

    def _deliver(self, output: RequestOutput) -> None:
        queue = self._queues.get(output.request_id)
        if queue is not None and self._loop is not None:
            self._loop.call_soon_threadsafe(queue.put_nowait, output)

    def _deliver_failure(self, error: BaseException) -> None:
        assert self._loop is not None
        for queue in list(self._queues.values()):
            self._loop.call_soon_threadsafe(queue.put_nowait, error)


def _settle(future: asyncio.Future[str], value: str | None, error: BaseException | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        assert value is not None
        future.set_result(value)
