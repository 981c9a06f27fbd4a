"""An `s3://bucket/prefix` URL as a list of objects that can be read by range. Thin over obstore, which retries.

Credentials come from the environment only (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, web identity,
container or instance metadata) and appear in no message.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any, Final, NoReturn

from weights.records.errors import StoreError, WeightsError
from weights.sources.remote import MAX_OBJECTS, ObjectChanged, RemoteObject, is_inside

KNOWN_OPTIONS: Final = ("endpoint", "region", "anonymous", "verify_md5")
MAX_RETRIES: Final = 6  # of one request, with exponential backoff
_CHUNK_BYTES: Final = 2**20
_URL = re.compile(r"s3://(?P<bucket>[A-Za-z0-9][A-Za-z0-9._-]{1,254})(/(?P<prefix>[^?#]*))?")
_ENDPOINT = re.compile(r"https?://([A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\])(:(?P<port>\d{1,5}))?/?")
OWN_FILES: Final = ".mirror"  # what a mirror keeps beside the copies
_MD5_ETAG = re.compile(r'"?([0-9a-f]{32})"?')
_CREDENTIALS = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the environment, or anonymous: true for a public bucket"


def split_url(url: str) -> tuple[str, str]:
    """Return bucket and prefix (without slashes at its ends) of an s3:// URL. Raises StoreError."""
    match = _URL.fullmatch(url)
    prefix = (match["prefix"] or "").strip("/") if match else ""
    if match is None or (prefix and not is_inside(prefix)):
        # The URL itself stays out of the message: what is wrong with it may be a password in it.
        raise StoreError("not a URL of object storage: expected s3://bucket/prefix without credentials, query or '..'")
    return match["bucket"], prefix


class Bucket:
    """The objects below one URL. `options`: endpoint (URL), region, anonymous and verify_md5 ("true" or "false")."""

    def __init__(self, url: str, options: Mapping[str, str]) -> None:
        self.url = url.rstrip("/")
        self._name, self.prefix = split_url(url)
        unknown = sorted(set(options) - set(KNOWN_OPTIONS))
        if unknown:
            raise StoreError(f"unknown object storage options {', '.join(unknown)} (known: {', '.join(KNOWN_OPTIONS)})")
        for name in ("anonymous", "verify_md5"):
            if options.get(name, "true") not in ("true", "false"):
                raise StoreError(f"object storage option {name} is {options[name]!r}, expected true or false")
        self._verify_md5 = options.get("verify_md5", "true") == "true"
        self._obstore, self._client = _open(self._name, options)

    def objects(self) -> list[RemoteObject]:
        """List everything below the prefix, or the one object that the URL names.

        Raises StoreError: cannot be reached, access refused, nothing there, a key that would leave the target folder.
        """
        found: list[RemoteObject] = []
        with self._named_errors():
            for page in self._obstore.list(self._client, self.prefix or None, chunk_size=1000):
                found += [self._object(meta) for meta in page if meta["path"] != self.prefix]
                if len(found) > MAX_OBJECTS:
                    raise StoreError(f"{self.url}: more than {MAX_OBJECTS} objects, expected those of one checkpoint")
        if not found:
            with self._named_errors():
                if not self.prefix:
                    raise FileNotFoundError
                found = [self._object(self._obstore.head(self._client, self.prefix))]
        self._refuse_file_as_folder(found)
        return found

    def read_range(self, remote: RemoteObject, start: int, stop: int) -> Iterator[bytes]:
        """Yield bytes `start` to `stop` in chunks. Raises ObjectChanged, or StoreError when the client gave up."""
        with self._named_errors(remote.key):
            try:
                options = {"range": (start, stop), "if_match": remote.etag}
                result = self._obstore.get(self._client, remote.key, options=options)
            except (self._obstore.exceptions.PreconditionError, FileNotFoundError):
                raise ObjectChanged(remote.name) from None
            if (result.meta["e_tag"], result.meta["size"]) != (remote.etag, remote.nbytes):
                raise ObjectChanged(remote.name)  # by a server that knows no If-Match
            yield from result.stream(min_chunk_size=_CHUNK_BYTES)

    def _object(self, meta: Mapping[str, Any]) -> RemoteObject:
        key = meta["path"]
        name = key.rpartition("/")[2] if key == self.prefix else key.removeprefix(f"{self.prefix}/")
        if not is_inside(name) or name.startswith(OWN_FILES):
            raise StoreError(f"{self.url}: key {key!r} is not a path inside the folder that it is copied to")
        if not meta["e_tag"]:
            raise StoreError(f"{self.url}: the server gives {key!r} no ETag, so its parts cannot be matched")
        md5 = _MD5_ETAG.fullmatch(meta["e_tag"]) if self._verify_md5 else None
        return RemoteObject(key, name, meta["size"], meta["e_tag"], ("md5", md5[1]) if md5 else None)

    def _refuse_file_as_folder(self, found: list[RemoteObject]) -> None:
        names = {remote.name for remote in found if remote.nbytes}  # consoles make empty objects for "folders"
        for name in names:
            parents = name.split("/")[:-1]
            clash = names & {"/".join(parents[: depth + 1]) for depth in range(len(parents))}
            if clash:
                raise StoreError(f"{self.url}: {min(clash)!r} is an object and the folder of {name!r}")

    @contextlib.contextmanager
    def _named_errors(self, key: str = "") -> Iterator[None]:
        """Turn client errors into StoreError with the URL and without their dump of requests and answers."""
        where = f"s3://{self._name}/{key}" if key else self.url
        try:
            yield
        except FileNotFoundError:
            raise StoreError(f"{where}: no such object, and nothing below that prefix") from None
        except (self._obstore.exceptions.BaseError, OSError) as error:
            raise StoreError(f"{where}: {_reason(error)}") from None
        except BaseException as error:
            _raise_panic(error, where)


def _raise_panic(error: BaseException, where: str) -> NoReturn:
    # The client panics where a setting from the environment makes no valid request; that is no Exception in Python.
    if type(error).__name__ == "PanicException":
        raise StoreError(f"{where}: the client failed: {error}; check the AWS_* environment variables") from None
    raise error


def _open(bucket: str, options: Mapping[str, str]) -> tuple[Any, Any]:
    try:
        import obstore
        import obstore.exceptions
        from obstore.store import S3Store
    except ImportError:
        raise WeightsError("s3:// needs the obstore package: pip install 'atelier-serve[s3]'") from None
    config = {name: options[name] for name in ("endpoint", "region") if name in options}
    if not re.fullmatch("[A-Za-z0-9-]+", config.get("region", "default")):
        raise StoreError("the object storage region is not a plain name")
    endpoint = config.get("endpoint", "")
    if endpoint and not _is_endpoint(endpoint):
        raise StoreError("the object storage endpoint is not http(s)://host[:port]")
    client = S3Store(
        bucket,
        config={**config, "skip_signature": options.get("anonymous", "false")},
        client_options={
            "allow_http": endpoint.startswith("http://"),
            "connect_timeout": timedelta(seconds=5),
            "read_timeout": timedelta(seconds=30),
            "timeout": timedelta(minutes=10),  # of a whole part, which a slow line may need
        },
        retry_config={"max_retries": MAX_RETRIES, "retry_timeout": timedelta(minutes=2)},
    )
    return obstore, client


def _is_endpoint(endpoint: str) -> bool:
    """Return True for http(s)://host[:port]: no path, and above all no credentials."""
    match = _ENDPOINT.fullmatch(endpoint)
    return match is not None and int(match["port"] or 0) < 2**16


def _reason(error: Exception) -> str:
    """Return the first line of a client error: the rest is request and answer, which may name access keys."""
    text = str(error).partition("\n\nDebug source")[0]
    status = re.search(r"status code: (\d{3})([A-Za-z ]*)", text)
    if status is None:
        line = text.splitlines()[0] if text else repr(error)
        return line.rpartition(" - ")[2]
    code = re.search(r"<Code>(\w+)</Code>", text)
    answer = f"the server answered {status[1]}{status[2].rstrip()}" + (f" ({code[1]})" if code else "")
    return f"{answer}; needs {_CREDENTIALS}" if status[1] in ("401", "403") else answer
