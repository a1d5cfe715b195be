"""The page of the locks in Django's admin: its users, its permissions, and its log of who has done what."""

from io import BytesIO
from typing import Any

from django.contrib import admin
from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.contenttypes.models import ContentType
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.urls import path, reverse
from django.views.decorators.csrf import csrf_exempt

from celery_singleton_lock.web import application
from tests.frameworks.django_shop.celery import app
from tests.frameworks.django_shop.models import SingletonLock

SEE, BREAK = "django_shop.view_locks", "django_shop.break_locks"
LOCKS = "admin:django_shop_singletonlock_changelist"

to_read = application(app)
to_break = application(app, allow_break=True)


@admin.register(SingletonLock)
class LocksAdmin(admin.ModelAdmin):
    def has_view_permission(self, request: HttpRequest, obj: object = None) -> bool:
        return request.user.has_perm(SEE)

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    has_change_permission = has_delete_permission = lambda self, request, obj=None: False

    def get_urls(self) -> list[Any]:
        # The forms of the page have a token of their own, which `application` checks.
        page = self.admin_site.admin_view(csrf_exempt(self.page))
        return [path("", page, name=LOCKS.partition(":")[2]), path("<path:rest>", page)]

    def page(self, request: HttpRequest, rest: str = "") -> HttpResponse:
        if not self.has_view_permission(request):
            raise PermissionDenied
        environ = request.META | {
            "SCRIPT_NAME": reverse(LOCKS).rstrip("/"),
            "PATH_INFO": f"/{rest}",
            "REMOTE_USER": request.user.get_username(),
            "wsgi.url_scheme": request.scheme,
            "wsgi.input": BytesIO(request.body),
        }
        head: list[Any] = []
        locks = to_break if request.user.has_perm(BREAK) else to_read
        body = b"".join(locks(environ, lambda *answer: head.extend(answer)))
        response = HttpResponse(body, status=int(head[0].split()[0]))
        for name, value in head[1]:
            if name == "Set-Cookie":
                response.cookies.load(value)
            else:
                response[name] = value
        if response.status_code == 303:
            self.note(request, request.POST["key"])
        return response

    def note(self, request: HttpRequest, key: str) -> None:
        LogEntry.objects.create(
            user=request.user,
            content_type=ContentType.objects.get_for_model(SingletonLock),
            object_id=key,
            object_repr=key[:200],
            action_flag=CHANGE,
            change_message="Asked its holder to stop, or dropped its marks.",
        )
