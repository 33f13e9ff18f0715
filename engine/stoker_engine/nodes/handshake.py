"""Mutual authentication of a connection: both ends prove that they know the key, without sending it.

    head ──► node   a nonce
    node ──► head   another nonce, and HMAC(key, "node", both nonces)
    head ──► node   HMAC(key, "head", both nonces), or an error if the node's HMAC is wrong

HMAC-SHA256 (RFC 2104). Later messages are neither encrypted nor signed. The key only protects against attackers who can
reach the port, not against those who can read or modify packets between the nodes.
"""

from __future__ import annotations

import hmac
import os
from typing import Final

from stoker_engine.nodes.connection import NodeConnection

#: Name of the environment variable with the key, which must be equal on all nodes.
VARIABLE: Final = "STOKER_NODE_KEY"

_GREETING: Final = b"stoker-node-1 "
_WRONG: Final = b"wrong key"
_NUMBER_BYTES: Final = 32


class WrongKeyError(Exception):
    """The keys of this node and its peer differ."""


class NoNodeError(Exception):
    """The peer is not a Stoker node, or does not accept this node yet."""


def node_key() -> bytes:
    """Return the key; empty if none is set."""
    return os.environ.get(VARIABLE, "").encode()


def greet_node(connection: NodeConnection, key: bytes) -> None:
    """Run the head's side of the handshake.

    Raises:
        WrongKeyError, NoNodeError: authentication failed.
        EOFError, OSError: no message can be exchanged.
    """
    head_nonce = os.urandom(_NUMBER_BYTES)
    connection.send_bytes(_GREETING + head_nonce)
    answer = connection.receive_bytes()
    node_nonce, proof = answer[:_NUMBER_BYTES], answer[_NUMBER_BYTES:]
    if len(answer) != _NUMBER_BYTES + 32:
        raise NoNodeError("its response is not that of a Stoker node")
    if not hmac.compare_digest(proof, _proof(key, b"node", head_nonce + node_nonce)):
        connection.send_bytes(_WRONG)
        raise WrongKeyError
    connection.send_bytes(_proof(key, b"head", head_nonce + node_nonce))


def greet_head(connection: NodeConnection, key: bytes) -> None:
    """Run a node's side of the handshake. Raises the same errors as `greet_node`."""
    greeting = connection.receive_bytes()
    if not greeting.startswith(_GREETING) or len(greeting) != len(_GREETING) + _NUMBER_BYTES:
        raise NoNodeError("its greeting is not that of Stoker's node 0")
    head_nonce, node_nonce = greeting.removeprefix(_GREETING), os.urandom(_NUMBER_BYTES)
    connection.send_bytes(node_nonce + _proof(key, b"node", head_nonce + node_nonce))
    if not hmac.compare_digest(connection.receive_bytes(), _proof(key, b"head", head_nonce + node_nonce)):
        raise WrongKeyError


def _proof(key: bytes, role: bytes, nonces: bytes) -> bytes:
    return hmac.digest(key, role + nonces, "sha256")
