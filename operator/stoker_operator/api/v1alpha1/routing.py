"""How requests come through the gateway."""

from __future__ import annotations

import re
from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field

from stoker_operator.api.rule import Rule
from stoker_operator.api.v1alpha1.base import Part

#: Taken off each request before the gateway's picker reads it, or about the connection and not the session.
_NO_SESSION: Final = r"(?i)^(x-(stoker|gateway|envoy)-.*|host|connection|content-length|transfer-encoding|te)$"
#: A field name of HTTP (RFC 9110, section 5.1).
HeaderName = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[!#$%&'*+.^_`|~0-9A-Za-z-]+$")]


class Routing(Part):
    """How requests come through the gateway, one address for all models."""

    gateway: Literal["Enabled", "Disabled"] | None = None
    """Whether the gateway serves the endpoint's names. Enabled: it must; the condition Routed says what is missing.
    Disabled: never. Absent: Enabled where the namespace has the label stoker.dev/gateway: enabled."""
    session_header: HeaderName | None = None
    """A request header whose value keeps a session with one pod, such as X-Session-Id. Absent: sessions are known by
    the bodies of requests."""

    RULES: ClassVar = (
        Rule(
            field="sessionHeader",
            holds=lambda it: it.session_header is None or re.search(_NO_SESSION, it.session_header) is None,
            cel=f"!has(self.sessionHeader) || !self.sessionHeader.matches(r'{_NO_SESSION}')",
            message="this header cannot name a session: it is taken off requests, or is about the connection",
            remedy="use another one, such as X-Session-Id",
        ),
    )
