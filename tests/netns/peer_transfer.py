"""An extent between two network namespaces: two nodes with a link of their own, as far as the kernel is concerned.

Not collected by pytest: it needs root and iproute2. Run it by hand: `python tests/netns/peer_transfer.py`.
It makes two namespaces joined by a veth pair and takes them away again, whatever happens. The serving node is then
cut off in the middle of a transfer, without a word, as when a machine loses its power.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import xxhash

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from cluster.peers.client import PeerClient  # noqa: E402
from cluster.peers.protocol import PeerAddress  # noqa: E402
from cluster.peers.server import PeerServer  # noqa: E402
from cluster.records.errors import PeerUnavailable  # noqa: E402
from weights.records.manifest import ExtentRef  # noqa: E402

SECRET = b"only of this test"
SERVER, CLIENT = f"atelier-s-{os.getpid()}", f"atelier-c-{os.getpid()}"
HOST, PORT = "10.213.0.1", 7001
NBYTES = 64 * 2**20
DATA = np.random.default_rng(11).integers(0, 256, NBYTES, np.uint8)  # the same in every process


def main() -> None:
    if len(sys.argv) > 1:
        {"serve": serve, "fetch": fetch, "fetch-cut": fetch_cut}[sys.argv[1]]()
        return
    with namespaces():
        server = start(SERVER, "serve")
        try:
            assert server.stdout is not None
            assert server.stdout.readline() == "listening\n"
            for role in ("fetch", "fetch-cut"):
                assert start(CLIENT, role).wait(60) == 0, role
        finally:
            server.kill()
            server.wait()


@contextlib.contextmanager
def namespaces() -> Iterator[None]:
    try:
        ip(f"netns add {SERVER}")
        ip(f"netns add {CLIENT}")
        ip(f"-n {SERVER} link add veth0 type veth peer name veth0 netns {CLIENT}")
        for name, host in ((SERVER, HOST), (CLIENT, "10.213.0.2")):
            ip(f"-n {name} addr add {host}/24 dev veth0")
            ip(f"-n {name} link set veth0 up")
        yield
    finally:
        for name in (SERVER, CLIENT):
            subprocess.run(["ip", "netns", "del", name], check=False)


def ip(command: str) -> None:
    subprocess.run(["ip", *command.split()], check=True)


def start(namespace: str, role: str) -> subprocess.Popen[str]:
    command = ["ip", "netns", "exec", namespace, sys.executable, __file__, role]
    return subprocess.Popen(command, stdout=subprocess.PIPE if role == "serve" else None, text=True)


class Memory:
    """Every extent is the data. The link goes down with the range of "cut" that is asked for as the `cut_at`-th."""

    def __init__(self, cut_at: int = 0) -> None:
        self._cut_at = cut_at
        self._asked = 0

    def lookup(self, id_: str) -> np.ndarray:
        self._asked += id_ == "cut"
        if id_ == "cut" and self._asked == self._cut_at:
            ip("link set veth0 down")  # no FIN, no RST: silence
        return DATA

    def resident_ids(self) -> list[str]:
        return []

    def look_soon(self, id_: str) -> None: ...


def serve() -> None:
    with PeerServer(Memory(cut_at=8), SECRET, host=HOST, port=PORT):
        print("listening", flush=True)
        time.sleep(120)


def fetch() -> None:
    with PeerClient(SECRET) as client:
        for _ in range(3):
            out = np.ones(NBYTES, np.uint8)
            (share,) = client.fetch_extent([PeerAddress(HOST, PORT)], extent("whole"), lambda out=out: out).shares
            assert np.array_equal(out, DATA)
            print(f"fetched {share.nbytes} bytes at {share.nbytes / share.seconds / 1e9:.2f} GB/s")


def fetch_cut() -> None:
    """The rest comes from a second peer, here on the client's own node."""
    out = np.zeros(NBYTES, np.uint8)
    ip("link set lo up")
    start_s = time.monotonic()
    with PeerServer(Memory(), SECRET, host="127.0.0.1") as second, PeerClient(SECRET, timeout_s=1.0) as client:
        shares = client.fetch_extent([PeerAddress(HOST, PORT), second.address], extent("cut"), lambda: out).shares
        assert np.array_equal(out, DATA)
        assert sum(share.nbytes for share in shares) == NBYTES
        assert shares[-1].address == second.address
        took_s = time.monotonic() - start_s
        try:
            client.fetch_extent([PeerAddress(HOST, PORT)], extent("cut"), lambda: out)
        except PeerUnavailable as error:
            print(f"cut off: {[share.nbytes for share in shares]} bytes from either peer in {took_s:.2f} s; {error}")
        else:
            raise AssertionError("fetched from a node that is cut off")
    assert took_s < 10


def extent(id_: str) -> ExtentRef:
    return ExtentRef(id=id_, pack="p", offset=0, nbytes=NBYTES, checksum=xxhash.xxh3_128_hexdigest(DATA.data))


if __name__ == "__main__":
    main()
