"""The changes that Atelier makes to the HAProxy configuration that Serve writes.

Serve puts HAProxy's statistics and metrics on every interface and its admin socket into everybody's hands, repeats
nothing that has reached a replica, answers errors in plain text, and waits for a slow request as long as it takes.
Its replicas obey headers that are not for clients, and break on one that is no text.
"""

from __future__ import annotations

import re
from typing import Final

RECEIVED: Final = "x-received-us"  # when a request came: what waits behind it in a replica is not the client's time
# Kept connections to a replica that died can use up several; a request that kills replicas kills five at most.
MAX_RETRIES: Final = 4
RETRY_ON: Final = "conn-failure empty-response"
_NO_LOG: Final = r"^ +log 127\.0\.0\.1:514 local0 info\n"  # Serve's default, where usually nobody listens
_REQUEST_TIMEOUT_S: Final = 30  # for the head and the first of the body: slow clients hold nothing for longer

# Headers that Serve's replicas read before the ingress does (Ray 2.60, `replica.py`). The first lets a request
# go on whose client is gone. Bytes that are no ASCII text in the others would be a 500.
_SERVE_HEADER_RULES: Final = rf"""    http-request set-header {RECEIVED} %[date(0,us)]
    http-request del-header x-request-disconnect-disabled
    http-request del-header ^serve[-_]multiplexed[-_]model[-_]id$ -m reg
    http-request del-header ^x[-_]session[-_]id$ -m reg
    http-request del-header x-request-id if {{ req.fhdr(x-request-id) -m reg [^\x20-\x7e] }}
    http-request replace-header x-request-timeout-seconds .*[^\x20-\x7e].* not-text
"""
# Inference changes nothing, so that a request whose replica died without a word may be sent again. So may methods that
# change nothing by definition (RFC 9110, 9.2.1). All others are not repeated, POST /admin say. A request that never
# reached a replica is sent elsewhere in any case.
_FRONTEND_RULES: Final = r"""    acl reading method GET HEAD OPTIONS
    acl posting method POST
    acl inference path_beg /v1/ /v2/models/
    http-request disable-l7-retry if !reading !posting
    http-request disable-l7-retry if posting !inference
    acl open_inference_protocol path_beg /v2
    http-request set-var-fmt(txn.error_head) "{\"error\":{\"message\":\""
    http-request set-var-fmt(txn.error_tail) "\",\"type\":\"server_error\",\"param\":null,\"code\":\"no_replica\"}}"
    http-request set-var-fmt(txn.error_head) "{\"error\":\"" if open_inference_protocol
    http-request set-var-fmt(txn.error_tail) "\"}" if open_inference_protocol
"""
_DEFAULT_RULES: Final = f"""    timeout http-request {_REQUEST_TIMEOUT_S}s
    # A retry sends what the buffer holds, so that the body has to be in it.
    option http-buffer-request
"""
_ERRORS: Final = {
    502: "the replica that had this request ended, and the request cannot be sent to another one",
    503: "no replica of the ingress is available now; try again in a moment",
    504: "the replica that has this request did not answer in time",
}
_ERROR_RULES: Final = "".join(
    f"    http-error status {status} content-type application/json hdr Retry-After 1 "
    f"lf-string '%[var(txn.error_head)]{message}%[var(txn.error_tail)]'\n"
    for status, message in _ERRORS.items()
)


def rewrite_config(text: str, host: str, port: int) -> str:
    """Return Serve's configuration with the frontend on `host` and `port`, and with all rules of this module.

    Raises: ValueError when a line that has to change is not there, as may be with another version of Ray.
    """
    public = "*" if host == "0.0.0.0" else f"[{host}]" if ":" in host else host  # noqa: S104  # asked for
    changes = {
        "metrics": (r"^( +bind ):(\d+)\n", r"\g<1>127.0.0.1:\2\n"),
        "statistics": (r"^( +bind )\*:(\d+)\n(?= +stats enable\n)", r"\g<1>127.0.0.1:\2\n"),
        "admin socket": (r"^( +stats socket .* mode )666 ", r"\g<1>600 "),
        "frontend": (
            r"^(frontend http_frontend\n +bind ).*\n",
            rf"\g<1>{public}:{port}\n" + _literal(_SERVE_HEADER_RULES + _FRONTEND_RULES),
        ),
        "defaults": (r"^defaults\n", "defaults\n" + _literal(_DEFAULT_RULES)),
        "errors": (r"^(?: +errorfile 50[234] .*\n)+", _literal(_ERROR_RULES)),
    }
    for name, (pattern, replacement) in changes.items():
        text, count = re.subn(pattern, replacement, text, flags=re.MULTILINE)
        if count != 1:
            raise ValueError(f"HAProxy's configuration of this Ray has {count} places for {name}, and 1 was expected")
    return re.sub(_NO_LOG, "", text, flags=re.MULTILINE)


def _literal(text: str) -> str:
    """Return the text as a replacement of `re` that stands for itself."""
    return text.replace("\\", r"\\")
