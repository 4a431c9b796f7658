from collections.abc import Callable
from functools import wraps
from typing import Any

from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponseBase

View = Callable[..., HttpResponseBase]


def admin_required(view: View) -> View:
    """A signed-in member who is no admin gets 403; a visitor was sent to sign-in before this."""

    @wraps(view)
    def checked(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
        if not getattr(request.user, "is_admin", False):
            raise PermissionDenied
        return view(request, *args, **kwargs)

    return checked
