from django.urls import URLPattern, URLResolver, path, re_path

from appliance.accounts import views, views_groups

urlpatterns: list[URLPattern | URLResolver] = [
    path("login/", views.sign_in, name="account_login"),
    path("logout/", views.sign_out, name="account_logout"),
    path("setup/<str:token>/", views.set_up, name="set_up"),
    path("invite/<str:token>/", views.use_invite, name="invite"),
    path("account/password/", views.change_password, name="change_password"),
    path("console/users/", views.users, name="users"),
    re_path(
        r"^console/users/(?P<user_id>[0-9]{1,18})"
        r"/(?P<action>make-admin|take-admin|activate|deactivate|link)/$",
        views.user_action,
        name="user_action",
    ),
    path("console/groups/", views_groups.groups_page, name="groups"),
    re_path(
        r"^console/groups/(?P<group_id>[0-9]{1,18})/(?P<action>members|delete)/$",
        views_groups.group_action,
        name="group_action",
    ),
]
