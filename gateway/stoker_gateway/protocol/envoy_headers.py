"""Names of headers and metadata that Envoy, the picker and servers exchange: the endpoint-picker protocol's, and
Stoker's own.

https://github.com/kubernetes-sigs/gateway-api-inference-extension, proposal 004
"""

from __future__ import annotations

from typing import Final

#: Header and metadata key with the chosen servers: ``IP:PORT``, separated by commas, best first.
DESTINATION: Final = "x-gateway-destination-endpoint"
#: Namespace of the dynamic metadata with this key.
DESTINATION_METADATA: Final = "envoy.lb"
#: Namespace of the proxy's metadata with the servers among which the picker must choose.
SUBSET_METADATA: Final = "envoy.lb.subset_hint"
#: Header with the Envoy cluster of the chosen servers.
CLUSTER: Final = "x-stoker-cluster"
#: Prefix of the details of the picker's own responses (``ImmediateResponse.details``).
PICKER_DETAILS: Final = "picker"
#: Namespace of the dynamic metadata about a routed request. Its fields: id of the client's key, model, number of the
#: pick.
METADATA: Final = "stoker"
KEY: Final = "key"
MODEL: Final = "model"
PICK: Final = "pick"
#: Further fields: id of the reservation against the key's limits, and estimated prompt tokens.
GRANT: Final = "grant"
ESTIMATE: Final = "estimate"
#: Request header that makes Stoker's engine report its token counts so far in each event of a stream.
USAGE_HEADER: Final = "x-stoker-usage"
#: Request header with the id under which Stoker's engine stores its response.
RESPONSE_ID_HEADER: Final = "x-stoker-response-id"
#: Response header of Stoker's engine: it has not started the request, so Envoy may retry it at another server.
NOT_BEGUN_HEADER: Final = "x-stoker-not-begun"
#: Response header with the seconds that the request waited, if it was held; also the key of this value in the picker's
#: metadata.
HELD_HEADER: Final = "x-stoker-held-seconds"
#: Namespace of the dynamic metadata with the token usage in responses (``envoy/usage.lua``): JSON objects as text. The
#: fields of `USAGES`: the counts so far of Stoker's engine; ``usage`` of OpenAI's and Anthropic's APIs; the usage in
#: ``response`` of OpenAI's events; the usage in ``message`` of Anthropic's first event.
USAGE_METADATA: Final = "stoker.usage"
#: Further field: set if a JSON response has an error and no usage, or a stream has an error before any output.
FAILED: Final = "failed"
USAGES: Final = ("stoker_usage", "usage", "response", "message")
