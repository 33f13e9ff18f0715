"""Routing of requests through the gateway."""

from __future__ import annotations

import re
from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field

from stoker_operator.api.rule import Rule
from stoker_operator.api.v1alpha1.base import Part

#: Headers that are removed before the gateway's picker reads a request, or that describe the connection.
_NO_SESSION: Final = r"(?i)^(x-(stoker|gateway|envoy)-.*|host|connection|content-length|transfer-encoding|te)$"
#: A field name of HTTP (RFC 9110, section 5.1).
HeaderName = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[!#$%&'*+.^_`|~0-9A-Za-z-]+$")]


class Routing(Part):
    """Routing of requests through the gateway, which serves many endpoints at one address."""

    gateway: Literal["Enabled", "Disabled"] | None = None
    """Absent: the gateway serves the endpoint's model names if the namespace has the label stoker.dev/gateway: enabled,
    and no older endpoint claims one of them. Enabled: the same; if there is no gateway, the condition Routed reports
    this. Disabled: the gateway does not serve them."""
    session_header: HeaderName | None = None
    """Request header that identifies a session, such as X-Session-Id; the gateway prefers one pod for the requests of a
    session. Without the header, fields of the body can identify it."""

    RULES: ClassVar = (
        Rule(
            field="sessionHeader",
            holds=lambda it: it.session_header is None or re.search(_NO_SESSION, it.session_header) is None,
            cel=f"!has(self.sessionHeader) || !self.sessionHeader.matches(r'{_NO_SESSION}')",
            message="the header cannot identify a session: it is removed from requests, or describes the connection",
            remedy="use another one, such as X-Session-Id",
        ),
    )
