import botocore.exceptions
import pytest
from obstore import exceptions

from vescale_storage.backends import s3_errors
from vescale_storage.backends.obstore_errors import as_botocore_error
from vescale_storage.errors import (
    AccessDeniedError,
    ObjectNotFoundError,
    StorageError,
    StorageTimeoutError,
    ThrottledError,
)

ANSWER = (
    "Generic S3 error: Error performing PUT http://h/b/k in 1ms - Server returned non-2xx status code: {status} Words: "
    "{body}\n\nDebug source:\nGeneric {{\n    status: {status},\n}}"
)
BODY = "<Error><Code>{code}</Code><Message>what it says</Message></Error>"
NO_BUCKET = BODY.format(code="NoSuchBucket")
BROKEN = (
    "Generic S3 error: Error performing GET http://h/b/k in 1ms - HTTP error: error sending request\n\n"
    "Debug source:\nGeneric {{\n    inner: Http(\n        HttpError {{\n            kind: {kind},\n"
)


def translated(error):
    return s3_errors.translate(as_botocore_error(error), "get", "k", url="s3://b")


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        ("503", "SlowDown", ThrottledError),
        ("403", "ExpiredToken", AccessDeniedError),
        ("408", "RequestTimeout", StorageTimeoutError),
        ("404", "NoSuchKey", ObjectNotFoundError),
    ],
)
def test_answers_keep_code_status_and_message(status, code, kind):
    text = ANSWER.format(status=status, body=BODY.format(code=code))
    error = as_botocore_error(exceptions.GenericError(text))
    assert isinstance(error, botocore.exceptions.ClientError)
    assert error.response["Error"] == {"Code": code, "Message": "what it says"}
    assert error.response["ResponseMetadata"] == {"HTTPStatusCode": int(status)}
    assert type(translated(exceptions.GenericError(text))) is kind


def test_an_answer_without_a_body_is_known_by_its_status():
    found = translated(exceptions.GenericError(ANSWER.format(status="503", body="")))
    assert type(found) is ThrottledError
    assert "Debug source" not in found.message
    assert "\n" not in found.message


@pytest.mark.parametrize(
    ("error", "check"),
    [
        (exceptions.AlreadyExistsError("x"), s3_errors.is_taken),
        (exceptions.PreconditionError("x"), s3_errors.is_taken),
        (FileNotFoundError("x"), s3_errors.is_absent),
        (exceptions.GenericError(ANSWER.format(status="416", body="")), s3_errors.is_past_end),
        (
            exceptions.GenericError(ANSWER.format(status="404", body=BODY.format(code="NoSuchBucket"))),
            s3_errors.is_absent_bucket,
        ),
    ],
)
def test_what_the_back_end_asks_of_an_error(error, check):
    assert check(as_botocore_error(error))


@pytest.mark.parametrize(
    ("error", "kind", "retryable"),
    [
        (exceptions.GenericError(BROKEN.format(kind="Timeout")), StorageTimeoutError, True),
        (exceptions.GenericError(BROKEN.format(kind="Connect")), StorageError, True),
        (exceptions.GenericError(BROKEN.format(kind="Interrupted")), StorageError, True),
        (exceptions.GenericError("Generic S3 error: x\n\nDebug source:\nUnexpectedRange {}"), StorageError, True),
        (exceptions.GenericError("Received redirect without LOCATION"), StorageError, False),
        (exceptions.GenericError("something new"), StorageError, False),
        (exceptions.PermissionDeniedError("x"), AccessDeniedError, False),
        (exceptions.UnauthenticatedError("x"), AccessDeniedError, False),
        (ValueError("Could not parse path"), StorageError, False),
    ],
)
def test_failures_without_an_answer(error, kind, retryable):
    found = translated(error)
    assert type(found) is kind
    assert found.retryable is retryable
    assert found.context["key"] == "k"
