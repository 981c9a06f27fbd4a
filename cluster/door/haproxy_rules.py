"""The changes that Atelier makes to the HAProxy configuration that Serve writes.

Serve puts HAProxy's statistics and metrics on every interface, on ports that may be taken, and its admin socket into
everybody's hands, repeats
nothing that has reached a replica, answers errors in plain text, and waits for a slow request as long as it takes.
Its replicas follow headers that are not for clients, and break on one that is no text.

It also passes on whatever comes. A replica is one Python process, which reads some hundred requests a second and must
not spend them on refusing thousands: so each is given as many requests for inference as it may have in hand, and
HAProxy itself refuses the others. Probes, lists and operators have a backend of their own, with the same servers and no
such bound.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Collection
from pathlib import Path
from typing import Final

from configs.http import BEGINNING_PATHS, INFERENCE_PATHS

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
CLIENT: Final = "x-atelier-client"  # with requests under /v2: address and port of the client's own connection
# `clock:microseconds` when a request came, and on whose clock: a replica may be on a node whose clock says otherwise.
RECEIVED: Final = "x-received-us"
REQUEST_ID: Final = "x-request-id"
REQUEST_ID_FORM: Final = "[A-Za-z0-9._:+/=@-]{1,128}"  # nothing that ends a line of log, or a word in it
# Kept connections to a replica that died can use up several; a request that kills replicas kills five at most.
MAX_RETRIES: Final = 4
UNREAD: Final = "x-atelier-unread"  # with an answer that came before the whole body
CROWDED: Final = "x-atelier-crowded"  # with a 429 for whoever asks, not for one key: HAProxy repeats its Retry-After
RETRY_ON: Final = "conn-failure empty-response"
_NO_LOG: Final = r"^ +log 127\.0\.0\.1:514 local0 info\n"  # Serve's default, where usually nobody listens
STATISTICS: Final = "listen stats"  # HAProxy's own pages, by the heads of their sections
METRICS: Final = "frontend prometheus"
_CHOICE: Final = r"^( +use_backend )(\S+)( if is_\2)$"
_NO_PATH: Final = r"^( +http-request )return status 404 .*\n"
_SERVER: Final = r"^( +server (\S+) \S+) check\b.*?( backup)?$"
_HEAD_TIMEOUT_S: Final = 10  # for the head of a request
# From a replica's node (its kernel; a replica may take its time) before its requests go to another one.
_SILENT_S: Final = 10
_ENDS: Final = f"tcp-ut {_SILENT_S}s"  # for what was sent; `srvtcpka` is for what is waited for
_REQUEST_TIMEOUT_S: Final = 30  # for the first of the body: slow clients hold nothing for longer
_CROWDED: Final = "server busy; try again in %[var(txn.retry_after)] s"

# Headers that Serve's replicas read before the ingress does (Ray 2.60, `replica.py`). The first lets a request
# go on whose client is gone. Bytes that are no ASCII text in the others would be a 500.
_SERVE_HEADER_RULES: Final = rf"""    http-request set-header {RECEIVED} CLOCK:%[date(0,us)]
    http-request del-header x-request-disconnect-disabled
    http-request del-header ^serve[-_]multiplexed[-_]model[-_]id$ -m reg
    http-request del-header ^x[-_]session[-_]id$ -m reg
    acl has_id req.fhdr({REQUEST_ID},1) -m reg ^{REQUEST_ID_FORM}$
    acl has_ids req.fhdr_cnt({REQUEST_ID}) gt 1
    http-request set-var(txn.request_id) req.fhdr({REQUEST_ID},1) if has_id !has_ids
    http-request set-var(txn.request_id) uuid() if !{{ var(txn.request_id) -m found }}
    http-request set-header {REQUEST_ID} %[var(txn.request_id)]
    http-request replace-header x-request-timeout-seconds .*[^\x20-\x7e].* not-text
"""
# Inference changes nothing, so that a request whose replica died without a word may be sent again. So may methods that
# change nothing by definition (RFC 9110, 9.2.1). All others are not repeated, POST /admin say, nor is a request that
# begins a job (`_JOB_RULES`). A request that never
# reached a replica is sent elsewhere in any case.
# Of a request, without the prefix of its application, which the lines in place of PREFIXES take off.
_OF_V2: Final = "{ var(txn.path) -m beg /v2 }"
_PATH_RULES: Final = f"""    timeout http-request {_HEAD_TIMEOUT_S}s
    # Of the head alone: the body is waited for in the backends.
    no option http-buffer-request
    http-response del-header {UNREAD}
    # Also on HAProxy's own answers.
    http-after-response set-header {REQUEST_ID} %[var(txn.request_id)] if {{ var(txn.request_id) -m found }}
    http-request set-var(txn.path) path
PREFIXES    acl inference var(txn.path) -m beg {" ".join(INFERENCE_PATHS)}
    http-request set-header {CLIENT} %[src]:%[src_port] if {_OF_V2}
"""
_FRONTEND_RULES: Final = r"""    acl reading method GET HEAD OPTIONS
    acl posting method POST
    http-request disable-l7-retry if !reading !posting
    http-request disable-l7-retry if posting !inference
    acl open_inference_protocol var(txn.path) -m beg /v2
    http-request set-var-fmt(txn.error_head) "{\"error\":{\"message\":\""
    http-request set-var-fmt(txn.error_tail) "\",\"type\":\"server_error\",\"param\":null,\"code\":\"no_replica\"}}"
    http-request set-var-fmt(txn.refusal_tail) "\",\"type\":\"invalid_request_error\",\"param\":null,\"code\":null}}"
    http-request set-var-fmt(txn.error_head) "{\"error\":\"" if open_inference_protocol
    http-request set-var-fmt(txn.error_tail) "\"}" if open_inference_protocol
    http-request set-var-fmt(txn.refusal_tail) "\"}" if open_inference_protocol
"""
_DEFAULT_RULES: Final = f"""    timeout http-request {_REQUEST_TIMEOUT_S}s
    # A retry sends what the buffer holds, so that the body has to be in it.
    option http-buffer-request
    option srvtcpka
    srvtcpka-idle 4s
    srvtcpka-intvl 2s
    srvtcpka-cnt {(_SILENT_S - 4) // 2}
"""
# The body is waited for first: slow clients take no slot. The slots of a backup count when no other server is up.
# The times to come back are remembered by model: a chat has room again long before an image. Only models that a replica
# has refused requests for have one, so that clients cannot fill the table; `proc.retry_at` is for those without.
_RETRY_TABLE: Final = "retry_times"
_BACKEND_RULES: Final = f"""    http-request wait-for-body time {_REQUEST_TIMEOUT_S}s
    http-request set-var(txn.model) req.body,json_query('$.model') if !{_OF_V2}
    http-request set-var(txn.model) var(txn.path),field(4,/),url_dec if {_OF_V2}
    http-request set-var(txn.retry_after) int(1) if {{ be_conn_free le 0 }} {{ nbsrv gt 0 }}
    acl crowded var(txn.retry_after) -m found
    http-request set-var(txn.retry_at) var(proc.retry_at) if crowded
    http-request set-var(txn.retry_at) var(txn.model),table_gpt0({_RETRY_TABLE}) if crowded \
{{ var(txn.model),in_table({_RETRY_TABLE}) }}
    http-request set-var(txn.now) date if crowded
    http-request set-var(txn.wait) var(txn.retry_at),sub(txn.now) if crowded
    http-request set-var(txn.retry_after) var(txn.wait) if crowded {{ var(txn.wait) -m int gt 1 }}
    http-request return status 429 content-type application/json hdr Retry-After %[var(txn.retry_after)] lf-string \
'{{"error":"{_CROWDED}"}}' if crowded {_OF_V2}
    http-request return status 429 content-type application/json hdr Retry-After %[var(txn.retry_after)] lf-string \
'{{"error":{{"message":"{_CROWDED}","type":"rate_limit_error","param":null,"code":"queue_full"}}}}' if crowded
    acl refused status 429
    acl tells_all res.hdr({CROWDED}) -m found
    acl names_model var(txn.model) -m found
    http-response set-var(txn.wait) res.hdr(retry-after) if refused tells_all
    http-response set-var(proc.retry_at) date,add(txn.wait) if refused tells_all
    http-response track-sc0 var(txn.model) table {_RETRY_TABLE} if refused tells_all names_model
    http-response sc-set-gpt0(0) date,add(txn.wait) if refused tells_all names_model
    http-response del-header {CROWDED}
"""
# A request that begins a job may have begun it before its replica died: only one with an idempotency key is sent again.
_JOB_RULES: Final = f"""    acl begins_job var(txn.path) -m str {" ".join(BEGINNING_PATHS)}
    acl begins_job req.body,json_query('$.background') -m bool
    acl has_key req.hdr(idempotency-key) -m found
    acl has_key req.body,json_query('$.idempotency_key') -m found
    acl has_key req.body,json_query('$.prompt_id') -m found
    http-request disable-l7-retry if begins_job !has_key
"""
# An answer to a request whose body still comes. HAProxy would pass on the rest as slowly as it comes, and count the
# request for as long; an answer of its own ends it. Its text is kept apart: `return` empties the buffer that has it.
_RETRY_HEADER: Final = "hdr Retry-After %[res.hdr(retry-after)] "
_UNREAD_HEADERS: Final = {
    **dict.fromkeys((400, 403, 404, 408, 413), ""),
    **dict.fromkeys((429, 503), _RETRY_HEADER),
    401: "hdr WWW-Authenticate Bearer ",
}
_UNREAD_RULES: Final = (
    f"    acl unread res.hdr({UNREAD}) -m found\n    http-response wait-for-body time 1s if unread\n"
    "    http-response set-var(txn.refusal) res.body if unread\n"
) + "".join(
    f"    http-response return status {status} content-type application/json {headers}lf-string %[var(txn.refusal)] "
    f"if unread {{ status {status} }}\n"
    for status, headers in _UNREAD_HEADERS.items()
)
_RETRY_TABLE_SECTION: Final = f"""backend {_RETRY_TABLE}
    stick-table type string len 128 size 4k expire 10m store gpt0
"""
# An address has no more than its share of the connections, whatever it does with them.
_CONNECTIONS: Final = "connections"
_SHARE: Final = 0.75  # of all connections, for an address where the config says no number
_CONNECTION_RULES: Final = f"""    tcp-request connection track-sc1 src table {_CONNECTIONS}
    tcp-request connection reject if {{ sc1_conn_cur gt MAX_PER_ADDRESS }}
"""
_CONNECTIONS_SECTION: Final = f"""backend {_CONNECTIONS}
    stick-table type ipv6 size 100k expire 1m store conn_cur
"""
# Of a head that is no HTTP, or comes too slowly, HAProxy knows no more: there its answer is a fixed text, in HTML.
_REFUSALS: Final = {
    400: "the body is not written as HTTP has it",
    408: f"the body did not come within {_REQUEST_TIMEOUT_S} s",
}
_ERRORS: Final = {
    502: "the replica that had this request ended, and the request cannot be sent to another one",
    503: "no replica of the ingress is available now; try again in a moment",
    504: "the replica that has this request did not answer in time",
}


def _error(status: int) -> str:
    return (
        f"status {status} content-type application/json hdr Retry-After 1 "
        f"lf-string '%[var(txn.error_head)]{_ERRORS[status]}%[var(txn.error_tail)]'"
    )


def _refusal(status: int) -> str:
    return (
        f"status {status} content-type application/json "
        f"lf-string '%[var(txn.error_head)]{_REFUSALS[status]}%[var(txn.refusal_tail)]'"
    )


_ERROR_RULES: Final = "".join(f"    http-error {rule}\n" for rule in (*map(_refusal, _REFUSALS), *map(_error, _ERRORS)))


def machine_clock() -> str:
    """Return a name that only processes of this machine share: they have one clock, and those of others have another.

    It is the id of this boot on Linux, also in containers, and the host's name elsewhere.
    """
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return re.sub(r"[^0-9A-Za-z.-]", "-", socket.gethostname())


def rewrite_config(
    text: str, host: str, port: int, max_requests: int, max_per_address: int, pages: Collection[str] = ()
) -> str:
    """Return Serve's configuration with the frontend on `host` and `port`, and with all rules of this module.

    `max_requests` for inference are passed on to a replica at once; an address has `max_per_address` connections. Of
    HAProxy's own pages, `STATISTICS` and `METRICS`, those in `pages` listen, on loopback.

    Raises ValueError when a line that has to change is not there, as may be with another version of Ray.
    """
    connection_rules = _CONNECTION_RULES.replace("MAX_PER_ADDRESS", str(max_per_address))
    header_rules = _SERVE_HEADER_RULES.replace("CLOCK", machine_clock())
    path_rules = _PATH_RULES.replace("PREFIXES", _prefix_rules(text))
    public = "*" if host == "0.0.0.0" else f"[{host}]" if ":" in host else host  # noqa: S104  # asked for
    changes = {
        "metrics": (r"^( +bind ):(\d+)\n", r"\g<1>127.0.0.1:\2\n"),
        "statistics": (r"^( +bind )\*:(\d+)\n(?= +stats enable\n)", r"\g<1>127.0.0.1:\2\n"),
        "admin socket": (r"^( +stats socket .* mode )666 ", r"\g<1>600 "),
        "frontend": (
            r"^(frontend http_frontend\n +bind ).*\n",
            # A socket for each thread: one would drop what comes beyond the kernel's 4,096 connections, probes as well.
            rf"\g<1>{public}:{port} shards by-thread\n"
            + _literal(connection_rules + header_rules + path_rules + _FRONTEND_RULES),
        ),
        "defaults": (r"^defaults\n", "defaults\n" + _literal(_DEFAULT_RULES)),
        "errors": (r"^(?: +errorfile 50[234] .*\n)+", _literal(_ERROR_RULES)),
    }
    for name, (pattern, replacement) in changes.items():
        text, count = re.subn(pattern, replacement, text, flags=re.MULTILINE)
        if count != 1:
            raise ValueError(f"HAProxy's configuration of this Ray has {count} places for {name}, and 1 was expected")
    text = re.sub(_NO_LOG, "", text, flags=re.MULTILINE)
    routed = set(re.findall(r"^ +acl is_(\S+) ", text, flags=re.MULTILINE))
    choice = r"\1\2-quick\3 !posting\n\1\2-quick\3 !inference\n\g<0>"
    if not routed:  # it has just started, and knows of no application yet: no path is wrong
        text = re.sub(_NO_PATH, rf"\1return {_literal(_error(503))}\n", text, flags=re.MULTILINE)
    text, count = re.subn(_CHOICE, choice, text, flags=re.MULTILINE)
    if count != len(routed):
        raise ValueError(
            f"HAProxy's configuration of this Ray chooses {count} of {len(routed)} backends by their paths"
        )
    sections = re.split(r"^(?=\S)", text, flags=re.MULTILINE)
    left_out = {STATISTICS, METRICS}.difference(pages)
    kept = (section for section in sections if section.partition("\n")[0] not in left_out)
    return (
        "".join(_bounded(section, routed, max_requests) for section in kept)
        + _RETRY_TABLE_SECTION
        + _CONNECTIONS_SECTION
    )


def _prefix_rules(text: str) -> str:
    """Return the lines that take the prefixes of applications off `txn.path`: of one within another, the longer one."""
    prefixes = set(re.findall(r"^ +acl is_\S+ path (/\S+)$", text, flags=re.MULTILINE))
    return "".join(
        f"    http-request set-var(txn.path) path,bytes({len(prefix)}) if {{ path_beg {prefix}/ }}\n"
        for prefix in sorted(prefixes, key=len)
    )


def share_of_connections(max_connections: int) -> int:
    """Return the default limit of one address's connections, which leaves some of all to others."""
    return max(1, int(max_connections * _SHARE))


def _bounded(section: str, routed: Collection[str], max_requests: int) -> str:
    """Return the backend of an application with a bound on its requests, before it the one for all but inference.

    `routed` are the names of such backends, which may have no server now. Raises ValueError for one whose servers are
    written in another form.
    """
    name = section.partition("\n")[0].removeprefix("backend ")
    bounded, count = re.subn(_SERVER, rf"\g<0> maxconn {max_requests} {_ENDS}", section, flags=re.MULTILINE)
    if name not in routed and not count:
        return section
    if not count and re.search(r"^ +server ", section, flags=re.MULTILINE):
        raise ValueError(f"HAProxy's configuration of this Ray has servers of another form in backend {name}")
    quick = re.sub(_SERVER, rf"\1 track {name}/\2\3 {_ENDS}", section, flags=re.MULTILINE)
    quick = re.sub(r"^ +(?:option httpchk|http-check|default-server) .*\n", "", quick, flags=re.MULTILINE)
    heads = f"backend {name}\n", f"backend {name}-quick\n"
    return quick.replace(heads[0], heads[1], 1) + bounded.replace(
        heads[0], heads[0] + _BACKEND_RULES + _JOB_RULES + _UNREAD_RULES, 1
    )


def _literal(text: str) -> str:
    """Return the text as a replacement of `re` that stands for itself."""
    return text.replace("\\", r"\\")
