"""A model without a table, for permissions and for the admin's log."""

from typing import Any, ClassVar

from django.db import models


class _Nothing(models.Manager):
    """Has no rows: otherwise `dumpdata` would fail, because there is no table."""

    def get_queryset(self) -> Any:
        return super().get_queryset().none()


class Lock(models.Model):
    key = models.TextField(primary_key=True)

    objects = _Nothing()

    class Meta:
        """Its permissions."""

        managed = False
        base_manager_name = "objects"
        default_permissions = ("view",)
        permissions: ClassVar = [("break_lock", "Can ask the holder of a lock to stop")]

    def __str__(self) -> str:
        return str(self.key)
