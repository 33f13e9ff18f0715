"""What Envoy and the picker say to each other: names of headers and metadata by the endpoint-picker protocol, and ours.

https://github.com/kubernetes-sigs/gateway-api-inference-extension, proposal 004
"""

from __future__ import annotations

from typing import Final

#: The header, and the key of the metadata, that say the servers: ``IP:PORT``, several with commas, best first.
DESTINATION: Final = "x-gateway-destination-endpoint"
#: The dynamic metadata that says the same.
DESTINATION_METADATA: Final = "envoy.lb"
#: The metadata that says among which servers the picker has to choose.
SUBSET_METADATA: Final = "envoy.lb.subset_hint"
#: The header that says whose servers they are: a cluster of Envoy's.
CLUSTER: Final = "x-stoker-cluster"
#: How the details of an answer of the picker's own begin (``ImmediateResponse.details``).
PICKER_DETAILS: Final = "picker"
#: The dynamic metadata by which the picker says what it knows of a request that it routed. In it: who asked,
#: for which model, and the pick's number.
METADATA: Final = "stoker"
KEY: Final = "key"
MODEL: Final = "model"
PICK: Final = "pick"
#: What limits reserved for it, and how many tokens its prompt may have.
GRANT: Final = "grant"
ESTIMATE: Final = "estimate"
#: The request header by which an engine is asked to say what it has counted so far in each event of a stream.
USAGE_HEADER: Final = "x-stoker-usage"
#: The request header by which an engine is told what to call the response that it makes and keeps.
RESPONSE_ID_HEADER: Final = "x-stoker-response-id"
#: The header of an engine's answer that says that nothing of the request was started: another server may be asked.
NOT_BEGUN_HEADER: Final = "x-stoker-not-begun"
#: The header of an answer that says for how many seconds the request was held until a server was ready; also the key of
#: the picker's metadata that says the same.
HELD_HEADER: Final = "x-stoker-held-seconds"
#: The dynamic metadata where Envoy keeps what answers say of their tokens (``envoy/usage.lua``): objects as text. Whose
#: they are: our engine's so far; OpenAI's and Anthropic's; of OpenAI's responses; of Anthropic's first event.
USAGE_METADATA: Final = "stoker.usage"
#: What is there too if the answer says nothing but an error, or said one before anything else.
FAILED: Final = "failed"
USAGES: Final = ("stoker_usage", "usage", "response", "message")
