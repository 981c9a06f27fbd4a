"""Frames between keepers: what one writes the other reads, and nothing else is taken for a frame."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.peers import protocol
from cluster.peers.protocol import PeerAddress, Request, Status

numbers = st.integers(0, 2**64 - 1)


@given(st.from_regex(r"[A-Za-z0-9_-]{1,64}", fullmatch=True), numbers, numbers, numbers, st.booleans())
def test_a_request_is_decoded_as_it_was_encoded(
    id_: str, offset: int, nbytes: int, transfer: int, is_doubt: bool
) -> None:
    frame = protocol.encode_request(Request(id_, offset, nbytes, transfer, is_doubt))
    assert len(frame) == protocol.REQUEST_BYTES
    assert protocol.decode_request(frame) == Request(id_, offset, nbytes, transfer, is_doubt)


@given(st.binary(max_size=120), st.booleans())
def test_any_bytes_are_decoded_or_refused(frame: bytes, has_magic: bool) -> None:
    frame = protocol.MAGIC + b"\0\3" + frame if has_magic else frame
    for decode in (
        protocol.decode_greeting,
        protocol.decode_hello,
        protocol.decode_welcome,
        protocol.decode_request,
        protocol.decode_reply,
    ):
        with contextlib.suppress(ValueError):
            assert decode(frame)


@pytest.mark.parametrize("id_", [b"", b"a/b", b"\xff", b"a\0b", b"a" * 65])
def test_an_id_that_no_extent_can_have(id_: bytes) -> None:
    frame = protocol.MAGIC + struct.pack("!HBBQQQ", protocol.VERSION, 0, len(id_), 7, 0, 1) + id_[:64].ljust(64, b"\0")
    with pytest.raises(ValueError, match="is no extent id"):
        protocol.decode_request(frame)


def test_a_purpose_that_no_request_has() -> None:
    frame = protocol.encode_request(Request("ab", 0, 1, 7))
    with pytest.raises(ValueError, match="purpose 2 of a request"):
        protocol.decode_request(frame[:6] + b"\2" + frame[7:])


def test_bytes_after_the_id_are_refused() -> None:
    frame = protocol.encode_request(Request("ab", 0, 1, 7))
    with pytest.raises(ValueError, match="is no extent id"):
        protocol.decode_request(frame[:-1] + b"x")


@pytest.mark.parametrize(
    ("frame", "decode"),
    [
        (protocol.encode_greeting(Status.OK, bytes(32)), protocol.decode_greeting),
        (protocol.encode_hello(bytes(32), bytes(32)), protocol.decode_hello),
        (protocol.encode_request(Request("ab", 1, 2, 3)), protocol.decode_request),
        (protocol.encode_reply(Status.OK, 3, 5), protocol.decode_reply),
    ],
)
def test_frames_of_others_are_refused(frame: bytes, decode: Callable[[bytes], object]) -> None:
    assert decode(frame)
    with pytest.raises(ValueError, match=r"b'HTTP' is not the beginning of a frame \(b'ATPX'\)"):
        decode(b"HTTP" + frame[4:])
    with pytest.raises(ValueError, match="protocol version 4, this node speaks version 3"):
        decode(frame[:4] + b"\0\4" + frame[6:])


def test_the_layout_is_the_one_that_other_nodes_read() -> None:
    assert protocol.encode_request(Request("ab", 1, 2, 3)) == (
        b"ATPX\x00\x03\x00\x02" + bytes(7) + b"\x03" + bytes(7) + b"\x01" + bytes(7) + b"\x02" + b"ab" + bytes(62)
    )
    assert protocol.encode_reply(Status.OUT_OF_RANGE, 3, 5) == b"ATPX\x00\x03\x00\x04\x00\x05" + bytes(7) + b"\x03"


def test_addresses_read_as_usual() -> None:
    assert str(PeerAddress("10.0.0.1", 7)) == "10.0.0.1:7"
    assert str(PeerAddress("fe80::1", 7)) == "[fe80::1]:7"
