from django.contrib import admin
from django.db import transaction
from django.http import HttpRequest, JsonResponse
from django.urls import path

from celery_singleton_lock import LockHeld
from tests.frameworks.django_shop.models import Supplier
from tests.frameworks.django_shop.tasks import import_catalogue


def start(request: HttpRequest, supplier_id: int) -> JsonResponse:
    with transaction.atomic():
        Supplier.objects.update_or_create(pk=supplier_id, defaults={"state": "in the queue"})
        import_catalogue.delay_on_commit(supplier_id)
    return JsonResponse({}, status=202)


def delete(request: HttpRequest, supplier_id: int) -> JsonResponse:
    alone = import_catalogue.lock_for(supplier_id)
    alone.timeout = 0
    try:
        with alone:
            Supplier.objects.filter(pk=supplier_id).delete()
            return JsonResponse({})
    except LockHeld as held:
        return JsonResponse({"import": held.holder_task_id}, status=409)


urlpatterns = [
    path("suppliers/<int:supplier_id>/import", start),
    path("suppliers/<int:supplier_id>/delete", delete),
    path("admin/", admin.site.urls),
]
