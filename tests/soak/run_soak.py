"""`make soak`: a cluster asked and disturbed for an hour loses nothing, and takes at its end what it did first.

Two workers and two ingresses on this machine, in namespaces of their own: processes, /dev/shm, the store's disk.
Clients ask all the time, at a pace. Each sixth of the run is disturbed, by draws of its seed (`schedule.py`), and then
calm: figures are taken. Those of the last sixth are compared with those of the first (of the third in a short run).
Exit code 1 where a request was lost or wrong, a disturbance had no end, or a figure grew.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil
import yaml

ROOT: Final = Path(__file__).parents[2]
KEPT_LOGS: Final = ROOT / "out/soak"  # of the last soak that found a problem
sys.path.append(str(ROOT / "infra/demo"))  # the classifier of digits, and the sums

from integration.harness import DEMO_MODELS  # noqa: E402
from kit.waiting import wait_until  # noqa: E402
from soak.asking import Load, Question, first_answers, is_same, questions  # noqa: E402
from soak.deaths import Deaths  # noqa: E402
from soak.disturbing import ATELIER, CLOCK, Cluster, disturb  # noqa: E402
from soak.measuring import Meter  # noqa: E402
from soak.namespaces import TMP, in_namespaces, missing  # noqa: E402
from soak.schedule import CALM_SHARE, Event, drawn_sixths, sixth_s  # noqa: E402
from soak.verdicts import Figures, Verdict, verdicts  # noqa: E402

from infra.ports import free_port  # noqa: E402

VIDEO: Final = "tiny-wan"
START_S, END_S = 300.0, 120.0
COLLECTING: Final = "collect garbage"  # the second time collects what the first one has seen unneeded
WARMING: Final = [Event(0.0, what, 0) for what in ("register and remove", "pin", "unload", COLLECTING, COLLECTING)]
MIN_RIGHT: Final = 0.85  # of the first answers: a single seed may be a scrawl
SMALL: Final = {"num_cpus": 0.1}
ENVIRONMENT: Final = {
    "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_TMPDIR": str(TMP),
    "TMPDIR": str(TMP),
    "XDG_RUNTIME_DIR": str(TMP),
    "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE": "1",  # or a process writes a thousand lines at once, in any calm
}
IN_MOUNTS: Final = "--in-namespaces"


@dataclass
class Report:
    """The findings of a soak."""

    taken: list[Figures] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    num_disturbances: int = 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=None, help="of all draws; default: another one each time")
    parser.add_argument("--untimed", action="store_true", help="times are printed and fail nothing: others work here")
    parser.add_argument(IN_MOUNTS, dest="folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.folder:
        return soak(Path(options.folder), options.minutes, options.seed, is_judging_times=not options.untimed)
    if reason := missing():
        sys.exit(reason)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # by which the namespaces end, and the folder goes
    seed = random.randrange(2**31) if options.seed is None else options.seed
    print(f"soak of {options.minutes:g} minutes: SEED={seed} draws it again", flush=True)
    with tempfile.TemporaryDirectory(prefix="soak") as folder:
        again = [sys.executable, __file__, "--minutes", str(options.minutes), "--seed", str(seed), IN_MOUNTS, folder]
        return subprocess.run(
            [*in_namespaces(folder), *again, *["--untimed"] * options.untimed],
            env=os.environ | ENVIRONMENT,
            check=False,
        ).returncode


def soak(folder: Path, minutes: float, seed: int, *, is_judging_times: bool) -> int:
    """Run in the namespaces."""
    file, deaths, report = folder / "soak.yaml", Deaths(), Report()
    file.write_text(yaml.safe_dump(_fields(folder)))
    asked = questions(seed, VIDEO)
    with _running(file, folder) as url:
        cluster = Cluster(url, file, folder, deaths)
        cluster.wait_whole()
        answers, wrong = first_answers(url, asked)
        if len(answers) < MIN_RIGHT * (len(answers) + len(wrong)):
            print(f"first answers are wrong: {wrong}")
            return 1
        meter = Meter(url, cluster.store, TMP, _gcs_address(), is_judging_times)
        calm_s = CALM_SHARE * sixth_s(minutes)
        start_s = time.monotonic()
        with Load(url, seed, asked, answers, deaths) as load:
            for number, events in enumerate(drawn_sixths(seed, minutes)):
                _disturb_all(cluster, events, start_s + number * sixth_s(minutes), report)
                load.rest()
                _warm(cluster, asked, answers, report)
                try:
                    report.taken.append(meter.calm_figures(asked, answers, calm_s))
                except Exception as error:  # told at the end, as are all
                    report.problems.append(f"no figures of sixth {number + 1}: {error!r}")
                _say(f"sixth {number + 1}: {load.num_answers} right answers, {len(load.outcome.problems)} are not")
                for problem in load.outcome.problems[-2:]:
                    _say(problem[:400])
                load.go_on()
        report.problems += load.outcome.problems
        if report.problems:
            _keep_logs(folder)
    judged = verdicts(report.taken, minutes)
    _print(report, judged, load)
    return int(bool(report.problems) or any(one.word == "GREW" for one in judged))


def _disturb_all(cluster: Cluster, events: Sequence[Event], start_s: float, report: Report) -> None:
    """Disturb at the times of the events, or later where the one before took longer."""
    for event in events:
        time.sleep(max(0.0, start_s + event.at_s - time.monotonic()))
        began_s = time.monotonic()
        try:
            disturb(cluster, event)
        except Exception as error:  # told at the end: the others are wanted, too
            report.problems.append(f"{event.what}: {error!r}")
            _say(report.problems[-1])
        report.num_disturbances += 1
        _say(f"{event.what}: {time.monotonic() - began_s:.1f} s")


def _warm(cluster: Cluster, asked: Sequence[Question], answers: Mapping[int, np.ndarray], report: Report) -> None:
    """Let each process, also one that has just started, do what the others have done, and the store be collected,
    before figures are taken.

    Nothing may run any more for streams that were left.
    """
    _disturb_all(cluster, WARMING, 0.0, report)
    try:
        again, _ = first_answers(cluster.url, asked)
        wait_until(lambda: not cluster.work(), "an end of all work")
    except Exception as error:
        report.problems.append(f"at rest: {error!r}")
        return
    for place, answer in answers.items():
        if place not in again or not is_same(again[place], answer, asked[place]):
            report.problems.append(f"at rest: another answer to {asked[place].body}")


@contextlib.contextmanager
def _running(file: Path, folder: Path) -> Iterator[str]:
    """Run `atelier up` for the length of the block, with a wall clock that can step."""
    clock, log = folder / "clock", folder / "up.log"
    clock.write_bytes(bytes(8))
    library, source = folder / CLOCK, ROOT / "tests/nodes/wall_clock.c"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source], check=True)
    # Ray's workers would not get it without the second.
    own = os.environ | {"LD_PRELOAD": str(library), "RAY_LD_PRELOAD_ON_WORKERS": "1", "WALL_CLOCK": str(clock)}
    with (
        log.open("w") as out,
        subprocess.Popen([*ATELIER, "up", str(file)], stdout=out, stderr=out, env=own, cwd=ROOT) as up,
    ):
        try:
            wait_until(lambda: up.poll() is not None or "is up" in log.read_text(), "a cluster", START_S)
            if up.poll() is not None:
                raise OSError(log.read_text()[-3000:])
            yield f"http://127.0.0.1:{yaml.safe_load(file.read_text())['http']['port']}"
        finally:
            up.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                up.wait(END_S)
            up.kill()


def _fields(folder: Path) -> dict[str, Any]:
    """Return the config: the demo's models and one that makes videos, bounds that are reached soon."""
    fields: dict[str, Any] = yaml.safe_load((ROOT / "configs/clusters/demo.yaml").read_text())
    models = [model | {"path": str(DEMO_MODELS / Path(model["path"]).name)} for model in fields["models"]]
    adapters = [one | {"path": str(DEMO_MODELS / Path(one["path"]).name)} for one in fields["adapters"]]
    return fields | {
        "name": "soak",
        "http": {"port": free_port()},
        "grpc": {"port": free_port()},
        "ray": {"num_cpus": 4, "object_store_bytes": "256 MiB"},
        "store": {"path": str(folder / "store"), "node_budget_bytes": "20 MiB"},
        "model_roots": [str(folder), str(DEMO_MODELS)],
        "ingress": SMALL | {
            "num_replicas": 2,
            "stored_responses": {"folder": str(folder / "responses"), "max_bytes": "64 KiB"},
        },
        "jobs": {"max_jobs": 20},
        "text_encoder": SMALL | {"cache_bytes": "1 MiB"},
        "worker": SMALL | {"num_replicas": 2, "num_threads": 1, "resident_bytes": "64 MiB", "kv_cache_bytes": "16 MiB"},
        "models": [*models, {"id": VIDEO, "path": str(_video_model(folder))}],
        "adapters": adapters,
    }  # fmt: skip


def _keep_logs(folder: Path) -> None:
    """Copy what the cluster wrote: its folder goes with the namespaces."""
    shutil.rmtree(KEPT_LOGS, ignore_errors=True)
    KEPT_LOGS.mkdir(parents=True)
    shutil.copy(folder / "up.log", KEPT_LOGS)
    with contextlib.suppress(shutil.Error):  # files that went meanwhile; the others are copied
        shutil.copytree((TMP / "ray/session_latest/logs").resolve(), KEPT_LOGS / "ray", ignore_dangling_symlinks=True)
    _say(f"logs are kept in {KEPT_LOGS}")


def _video_model(folder: Path) -> Path:
    from kit.tiny.clips import wan
    from kit.tiny.pipelines import saved

    (folder / "models").mkdir()
    saved(wan, folder / "models" / VIDEO)
    return folder / "models" / VIDEO


def _gcs_address() -> str:
    lines = (" ".join(process.cmdline()) for process in psutil.process_iter() if process.name() == "raylet")
    found = [match.group(1) for line in lines if (match := re.search(r"--gcs-address=(\S+)", line))]
    return found[0]


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def _print(report: Report, judged: Sequence[Verdict], load: Load) -> None:
    print(f"{'':<52}{'first':>16}{'at the end':>16}{'':>9}")
    for one in judged:
        unit = "" if one.unit in ("files", "threads", "processes") else one.unit
        shown = [f"{_number(value, one.unit)} {_shown_unit(unit):<3}" for value in (one.early, one.late)]
        print(f"{one.name:<52}{shown[0]:>16}{shown[1]:>16}{one.share:>+9.1%} {one.word}")
        if one.has_grown:
            at_each = [_number(taken[one.name].value, one.unit) for taken in report.taken if one.name in taken]
            print(f"{'':<6}at each sixth: {', '.join(at_each)}")
    right, again = load.outcome.right, load.outcome.again
    print(f"{load.num_answers} right answers: {dict(right)}; asked again after a death: {dict(again)}")
    print(f"{report.num_disturbances} disturbances; {len(report.problems)} problems")
    for problem in report.problems:
        print(f"PROBLEM {problem}")


def _number(value: float, unit: str) -> str:
    return f"{value / 2**20:,.2f}" if unit == "bytes" else f"{value:,.1f}" if unit in ("ms", "B") else f"{value:,.0f}"


def _shown_unit(unit: str) -> str:
    return "MiB" if unit == "bytes" else unit


if __name__ == "__main__":
    sys.exit(main())
