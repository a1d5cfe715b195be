import os
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

from django.conf import settings

# Where it looks for django-tenants, which needs a PostgreSQL.
compat: Any = ModuleType("tenant_schemas_celery.compat")
compat.get_public_schema_name = lambda: "public"
compat.get_tenant_model = lambda: SimpleNamespace(objects=SimpleNamespace(get=SimpleNamespace))
sys.modules[compat.__name__] = compat

settings.configure(DATABASES={"default": {"ENGINE": "tests.frameworks.schemas", "NAME": ":memory:"}})

from django.db import connection  # noqa: E402
from tenant_schemas_celery.app import CeleryApp  # noqa: E402
from tenant_schemas_celery.task import TenantTask  # noqa: E402

from celery_singleton_lock import SingletonTask  # noqa: E402

REDIS = os.environ.get("SHOP_REDIS", "redis://localhost")

app = CeleryApp("shop", broker=REDIS, backend=REDIS)


class SingletonTenantTask(SingletonTask, TenantTask):  # type: ignore[misc]
    abstract = True


def of_the_schema(supplier_id: int, retries: int = 0) -> tuple[str, int]:
    return connection.schema_name, supplier_id


@app.task(base=SingletonTenantTask, bind=True, name="shop.run", lock_key=of_the_schema)
def run(self: Any, supplier_id: int, retries: int = 0) -> str:
    if self.request.retries < retries:
        raise self.retry(countdown=0)
    return f"{connection.schema_name} {supplier_id} {self.lock.held}"


@app.task(base=SingletonTenantTask, name="shop.queue", lock_key=of_the_schema, lock_mode="until_executed")
def queue(supplier_id: int) -> str:
    return f"{connection.schema_name} {supplier_id}"
