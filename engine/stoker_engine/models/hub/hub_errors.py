"""Translate errors of the hub's library into errors with a remedy."""

from __future__ import annotations

import errno
from typing import Final

from huggingface_hub import get_token
from huggingface_hub.constants import ENDPOINT, HF_HUB_CACHE
from huggingface_hub.errors import (
    DisabledRepoError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RevisionNotFoundError,
    RevisionResolutionError,
)

from stoker_common.errors import (
    DownloadError,
    ModelAccessDeniedError,
    ModelError,
    ModelNotFoundError,
)

#: All errors that the hub's library raises for failed downloads. Errors of its HTTP client derive from `OSError` or
#: from a base class of `HfHubHTTPError`.
HUB_ERRORS: Final[tuple[type[Exception], ...]] = (
    OSError,
    HFValidationError,
    RevisionResolutionError,
    *(base for base in HfHubHTTPError.__bases__ if issubclass(base, Exception)),
)

_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
_READ_ONLY: Final = (errno.EROFS, errno.EACCES, errno.EPERM)
_TOKEN: Final = "set a token that has access: spec.model.tokenSecretRef, or the environment variable HF_TOKEN"


def explain(error: Exception, name: str, revision: str | None) -> ModelError:
    """Return the error to raise, with cause and remedy."""
    error = _cause(error)
    if isinstance(error, GatedRepoError):
        return ModelAccessDeniedError(
            f"the hub model {name} is gated: accept its terms on its page ({ENDPOINT}/{name}), and {_TOKEN}"
        )
    if isinstance(error, RevisionNotFoundError):
        return ModelNotFoundError(f"the hub model {name} has no revision {revision or 'main'!r}; check the revision")
    if isinstance(error, HFValidationError):
        return ModelNotFoundError(f"{name!r} is not a valid hub id: {first_line(error)}")
    if isinstance(error, DisabledRepoError):
        return ModelAccessDeniedError(f"the hub has disabled the model {name}; choose another one")
    if isinstance(error, HfHubHTTPError) and error.response.status_code in (401, 403, 404):
        return _not_given(error, name)
    if isinstance(error, OSError) and error.errno in _FULL:
        return DownloadError(
            f"the disk is full: {name} does not fit into {HF_HUB_CACHE}; "
            "give spec.storage.cache a larger volume, or on one machine set HF_HUB_CACHE to a folder on another disk"
        )
    if isinstance(error, OSError) and error.errno in _READ_ONLY:
        return DownloadError(f"{name} cannot be written into {HF_HUB_CACHE}: {error.strerror}; make it writable")
    return DownloadError(
        f"cannot download {name} from the model hub {ENDPOINT}: {first_line(error)}; check the network, the proxy "
        "(HTTPS_PROXY) or the mirror (HF_ENDPOINT), or use a downloaded model: a folder, or pvc:// in a cluster"
    )


def may_pass(error: Exception) -> bool:
    """Whether a retry may succeed: the error is not known to be permanent."""
    error = _cause(error)
    if isinstance(error, HfHubHTTPError):
        return error.response.status_code in (408, 429) or error.response.status_code >= 500
    if isinstance(error, HFValidationError | OfflineModeIsEnabled):
        return False
    return not (isinstance(error, OSError) and error.errno in (*_FULL, *_READ_ONLY))


def _not_given(error: HfHubHTTPError, name: str) -> ModelError:
    """Return the error for a response with status 401, 403 or 404. Without a token, the hub returns 401 both for
    private models and for missing ones."""
    status = error.response.status_code
    if status == 403 or (status == 401 and get_token()):
        return ModelAccessDeniedError(f"the hub denies access to {name} ({status}): {_TOKEN}")
    return ModelNotFoundError(
        f"the hub has no model {name}, or it is private ({status}): check the name; for a private model {_TOKEN}"
    )


def _cause(error: Exception) -> Exception:
    """Return the error behind the library's "not found in the cache" or "revision cannot be resolved"."""
    while isinstance(error, LocalEntryNotFoundError | RevisionResolutionError) and isinstance(
        error.__cause__, Exception
    ):
        error = error.__cause__
    return error


def first_line(error: Exception) -> str:
    """Return the first line of the error's text that is not blank, or the name of its type."""
    return next(filter(None, map(str.strip, str(error).split("\n"))), type(error).__name__)
