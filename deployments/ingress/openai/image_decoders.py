"""Decoder processes, and the places of requests that wait for one: few images are read at a time."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

from cluster.admission.fair_slots import FairSlots, SlotsFull
from cluster.process.processes import start_connected
from deployments.ingress.access.callers import current_tenant
from deployments.ingress.messages.terms import within_request_time
from deployments.ingress.openai.image_decoder import MODULE, PIXELS_OF_CPU_S, DecodeJob, DecodeReply
from deployments.records.errors import InvalidRequest, Overloaded, QueueFull

MAX_READERS: Final = 2  # processes that decode at once; they have a low priority
MAX_WAITING: Final = 64  # requests whose images are not read yet: their bodies take memory
_CPU_S: Final = 2.0  # a sound file takes a fifth of that
_PATIENCE: Final = 20.0  # wall-clock time for a processor second: a machine may be busy
_START_S: Final = 60.0  # wall-clock time for a process to start, likewise
_END_S: Final = 5.0
_MAX_REPLY_BYTES: Final = 2**16
_STARTS: Final = 2  # an idle process may end just when it gets a job
ResultT = TypeVar("ResultT")


class DecoderProcesses:
    """Processes that decode images, started when they are needed. Thread-safe; a call blocks until it is done."""

    def __init__(self, max_processes: int = MAX_READERS, cpu_s: float = _CPU_S) -> None:
        self._cpu_s = cpu_s
        self._free = threading.BoundedSemaphore(max_processes)
        self._idle: list[_DecoderProcess] = []

    def decode(
        self,
        data: bytes,
        field: str,
        max_pixels: int,
        max_result_pixels: int,
        *,
        is_base64: bool = False,
        max_frames: int = 0,
        max_video_pixels: int = 0,
    ) -> tuple[DecodeReply, bytes]:
        """Return form and pixels of a file, or of one in base64, with at most `max_pixels`.

        An image of more than `max_result_pixels` is scaled down to them. With `max_frames` it may be a video, of so
        many frames and of `max_video_pixels` in all. Raises InvalidRequest naming `field` for a file that
        cannot be read with the processor time and the memory that its pixels need; Overloaded when no
        process starts, or answers.
        """
        video = max_frames, max_video_pixels
        job = DecodeJob(len(data), is_base64, max_pixels, max_result_pixels, self._cpu_s, *video)
        with self._free:
            for _ in range(_STARTS):
                process = self._take_idle() or _DecoderProcess()
                try:
                    reply, pixels = process.run_job(job, data)
                except TimeoutError:
                    process.kill()
                    raise Overloaded("images cannot be read now: the machine is too busy; try again") from None
                except (EOFError, OSError, ValueError, TypeError):  # the last two: another answer than expected
                    _explain_end(process.wait(), field)
                    continue
                self._idle.append(process)
                if reply.problem:
                    raise InvalidRequest(f"{field}: {reply.problem}", field)
                return reply, pixels
        raise Overloaded("images cannot be read now: the processes that read them do not start; try again")

    def _take_idle(self) -> _DecoderProcess | None:
        while self._idle:
            process = self._idle.pop()
            if process.is_alive:
                return process
            process.wait()
        return None

    def close(self) -> None:
        """End the processes that are idle."""
        while self._idle:
            self._idle.pop().kill()


class _DecoderProcess:
    """One process, which does one job at a time. It ends after a while without a job, and with this process."""

    def __init__(self) -> None:
        self._process, self._connection = start_connected(MODULE)

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def run_job(self, job: DecodeJob, data: bytes) -> tuple[DecodeReply, bytes]:
        """Return the outcome. Raises TimeoutError without one, EOFError and OSError when the process has ended."""
        connection = self._connection
        connection.send_bytes(json.dumps(job).encode())
        connection.send_bytes(data)
        num_pixels = max(job.max_pixels, job.max_video_pixels)
        if not connection.poll(_START_S + _PATIENCE * job.cpu_s * (1 + num_pixels / PIXELS_OF_CPU_S)):
            raise TimeoutError
        # The process may have read a hostile file: its answer is checked.
        reply = DecodeReply(*json.loads(connection.recv_bytes(_MAX_REPLY_BYTES)))
        pixels = connection.recv_bytes(max(4 * job.max_result_pixels, 3 * job.max_video_pixels))
        width, height = reply.file_size
        count = (reply.frames or 1) * reply.height * reply.width * reply.channels
        if len(pixels) != count or reply.channels not in (0, 3, 4) or not 0 <= reply.frames <= job.max_frames:
            raise ValueError(reply)
        return reply._replace(file_size=(width, height)), pixels

    def wait(self) -> int:
        """Return the exit code of a process that has ended, or ends now since its socket is closed."""
        self._connection.close()
        try:
            return self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def kill(self) -> None:
        self._process.kill()
        self.wait()


def _explain_end(exit_code: int, field: str) -> None:
    """Raise InvalidRequest if the file ended the process; do nothing for one that was idle or did not start."""
    if exit_code == -signal.SIGPROF:
        raise InvalidRequest(f"{field}: the image takes longer to decode than its pixels need", field)
    if exit_code < 0:
        how = signal.Signals(-exit_code).name
        raise InvalidRequest(f"{field}: the image cannot be read: it ended its reader by {how}", field)


DECODERS: Final = DecoderProcesses()


class ImageReaders:
    """The few slots of requests whose images are read; tenants take turns. Lives on one event loop."""

    def __init__(self, max_readers: int = MAX_READERS, max_waiting: int = MAX_WAITING) -> None:
        self._threads = ThreadPoolExecutor(max_readers, "images")
        self._slots = FairSlots(max_readers, max_waiting)

    async def read(self, function: Callable[..., ResultT], *arguments: object) -> ResultT:
        """Call a function that decodes images, in a thread, and return its result.

        The request's read slot is released first. A cancelled caller keeps the place until the thread is done.

        Raises QueueFull when too many wait already, DeadlineExceeded when the request's time is over.
        """
        async with within_request_time("its images were read"):
            try:
                await self._slots.acquire(current_tenant.get())
            except SlotsFull as full:
                text = f"server busy: the images of {full.num_waiting} requests wait to be read, the maximum; try again"
                raise QueueFull(text) from None
            work = asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)
            work.add_done_callback(self._release)
            return await asyncio.shield(work)

    def _release(self, work: asyncio.Future[Any]) -> None:
        if not work.cancelled():
            work.exception()  # its caller may have gone
        self._slots.release()
