"""EngineThread: one background thread steps the engine for consumers in any thread and any event loop.

The thread lives while there is work. Only it touches the engine: callers leave commands, which it takes between two
steps, so nobody needs a lock on the engine, and an event loop never waits for a forward pass. It knows no tensors.
"""

import asyncio
import atexit
import itertools
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from hf_sparsekv.engine.consumer import Callback, Consumer, Steps
from hf_sparsekv.engine.mailbox import Mailbox
from hf_sparsekv.engine.output import RequestOutput
from hf_sparsekv.engine.ownership import OneProcess
from hf_sparsekv.errors import EngineError, RequestError

_log = logging.getLogger(__name__)


class EngineThread:
    """Streams of outputs from one engine; every method may be called from any thread.

    Args:
        engine: nobody else may step it while a stream is open.
        context: makes what the thread runs in, such as the engine's CUDA device.
    """

    def __init__(self, engine: Steps, context: Callable[[], AbstractContextManager[Any]] = nullcontext) -> None:
        self._engine, self._context = engine, context
        self._ids, self.process = itertools.count(), OneProcess()
        self._routes: dict[str, Consumer] = {}
        """By live request; the thread's alone."""
        self._outputs: deque[RequestOutput] | None = None
        """What is still to be delivered, while consumers are being told; the thread's alone."""
        self.arrival_s: float | None = None
        """While the thread takes a request in: when its client handed it in, by `time.perf_counter`. A step may have
        been in progress then, which the client waits for too."""
        # All below belong to whoever holds `_changed`.
        self._changed = threading.Condition()
        self._commands: deque[tuple[Callable[[], None], Future[Any]]] = deque()
        self._listening: dict[Consumer, str] = {}
        """With the request's id."""
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._is_closed = False
        atexit.register(_close, weakref.ref(self))

    # --- consumers ------------------------------------------------------------------------------------------------

    async def stream(
        self,
        prompt: str | Sequence[int],
        params: Any = None,
        *,
        config: Any = None,
        request_id: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Run one request; its outputs as they come, the finished one last.

        The request is queued when the first output is asked for. A consumer that falls behind gets what it missed in
        one output. Cancelling the consumer or closing the generator aborts the request.

        Args:
            prompt, params, config, request_id: as for `Engine.add_request`.
        Raises:
            RequestError, ConfigError: the request is refused.
            EngineError: the engine failed, or was closed meanwhile.
        """
        loop, news = asyncio.get_running_loop(), asyncio.Event()
        mailbox = Mailbox(lambda: loop.call_soon_threadsafe(news.set))
        name, _ = self._submit(mailbox, prompt, params, config, request_id)
        try:
            is_finished = False
            while not is_finished:
                self.process.check()
                await news.wait()
                news.clear()
                output = mailbox.take()
                if output is not None:
                    is_finished = output.is_finished
                    yield output
        finally:
            self._cancel(name, mailbox)

    def iterate(
        self,
        prompt: str | Sequence[int],
        params: Any = None,
        *,
        config: Any = None,
        request_id: str | None = None,
    ) -> Generator[RequestOutput, None, None]:
        """As `stream`, for a thread without an event loop: waits for each output."""
        news = threading.Event()
        mailbox = Mailbox(news.set)
        name, _ = self._submit(mailbox, prompt, params, config, request_id)
        try:
            is_finished = False
            while not is_finished:
                self.process.check()
                news.wait()
                news.clear()
                output = mailbox.take()
                if output is not None:
                    is_finished = output.is_finished
                    yield output
        finally:
            self._cancel(name, mailbox)

    def add_request(
        self,
        prompt: str | Sequence[int],
        params: Any = None,
        *,
        on_output: Callable[[RequestOutput | BaseException], object],
        config: Any = None,
        request_id: str | None = None,
    ) -> str:
        """Queue a request whose outputs go to a function; its id, once the engine has taken it in.

        Waits for the step in progress. An `on_output` that raises has its request aborted.

        Args:
            prompt, params, config, request_id: as for `Engine.add_request`.
            on_output: called in the engine's thread, so it must be quick, and wait for nothing here. After a finished
                output or an EngineError nothing follows.
        Raises:
            RequestError, ConfigError: the request is refused; `on_output` is never called.
            EngineError: the engine failed, or was closed.
        """
        name, accepted = self._submit(Callback(on_output), prompt, params, config, request_id)
        accepted.result()
        return name

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request; what it had so far, or None when no such request is live. Waits for the step in progress.

        Whoever consumes the request gets the same output as its last one.
        """
        self.process.check()
        answer: Future[RequestOutput | None] = Future()

        def command() -> None:
            output = self._engine.abort(request_id)
            if output is not None:
                self._deliver(output)
            answer.set_result(output)

        with self._changed:
            if self._thread is None:
                return None  # nothing is live without it
            self._commands.append((command, answer))
        return answer.result()

    # --- the owner of the engine ----------------------------------------------------------------------------------

    @property
    def is_elsewhere(self) -> bool:
        """Whether the engine belongs to the thread or to another process, and not to the caller."""
        thread = self._thread
        return self.process.is_forked or (thread is not None and thread is not threading.current_thread())

    def note_aborted(self, output: RequestOutput) -> None:
        """Pass on the end of a request that a consumer aborted while it was being told something."""
        if self._is_telling:
            assert self._outputs is not None
            self._outputs.append(output)

    @property
    def _is_telling(self) -> bool:
        """Whether the caller is a consumer, called by the thread."""
        return self._thread is threading.current_thread() and self._outputs is not None

    def give_way(self, call: str) -> None:
        """Return once the caller may use the engine: the thread lets go of it as soon as no stream is open.

        Args:
            call: what the caller wants to do, for the message.
        Raises:
            RequestError: a stream is open, or the caller is a consumer that is being told of an output.
            EngineError: the engine has failed in the thread, or belongs to another process.
        """
        self.process.check()
        if self._is_telling:
            raise RequestError(f"{call} while an output is delivered: take note of it, and call from another thread")
        with self._changed:
            while self.is_elsewhere:
                if self._listening:
                    raise RequestError(
                        f"{call} while a background thread steps the engine for {len(self._listening)} open streams: "
                        "finish or close them first, or use stream() here too"
                    )
                self._changed.wait()
            if self._failure is not None:
                raise _failed(self._failure)

    def close(self) -> None:
        """End every open stream with an EngineError and stop after the step in progress; once closed, always closed."""
        if self.process.is_forked:
            return  # its owner does
        with self._changed:
            self._is_closed = True
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _submit(
        self, consumer: Consumer, prompt: str | Sequence[int], params: Any, config: Any, request_id: str | None
    ) -> tuple[str, "Future[None]"]:
        """Have the thread add a request; its id, and what tells that it was accepted."""
        self.process.check()
        accepted: Future[None] = Future()
        arrival_s = time.perf_counter()

        def command() -> None:
            self.arrival_s = arrival_s
            try:
                self._engine.add_request(prompt, params, config=config, request_id=name)
            except Exception as error:  # noqa: BLE001 (a prompt's or a tokenizer's: this consumer's alone)
                self._drop(consumer)
                _fail(consumer, error)
                accepted.set_exception(error)
                return
            finally:
                self.arrival_s = None
            self._routes[name] = consumer
            accepted.set_result(None)

        with self._changed:
            if self._failure is not None:
                raise _failed(self._failure)
            if self._is_closed:
                raise EngineError("the engine is closed: make a new one")
            if self._thread is None:
                self._start()
            name = self._free_name() if request_id is None else request_id
            self._listening[consumer] = name
            self._commands.append((command, accepted))
        return name, accepted

    def _cancel(self, name: str, consumer: Consumer) -> None:
        """Abort a request that nobody listens to any more, if it is still live."""
        if self.process.is_forked:
            return

        def command() -> None:
            if self._routes.get(name) is consumer:  # the name may be another's by now
                del self._routes[name]
                self._engine.abort(name)

        with self._changed:
            if self._listening.pop(consumer, None) is not None:
                self._commands.append((command, Future()))

    def _free_name(self) -> str:
        taken = self._listening.values()
        return next(name for name in (f"stream-{i}" for i in self._ids) if name not in taken)

    def _start(self) -> None:
        if self._engine.has_unfinished:
            raise RequestError(
                "stream() while requests of add_request() or generate() are running: finish them with step() first"
            )
        # A daemon, so that an interrupted program ends; `close` still runs before the interpreter goes down.
        thread = threading.Thread(target=self._run, name="hf-sparsekv-engine", daemon=True)
        thread.start()
        self._thread = thread

    # --- the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with self._context():
                while self._obey():
                    self._deliver_all(self._engine.step())
        except BaseException as error:  # noqa: BLE001 (whatever it is: the alternative is streams that hang)
            _log.exception("the engine has failed: every open stream ends")
            self._let_go(_failed(error), failure=error)

    def _obey(self) -> bool:
        """Run the commands that have come; whether there is anything to step, having let go of the engine if not."""
        while True:
            with self._changed:
                is_closed = self._is_closed
                command = self._commands[0][0] if self._commands else None
                is_idle = command is None and not self._engine.has_unfinished
                if is_idle and not is_closed:
                    self._thread = None
                    self._changed.notify_all()
                    return False
            if is_closed:
                for name in self._routes:
                    self._engine.abort(name)
                self._let_go(EngineError("the engine was closed while this request was running"))
                return False
            if command is None:
                return True
            command()
            # Only now, so that whoever waits for its answer is told if it fails.
            with self._changed:
                self._commands.popleft()

    def _deliver_all(self, outputs: Iterable[RequestOutput]) -> None:
        self._outputs = deque(outputs)
        while self._outputs:
            self._deliver(self._outputs.popleft())
        self._outputs = None

    def _deliver(self, output: RequestOutput) -> None:
        consumer = self._routes.get(output.request_id)
        if consumer is None:
            return
        if output.is_finished:
            del self._routes[output.request_id]
            self._drop(consumer)
        try:
            consumer.put(output)
        except Exception:  # noqa: BLE001 (such as an event loop that was closed with the stream open)
            _log.exception("the consumer of request %r failed: the request is aborted", output.request_id)
            self._cancel(output.request_id, consumer)

    def _drop(self, consumer: Consumer) -> None:
        with self._changed:
            self._listening.pop(consumer, None)

    def _let_go(self, reason: EngineError, failure: BaseException | None = None) -> None:
        """Leave the engine for good; who still waits for something is told why it will not come."""
        with self._changed:
            consumers, self._listening = self._listening, {}
            commands, self._commands = self._commands, deque()
            self._routes.clear()
            self._failure, self._thread = failure, None
            self._changed.notify_all()
        for consumer in consumers:
            _fail(consumer, _copy(reason))
        for _, answer in commands:
            if not answer.done():
                answer.set_exception(_copy(reason))


def _fail(consumer: Consumer, error: BaseException) -> None:
    try:
        consumer.fail(error)
    except Exception:  # noqa: BLE001 (nobody is left to be told)
        _log.exception("a consumer of the engine's outputs failed")


def _failed(error: BaseException) -> EngineError:
    failure = EngineError(f"the engine has failed ({type(error).__name__}: {error}): close it and make a new one")
    failure.__cause__ = error
    return failure


def _copy(error: EngineError) -> EngineError:
    """An error of one's own to raise: tracebacks of several threads do not belong in one."""
    own = EngineError(*error.args)
    own.__cause__ = error.__cause__
    return own


def _close(thread: "weakref.ref[EngineThread]") -> None:
    here = thread()
    if here is not None:
        here.close()
