"""The page of groups: make one, put members in, delete it."""

from django import forms
from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods, require_POST

from appliance.accounts.access import admin_required
from appliance.accounts.groups import (
    MAX_NAME,
    group_create,
    group_delete,
    group_get,
    group_set_members,
    groups,
)
from appliance.accounts.selectors import members
from appliance.errors import ApplianceError, BadRequest


class GroupForm(forms.Form):
    name = forms.CharField(
        label="Name of a new group",
        max_length=MAX_NAME,
        widget=forms.TextInput(attrs={"class": "input", "autocomplete": "off"}),
    )


@never_cache
@require_http_methods(["GET", "POST"])
@admin_required
def groups_page(request: HttpRequest) -> HttpResponse:
    form = GroupForm(request.POST or None)
    if request.method == "POST" and form.is_valid():
        try:
            group = group_create(form.cleaned_data["name"], by=request.user)
        except ApplianceError as exc:
            form.add_error("name", exc.message)
        else:
            messages.success(request, f"Group “{group.name}” made. Now choose its members.")
            return redirect("groups")
    context = {"section": "users", "groups": groups(), "people": list(members()), "form": form}
    return render(request, "accounts/groups.html", context, status=400 if form.errors else 200)


@never_cache
@require_POST
@admin_required
def group_action(request: HttpRequest, group_id: int, action: str) -> HttpResponse:
    try:
        group = group_get(group_id)
        if action == "delete":
            group_delete(group, by=request.user)
            messages.success(request, f"Group “{group.name}” deleted, with the rules for it.")
        else:
            group_set_members(group, _ids(request.POST.getlist("members")), by=request.user)
            messages.success(request, f"Members of “{group.name}” saved.")
    except ApplianceError as exc:
        messages.error(request, exc.message)
    return redirect("groups")


def _ids(texts: list[str]) -> list[int]:
    if not all(text.isascii() and text.isdigit() and len(text) < 19 for text in texts):
        raise BadRequest("The list of members names something that is no member.")
    return [int(text) for text in texts]
