"""`atelier chat` in a terminal of its own, against a server that streams: lines, commands, keys."""

from __future__ import annotations

import http.server
import json
import os
import pty
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

pytestmark = pytest.mark.slow


class Server(http.server.BaseHTTPRequestHandler):
    """Answers a chat with words that say how many messages came; one of "long" goes on until its caller has gone."""

    def log_message(self, *args: Any) -> None: ...

    def do_GET(self) -> None:
        models = [{"id": name, "kind": "llm"} for name in ("adder", "larger")]
        self._begin("application/json")
        self.wfile.write(json.dumps({"data": models}).encode())

    def do_POST(self) -> None:
        messages = json.loads(self.rfile.read(int(self.headers["content-length"])))["messages"]
        self._begin("text/event-stream")
        number = 0
        try:
            while number < 3 or messages[-1]["content"] == "long":
                self._send({"choices": [{"delta": {"content": f"w{len(messages)}.{number} "}}]})
                number += 1
        except OSError:
            return
        self._send({"choices": [{"delta": {}, "finish_reason": "stop"}], "timings_ms": {"generate": 400.0}})
        self._send({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 3}})

    def _begin(self, content_type: str) -> None:
        self.send_response(200)
        self.send_header("content-type", content_type)
        self.end_headers()

    def _send(self, event: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())


class Terminal:
    """The command in a pseudo-terminal."""

    def __init__(self, url: str) -> None:
        self.pid, self.fd = pty.fork()
        if not self.pid:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # ignored in the background, and inherited
            command = [sys.executable, "-c", "from deployments.cli.main import main; main()", "chat", "--url", url]
            os.execve(sys.executable, command, {**os.environ, "TERM": "xterm", "COLUMNS": "100"})
        self.shown = ""

    def read_until(self, text: str) -> str:
        """Return the screen's output up to `text`; the test's own limit ends a wait in vain."""
        while text not in self.shown:
            self.shown += os.read(self.fd, 4096).decode()
        before, _, self.shown = self.shown.partition(text)
        return before

    def type(self, keys: str) -> None:
        os.write(self.fd, keys.encode())


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    terminal = Terminal(f"http://127.0.0.1:{server.server_port}")
    yield terminal
    server.shutdown()
    server.server_close()
    os.close(terminal.fd)


def test_a_conversation_in_a_terminal(terminal: Terminal) -> None:
    assert "/help" in terminal.read_until("adder> ")
    terminal.type("hello\n")
    answer = terminal.read_until("adder> ")
    assert "w1.0 w1.1 w1.2" in answer
    assert "3 tokens, the first after" in answer
    assert "5.0 per second" in answer
    terminal.type("/model la\t\n")  # completed by the tab
    terminal.read_until("larger> ")
    terminal.type("long\n")
    terminal.read_until("w3.2 ")
    terminal.type("\x03")  # ends the answer, not the conversation, which remembers what came of it
    terminal.read_until("larger> ")
    terminal.type("again\n")
    assert "w5.0 w5.1 w5.2" in terminal.read_until("larger> ")
    terminal.type("\x04")
    _, status = os.waitpid(terminal.pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
