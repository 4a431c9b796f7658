from django.db.models import F, QuerySet

from appliance.accounts.models import User


def members() -> QuerySet[User]:
    """All users: who can sign in first, then by name."""
    return User.objects.order_by(F("is_active").desc(), "username")


def service_names() -> set[str]:
    return set(User.objects.filter(is_service=True).values_list("username", flat=True))


def admin_names() -> list[str]:
    """Whom a member can ask."""
    admins = User.objects.filter(is_staff=True, is_active=True).order_by("username")
    return list(admins.values_list("username", flat=True))
