"""The command that talks to language models: one question, or a conversation that streams and remembers."""

from __future__ import annotations

import sys
import time
import unicodedata
from collections.abc import Callable
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.markup import escape

from deployments.cli.generate import lora_use
from deployments.console.client import ChatUsage, Client, ClientError, Key, Url, find_client

app = typer.Typer()
_HELP: Final = """\
/model NAME    go on with another model; without a name, list them
/clear         forget the conversation
/system TEXT   begin the conversation with instructions; without a text, without
/help          this
/quit          end (as Ctrl-D does)
\"\"\"            begin a text of several lines, which ends with another \"\"\"
Ctrl-C ends an answer that is on its way."""
_COMMANDS: Final = ("/model ", "/clear", "/system ", "/help", "/quit")
_QUOTES: Final = '"""'


@app.command()
def chat(
    message: Annotated[str | None, typer.Argument(help="One question; without it, a conversation.")] = None,
    model: Annotated[str | None, typer.Option("--model", "-m", help="Model id; default: the first one.")] = None,
    lora: Annotated[list[str] | None, typer.Option(help="Adapter, as NAME or NAME:SCALE; may be repeated.")] = None,
    system: Annotated[str | None, typer.Option(help="Instructions to begin with.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0, max=2, help="0 picks the likeliest token.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of an answer, at most.")] = None,
    url: Url = None,
    key: Key = None,
) -> None:
    """Talk to a language model."""
    loras = [lora_use(text) for text in lora or []]
    options = {"temperature": temperature, "max_tokens": max_tokens, "lora": loras or None}
    given = {name: value for name, value in options.items() if value is not None}
    conversation = _Conversation(find_client(url, key), model, Console(), system=system, options=given)
    if message is not None:
        conversation.ask(message, shows_speed=False)
        return
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if is_terminal:
        _edit_lines(conversation)
        conversation.greet()
    while True:
        text = _read_text(f"{conversation.model}> " if is_terminal else "")
        if text is None or not conversation.take_text(text, shows_speed=is_terminal):
            return


class _Conversation:
    """A conversation with one model after another. Its history stays when the model changes.

    `model` None is the first language model of the cluster. `options` are fields of every request.
    Raises ClientError for a model that is not there or does not talk.
    """

    def __init__(
        self,
        client: Client,
        model: str | None,
        out: Console,
        clock: Callable[[], float] = time.perf_counter,
        system: str | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        self.history: list[dict[str, str]] = []
        self._system = _instructions(system or "")
        self._client = client
        self._out = out
        self._clock = clock
        self._options = dict(options or {})
        known = self.known_models()
        if not known:
            raise ClientError("the cluster serves no language model")
        self.model = model or known[0]
        if self.model not in known:
            raise ClientError(f"no language model {self.model!r} (known: {', '.join(known)})")

    def known_models(self) -> list[str]:
        """Return the names of language models, then pipelines, then models without room."""
        models = sorted(self._client.models(), key=lambda model: model.get("state") == "does_not_fit")
        return [model["id"] for kind in ("llm", "pipeline") for model in models if model["kind"] == kind]

    def greet(self) -> None:
        """Print the name of the model."""
        self._out.print(f"[dim]{escape(self.model)}; /help lists the other commands[/dim]", highlight=False)

    def take_text(self, text: str, *, shows_speed: bool = True) -> bool:
        """Answer a text, or run its command. Returns False at the end of the conversation."""
        command, _, rest = text.strip().partition(" ")
        rest = rest.strip()
        if command == "/quit":
            return False
        try:
            if command == "/model":
                self._change_model(rest)
            elif command == "/clear":
                self.history.clear()
            elif command == "/system":
                self._system = _instructions(rest)
            elif command.startswith("/"):
                unknown = "" if command == "/help" else f"no command {command}\n"
                self._out.print(unknown + _HELP, markup=False, highlight=False)
            elif command:
                self.ask(text, shows_speed=shows_speed)
        except ClientError as error:  # one bad answer does not end a conversation
            self._out.print(f"[red]error:[/red] {escape(str(error))}", highlight=False, soft_wrap=True)
            if self.history:
                self._out.print("[dim]/clear forgets the conversation, if it is too long[/dim]", highlight=False)
        return True

    def ask(self, text: str, *, shows_speed: bool = True) -> None:
        """Print the answer as it comes, and remember both. Raises ClientError; then the question is forgotten."""
        messages = [*self.history, {"role": "user", "content": text}]
        answer, usage = "", None
        first_s = last_s = start_s = self._clock()
        try:
            pieces = self._client.chat_stream(model=self.model, messages=[*self._system, *messages], **self._options)
            for piece in pieces:
                if isinstance(piece, ChatUsage):
                    usage = piece
                    continue
                last_s = self._clock()
                first_s = last_s if not answer else first_s
                answer += piece
                self._print_piece(piece)
        except KeyboardInterrupt:  # the answer ends here; the conversation goes on
            self._print_piece(" …")
        finally:
            if answer:
                self._out.print()
        if not answer and usage is None:  # interrupted before anything came
            self._out.print()
            return
        self.history = [*messages, {"role": "assistant", "content": answer}]
        if usage and usage.is_cut:
            self._out.print("[dim](cut off: the limit of tokens was reached)[/dim]", highlight=False)
        if usage and usage.num_completion_tokens and shows_speed:  # pipelines count none
            rest_s = last_s - first_s if usage.generate_s is None else usage.generate_s
            self._out.print(
                f"[dim]{_speed(usage.num_completion_tokens, first_s - start_s, rest_s)}[/dim]", highlight=False
            )

    def _print_piece(self, piece: str) -> None:
        """Print text as it is, without the control characters, with which a model could write anywhere."""
        shown = "".join(each for each in piece if each in "\n\t" or unicodedata.category(each) != "Cc")
        self._out.file.write(shown)  # rich would make blanks of tabs
        self._out.file.flush()

    def _change_model(self, name: str) -> None:
        known = self.known_models()
        if name in known:
            self.model = name
            self._options.pop("lora", None)  # LoRAs are for the model that they came with
        else:
            unknown = f"no language model {name!r}; " if name else ""
            self._out.print(f"{unknown}models: {', '.join(known)}", markup=False, highlight=False)


def _instructions(text: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": text}] if text else []


def _speed(number: int, first_s: float, rest_s: float) -> str:
    """Return the number of tokens, the time of the first one, and the rate of the others."""
    if number < 2 or rest_s <= 0:
        return f"{number} token{'s'[: number != 1]} after {first_s * 1e3:.0f} ms"
    return f"{number} tokens, the first after {first_s * 1e3:.0f} ms, then {(number - 1) / rest_s:.1f} per second"


def _read_text(prompt: str) -> str | None:
    """Return the next line, or the lines between triple quotes; None at the end of input.

    Ctrl-C drops what has been typed so far.
    """
    lines: list[str] = []
    while True:
        try:
            lines.append(input("... " if prompt and lines else prompt))
        except EOFError:
            if prompt:
                typer.echo()  # the shell's own prompt begins a line
            return "\n".join(lines).removeprefix(_QUOTES) or None
        except KeyboardInterrupt:
            typer.echo("  (Ctrl-D or /quit ends)")
            return ""
        text = "\n".join(lines)
        if not text.startswith(_QUOTES):
            return text
        if text.rstrip().endswith(_QUOTES) and len(text.strip()) >= 2 * len(_QUOTES):
            return text.strip().removeprefix(_QUOTES).removesuffix(_QUOTES).strip("\n")


def _edit_lines(conversation: _Conversation) -> None:
    """Enable editing, history and completion of commands and of names behind /model."""
    try:
        import readline
    except ImportError:  # a Python without it: lines are typed, and that is all
        return

    def complete(begun: str, state: int) -> str | None:
        line = readline.get_line_buffer()
        if line.startswith("/model "):
            found = [name for name in conversation.known_models() if name.startswith(begun)]
        else:
            found = [command for command in _COMMANDS if line and command.startswith(line)]
        return found[state] if state < len(found) else None

    readline.set_completer(complete)
    readline.set_completer_delims(" ")
    readline.parse_and_bind("tab: complete")
