"""The page of the locks in the admin."""

from typing import Any
from urllib.parse import urlencode

from celery.app import app_or_default
from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.urls import path
from django.views.decorators.http import require_POST

from celery_singleton_lock.contrib.django.apps import why_no_app
from celery_singleton_lock.contrib.django.models import Lock
from celery_singleton_lock.definition.options import as_set
from celery_singleton_lock.errors import ConfigurationError, StoreError
from celery_singleton_lock.log import shown
from celery_singleton_lock.operations import Plan, ask
from celery_singleton_lock.operations.page import Observer, page_context
from celery_singleton_lock.operations.rows import Locks, Row

# Taken at import, because the thread of a request may have another current app in Celery.
_observer = Observer(app_or_default())


@admin.register(Lock)
class LockAdmin(admin.ModelAdmin):
    def get_urls(self) -> list[Any]:
        """Only the page and its button, not the views that add, change or delete."""
        page, button = (self.admin_site.admin_view(view) for view in (self.changelist_view, self.break_view))
        return [
            path("", page, name="celery_singleton_lock_lock_changelist"),  # the admin's index links to this name
            path("break/", require_POST(button)),
        ]

    def has_break_permission(self, request: HttpRequest) -> bool:
        return bool(request.user.has_perm("celery_singleton_lock.break_lock"))

    def has_view_permission(self, request: HttpRequest, obj: Lock | None = None) -> bool:
        return super().has_view_permission(request, obj) or self.has_break_permission(request)

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        if not self.has_view_permission(request):
            raise PermissionDenied
        if why := why_no_app(_observer.app):
            facts: dict[str, Any] = {"name": "?", "problem": why}
        else:
            facts = page_context(_observer, request.GET.get("name", ""))
        for line in facts.get("lines", ()):
            line["button"], line["holder"] = _button_of(line["row"])
        context = {
            **self.admin_site.each_context(request),
            **facts,
            **(extra_context or {}),
            "title": f"Locks of {facts['name']}",
            "opts": self.model._meta,  # noqa: SLF001 (Django's name for what its own templates get)
            "may_break": self.has_break_permission(request),
        }
        # Otherwise the template's URLs would lead to the default admin, even on the page of another admin site.
        request.current_app = self.admin_site.name
        return render(request, "singleton_locks.html", context, status=503 if "problem" in facts else 200)

    def break_view(self, request: HttpRequest) -> HttpResponse:
        if not self.has_break_permission(request):
            raise PermissionDenied
        key, holder, name = (request.POST.get(field, "") for field in ("key", "holder", "name"))
        by = f"{shown(request.user.get_username())[:100]}@{request.META.get('REMOTE_ADDR') or 'unknown'}"
        try:
            is_done, notice = _break(key, holder, by)
        except (ConfigurationError, StoreError) as error:
            self.message_user(request, as_set(_observer.app, str(error)), messages.ERROR)
        else:
            self.message_user(request, notice, messages.SUCCESS if is_done else messages.WARNING)
            if is_done:
                self.log_change(request, Lock(key), f"Asked {holder} to stop." if holder else "Dropped its marks.")
        return redirect(f"{request.path.removesuffix('break/')}?{urlencode({'name': name})}")


def _button_of(row: Row) -> tuple[str, str]:
    """The text of the button, and the holder to ask to stop; each may be empty."""
    if row.about.has_lease and not row.is_beat and not row.asked_by:
        return "Ask to stop", row.about.task_id or row.worker
    return "" if row.lock.holders or row.lock.problem else "Drop marks", ""


def _break(key: str, holder: str, by: str) -> tuple[bool, str]:
    """Ask *holder* to stop. If *holder* is empty, drop the marks of a lock that nobody holds."""
    locks = Locks(_observer.app)
    if not locks.is_key(key):
        return False, f"Nothing was done: {shown(key)} is not a lock key of this app."
    survey = locks.survey(key)
    if not holder and survey.holders:
        return False, "Nothing was done: somebody holds the lock now. Check again."
    done = ask(locks, Plan.of(survey, holder or None), by)
    _observer.locks.forget()
    if not done:
        return False, "Nothing was done: nobody was there any more."
    if not done.holders:
        return True, "The marks are gone."
    return True, "Asked to stop. The holder learns of it at its next renewal, within a third of its TTL."
