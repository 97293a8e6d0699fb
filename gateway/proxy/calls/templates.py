"""The heads of responses to clients, which responses of the same head of a server share."""

from __future__ import annotations

from multidict import CIMultiDict, CIMultiDictProxy

from gateway.http1.head import STATUSES_WITHOUT_BODY, ResponseHead
from gateway.proxy.calls.handler import ClientMessage
from gateway.proxy.headers import connection_options, end_to_end, with_body
from gateway.proxy.interfaces import ResponseTemplate
from gateway.proxy.response_headers import ResponseHeaderPolicy
from gateway.sizes import CACHED_HEADS
from gateway.system.bounded_cache import BoundedCache

_templates: BoundedCache[tuple[object, ...], ResponseTemplate] = BoundedCache(CACHED_HEADS)


def response_template(
    head: ResponseHead,
    policy: ResponseHeaderPolicy | None,
    content_type: str | None = None,
    *,
    has_new_body: bool = False,
) -> ResponseTemplate:
    """Return the template of responses with the same key.

    A new body has another size, and another ``content_type`` if one is given.
    """
    key = head.key, policy, content_type, has_new_body
    if (template := _templates.get(key)) is not None:
        return template
    keyed = CIMultiDictProxy(CIMultiDict(head.keyed_headers))
    if has_new_body:
        headers = with_body(keyed, {} if content_type is None else {"Content-Type": content_type})
    else:
        headers = end_to_end(keyed)
    return _templates.put(key, make_template(head, headers, policy))


def make_template(
    head: ResponseHead,
    headers: CIMultiDict[str],
    policy: ResponseHeaderPolicy | None,
    *,
    states_length: bool = True,
) -> ResponseTemplate:
    """Make a template of ``headers``, which are those of the head that pass to the client."""
    lines = tuple(headers.items())
    if policy is not None:
        lines = policy.apply_to_lines(lines)
    dropped = connection_options(head.headers)
    return ResponseTemplate(head.status, head.reason, lines, dropped, states_length)


def untouched_message(
    head: ResponseHead, body: bytes | memoryview, policy: ResponseHeaderPolicy | None
) -> ClientMessage:
    """Return a server's response as it is."""
    template = response_template(head, policy)
    lines = passed_lines(head, template)
    if head.status in STATUSES_WITHOUT_BODY and "Content-Length" in head.headers:
        # It is that of a body that is not sent: RFC 9110, section 8.6.
        lines += b"Content-Length: %s\r\n" % head.headers["Content-Length"].encode()
    return template, lines, body, ()


def passed_lines(head: ResponseHead, template: ResponseTemplate) -> bytes:
    """Return the lines that pass to the client as they came."""
    if not template.dropped:
        return head.passed
    return b"".join(
        line + b"\r\n"
        for line in head.passed.split(b"\r\n")
        if line and line.partition(b":")[0].decode("latin-1").lower() not in template.dropped
    )
