"""What obstore raises, as what botocore would have raised, so that one table (``s3_errors``) classes both.

obstore keeps status, error code and cause only in the text of its errors.
"""

from __future__ import annotations

import re
from typing import Any, Final

import botocore.exceptions
from obstore import exceptions

_STATUS: Final = re.compile(r"status code: (\d{3})")
_CODE: Final = re.compile(r"<Code>([^<]+)</Code>")
_SAID: Final = re.compile(r"<Message>([^<]*)</Message>")
_HTTP_KIND: Final = re.compile(r"HttpError \{\s*kind: (\w+)")
_DEBUG: Final = "\n\nDebug source:"
_CODES: Final[tuple[tuple[type[BaseException], str], ...]] = (
    (exceptions.AlreadyExistsError, "PreconditionFailed"),
    (exceptions.PreconditionError, "PreconditionFailed"),
    (exceptions.PermissionDeniedError, "AccessDenied"),
    (exceptions.UnauthenticatedError, "AuthFailure"),
    (FileNotFoundError, "NoSuchKey"),
)
"""For an answer without a body, as to a HEAD."""

RAISED: Final = (exceptions.BaseError, OSError, ValueError)
"""What a call of obstore raises."""


def as_botocore_error(error: BaseException) -> BaseException:
    """Return the error of botocore or of the operating system that says the same."""
    text = str(error)
    said = " ".join(text.partition(_DEBUG)[0].split())
    if "Received redirect" in said:
        return _answer("PermanentRedirect", "301", said)
    status = _STATUS.search(text)
    code = _CODE.search(text)
    if status is not None:
        told = _SAID.search(text)
        return _answer(code[1] if code else status[1], status[1], told[1] if told else said)
    for kind, known in _CODES:
        if isinstance(error, kind):
            return _answer(known, "", said)
    return _broken(text, said)


def _broken(text: str, said: str) -> OSError:
    http = _HTTP_KIND.search(text)
    if http is not None and http[1] == "Timeout":
        return TimeoutError(said)
    if http is not None or "UnexpectedRange" in text:
        return ConnectionError(said)
    return OSError(said)


def _answer(code: str, status: str, said: str) -> BaseException:
    response: dict[str, Any] = {"Error": {"Code": code, "Message": said}}
    if status:
        response["ResponseMetadata"] = {"HTTPStatusCode": int(status)}
    error: BaseException = botocore.exceptions.ClientError(response, "obstore")
    return error
