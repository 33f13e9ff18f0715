"""Both ends of a connection show that they know the key, without sending it.

    head ──► node   a random number
    node ──► head   another one, and HMAC(key, "node", both numbers)
    head ──► node   HMAC(key, "head", both numbers), or that the node's was wrong

HMAC-SHA256 (RFC 2104). What follows is neither encrypted nor signed: who can change packets on their way between the
nodes can do anything. The key keeps out who can only reach the port.
"""

from __future__ import annotations

import hmac
import os
from typing import Final

from stoker_engine.nodes.connection import NodeConnection

#: The variable of the environment that holds the key, the same on all nodes.
VARIABLE: Final = "STOKER_NODE_KEY"

_GREETING: Final = b"stoker-node-1 "
_WRONG: Final = b"wrong key"
_NUMBER_BYTES: Final = 32


class WrongKeyError(Exception):
    """The other end has another key, or none."""


class NoNodeError(Exception):
    """What is at the other end is no node of ours."""


def node_key() -> bytes:
    """The key; empty where there is none."""
    return os.environ.get(VARIABLE, "").encode()


def greet_node(connection: NodeConnection, key: bytes) -> None:
    """The head's part.

    Raises:
        WrongKeyError, NoNodeError: the connection is of no use.
        EOFError, OSError: it has ended.
    """
    head_nonce = os.urandom(_NUMBER_BYTES)
    connection.send_bytes(_GREETING + head_nonce)
    answer = connection.receive_bytes()
    node_nonce, proof = answer[:_NUMBER_BYTES], answer[_NUMBER_BYTES:]
    if len(answer) != _NUMBER_BYTES + 32:
        raise NoNodeError("it does not answer as a node does")
    if not hmac.compare_digest(proof, _proof(key, b"node", head_nonce + node_nonce)):
        connection.send_bytes(_WRONG)
        raise WrongKeyError
    connection.send_bytes(_proof(key, b"head", head_nonce + node_nonce))


def greet_head(connection: NodeConnection, key: bytes) -> None:
    """A node's part; raises what `greet_node` does."""
    greeting = connection.receive_bytes()
    if not greeting.startswith(_GREETING) or len(greeting) != len(_GREETING) + _NUMBER_BYTES:
        raise NoNodeError("it does not greet as a head does")
    head_nonce, node_nonce = greeting.removeprefix(_GREETING), os.urandom(_NUMBER_BYTES)
    connection.send_bytes(node_nonce + _proof(key, b"node", head_nonce + node_nonce))
    if not hmac.compare_digest(connection.receive_bytes(), _proof(key, b"head", head_nonce + node_nonce)):
        raise WrongKeyError


def _proof(key: bytes, role: bytes, nonces: bytes) -> bytes:
    return hmac.digest(key, role + nonces, "sha256")
