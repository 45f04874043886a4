import aiohttp
import botocore.exceptions as boto
import pytest
from botocore.parsers import ResponseParserError

from vescale_storage.backends import s3_errors
from vescale_storage.errors import (
    AccessDeniedError,
    ConfigError,
    InvalidInputError,
    NoSpaceError,
    ObjectNotFoundError,
    StorageError,
    StorageTimeoutError,
    ThrottledError,
)


def answered(code, status=400, message="what the server says"):
    response = {"Error": {"Code": code, "Message": message}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return boto.ClientError(response, "PutObject")


def as_s3fs_raises(error):
    wrapped = OSError(5, "translated by s3fs")
    wrapped.__cause__ = error
    return wrapped


def translated(error):
    return s3_errors.translate(error, "put", "a/b", url="s3://bucket/p")


@pytest.mark.parametrize(
    ("code", "status", "kind", "retryable"),
    [
        ("AccessDenied", 403, AccessDeniedError, False),
        ("SignatureDoesNotMatch", 403, AccessDeniedError, False),
        ("InvalidAccessKeyId", 403, AccessDeniedError, False),
        ("ExpiredToken", 400, AccessDeniedError, False),
        ("TokenRefreshRequired", 400, AccessDeniedError, False),
        ("RequestTimeTooSkewed", 403, AccessDeniedError, False),
        ("SomethingNew", 403, AccessDeniedError, False),
        ("SomethingNew", 401, AccessDeniedError, False),
        ("SlowDown", 503, ThrottledError, True),
        ("ServiceUnavailable", 503, ThrottledError, True),
        ("SomethingNew", 503, ThrottledError, True),
        ("TooManyRequests", 429, ThrottledError, True),
        ("RequestTimeout", 400, StorageTimeoutError, True),
        ("SomethingNew", 504, StorageTimeoutError, True),
        ("InternalError", 500, StorageError, True),
        ("SomethingNew", 502, StorageError, True),
        ("SomethingNew", 599, StorageError, True),
        ("BadDigest", 400, StorageError, True),
        ("XAmzContentSHA256Mismatch", 400, StorageError, True),
        ("NoSuchUpload", 404, StorageError, True),
        ("OperationAborted", 409, StorageError, True),
        ("QuotaExceeded", 403, NoSpaceError, False),
        ("XMinioStorageFull", 507, NoSpaceError, False),
        ("PermanentRedirect", 301, StorageError, False),
        ("MalformedXML", 400, StorageError, False),
        ("EntityTooLarge", 400, StorageError, False),
    ],
)
@pytest.mark.parametrize("wrap", [lambda error: error, as_s3fs_raises])
def test_answers(code, status, kind, retryable, wrap):
    found = translated(wrap(answered(code, status)))
    assert type(found) is kind
    assert found.retryable is retryable
    assert found.context == {"key": "a/b"}
    for part in ("put", "a/b", "s3://bucket/p", code, "what the server says"):
        assert part in str(found)


@pytest.mark.parametrize(("code", "status"), [("NoSuchKey", 404), ("404", 404), ("NoSuchVersion", 404)])
def test_missing_objects(code, status):
    assert s3_errors.is_absent(answered(code, status))
    assert isinstance(translated(answered(code, status)), ObjectNotFoundError)


def test_a_missing_bucket_is_no_missing_object():
    error = answered("NoSuchBucket", 404)
    assert s3_errors.is_absent_bucket(error)
    assert not s3_errors.is_absent(error)
    found = translated(error)
    assert type(found) is StorageError
    assert not found.retryable
    assert "bucket does not exist" in str(found)


@pytest.mark.parametrize(
    ("code", "status", "taken"),
    [
        ("PreconditionFailed", 412, True),
        ("412", 412, True),
        ("ConditionalRequestConflict", 409, True),
        ("OperationAborted", 409, True),
        ("AccessDenied", 403, False),
        ("NoSuchKey", 404, False),
        ("SlowDown", 503, False),
    ],
)
def test_refused_creates(code, status, taken):
    assert s3_errors.is_taken(answered(code, status)) is taken
    assert s3_errors.is_taken(as_s3fs_raises(answered(code, status))) is taken


def test_key_too_long():
    assert type(translated(answered("KeyTooLongError"))) is InvalidInputError


def test_ranges_behind_the_end():
    assert s3_errors.is_past_end(answered("InvalidRange", 416))
    assert s3_errors.is_past_end(answered("416", 416))
    assert not s3_errors.is_past_end(answered("NoSuchKey", 404))


def test_missing_uploads():
    assert s3_errors.is_absent_upload(answered("NoSuchUpload", 404))
    assert not s3_errors.is_absent_upload(answered("AccessDenied", 403))


@pytest.mark.parametrize(
    ("error", "kind", "retryable"),
    [
        (boto.NoCredentialsError(), AccessDeniedError, False),
        (boto.PartialCredentialsError(provider="env", cred_var="x"), AccessDeniedError, False),
        (boto.CredentialRetrievalError(provider="x", error_msg="y"), AccessDeniedError, False),
        (boto.TokenRetrievalError(provider="x", error_msg="y"), AccessDeniedError, False),
        (boto.ReadTimeoutError(endpoint_url="http://x"), StorageTimeoutError, True),
        (boto.ConnectTimeoutError(endpoint_url="http://x"), StorageTimeoutError, True),
        (TimeoutError(), StorageTimeoutError, True),
        (boto.EndpointConnectionError(endpoint_url="http://x"), StorageError, True),
        (boto.ConnectionClosedError(endpoint_url="http://x"), StorageError, True),
        (boto.HTTPClientError(error="x"), StorageError, True),
        (boto.IncompleteReadError(actual_bytes=1, expected_bytes=2), StorageError, True),
        (aiohttp.ClientPayloadError("cut"), StorageError, True),
        (ResponseParserError("no XML"), StorageError, True),
        (ConnectionResetError(104, "reset"), StorageError, True),
        (boto.SSLError(endpoint_url="https://x", error="bad"), StorageError, False),
        (OSError(5, "odd"), StorageError, False),
    ],
)
def test_no_answer(error, kind, retryable):
    found = translated(error)
    assert type(found) is kind
    assert found.retryable is retryable
    assert "s3://bucket/p" in str(found)


def test_wrong_arguments_are_a_matter_of_configuration():
    assert type(translated(boto.ParamValidationError(report="bad bucket name"))) is ConfigError


def test_an_error_without_text_is_named():
    assert "TimeoutError" in str(translated(TimeoutError()))
