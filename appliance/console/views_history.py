"""What admins did, newest first."""

from django.core.paginator import Paginator
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_GET

from appliance.accounts.access import admin_required
from appliance.console.audit import ACTIONS, KINDS, audit_words
from appliance.console.models import AuditRecord

ACTS_A_PAGE = 50


@never_cache
@require_GET
@admin_required
def history(request: HttpRequest) -> HttpResponse:
    kind = request.GET.get("kind", "")
    records = AuditRecord.objects.all()
    if kind in KINDS:
        records = records.filter(action__in=[a for a, (k, _) in ACTIONS.items() if k == kind])
    page = Paginator(records, ACTS_A_PAGE).get_page(request.GET.get("page"))
    rows = [
        {
            "at": record.at,
            "who": record.actor_name,
            "kind": ACTIONS.get(record.action, ("other", ""))[0],
            "words": audit_words(record),
        }
        for record in page
    ]
    context = {
        "section": "history",
        "page": page,
        "rows": rows,
        "kind": kind,
        "query": f"kind={kind}&" if kind in KINDS else "",
        "kinds": KINDS,
    }
    return render(request, "console/history.html", context)
