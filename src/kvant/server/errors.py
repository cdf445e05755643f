"""Errors for clients, in the shape of each interface, and what the log has of their causes."""

import logging
import traceback
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from kvant.errors import EngineError, printable

# Anthropic's error types by status (docs.claude.com, API errors).
ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
# OpenAI's (platform.openai.com, error codes).
OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}

logger = logging.getLogger("kvant.server")


class ApiError(Exception):
    """An error response."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.message = printable(message, 1000)  # one line: it may quote long names and values
        super().__init__(self.message)
        self.status = status  # HTTP status
        self.param = param and printable(param, 200)  # the field at fault
        self.code = code  # OpenAI's error code, such as "context_length_exceeded"
        self.headers = dict(headers or {})  # additional headers, such as Retry-After

    def openai(self) -> dict[str, Any]:
        """Return the body in OpenAI's shape."""
        message = self._worded("this model's maximum context length is exceeded")
        kind = OPENAI_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}

    def anthropic(self, request_id: str) -> dict[str, Any]:
        """Return the body in Anthropic's shape."""
        default = "invalid_request_error" if self.status < 500 else "api_error"
        error: dict[str, Any] = {
            "type": ANTHROPIC_TYPES.get(self.status, default),
            "message": self._worded("prompt is too long"),
        }
        if self.code is not None:
            error["details"] = {"error_code": self.code}
        return {"type": "error", "error": error, "request_id": request_id}

    def _worded(self, too_long: str) -> str:
        """Return the message. Clients recognize a prompt that is too long by their interface's words."""
        return f"{too_long}: {self.message}" if self.code == "context_length_exceeded" else self.message


def log_cause(request_id: str, error: ApiError) -> None:
    """Log the type and place of the failure behind a server error."""
    cause = error.__cause__
    if isinstance(cause, EngineError):  # without a cause, the engine was closed and did not fail
        cause = cause.__cause__
    if error.status >= HTTPStatus.INTERNAL_SERVER_ERROR and cause is not None:
        logger.error("%s: %s", request_id, described(cause))


def described(error: BaseException) -> str:
    """Return the type and place of an error, without its text, which may quote a prompt."""
    places = traceback.extract_tb(error.__traceback__)
    at = f" at {places[-1].filename.rpartition('/')[2]}:{places[-1].lineno}" if places else ""
    return f"{type(error).__name__}{at}"
