from allauth.account.auth_backends import AuthenticationBackend

from appliance.accounts.models import User
from appliance.accounts.services import user_seen


class SignInBackend(AuthenticationBackend):  # type: ignore[misc]
    """Sign-in by name and password. No service account signs in.

    Loading a session's user, page or socket, notes them seen."""

    def user_can_authenticate(self, user: User) -> bool:
        return super().user_can_authenticate(user) and not user.is_service

    def get_user(self, user_id: int) -> User | None:
        user: User | None = super().get_user(user_id)
        if user is not None:
            user_seen(user)
        return user
