"""`atelier trace`: the requests of a running cluster, recorded for `atelier simulate`."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console

from deployments.console.client import Client, Key, Url, find_client
from deployments.console.output import OptionError
from infra.simulator.recorded import note_sizes, recorded_scenario
from infra.simulator.scenario import trace_lines

app = typer.Typer()
_err = Console(stderr=True)

POLL_S: Final = 1.0


@app.command("trace")
def record_trace(
    file: Annotated[Path, typer.Argument(help="Where to write the JSON lines.")],
    seconds: Annotated[float, typer.Option(min=0.1, max=1e6, help="How long; Ctrl-C ends it earlier.")] = 60.0,
    url: Url = None,
    key: Key = None,
) -> None:
    """Record the requests of a running cluster with what they cost: arrival, model, size, start and end.

    `atelier simulate FILE` replays them. Requests that are still under way at the end are not in it.
    """
    client = find_client(url, key)
    try:
        out = file.open("w", encoding="utf-8")
    except OSError as error:
        raise OptionError(f"{file}: {error.strerror or error}") from None
    with out:
        sizes: dict[str, dict[str, int]] = {}
        requests, began_s = _recorded(client, seconds, lambda workers: note_sizes(sizes, workers))
        cluster = client.cluster()
        loads = (cluster.get("admission") or {}).get("models", [])
        scenario = recorded_scenario(requests, loads, cluster["workers"], began_s, sizes)
        out.writelines(trace_lines(scenario))
    _err.print(f"{file}: {len(scenario.requests)} requests for {len(scenario.models)} models", highlight=False)


def _recorded(
    client: Client, seconds: float, note_workers: Callable[[list[dict[str, Any]]], None]
) -> tuple[list[dict[str, Any]], float]:
    """Return the requests that end within the time, and the second of the queue's clock at which it began."""
    first = client.ended_requests()
    number, began_s = first["next_number"], first["now_s"]
    requests: list[dict[str, Any]] = []
    end_s = time.monotonic() + seconds
    try:
        with _err.status("recording") as status:
            while (left_s := end_s - time.monotonic()) > 0:
                time.sleep(min(POLL_S, left_s))
                found = client.ended_requests(number)
                number = found["next_number"]
                requests += found["requests"]
                note_workers(client.cluster()["workers"])
                status.update(f"recording: {len(requests)} requests")
    except KeyboardInterrupt:
        pass
    return requests, began_s
