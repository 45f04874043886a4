"""What S3 and its client library say, in the words of this package: classed by what a handler will do."""

from __future__ import annotations

import asyncio
from typing import Final

import aiohttp
import botocore.exceptions
import botocore.parsers

from vescale_storage.errors import (
    AccessDeniedError,
    ConfigError,
    InvalidInputError,
    NoSpaceError,
    ObjectNotFoundError,
    StorageError,
    StorageTimeoutError,
    ThrottledError,
    VeScaleError,
)

_DENIED: Final = frozenset({
    "AccessDenied", "AccountProblem", "AllAccessDisabled", "AuthFailure", "ExpiredToken", "ExpiredTokenException",
    "Forbidden", "InvalidAccessKeyId", "InvalidClientTokenId", "InvalidSecurity", "InvalidToken",
    "MissingSecurityHeader", "NotSignedUp", "RequestExpired", "RequestTimeTooSkewed", "SignatureDoesNotMatch",
    "TokenRefreshRequired", "UnauthorizedAccess", "UnrecognizedClientException", "401", "403",
})  # fmt: skip
_ABSENT: Final = frozenset({"NoSuchKey", "NoSuchVersion", "404"})
_THROTTLED: Final = frozenset({
    "BandwidthLimitExceeded", "ProvisionedThroughputExceededException", "RequestLimitExceeded", "RequestThrottled",
    "ServiceUnavailable", "SlowDown", "Throttling", "ThrottlingException", "TooManyRequests",
    "TooManyRequestsException", "429", "503",
})  # fmt: skip
_TIMEOUT: Final = frozenset({"RequestTimeout", "RequestTimeoutException", "408", "504"})
_NO_SPACE: Final = frozenset({"InsufficientStorage", "QuotaExceeded", "StorageFull", "XMinioStorageFull", "507"})
_ELSEWHERE: Final = frozenset({
    "AuthorizationHeaderMalformed", "IllegalLocationConstraintException", "PermanentRedirect", "Redirect",
    "TemporaryRedirect", "301", "307",
})  # fmt: skip
# Damaged on the way, met by another request, or a failure inside the server: the same request may succeed.
_PASSING: Final = frozenset({
    "BadDigest", "ConditionalRequestConflict", "IncompleteBody", "InternalError", "NoSuchUpload", "OperationAborted",
    "XAmzContentChecksumMismatch", "XAmzContentSHA256Mismatch", "409", "500", "502",
})  # fmt: skip
_TAKEN: Final = frozenset({"PreconditionFailed", "ConditionalRequestConflict", "OperationAborted", "409", "412"})

_NO_CREDENTIALS: Final = (
    botocore.exceptions.NoCredentialsError,
    botocore.exceptions.PartialCredentialsError,
    botocore.exceptions.CredentialRetrievalError,
    botocore.exceptions.NoAuthTokenError,
    botocore.exceptions.TokenRetrievalError,
    botocore.exceptions.SSOError,
)
_SLOW: Final = (
    botocore.exceptions.ReadTimeoutError,
    botocore.exceptions.ConnectTimeoutError,
    asyncio.TimeoutError,
    TimeoutError,
)
_BROKEN: Final = (
    botocore.exceptions.HTTPClientError,
    botocore.exceptions.ConnectionError,
    botocore.exceptions.IncompleteReadError,
    botocore.exceptions.FlexibleChecksumError,
    botocore.exceptions.ChecksumError,
    botocore.parsers.ResponseParserError,
    aiohttp.ClientError,
    ConnectionError,
)
TRANSLATED: Final = (botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError, aiohttp.ClientError, OSError)
"""What a call to S3 may raise and ``translate`` understands."""


def is_taken(error: BaseException) -> bool:
    """Return whether a create-only put was refused because of another object, there or on its way."""
    code, status = _answer(error)
    return code in _TAKEN or status in _TAKEN


def is_absent_bucket(error: BaseException) -> bool:
    """Return whether the server says that the bucket, not the object, is missing."""
    return _answer(error)[0] == "NoSuchBucket"


def is_absent_upload(error: BaseException) -> bool:
    """Return whether the server knows no such multipart upload."""
    return "NoSuchUpload" in _answer(error) or is_absent(error)


def is_past_end(error: BaseException) -> bool:
    """Return whether a range begins behind the object's last byte."""
    return bool({"InvalidRange", "416"} & set(_answer(error)))


def is_absent(error: BaseException) -> bool:
    """Return whether the server says that there is no such object."""
    code, status = _answer(error)
    return code in _ABSENT or (status in _ABSENT and code not in {"NoSuchBucket", "NoSuchUpload"})


def translate(error: BaseException, action: str, key: str, *, url: str) -> VeScaleError:
    """Return the package's error for what a request to ``action`` ``key`` met."""
    code, status = _answer(error)
    if code:
        return _from_answer(error, code, status, f"cannot {action} {key!r} in {url}", key)
    return _from_exception(error, f"cannot {action} {key!r} in {url}: {str(error) or type(error).__name__}", key)


def _from_answer(error: BaseException, code: str, status: str, asked: str, key: str) -> VeScaleError:
    message = f"{asked}: {code} ({_said(error)})"
    if is_absent_bucket(error):
        return _absent_bucket(asked, key)
    if is_absent(error):
        return ObjectNotFoundError(f"{asked}: there is no such object", key=key)
    if code == "KeyTooLongError":
        return InvalidInputError(message, key=key)
    for said in (code, status):
        found = _by_code(said, message, key)
        if found is not None:
            return found
    return StorageError(message, retryable=status.startswith("5"), key=key)


def absent_bucket(action: str, key: str, *, url: str) -> StorageError:
    """Return the error for a bucket that is not there."""
    return _absent_bucket(f"cannot {action} {key!r} in {url}", key)


def _absent_bucket(asked: str, key: str) -> StorageError:
    return StorageError(f"{asked}: the bucket does not exist; create it, or check its name and region", key=key)


def _by_code(said: str, message: str, key: str) -> StorageError | None:
    found: StorageError | None = None
    if said in _DENIED:
        hint = "check that the credentials are valid, not expired, and allowed to do this"
        also = "without s3:ListBucket, S3 says the same of an object that is not there"
        found = AccessDeniedError(f"{message}; {hint} ({also})", key=key)
    elif said in _THROTTLED:
        found = ThrottledError(message, retryable=True, key=key)
    elif said in _TIMEOUT:
        found = StorageTimeoutError(message, retryable=True, key=key)
    elif said in _NO_SPACE:
        found = NoSpaceError(f"{message}; free space, or raise the quota, and save again", key=key)
    elif said in _ELSEWHERE:
        found = StorageError(f"{message}; name the bucket's region in client_kwargs={{'region_name': ...}}", key=key)
    elif said in _PASSING:
        found = StorageError(message, retryable=True, key=key)
    return found


def _from_exception(error: BaseException, message: str, key: str) -> VeScaleError:
    found: VeScaleError
    if isinstance(error, _NO_CREDENTIALS):
        where = "storage_options (key, secret, token), AWS_* variables, a profile or an instance role"
        found = AccessDeniedError(f"{message}; give credentials by {where}", key=key)
    elif isinstance(error, _SLOW):
        found = StorageTimeoutError(message, retryable=True, key=key)
    elif isinstance(error, botocore.exceptions.SSLError):
        found = StorageError(f"{message}; check the endpoint's certificate", key=key)
    elif isinstance(error, _BROKEN):
        found = StorageError(message, retryable=True, key=key)
    elif isinstance(error, OSError):
        found = StorageError(message, key=key)
    else:
        found = ConfigError(f"{message}; check the URL and storage_options", key=key)
    return found


def _answer(error: BaseException) -> tuple[str, str]:
    """Return the error code and the HTTP status of the server's answer, empty where there was none."""
    found = _client_error(error)
    if found is None:
        return "", ""
    response = found.response
    code = str(response.get("Error", {}).get("Code", ""))
    status = str(response.get("ResponseMetadata", {}).get("HTTPStatusCode", ""))
    return code or status, status


def _said(error: BaseException) -> str:
    found = _client_error(error)
    return str(found.response.get("Error", {}).get("Message") or error) if found is not None else str(error)


def _client_error(error: BaseException | None) -> botocore.exceptions.ClientError | None:
    # s3fs raises its own translation of the client's error and keeps the latter as the cause.
    while error is not None:
        if isinstance(error, botocore.exceptions.ClientError):
            return error
        error = error.__cause__
    return None
