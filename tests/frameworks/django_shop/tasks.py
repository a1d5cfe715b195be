from celery import shared_task

from celery_singleton_lock.contrib.django import SingletonDjangoTask
from tests.frameworks.django_shop.models import Supplier
from tests.frameworks.feed import pages


@shared_task(base=SingletonDjangoTask, lock_key=("supplier_id",))
def import_catalogue(supplier_id: int) -> None:
    list(pages(supplier_id))
    Supplier.objects.filter(pk=supplier_id).update(state="imported")
