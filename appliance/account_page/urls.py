from django.urls import URLPattern, URLResolver, path, re_path

from appliance.account_page import key_page, views

urlpatterns: list[URLPattern | URLResolver] = [
    path("account/", views.account, name="account"),
    path("account/usage.csv", views.usage_download, name="usage_csv"),
    path("account/keys/", views.key_create, name="key_create"),
    re_path(r"^account/keys/(?P<key_id>[0-9]{1,18})/$", key_page.own_key, name="own_key"),
    re_path(r"^account/keys/(?P<key_id>[0-9]{1,18})/revoke/$", views.key_revoke, name="key_revoke"),
]
