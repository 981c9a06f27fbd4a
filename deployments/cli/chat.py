"""The command that talks to language models: one question, or a conversation that streams and remembers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.markup import escape

from deployments.cli.client import ChatUsage, Client, ClientError, Key, Url, find_client
from deployments.cli.generate import lora_use

app = typer.Typer()
_HELP: Final = """\
/model NAME    go on with another model; without a name, list them
/clear         forget the conversation
/system TEXT   begin the conversation with instructions; without a text, without
/help          this
/quit          end (as end of input and an empty line do)"""


@app.command()
def chat(
    message: Annotated[str | None, typer.Argument(help="One question; without it, a conversation.")] = None,
    model: Annotated[str, typer.Option("--model", "-m", help="Model id.")] = "adder",
    lora: Annotated[list[str] | None, typer.Option(help="Adapter, as NAME or NAME:SCALE; may be repeated.")] = None,
    url: Url = None,
    key: Key = None,
) -> None:
    """Talk to a language model."""
    loras = [lora_use(text) for text in lora or []]
    conversation = _Conversation(find_client(url, key), model, Console(), loras=loras)
    if message is not None:
        conversation.ask(message, shows_speed=False)
        return
    while (line := _read_line(f"{conversation.model}> ")) is not None and conversation.take_line(line):
        pass


class _Conversation:
    """A conversation with one model after another. What was said stays when the model changes."""

    def __init__(
        self,
        client: Client,
        model: str,
        out: Console,
        clock: Callable[[], float] = time.perf_counter,
        loras: Sequence[dict[str, Any]] = (),
    ) -> None:
        self.model = model
        self.history: list[dict[str, str]] = []
        self._system: list[dict[str, str]] = []
        self._client = client
        self._out = out
        self._clock = clock
        self._options = {"lora": list(loras)} if loras else {}

    def take_line(self, line: str) -> bool:
        """Answer a line, or do what its command says. Returns False at the end of the conversation."""
        command, _, rest = line.strip().partition(" ")
        rest = rest.strip()
        if not command or command == "/quit":
            return False
        try:
            if command == "/model":
                self._change_model(rest)
            elif command == "/clear":
                self.history.clear()
            elif command == "/system":
                self._system = [{"role": "system", "content": rest}] if rest else []
            elif command.startswith("/"):
                self._out.print(_HELP, markup=False, highlight=False)
            else:
                self.ask(line)
        except ClientError as error:  # one bad answer does not end a conversation
            self._out.print(f"[red]error:[/red] {escape(str(error))}", highlight=False, soft_wrap=True)
        return True

    def ask(self, text: str, *, shows_speed: bool = True) -> None:
        """Print the answer as it comes, and remember both. Raises ClientError; then the question is forgotten."""
        messages = [*self._system, *self.history, {"role": "user", "content": text}]
        answer, usage = "", None
        first_s = last_s = start_s = self._clock()
        try:
            for piece in self._client.chat_stream(model=self.model, messages=messages, **self._options):
                if isinstance(piece, ChatUsage):
                    usage = piece
                    continue
                last_s = self._clock()
                first_s = last_s if not answer else first_s
                answer += piece
                self._out.print(piece, end="", markup=False, highlight=False, soft_wrap=True)
        except KeyboardInterrupt:  # the answer ends here; the conversation goes on
            self._out.print(" …", end="")
        finally:
            self._out.print()
        self.history = [message for message in messages if message not in self._system]
        self.history.append({"role": "assistant", "content": answer})
        if usage and shows_speed:
            self._out.print(f"[dim]{_speed(usage, first_s - start_s, last_s - first_s)}[/dim]", highlight=False)

    def _change_model(self, name: str) -> None:
        known = [model["id"] for model in self._client.models() if model["kind"] in ("llm", "pipeline")]
        if name in known:
            self.model = name
            self._options = {}  # LoRAs are for the model that they came with
        else:
            self._out.print(f"models: {', '.join(known)}", markup=False, highlight=False)


def _speed(usage: ChatUsage, first_s: float, rest_s: float) -> str:
    """Return how many tokens came, how long the first one took, and how fast the others were."""
    text = f"{usage.num_completion_tokens} tokens, the first after {first_s * 1e3:.0f} ms"
    if usage.num_completion_tokens > 1 and rest_s > 0:
        text += f", then {(usage.num_completion_tokens - 1) / rest_s:.1f} per second"
    return text


def _read_line(prompt: str) -> str | None:
    """Return the next line; None at the end of input."""
    try:
        return input(prompt)
    except (EOFError, KeyboardInterrupt):
        return None
