"""A form with one file, read piece by piece: its file is never whole in memory, nor in a file of this process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from deployments.records.errors import InvalidRequest

_MAX_FIELDS: Final = 16
_MAX_FIELD_BYTES: Final = 2**12
_MAX_NAME_CHARS: Final = 255
_FILE: Final = "file"


class FileForm:
    """The fields of a form and the name of its file. The fields may come before the file and after it."""

    def __init__(self, piece_bytes: int) -> None:
        self.fields: dict[str, str] = {}
        self.file_name: str | None = None
        self._piece_bytes = piece_bytes
        self._piece = bytearray()
        self._header = (bytearray(), bytearray())
        self._disposition = b""
        self._field: str | None = None  # None within the file
        self._value = bytearray()

    async def read(self, request: Request, take: Callable[[bytes], Awaitable[None]]) -> None:
        """Read the form; `take` gets the file, in pieces of `piece_bytes` or less.

        Raises InvalidRequest for another body than a form with a file.
        """
        type_, options = parse_options_header(request.headers.get("content-type", ""))
        boundary = options.get(b"boundary", b"")
        if type_ != b"multipart/form-data" or not 0 < len(boundary) <= 256:
            raise InvalidRequest("expected a body of multipart/form-data with a file and its purpose")
        try:
            await self._parse(boundary, request.stream(), take)
        except FormParserError as error:
            raise InvalidRequest(f"the form cannot be read: {error}") from None
        if self.file_name is None:
            raise InvalidRequest("file: the form has no file", _FILE)

    async def _parse(
        self, boundary: bytes, pieces: AsyncIterator[bytes], take: Callable[[bytes], Awaitable[None]]
    ) -> None:
        parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin_part,
                "on_header_field": self._add_header_name,
                "on_header_value": self._add_header_value,
                "on_header_end": self._end_header,
                "on_headers_finished": self._end_headers,
                "on_part_data": self._add_data,
                "on_part_end": self._end_part,
            },
        )
        async for piece in pieces:
            parser.write(piece)
            while len(self._piece) >= self._piece_bytes:
                await take(bytes(self._piece[: self._piece_bytes]))
                del self._piece[: self._piece_bytes]
        parser.finalize()
        if self._piece:
            await take(bytes(self._piece))

    def _begin_part(self) -> None:
        self._disposition, self._field, self._value = b"", "", bytearray()

    def _add_header_name(self, data: bytes, start: int, end: int) -> None:
        self._add_bounded(self._header[0], data[start:end])

    def _add_header_value(self, data: bytes, start: int, end: int) -> None:
        self._add_bounded(self._header[1], data[start:end])

    def _end_header(self) -> None:
        name, value = map(bytes, self._header)
        self._header = (bytearray(), bytearray())
        if name.lower() == b"content-disposition":
            self._disposition = value

    def _end_headers(self) -> None:
        _, options = parse_options_header(self._disposition)
        name = options.get(b"name", b"").decode("utf-8", "replace")
        if b"filename" in options:
            if name != _FILE or self.file_name is not None:
                raise InvalidRequest(f"{name[:80]}: expected one file, called {_FILE!r}", _FILE)
            self._field, self.file_name = None, options[b"filename"].decode("utf-8", "replace")[:_MAX_NAME_CHARS]
        elif name in self.fields or len(self.fields) == _MAX_FIELDS:
            raise InvalidRequest(f"{name[:80]}: given more than once, or one of more than {_MAX_FIELDS} fields", name)
        else:
            self._field = name

    def _add_data(self, data: bytes, start: int, end: int) -> None:
        if self._field is None:
            self._piece += data[start:end]
        else:
            self._add_bounded(self._value, data[start:end])

    def _end_part(self) -> None:
        if self._field is not None:
            self.fields[self._field] = self._value.decode("utf-8", "replace")

    def _add_bounded(self, value: bytearray, more: bytes) -> None:
        if len(value) + len(more) > _MAX_FIELD_BYTES:
            raise InvalidRequest(f"a field of the form has more than {_MAX_FIELD_BYTES} bytes")
        value += more
