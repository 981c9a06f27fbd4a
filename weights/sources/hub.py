"""An `hf://organization/name[@revision][/path]` URL as a list of files that can be read by range, of one commit.

Thin over huggingface_hub: HF_TOKEN (or its token file), HF_ENDPOINT and HF_HUB_OFFLINE mean what they mean there, and
the token appears in no message. A path names a folder or a file of the repository. Of all files only those are taken
that a model is made of (`_served_files`), and each is checked against its hash: sha256 of a large one, else git's own.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final, Self, TypeVar
from urllib.parse import quote

from weights.records.errors import StoreError, listed
from weights.sources.remote import MAX_OBJECTS, ObjectChanged, RemoteObject, is_inside

SCHEME: Final = "hf://"
EXPECTED: Final = "expected hf://organization/name, with @revision and a path in the repository if need be"
MAX_WAIT_S: Final = 60.0  # for a hub that says when to come back; what takes longer is told instead
_MAX_WAITS: Final = 5
_TIMEOUT_S: Final = 30.0
_URL = re.compile(
    r"hf://(?P<repository>[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})"
    r"(@(?P<revision>refs/pr/\d{1,9}|[A-Za-z0-9][\w.-]{0,199}))?(/(?P<path>[^?#@]+))?/?"
)
_WEIGHTS: Final = frozenset({".safetensors", ".gguf", ".onnx", ".onnx_data"})
_PICKLES: Final = frozenset({".bin", ".pt", ".pth", ".ckpt"})
_CONFIGS: Final = frozenset({".json", ".txt", ".model", ".jinja", ".tiktoken"})
# model.safetensors, model.fp16.safetensors, model.fp16-00001-of-00002.safetensors, and the two the other way round
_SAFETENSORS = re.compile(
    r"(?P<stem>[^.]+?)(-\d{5}-of-\d{5})?(\.(?P<variant>[\w-]+?))?(-\d{5}-of-\d{5})?\.safetensors"
    r"(\.index(\.(?P<of_index>[\w-]+))?\.json)?"
)
_SHARD = re.compile(r"-\d{5}-of-\d{5}(?=\.gguf$)")
_STOCK_STEMS: Final = ("model", "diffusion_pytorch_model", "pytorch_lora_weights", "adapter_model")
_PLAIN_VARIANTS: Final = ("", "fp16", "bf16")  # in this order, before all others
_MODULE = re.compile(r"\d+_\w+")  # of sentence-transformers: 2_Dense
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class HubName:
    """The files that a URL names: `path` is "" for the whole repository."""

    repository: str
    revision: str
    path: str

    @classmethod
    def of(cls, url: str) -> Self:
        """Take a URL apart. Raises StoreError."""
        match = _URL.fullmatch(url)
        path = (match["path"] or "").strip("/") if match else ""
        if match is None or (path and not is_inside(path)) or ".." in match["repository"]:
            raise StoreError(f"not a model of a hub: {EXPECTED}")
        return cls(match["repository"], match["revision"] or "main", path)

    @property
    def folder(self) -> Path:
        """The folder of its copy, relative to that of all copies; no bucket has a colon in its name."""
        organization, _, name = self.repository.partition("/")
        return Path(f"hf:{organization}") / quote(f"{name}@{self.revision}/{self.path}".rstrip("/"), safe="@")


class HubRepository:
    """The files of one commit below one URL. `sleep` waits where the hub asks for it."""

    def __init__(self, url: str, sleep: Callable[[float], None] = time.sleep) -> None:
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.errors
        import huggingface_hub.utils

        self.url = url.rstrip("/")
        self._name = HubName.of(url)
        self.prefix = self._name.path
        self._hub: Any = huggingface_hub
        # Read here and not when the library was imported, as it does itself.
        self._endpoint = os.environ.get("HF_ENDPOINT", huggingface_hub.constants.ENDPOINT).rstrip("/")
        self._sleep = sleep
        self._commit = ""

    def objects(self) -> list[RemoteObject]:
        """List what a model is made of below the path, or the one file that the URL names.

        Raises StoreError: no such repository, revision or path, no permission, out of reach, or nothing to choose by.
        """
        info = self._call_hub(self._model_info)
        files = {file.rfilename: file for file in info.siblings or ()}
        if len(files) > MAX_OBJECTS:
            raise StoreError(f"{self.url}: more than {MAX_OBJECTS} files, expected those of one model")
        self._commit = str(info.sha)
        if self.prefix in files:
            return [self._object(files[self.prefix], PurePosixPath(self.prefix).name)]
        below = f"{self.prefix}/" if self.prefix else ""
        names = [name.removeprefix(below) for name in files if name.startswith(below)]
        if not names:
            raise StoreError(f"{self.url}: no such file or folder in {self._name.repository}")
        try:
            return [self._object(files[below + name], name) for name in _served_files(names)]
        except ValueError as error:
            raise StoreError(f"{self.url}: {error}") from None

    def read_range(self, remote: RemoteObject, start: int, stop: int) -> Iterator[bytes]:
        """Yield bytes `start` to `stop` in chunks. Raises ObjectChanged, or StoreError when the hub gave up."""
        num_cuts = 0
        while True:
            try:
                for chunk in self._read(remote, start, stop):
                    start += len(chunk)
                    yield chunk
                return
            except self._hub.errors.HTTPError:
                num_cuts += 1
                if num_cuts > _MAX_WAITS:
                    raise StoreError(
                        f"{self.url}: the connection ended {num_cuts} times within {remote.name}"
                    ) from None
                self._sleep(2.0 ** (num_cuts - 1))

    def _read(self, remote: RemoteObject, start: int, stop: int) -> Iterator[bytes]:
        with contextlib.ExitStack() as held:
            response = self._call_hub(lambda: held.enter_context(self._opened(remote, start, stop)))
            if response.status_code != 206 and (start, stop) != (0, remote.nbytes):
                raise StoreError(f"{self.url}: the server gave all of {remote.name} where a part was asked for")
            yield from response.iter_raw()  # as it arrives: what did is not asked for again

    @contextlib.contextmanager
    def _opened(self, remote: RemoteObject, start: int, stop: int) -> Iterator[Any]:
        utils = self._hub.utils
        url = self._hub.hf_hub_url(self._name.repository, remote.key, revision=self._commit, endpoint=self._endpoint)
        headers = utils.build_hf_headers(library_name="atelier") | {"accept-encoding": "identity"}
        if stop > start:
            headers["range"] = f"bytes={start}-{stop - 1}"
        with utils.get_session().stream(
            "GET", url, headers=headers, follow_redirects=True, timeout=_TIMEOUT_S
        ) as response:
            if response.status_code in (404, 416):
                raise ObjectChanged(remote.name)
            utils.hf_raise_for_status(response)
            yield response

    def _model_info(self) -> Any:
        api = self._hub.HfApi(endpoint=self._endpoint, library_name="atelier")
        return api.model_info(
            self._name.repository, revision=self._name.revision, files_metadata=True, timeout=_TIMEOUT_S
        )

    def _object(self, file: Any, name: str) -> RemoteObject:
        if not is_inside(name) or file.size is None or not file.blob_id:
            raise StoreError(f"{self.url}: the hub has no {file.rfilename!r} is")
        sha256 = file.lfs.sha256 if file.lfs else ""
        digest = ("sha256", sha256) if sha256 else ("git", file.blob_id)
        return RemoteObject(file.rfilename, name, file.size, sha256 or file.blob_id, digest)

    def _call_hub(self, ask: Callable[[], T]) -> T:
        """Return the hub's answer. Ask again later where the hub says when to come back, or has an error of its own."""
        for num_waits in range(_MAX_WAITS + 1):
            with self._named_errors():
                try:
                    return ask()
                except self._hub.errors.HTTPError as error:
                    wait_s = _wait_s(getattr(error, "response", None), num_waits)
                    if wait_s is None or num_waits == _MAX_WAITS:
                        raise
            self._sleep(wait_s)
        raise AssertionError("the last answer is returned or raised")

    @contextlib.contextmanager
    def _named_errors(self) -> Iterator[None]:
        """Turn errors of the library into StoreError of one line, with the URL."""
        errors = self._hub.errors
        try:
            yield
        except (StoreError, ObjectChanged):
            raise
        except errors.OfflineModeIsEnabled:
            raise StoreError(f"{self.url}: HF_HUB_OFFLINE is set, so the hub is not asked") from None
        except errors.GatedRepoError:
            page = f"{self._endpoint}/{self._name.repository}"
            raise StoreError(
                f"{self.url}: access is given on request: accept the conditions at {page} and set HF_TOKEN"
            ) from None
        except errors.RevisionNotFoundError:
            raise StoreError(f"{self.url}: the repository has no revision {self._name.revision!r}") from None
        except errors.RepositoryNotFoundError:
            raise StoreError(
                f"{self.url}: no such model at {self._endpoint}, or a private one that HF_TOKEN gives no access to"
            ) from None
        except errors.HfHubHTTPError as error:
            raise StoreError(f"{self.url}: {_refusal(error.response)}") from None
        except errors.HTTPError as error:
            text = str(error).splitlines()
            raise StoreError(f"{self.url}: {self._endpoint}: {text[0] if text else type(error).__name__}") from None


def _wait_s(response: Any, num_waits: int) -> float | None:
    """Return the seconds after which to ask again; None: not at all, or not in any time that somebody waits.

    No response is a connection that failed.
    """
    if response is None:
        return 2.0**num_waits
    if response.status_code not in (429, 500, 502, 503, 504):
        return None
    asked = response.headers.get("retry-after", "")
    wait_s = float(asked) if re.fullmatch(r"\d{1,9}", asked) else 2.0**num_waits
    return wait_s if wait_s <= MAX_WAIT_S else None


def _refusal(response: Any) -> str:
    status = response.status_code
    if status in (401, 403):
        return f"the hub answered {status}: set HF_TOKEN to a token that may read it"
    if status == 429 and (wait := response.headers.get("retry-after")):
        return f"the hub answered 429, and asks to come back in {wait:.20} s"
    return f"the hub answered {status}"


def _served_files(names: Collection[str]) -> list[str]:
    """Return, sorted, the files of a repository that its model is made of.

    Of weights: safetensors before all others, one variant (the plain one, else fp16, else bf16), of several files in
    one folder those of the stock name, in a pipeline those of its components, in other models those at the root and of
    sentence-transformers' modules. Raises ValueError where that leaves a choice, or nothing, with the names.
    """
    paths = [PurePosixPath(name) for name in names]
    weights = [path for path in paths if path.suffix in _WEIGHTS or _is_index(path)]
    configs = [path for path in paths if path.suffix in _CONFIGS and not _is_index(path)]
    if any(path.suffix == ".safetensors" for path in weights):
        weights = [path for path in weights if path.suffix == ".safetensors" or _is_index(path)]
    elif any(path.suffix == ".gguf" for path in weights):
        weights = [path for path in weights if path.suffix == ".gguf"]
    has_config = {path.parent for path in configs if path.name in ("config.json", "model_index.json")}
    is_pipeline = PurePosixPath("model_index.json") in paths
    if is_pipeline:
        weights = [path for path in weights if len(path.parts) == 2 and path.parent in has_config]
    elif any(len(path.parts) == 1 for path in weights):
        weights = [path for path in weights if len(path.parts) == 1 or _MODULE.fullmatch(str(path.parent))]
    folders: dict[PurePosixPath, list[PurePosixPath]] = defaultdict(list)
    for path in weights:
        folders[path.parent].append(path)
    chosen = [path for folder in folders.values() for path in _one_model(folder)]
    if not chosen:
        pickles = sorted(path.as_posix() for path in paths if path.suffix in _PICKLES)
        found = f"only pickles ({listed(pickles)}), which are not downloaded" if pickles else "none that is known"
        raise ValueError(f"no weights: {found}; expected .safetensors, .gguf or .onnx")
    # A folder whose weights stay behind (onnx, openvino, original) is another form of the model, with its configs.
    others = {path.parent for path in paths if path.suffix in _WEIGHTS | _PICKLES} - {path.parent for path in chosen}
    chosen += [path for path in configs if is_pipeline or len(path.parts) == 1 or path.parent not in others]
    return sorted(path.as_posix() for path in chosen)


def _is_index(path: PurePosixPath) -> bool:
    return ".safetensors.index." in path.name


def _one_model(files: list[PurePosixPath]) -> list[PurePosixPath]:
    """Return the files of one folder that belong to one model. Raises ValueError where there are several."""
    if files[0].suffix == ".gguf":
        models = {_SHARD.sub("", file.name) for file in files}
        if len(models) > 1:
            raise ValueError(f"{len(models)} GGUF models; add the name of one to the URL ({listed(sorted(models))})")
        return files
    found = {file: match for file in files if (match := _SAFETENSORS.fullmatch(file.name))}
    if not found:
        return files
    stems = {match["stem"] for match in found.values()}
    stem = next((stem for stem in _STOCK_STEMS if stem in stems), None)
    if stem is None and len(stems) > 1:
        names = sorted(file.as_posix() for file in found)
        raise ValueError(f"{len(stems)} safetensors files; add the name of one to the URL ({listed(names)})")
    of_stem = {file: match for file, match in found.items() if stem is None or match["stem"] == stem}
    variants = {match["variant"] or match["of_index"] or "" for match in of_stem.values()}
    variant = next((one for one in _PLAIN_VARIANTS if one in variants), min(variants))
    return [file for file, match in of_stem.items() if (match["variant"] or match["of_index"] or "") == variant]
