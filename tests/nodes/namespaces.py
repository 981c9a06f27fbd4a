"""Nodes of a cluster as namespaces of this machine: each has its own network, processes, host name, /tmp and /dev/shm.

A boot's id too, and, where there is a C compiler for `wall_clock.c`, a wall clock that is off.

A switch, in a namespace as well, joins them; nothing of the machine's own network is touched or reached. The first
process of each namespace lives as long as its input is open. The kernel ends all others with it and takes away
network and mounts, so that nothing stays, even of a test that was killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import select
import shutil
import signal
import struct
import subprocess
import threading
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, Self

import psutil
from kit.seeding import seeded_random

PREFIX: Final = "10.214.0"
SHM_BYTES: Final = 512 * 2**20  # of memory for all that a node has in /dev/shm
# Bash, because the first process of a namespace has to take the exit status of those whose parents have ended.
FIRST_PROCESS: Final = """
set -e
mount --bind "$1" /mnt; mkdir -p /mnt/tmp; mount --bind /mnt/tmp /tmp
mount -t tmpfs -o size="$2" tmpfs /dev/shm
hostname "$3"; ip link set lo up
cat /proc/sys/kernel/random/uuid > /mnt/boot_id; mount --bind /mnt/boot_id /proc/sys/kernel/random/boot_id
exec 3<&0; cat <&3 >/dev/null & echo ready; wait $!
"""
TUNSETIFF, IFF_TAP, IFF_NO_PI, FRAME_BYTES = 0x400454CA, 0x2, 0x1000, 65536


def missing() -> str:
    """Return the reason why this machine cannot have such nodes, "" for none."""
    if os.geteuid() != 0:
        return "namespaces need root"
    if absent := [tool for tool in ("bash", "ip", "mount", "nsenter", "unshare") if not shutil.which(tool)]:
        return f"namespaces need the commands {', '.join(absent)}"
    if Path(__file__).is_relative_to("/tmp"):
        return "a node has a /tmp of its own, where this checkout would not be"
    # In a namespace of its own: whatever this leaves is gone with it.
    bridge = "ip link add v0 type veth peer name v1 && ip link add br0 type bridge"
    tried = subprocess.run(
        ["unshare", "--net", "--pid", "--mount", "--fork", "bash", "-c", bridge],
        capture_output=True,
        text=True,
        check=False,
    )
    return f"no namespaces with a bridge here: {tried.stderr.strip()}" if tried.returncode else ""


def _clock_variables(folder: Path, off_s: int) -> list[str]:
    """Return the environment of processes whose wall clock is off, with the library that it names in the folder."""
    library = folder / f"wall_clock_{off_s}.so"
    source = Path(__file__).with_name("wall_clock.c")
    if not library.exists():  # processes of a node before may still have it mapped
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", f"-DOFF_S={off_s}", "-o", library, source], check=True)
    return [f"LD_PRELOAD=/mnt/{library.name}", "RAY_LD_PRELOAD_ON_WORKERS=1"]  # or Ray's workers would not get it


class Node:
    """A machine, as far as its processes can tell. `folder` is its disk, at /mnt and, below it, /tmp.

    The wall clock of its processes is `clock_off_s` seconds ahead of this machine's.
    """

    def __init__(self, name: str, address: str, folder: Path, clock_off_s: int = 0) -> None:
        self.name, self.address = name, address
        folder.mkdir(exist_ok=True)
        self._variables = _clock_variables(folder, clock_off_s) if clock_off_s else []
        options = ["--net", "--pid", "--mount", "--ipc", "--uts", "--fork", "--mount-proc"]
        first = ["bash", "-c", FIRST_PROCESS, "node", str(folder), str(SHM_BYTES), name]
        self._holder = subprocess.Popen(
            ["unshare", *options, *first],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert self._holder.stdout is not None
        if (said := self._holder.stdout.readline()) != "ready\n":
            self._holder.kill()
            raise OSError(f"node {name} did not start: {said}{self._holder.stdout.read()}")
        (first_process,) = psutil.Process(self._holder.pid).children()
        self.pid: int = first_process.pid

    def start(self, *command: str, env: Mapping[str, str] | None = None, **options: Any) -> subprocess.Popen[str]:
        """Start a command on the node. `env` is added to this process's environment."""
        enter = ["nsenter", f"--target={self.pid}", "--net", "--pid", "--mount", "--ipc", "--uts", "--"]
        given = ["env", *self._variables, *command]
        return subprocess.Popen([*enter, *given], env=os.environ | (env or {}), text=True, **options)

    def run(self, *command: str, env: Mapping[str, str] | None = None, timeout_s: float = 120) -> str:
        """Run a command on the node and return what it printed. Raises CalledProcessError with that."""
        process = self.start(*command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        try:
            printed, _ = process.communicate(timeout=timeout_s)
        finally:
            process.kill()
        if process.returncode:
            error = subprocess.CalledProcessError(process.returncode, command, printed)
            error.add_note(printed[-4000:])
            raise error
        return printed

    def processes(self, title: str = "") -> list[psutil.Process]:
        """Return the node's processes whose command line begins so, the first one left out."""
        return [process for process in psutil.process_iter() if self._has(process, title)]

    def _has(self, process: psutil.Process, title: str) -> bool:
        try:
            here = os.readlink(f"/proc/{process.pid}/ns/pid") == os.readlink(f"/proc/{self.pid}/ns/pid")
            return here and process.pid != self.pid and " ".join(process.cmdline()).startswith(title)
        except (OSError, psutil.Error):  # it has ended just now
            return False

    def enter_network(self) -> None:
        """Let the calling thread, and only it, be in the node's network from now on."""
        with open(f"/proc/{self.pid}/ns/net") as namespace:
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.setns(namespace.fileno(), 0):
                raise OSError(ctypes.get_errno(), f"the network of {self.name} cannot be entered")

    def kill(self) -> None:
        """End the node as a loss of power does: no process of it does anything any more."""
        if self._holder.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        self._holder.wait(30)
        for pipe in (self._holder.stdin, self._holder.stdout):
            assert pipe is not None
            pipe.close()


class Wire:
    """A link that takes time and loses frames, both ways, where the kernel has no netem: two TAPs and a thread."""

    def __init__(self, ends: tuple[tuple[Node, str], tuple[Node, str]], delay_s: float, loss: float) -> None:
        with ThreadPoolExecutor(1) as pool:  # a thread that may change its network
            self._ends = [pool.submit(_open_tap, node, name).result() for node, name in ends]
        self._delay_s, self._loss, self._rng = delay_s, loss, seeded_random()
        self._wake, self._closing = os.pipe()
        self._thread = threading.Thread(target=self._carry, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the link; both its interfaces are gone with it."""
        os.close(self._closing)
        self._thread.join()
        for end in (*self._ends, self._wake):
            os.close(end)

    def _carry(self) -> None:
        others = dict(zip(self._ends, reversed(self._ends), strict=True))
        under_way: deque[tuple[float, int, bytes]] = deque()  # each as long as the others, so they arrive in order
        while True:
            wait_s = max(under_way[0][0] - time.monotonic(), 0) if under_way else None
            ready, _, _ = select.select([*self._ends, self._wake], [], [], wait_s)
            if self._wake in ready:
                return
            for end in ready:
                frame = os.read(end, FRAME_BYTES)
                if self._rng.random() >= self._loss:
                    under_way.append((time.monotonic() + self._delay_s, others[end], frame))
            while under_way and under_way[0][0] <= time.monotonic():
                _, end, frame = under_way.popleft()
                with contextlib.suppress(OSError):  # an interface that is down takes none
                    os.write(end, frame)


def _open_tap(node: Node, name: str) -> int:
    node.enter_network()
    tap = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI))
    return tap


def _add_bridge(node: Node, name: str) -> None:
    """Give the node its address at a bridge, which stays while links come and go, and has the same MAC in each life."""
    mac = f"02:00:00:00:00:{int(node.address.rpartition('.')[2]):02x}"
    node.run("ip", "link", "add", name, "address", mac, "type", "bridge")
    node.run("ip", "addr", "add", f"{node.address}/24", "dev", name)
    node.run("ip", "link", "set", name, "up")


class Network:
    """A switch and the nodes at it, for the length of a `with` block."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._wires: dict[str, Wire] = {}
        self._nodes: dict[str, Node] = {}

    def __enter__(self) -> Self:
        self.switch = Node("switch", f"{PREFIX}.254", self._folder / "switch")
        _add_bridge(self.switch, "br0")
        return self

    def __exit__(self, *_: object) -> None:
        for wire in self._wires.values():
            wire.close()
        for node in (*self._nodes.values(), self.switch):
            node.kill()

    def add(self, name: str, clock_off_s: int = 0) -> Node:
        """Return a new node at the switch, or a new one in the place of a dead node of that name, with its disk."""
        number = [*self._nodes, name].index(name) + 1
        if name in self._nodes:
            self._nodes[name].kill()
        self._nodes[name] = node = Node(name, f"{PREFIX}.{number}", self._folder / name, clock_off_s)
        _add_bridge(node, "eth0")
        self.plug(node)
        return node

    def plug(self, node: Node, delay_s: float = 0.0, loss: float = 0.0) -> None:
        """Join node and switch by a link, in place of the one that was there: a veth, or, with delay, a `Wire`."""
        port = f"to-{node.name}"
        if old := self._wires.pop(node.name, None):
            old.close()
        self.switch.start("ip", "link", "del", port, stderr=subprocess.DEVNULL).wait()  # nothing at the first time
        if delay_s or loss:
            self._wires[node.name] = Wire(((self.switch, port), (node, "wire")), delay_s, loss)
        else:
            ends = f"wire netns {node.pid} type veth peer name {port} netns {self.switch.pid}"
            subprocess.run(["ip", "link", "add", *ends.split()], check=True)
        self.switch.run("ip", "link", "set", port, "master", "br0", "up")
        node.run("ip", "link", "set", "wire", "master", "eth0", "up")

    def cut(self, node: Node) -> None:
        """Let no frame of the node through any more, without a word to either side."""
        self.switch.run("ip", "link", "set", f"to-{node.name}", "down")

    def heal(self, node: Node) -> None:
        self.switch.run("ip", "link", "set", f"to-{node.name}", "up")
